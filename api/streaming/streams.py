"""Server-sent events of one or more jobs, read at each client's own speed.

The response is a custom ASGI callable. One loop reads, sends and pings, so nothing is queued for a
client and nothing else writes to its connection. It ends when its jobs have ended, when the client
disconnects or stops reading, when its key is revoked, and when the process shuts down.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.http.access import Caller
from api.streaming.tails import CHUNK_BYTES, Chunk, EventFilter, Tail, Tails
from api.streaming.wakeups import Subscription, Wakeups
from glasshouse.errors import DatabaseUnavailable, JobNotFound, TooManyRequests, Unavailable
from models import keys
from models.access import quotas
from models.database import Database
from models.settings import Settings

LAST_SEND_S = 1.0
"""At shutdown, a client has this long to receive its last lines."""
_log = structlog.get_logger(__name__)

HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The state of one job's log, and where the client resumes."""

    job: str
    seq: int
    """The last event that the client has."""
    last_seq: int
    ended: bool
    hello: str
    """The data of the first event, as JSON text."""

    @property
    def is_over(self) -> bool:
        """Return whether the client has all events and no more will come."""
        return self.ended and self.seq >= self.last_seq


@dataclass(slots=True)
class _Position:
    job: str
    seq: int
    tail: Tail | None
    """None for a job that had already ended: its log is only read."""
    done: bool = False


@dataclass(slots=True)
class Feed:
    """The data for one client after the hello."""

    tails: Tails
    wanted: EventFilter
    many: bool
    """Ids are the cursors of all jobs, not one number."""
    positions: list[_Position] = field(default_factory=list[_Position])

    @property
    def done(self) -> bool:
        """Return whether the end of every job was sent."""
        return all(position.done for position in self.positions)

    async def read(self) -> bytes:
        """Return everything that can be sent now, up to about the size of a chunk."""
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
            chunk = await self.tails.read(position.job, position.seq, self.wanted)
        except JobNotFound:
            return []
        return [chunk] if chunk.seq > position.seq else []

    def _lines(self, position: _Position, chunk: Chunk) -> bytes:
        if not self.many:
            return chunk.lines(position.seq, self.wanted.types)
        others = [f"{other.job}:{other.seq}" for other in self.positions if other is not position]
        rest = "".join(f",{pair}" for pair in sorted(others)).encode()
        job = position.job.encode()
        return b"".join(
            b"id: %b:%d%b\n%b" % (job, event.seq, rest, event.body)
            for event in chunk.since(position.seq, self.wanted.types)
        )


class Streams:
    """The open streams of this process."""

    def __init__(self, settings: Settings, database: Database, wakeups: Wakeups) -> None:
        self.settings = settings
        self.tails = Tails(database, wakeups)
        self.draining = False
        self.num_open: Counter[str] = Counter()
        """Number of open streams of each key."""
        self.num_of_owner: Counter[str] = Counter()
        self._database = database
        self._open: set[StreamResponse] = set()
        self._good_until: dict[str, float] = {}

    def drain(self) -> None:
        """End every stream with a retry delay. Call it in the event loop."""
        self.draining = True
        for stream in self._open:
            stream.hurry()

    def response(
        self,
        caller: Caller,
        starts: Sequence[StreamStart],
        wanted: EventFilter,
        *,
        many: bool,
    ) -> Response:
        """Return the response to a request for a stream.

        Raises:
            TooManyRequests: The key or the process has too many open streams.
            QuotaExceeded: The owner has too many open streams.
            Unavailable: The process is shutting down.
        """
        if self.draining:
            raise Unavailable("The service is shutting down.", retry_after_s=2)
        if all(start.is_over for start in starts):
            return Response(status_code=204, headers={"Cache-Control": "no-store"})
        limits = self.settings
        if (
            self.num_open[caller.key] >= limits.max_streams_per_key
            or len(self._open) >= limits.max_streams
        ):
            raise TooManyRequests("Too many event streams are open.", retry_after_s=10)
        streams = self.num_of_owner[caller.owner] + 1
        quotas.refuse_over("streams", streams, caller.limits.streams)
        return StreamResponse(self, caller, starts, wanted, many=many)

    async def is_good(self, caller: Caller) -> bool:
        """Return whether a key is still valid. Queries the database only now and then."""
        now = time.monotonic()
        if self._good_until.get(caller.secret_sha256, 0.0) > now:
            return True
        # set before the query, so that other streams of the key do not query at the same time
        self._good_until[caller.secret_sha256] = now + self.settings.stream_key_check_s
        try:
            good = await self.tails.in_thread(partial(self._is_good, caller.secret_sha256))
        except DatabaseUnavailable:
            return True  # nothing can be read either; checked again soon
        if not good:
            self._good_until.pop(caller.secret_sha256, None)
        return good

    @contextmanager
    def counted(self, stream: "StreamResponse") -> Generator[None]:
        """Count a stream as open during the block."""
        key, owner = stream.caller.key, stream.caller.owner
        self._open.add(stream)
        self.num_open[key] += 1
        self.num_of_owner[owner] += 1
        try:
            yield
        finally:
            self._open.discard(stream)
            self.num_open[key] -= 1
            self.num_of_owner -= Counter((owner,))
            if not self.num_open[key]:
                del self.num_open[key]
                self._good_until.pop(stream.caller.secret_sha256, None)

    def _is_good(self, secret_sha256: str) -> bool:
        with self._database.read() as tx:
            return keys.is_good(tx, secret_sha256)


