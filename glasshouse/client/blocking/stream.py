# Made from glasshouse/client/aio/stream.py by .ci/twins.py: change that file.
"""Live events of jobs, with automatic reconnection and exactly-once delivery."""

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from types import TracebackType
from typing import Any, Literal, Self, cast

from glasshouse import jsonio
from glasshouse.client.blocking.running import sleep
from glasshouse.client.blocking.transport import Transport
from glasshouse.client.connection.requests import Request, backoff
from glasshouse.client.connection.sse import Decoder, Message
from glasshouse.client.monitoring.events import AnyEvent, read_event
from glasshouse.errors import APIConnectionError, APIStatusError

SILENCE_S = 45.0
"""Read timeout of a stream, on which the service sends a ping every 15 s."""
ONE = ""
"""The key that stands for the job in a stream of one job."""
_RETRYABLE = frozenset({408, 409, 429, 500, 502, 503, 504})


class EventStream:
    """The events of one or several jobs, in order and without duplicates, until all have ended.

    When an attempt resumes from a checkpoint, the stream has an event ``attempt`` with
    ``resumed_from_step``. The steps from there on are repeated: discard what you have stored of
    them. A stream that starts later does not contain the superseded events.

    Iterate over the stream. Leaving the loop or the ``with`` block closes the connection.
    """

    def __init__(
        self,
        transport: Transport,
        path: str,
        *,
        types: Iterable[str] | None = None,
        after: int | Mapping[str, int] = 0,
        attempt: int | Literal["all"] | None = None,
        give_up_after_s: float = 120.0,
    ) -> None:
        self._many = not isinstance(after, int)
        self._seqs = {ONE: after} if isinstance(after, int) else dict(after)
        self._ended: set[str] = set()
        self._transport = transport
        self._path = path
        self._types = None if types is None else frozenset(types)
        self._attempt = attempt
        self._give_up_after_s = give_up_after_s
        self._retry_s: float | None = None
        self._connected = False
        self._seen_at = 0.0
        self._events = self._run()

    @property
    def last_seq(self) -> int:
        """The ``seq`` of the last event received. Pass it as ``after`` to continue from there."""
        return max(self._seqs.values())

    @property
    def last_seqs(self) -> dict[str, int]:
        """For a stream of several jobs: the last ``seq`` by job id, to be passed as ``after``."""
        return dict(self._seqs)

    def __iter__(self) -> Generator[AnyEvent]:
        for record in self._events:
            yield read_event(record)

    def records(self) -> Generator[dict[str, Any]]:
        """Iterate over the events as the JSON objects that the service sends."""
        return self._events

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the iteration."""
        self._events.close()

    def _run(self) -> Generator[dict[str, Any]]:
        failures = 0
        self._seen_at = time.monotonic()
        while True:
            try:
                with closing(self._connection()) as records:
                    for record in records:
                        failures = 0
                        if self._types is None or record["type"] in self._types:
                            yield record
                        if self._is_over(record):
                            return
                if not self._connected:  # 204: the job has ended and there are no more events
                    return
            except (APIStatusError, APIConnectionError) as error:
                self._raise_if_permanent(error)
            sleep(self._delay(failures))
            failures += 1

    def _is_over(self, record: dict[str, Any]) -> bool:
        """Whether this is the last event of the stream."""
        if record["type"] == "end":
            self._ended.add(self._key(record))
        return self._ended >= self._seqs.keys()

    def _key(self, record: dict[str, Any]) -> str:
        return str(record.get("job")) if self._many else ONE

    def _raise_if_permanent(self, error: APIStatusError | APIConnectionError) -> None:
        if isinstance(error, APIStatusError) and error.status_code not in _RETRYABLE:
            raise error
        if self._connected:
            self._seen_at = time.monotonic()
        elif time.monotonic() - self._seen_at > self._give_up_after_s:
            raise error

    def _delay(self, failures: int) -> float:
        """Seconds before the next connection: short at first, then with exponential backoff."""
        if failures == 0:
            return min(self._retry_s or 0.05, 1.0)
        return max(self._retry_s or 0.0, backoff(failures - 1))

    def _connection(self) -> Generator[dict[str, Any]]:
        """The new events of one connection, in order."""
        self._connected = False
        with self._transport.open(self._request()) as response:
            if response.status_code == 204:
                return
            self._connected = True
            decoder = Decoder()
            for chunk in response.iter_bytes():
                for message in decoder.feed(chunk):
                    record = self._new(message)
                    if record is not None:
                        yield record
                if decoder.retry_ms is not None:
                    self._retry_s = decoder.retry_ms / 1000

    def _request(self) -> Request:
        cursor = self._cursor()
        params: dict[str, Any] = {"after": cursor}
        if self._many:
            params["job"] = list(self._seqs)
        if self._types is not None:  # 'end' is needed to detect the end of the stream
            params["types"] = ",".join(sorted(self._types | {"end"}))
        if self._attempt is not None:
            params["attempt"] = self._attempt
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self.last_seq:
            headers["Last-Event-ID"] = cursor
        return Request("GET", self._path, params, headers, timeout_s=SILENCE_S)

    def _cursor(self) -> str:
        if not self._many:
            return str(self.last_seq)
        return ",".join(f"{job}:{seq}" for job, seq in self._seqs.items())

    def _new(self, message: Message) -> dict[str, Any] | None:
        """The event of a message; None for duplicates and for ``hello``."""
        if message.event == "hello":
            return None
        data: Any = jsonio.loads(message.data)
        if not isinstance(data, dict):
            return None
        record = cast("dict[str, Any]", data)
        key, seq = self._key(record), record.get("seq")
        if not isinstance(seq, int) or seq <= self._seqs.get(key, 0):
            return None
        self._seqs[key] = seq
        return record
