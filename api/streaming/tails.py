"""The newest events of watched jobs, encoded once for all watchers.

One tail per job and process reads the log from its cursor while there are watchers, and keeps a
bounded ring of chunks. Watchers pull, so there is no queue per client, and a client that does not
read holds only its last chunk. A watcher behind the ring reads the log itself until it has caught
up. No transaction outlives its read.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread
import structlog

from api.streaming.wakeups import Subscription, Wakeups
from glasshouse.errors import DatabaseUnavailable, JobNotFound
from models.database import Database
from models.observations import events
from models.observations.events import EventPage, LoggedEvent
from models.observations.lineage import AttemptFilter

COALESCE_S = 0.025
"""Minimum interval between two reads of one tail; the additional delay of an event."""
CHUNK_BYTES = 256 * 1024
"""A chunk has at most this size, plus its last event."""
RING_BYTES = 4 * 1024 * 1024
RING_CHUNKS = 256
PAGE = 200
ALWAYS = ("end", "gap")
"""Types of event that every reader gets: the end of the log, and gaps."""
READERS = 4
"""Threads that read logs: fewer than the database's connections, so that others stay fast."""

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class EventFilter(NamedTuple):
    """Which events of a log a client gets."""

    types: frozenset[str] | None = None
    """None: all types."""
    attempt: AttemptFilter = None


WHOLE = EventFilter()


class Encoded(NamedTuple):
    """An event in the stream's format."""

    seq: int
    type: str
    body: bytes
    """Its lines after ``id``."""


def encode(event: LoggedEvent) -> Encoded:
    """Write an event's lines. JSON text has no line break, so nothing can forge a frame."""
    body = f"event: {event.type}\ndata: {event.as_json()}\n\n".encode()
    return Encoded(event.seq, event.type, body)


@dataclass(slots=True)
class Chunk:
    """Consecutive events of one job. Immutable, shared by all watchers."""

    after: int
    seq: int
    """It covers everything in the log in (after, seq]."""
    events: tuple[Encoded, ...]
    size_bytes: int
    _joined: dict[frozenset[str] | None, bytes] = field(
        default_factory=dict[frozenset[str] | None, bytes]
    )

    @classmethod
    def of(cls, after: int, page: EventPage) -> "Chunk":
        """Encode a page that was read from a number on."""
        encoded = tuple(encode(event) for event in page.events)
        return cls(after, page.seq, encoded, sum(len(event.body) for event in encoded))

    @property
    def ends(self) -> bool:
        """Return whether the job's last event is in it."""
        return bool(self.events) and self.events[-1].type == "end"

    @property
    def rewinds(self) -> bool:
        """Return whether an attempt starts in it, which may hide earlier events."""
        return any(event.type == "attempt" for event in self.events)

    def since(self, seq: int, types: frozenset[str] | None) -> Iterable[Encoded]:
        """Yield events after a number and of the types, plus the end and gaps."""
        for event in self.events:
            if event.seq > seq and (types is None or event.type in types or event.type in ALWAYS):
                yield event

    def lines(self, seq: int, types: frozenset[str] | None) -> bytes:
        """Return the same as bytes of a stream of one job. Whole chunks are joined once."""
        if seq > self.after:
            return _lines(self.since(seq, types))
        found = self._joined.get(types)
        if found is None:
            found = self._joined[types] = _lines(self.since(seq, types))
        return found


def _lines(events: Iterable[Encoded]) -> bytes:
    return b"".join(b"id: %d\n%b" % (event.seq, event.body) for event in events)


