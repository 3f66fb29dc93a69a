"""The events of jobs as they happen: reconnects by itself, loses and doubles nothing."""

import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, Self, cast

from glasshouse import jsonio
from glasshouse.client.aio.running import sleep
from glasshouse.client.aio.transport import AsyncTransport
from glasshouse.client.events import AnyEvent, read_event
from glasshouse.client.requests import Request, backoff
from glasshouse.client.sse import Decoder, Message
from glasshouse.errors import APIConnectionError, APIStatusError

SILENCE_S = 45.0
"""A stream without even a ping (due every 15 s) for this long is taken for dead."""
ONE = ""
"""Stands for the job of a stream of one."""
_WORTH_ANOTHER_TRY = frozenset({408, 409, 429, 500, 502, 503, 504})


class AsyncEventStream:
    """The events of one job or several, each once and in order, until all have ended.

    After an event ``attempt`` with a ``resumed_from_step`` the steps from that one on come again,
    from an attempt that goes on from a checkpoint: what is kept of them should be dropped then.
    A stream that is begun later does not show what gave way.

    Iterate over it; leave the loop, or the ``with`` block, to close the connection.
    """

    def __init__(
        self,
        transport: AsyncTransport,
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
        """The newest event that was given out; pass it as ``after`` to go on from there."""
        return max(self._seqs.values())

    @property
    def last_seqs(self) -> dict[str, int]:
        """Of a stream of several jobs: the newest event of each, to be passed as ``after``."""
        return dict(self._seqs)

    async def __aiter__(self) -> AsyncGenerator[AnyEvent]:
        async for record in self._events:
            yield read_event(record)

    def records(self) -> AsyncGenerator[dict[str, Any]]:
        """Iterate over the events as the service sent them, in its JSON."""
        return self._events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; iterating ends."""
        await self._events.aclose()

    async def _run(self) -> AsyncGenerator[dict[str, Any]]:
        failures = 0
        self._seen_at = time.monotonic()
        while True:
            try:
                async with aclosing(self._connection()) as records:
                    async for record in records:
                        failures = 0
                        if self._types is None or record["type"] in self._types:
                            yield record
                        if self._is_over(record):
                            return
                if not self._connected:  # 204: the job has ended and all its events were given
                    return
            except (APIStatusError, APIConnectionError) as error:
                self._raise_if_hopeless(error)
            await sleep(self._delay(failures))
            failures += 1

    def _is_over(self, record: dict[str, Any]) -> bool:
        """Whether this event is the last of all."""
        if record["type"] == "end":
            self._ended.add(self._key(record))
        return self._ended >= self._seqs.keys()

    def _key(self, record: dict[str, Any]) -> str:
        return str(record.get("job")) if self._many else ONE

    def _raise_if_hopeless(self, error: APIStatusError | APIConnectionError) -> None:
        if isinstance(error, APIStatusError) and error.status_code not in _WORTH_ANOTHER_TRY:
            raise error
        if self._connected:
            self._seen_at = time.monotonic()
        elif time.monotonic() - self._seen_at > self._give_up_after_s:
            raise error

    def _delay(self, failures: int) -> float:
        """A cut stream is picked up almost at once; one that stays away is asked ever less."""
        if failures == 0:
            return min(self._retry_s or 0.05, 1.0)
        return max(self._retry_s or 0.0, backoff(failures - 1))

    async def _connection(self) -> AsyncGenerator[dict[str, Any]]:
        """One connection: its new events, in order."""
        self._connected = False
        async with self._transport.open(self._request()) as response:
            if response.status_code == 204:
                return
            self._connected = True
            decoder = Decoder()
            async for chunk in response.aiter_bytes():
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
        if self._types is not None:  # 'end' too: without it the stream would not know it is over
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
        """The event of a message, unless it was given out before or is none (``hello``)."""
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
