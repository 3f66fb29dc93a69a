"""The events of a job as they happen: reconnects by itself, loses and doubles nothing."""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, Self

from glasshouse import jsonio
from glasshouse.client.aio.running import sleep
from glasshouse.client.aio.transport import AsyncTransport
from glasshouse.client.events import AnyEvent, read_event
from glasshouse.client.requests import Request, backoff
from glasshouse.client.sse import Decoder, Message
from glasshouse.errors import APIConnectionError, APIStatusError

SILENCE_S = 45.0
"""A stream without even a ping (due every 15 s) for this long is taken for dead."""
_WORTH_ANOTHER_TRY = frozenset({408, 409, 429, 500, 502, 503, 504})


class AsyncEventStream:
    """The events of one job, each once and in order, until it has ended.

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
        after: int = 0,
        attempt: int | Literal["all"] | None = None,
        give_up_after_s: float = 120.0,
    ) -> None:
        self.last_seq = after
        """The newest event that was given out; pass it as ``after`` to go on from there."""
        self._transport = transport
        self._path = path
        self._types = None if types is None else frozenset(types)
        self._attempt = attempt
        self._give_up_after_s = give_up_after_s
        self._retry_s: float | None = None
        self._connected = False
        self._seen_at = 0.0
        self._events = self._run()

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
                        if record["type"] == "end":
                            return
                if not self._connected:  # 204: the job has ended and all its events were given
                    return
            except (APIStatusError, APIConnectionError) as error:
                self._raise_if_hopeless(error)
            await sleep(self._delay(failures))
            failures += 1

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
        params: dict[str, Any] = {"after": self.last_seq}
        if self._types is not None:  # 'end' too: without it the stream would not know it is over
            params["types"] = ",".join(sorted(self._types | {"end"}))
        if self._attempt is not None:
            params["attempt"] = self._attempt
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self.last_seq:
            headers["Last-Event-ID"] = str(self.last_seq)
        return Request("GET", self._path, params, headers, timeout_s=SILENCE_S)

    def _new(self, message: Message) -> dict[str, Any] | None:
        """The event of a message, unless it was given out before or is none (``hello``)."""
        if message.event == "hello":
            return None
        record = jsonio.loads(message.data)
        seq = record.get("seq") if isinstance(record, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(seq, int) or seq <= self.last_seq:
            return None
        self.last_seq = seq
        return record  # pyright: ignore[reportUnknownVariableType]
