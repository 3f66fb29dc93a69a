"""Server-sent events: a client's view of the logs of one or many jobs, pulled at its own speed.

The response is our own ASGI callable: one loop reads, sends and pings, so nothing is queued for
a client and nothing else writes to its connection. It ends when its jobs have ended, when the
client goes or stops reading, when its key is revoked, and when the process drains.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.tails import CHUNK_BYTES, Chunk, Tail, Tails
from api.wakeups import Wakeups, Watch
from glasshouse.errors import DatabaseUnavailable, JobNotFound, TooManyRequests, Unavailable
from models import keys
from models.database import Database
from models.settings import Settings

KEY_CHECK_S = 20.0
_log = structlog.get_logger(__name__)

HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Start:
    """Where one job's log stands, and where the client wants to go on from."""

    job: str
    seq: int
    """The last event that the client has."""
    last_seq: int
    ended: bool
    hello: str
    """The data of the first event: JSON text."""

    @property
    def is_over(self) -> bool:
        """The client has everything that there will ever be."""
        return self.ended and self.seq >= self.last_seq


@dataclass(slots=True)
class _Position:
    job: str
    seq: int
    tail: Tail | None
    """None for a job that had ended already: its log is only read."""
    done: bool = False


@dataclass(slots=True)
class Feed:
    """What one client is sent after the hello, as far as it is there."""

    tails: Tails
    types: frozenset[str] | None
    many: bool
    """Ids are the cursors of all jobs, not one number."""
    positions: list[_Position] = field(default_factory=list[_Position])

    @property
    def done(self) -> bool:
        """Whether the end of every job was given out."""
        return all(position.done for position in self.positions)

    async def read(self) -> bytes:
        """Everything that can be sent now, up to about the size of a chunk."""
        parts: list[bytes] = []
        size = 0
        for position in self.positions:
            if not position.done:
                data = await self._advance(position)
                parts.append(data)
                size += len(data)
            if size > CHUNK_BYTES:
                break
        self.positions.append(self.positions.pop(0))  # the first must not starve the others
        return b"".join(parts)

    async def _advance(self, position: _Position) -> bytes:
        while not position.done:
            chunks = await self._chunks(position)
            if not chunks:
                position.done = position.tail is None or position.tail.closed
                break
            data = b"".join(self._lines(position, chunk) for chunk in chunks)
            position.seq = chunks[-1].seq
            position.done = chunks[-1].ends
            if data:
                return data
        return b""

    async def _chunks(self, position: _Position) -> list[Chunk]:
        if position.tail is not None and position.tail.covers(position.seq):
            return position.tail.since(position.seq)
        try:
            chunk = await self.tails.read(position.job, position.seq, self.types)
        except JobNotFound:
            return []
        return [chunk] if chunk.seq > position.seq else []

    def _lines(self, position: _Position, chunk: Chunk) -> bytes:
        if not self.many:
            return chunk.lines(position.seq, self.types)
        others = [f"{other.job}:{other.seq}" for other in self.positions if other is not position]
        rest = "".join(f",{pair}" for pair in sorted(others)).encode()
        job = position.job.encode()
        return b"".join(
            b"id: %b:%d%b\n%b" % (job, event.seq, rest, event.body)
            for event in chunk.since(position.seq, self.types)
        )