class Tail:
    """The newest chunks of one job's log."""

    def __init__(self, job: str, seq: int, attempt: AttemptFilter = None) -> None:
        self.job = job
        self.attempt: AttemptFilter = attempt
        """Which attempt's events it holds."""
        self.seq = seq
        """Everything up to here was read."""
        self.first = seq
        """The ring holds everything after this."""
        self.closed = False
        """Nothing more will come: the job has ended, or is gone."""
        self.watchers: set[Subscription] = set()
        self._ring: deque[Chunk] = deque()
        self._ring_bytes = 0

    def add(self, chunk: Chunk) -> None:
        """Append a chunk and wake the watchers.

        When another attempt starts, the ring is cleared: later watchers read earlier events from
        the log, which hides the replaced ones.
        """
        if chunk.rewinds and self.attempt is None:
            self._ring.clear()
            self._ring_bytes, self.first = 0, chunk.after
        self.seq = chunk.seq
        self._ring.append(chunk)
        self._ring_bytes += chunk.size_bytes
        while len(self._ring) > 1 and (
            len(self._ring) > RING_CHUNKS or self._ring_bytes > RING_BYTES
        ):
            old = self._ring.popleft()
            self._ring_bytes -= old.size_bytes
            self.first = old.seq
        self.closed = self.closed or chunk.ends
        self.notify()

    def notify(self) -> None:
        """Wake the watchers."""
        for watch in self.watchers:
            watch.notify()

    def covers(self, seq: int) -> bool:
        """Return whether the ring continues from this number without a gap."""
        return seq >= self.first

    def since(self, seq: int) -> list[Chunk]:
        """Return chunks with events after a number, as many as fit into one send."""
        found: list[Chunk] = []
        size = 0
        for chunk in reversed(self._ring):
            if chunk.seq <= seq:
                break
            found.append(chunk)
        found.reverse()
        for place, chunk in enumerate(found):
            size += chunk.size_bytes
            if size > CHUNK_BYTES and place:
                return found[:place]
        return found


class Tails:
    """The tails of this process. Each exists while its job is watched."""

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups
        self._tails: dict[tuple[str, AttemptFilter], tuple[Tail, asyncio.Task[None]]] = {}
        self._readers = anyio.CapacityLimiter(READERS)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Run a blocking function in one of the few threads for streams."""
        return await anyio.to_thread.run_sync(function, limiter=self._readers)

    async def read(self, job: str, seq: int, wanted: EventFilter = WHOLE) -> Chunk:
        """Read a chunk of a log from the database: the wanted types, and the end.

        Raises:
            JobNotFound: The job is gone.
        """
        return await self.in_thread(partial(self._read, job, seq, wanted))

    @contextmanager
    def join(
        self, job: str, seq: int, watch: Subscription, attempt: AttemptFilter = None
    ) -> Generator[Tail]:
        """Watch a job during the block. A new tail begins after ``seq``."""
        key = (job, attempt)
        if key not in self._tails:
            tail = Tail(job, seq, attempt)
            self._tails[key] = tail, asyncio.create_task(self._follow(tail), name=f"tail {job}")
        tail, task = self._tails[key]
        tail.watchers.add(watch)
        try:
            yield tail
        finally:
            tail.watchers.discard(watch)
            if not tail.watchers and self._tails.get(key, (None,))[0] is tail:
                del self._tails[key]
                task.cancel()

    def __len__(self) -> int:
        return len(self._tails)

    async def _follow(self, tail: Tail) -> None:
        try:
            with self._wakeups.watch(tail.job) as watch:
                while not tail.closed:
                    await self._grow(tail, watch)
        except JobNotFound:
            _log.info("tail_of_deleted_job", job=tail.job)
        finally:  # whatever the reason, no watcher may keep waiting
            tail.closed = True
            tail.notify()

    async def _grow(self, tail: Tail, watch: Subscription) -> None:
        try:
            chunk = await self.read(tail.job, tail.seq, EventFilter(None, tail.attempt))
        except DatabaseUnavailable:
            _log.warning("tail_cannot_read", job=tail.job)
            await asyncio.sleep(1.0)
            return
        if chunk.seq > tail.seq:
            tail.add(chunk)
            await asyncio.sleep(COALESCE_S)
        else:
            await watch.wait()

    def _read(self, job: str, seq: int, wanted: EventFilter) -> Chunk:
        types = None if wanted.types is None else sorted(wanted.types | {"end"})
        with self._database.read() as tx:
            page = events.read(
                tx,
                job,
                seq,
                types=types,
                limit=PAGE,
                max_bytes=CHUNK_BYTES,
                attempt_filter=wanted.attempt,
                with_end=True,
            )
        return Chunk.of(seq, page)