class StreamResponse(Response):
    """One client's stream of events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        streams: Streams,
        caller: Caller,
        starts: Sequence[StreamStart],
        wanted: EventFilter,
        *,
        many: bool,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self.caller = caller
        self._streams = streams
        self._starts = starts
        self._feed = Feed(streams.tails, wanted, many)
        self._watch = Subscription(streams.settings.stream_ping_s)
        self._sending: asyncio.Timeout | None = None
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until all jobs have ended, or the client disconnects or stops reading."""
        with self._streams.counted(self), ExitStack() as stack:
            for start in self._starts:
                tail = None
                if not start.ended:
                    tails = self._streams.tails
                    joined = tails.join(
                        start.job, start.last_seq, self._watch, self._feed.wanted.attempt
                    )
                    tail = stack.enter_context(joined)
                position = _Position(start.job, start.seq, tail, done=start.is_over)
                self._feed.positions.append(position)
            listener = asyncio.create_task(self._listen(receive))
            try:
                await self._run(send)
            except TimeoutError:
                _log.warning("stream_stalled", key=self.caller.key)
            finally:
                listener.cancel()

    def hurry(self) -> None:
        """Shorten the send timeout, because the process is about to end."""
        self._watch.notify()
        if self._sending is not None:
            self._sending.reschedule(asyncio.get_running_loop().time() + LAST_SEND_S)

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        hello = "".join(f"event: hello\ndata: {start.hello}\n\n" for start in self._starts)
        await self._send(send, hello.encode())
        ping_s = self._streams.settings.stream_ping_s
        ping_at = time.monotonic() + ping_s
        while await self._may_continue():
            data = await self._feed.read()
            if data:
                await self._send(send, data)
                ping_at = time.monotonic() + ping_s
            elif (left_s := ping_at - time.monotonic()) <= 0:
                await self._send(send, b": ping\n\n")
                ping_at = time.monotonic() + ping_s
            elif not self._feed.done:
                await self._watch.wait(left_s)
        if self._streams.draining:
            advice = f"retry: {random.randint(500, 3000)}\n: server_draining\n\n"  # noqa: S311
            await self._send(send, advice.encode())
        await self._send(send, b"", more=False)

    async def _may_continue(self) -> bool:
        if self._gone or self._feed.done or self._streams.draining:
            return False
        return await self._streams.is_good(self.caller)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        limit_s = self._streams.settings.stream_send_timeout_s
        if self._streams.draining:
            limit_s = min(limit_s, LAST_SEND_S)
        try:
            async with asyncio.timeout(limit_s) as self._sending:
                await send({"type": "http.response.body", "body": body, "more_body": more})
        finally:
            self._sending = None

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._watch.notify()