class Streams:
    """The open streams of this process."""

    def __init__(self, settings: Settings, database: Database, wakeups: Wakeups) -> None:
        self.settings = settings
        self.tails = Tails(database, wakeups)
        self.draining = False
        self.open: Counter[str] = Counter()
        """How many streams each key has open."""
        self._database = database
        self._watches: set[Watch] = set()
        self._live_until: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Remember the running loop, so that a signal handler can reach it."""
        self._loop = asyncio.get_running_loop()

    def drain(self) -> None:
        """End every stream, with advice when to come back. Safe in a signal handler."""
        self.draining = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no stream is left
                self._loop.call_soon_threadsafe(self._ring_all)

    def response(
        self, key: str, starts: Sequence[Start], types: frozenset[str] | None, *, many: bool
    ) -> Response:
        """The answer to a request for a stream.

        Raises:
            TooManyRequests: the key, or everybody together, has too many open.
            Unavailable: the process is about to end.
        """
        if self.draining:
            raise Unavailable("The service is shutting down.", retry_after_s=2)
        if all(start.is_over for start in starts):
            return Response(status_code=204, headers={"Cache-Control": "no-store"})
        limits = self.settings
        if self.open[key] >= limits.max_streams_per_key or self.open.total() >= limits.max_streams:
            raise TooManyRequests("Too many event streams are open.", retry_after_s=10)
        return StreamResponse(self, key, starts, types, many=many)

    async def still_live(self, key: str) -> bool:
        """Whether a key is still good; asked of the database every few seconds at most."""
        now = time.monotonic()
        if self._live_until.get(key, 0.0) > now:
            return True
        try:
            live = await self.tails.in_thread(partial(self._is_live, key))
        except DatabaseUnavailable:
            return True  # nothing can be read either; asked again soon
        if live:
            self._live_until[key] = now + KEY_CHECK_S
        else:
            self._live_until.pop(key, None)
        return live

    def watch(self, stack: ExitStack, key: str) -> Watch:
        """Count a stream, and make what wakes it, until the stack closes."""
        watch = Watch(self.settings.stream_ping_s)
        self._watches.add(watch)
        self.open[key] += 1
        stack.callback(self._forget, watch, key)
        return watch

    def _forget(self, watch: Watch, key: str) -> None:
        self._watches.discard(watch)
        self.open[key] -= 1
        if not self.open[key]:
            del self.open[key]
            self._live_until.pop(key, None)

    def _ring_all(self) -> None:
        for watch in self._watches:
            watch.ring()

    def _is_live(self, key: str) -> bool:
        with self._database.read() as tx:
            return keys.is_live(tx, key)


class StreamResponse(Response):
    """One client's stream of events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        streams: Streams,
        key: str,
        starts: Sequence[Start],
        types: frozenset[str] | None,
        *,
        many: bool,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._streams = streams
        self._key = key
        self._starts = starts
        self._feed = Feed(streams.tails, types, many)
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            watch = self._streams.watch(stack, self._key)
            for start in self._starts:
                tail = None
                if not start.ended:
                    tails = self._streams.tails
                    tail = stack.enter_context(tails.join(start.job, start.last_seq, watch))
                position = _Position(start.job, start.seq, tail, done=start.is_over)
                self._feed.positions.append(position)
            listener = asyncio.create_task(self._listen(receive, watch))
            try:
                await self._run(send, watch)
            except TimeoutError:
                _log.warning("stream_stalled", key=self._key)
            finally:
                listener.cancel()

    async def _run(self, send: Send, watch: Watch) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        hello = "".join(f"event: hello\ndata: {start.hello}\n\n" for start in self._starts)
        await self._send(send, hello.encode())
        ping_s = self._streams.settings.stream_ping_s
        ping_at = time.monotonic() + ping_s
        while await self._goes_on():
            data = await self._feed.read()
            if data:
                await self._send(send, data)
                ping_at = time.monotonic() + ping_s
            elif (left_s := ping_at - time.monotonic()) <= 0:
                await self._send(send, b": ping\n\n")
                ping_at = time.monotonic() + ping_s
            elif not self._feed.done:
                await watch.wait(left_s)
        if self._streams.draining:
            advice = f"retry: {random.randint(500, 3000)}\n: server_draining\n\n"  # noqa: S311
            await self._send(send, advice.encode())
        await self._send(send, b"", more=False)

    async def _goes_on(self) -> bool:
        if self._gone or self._feed.done or self._streams.draining:
            return False
        return await self._streams.still_live(self._key)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._streams.settings.stream_send_timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _listen(self, receive: Receive, watch: Watch) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        watch.ring()
