"""Search the log of a job: filters of lines, read in batches within a budget of time and bytes."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from api.http.answers import bad_parameter
from api.http.patterns import Search
from glasshouse import jsonio
from glasshouse.events import LOG_LEVELS, LogLevel
from models.database import Transaction
from models.observations import log_batches
from models.observations.events import LoggedEvent
from models.observations.log_batches import LogBatch
from models.observations.log_levels import levels_of

MAX_BYTES = 32 * 1024 * 1024
"""Of one result, plus its last event."""
SEARCH_S = 2.0
"""A search that takes longer returns what it has found, and where to continue."""
MAX_EVENT_S = 10.0
"""An event is searched whole, or the request would make no progress. But no longer than this."""
Read = Callable[[], AbstractContextManager[Transaction]]


@dataclass(frozen=True, slots=True)
class LineFilter:
    """Which lines are wanted. None: all."""

    ranks: frozenset[int] | None = None
    level: LogLevel | None = None
    """This level and those above."""
    search: Search | None = None
    """Whether the UTF-8 bytes of a line match."""
    since: datetime | None = None
    """Only lines that were read at this time or later."""

    def apply(self, event: LoggedEvent) -> dict[str, Any] | None:
        """Return the event with the wanted lines and their levels; None if there is none.

        Raises:
            InvalidRequest: The pattern takes too long.
        """
        entry = jsonio.loads(event.as_json())
        if self.ranks is not None and entry["rank"] not in self.ranks:
            return None
        pairs = list(zip(entry["lines"], levels_of(entry), strict=True))
        if self.level is not None:
            wanted = LOG_LEVELS[LOG_LEVELS.index(self.level) :]
            pairs = [pair for pair in pairs if pair[1] in wanted]
        if self.search is not None:
            pairs = list(_matching(self.search, pairs))
        if not pairs:
            return None
        return entry | {"lines": [line for line, _ in pairs], "levels": [of for _, of in pairs]}


def _matching(search: Search, pairs: list[tuple[str, LogLevel]]) -> Iterator[tuple[str, LogLevel]]:
    end = time.monotonic() + MAX_EVENT_S
    for pair in pairs:
        if search(pair[0].encode("utf-8", "replace")):
            yield pair
        if time.monotonic() > end:
            detail = "the pattern takes too long; use fewer and smaller repetitions."
            raise bad_parameter("grep", detail, "invalid_pattern")


class Range(NamedTuple):
    """The numbers of the events to search: ``after < seq <= last``."""

    job: str
    after: int
    last: int


@dataclass(slots=True)
class Found:
    """The result of a search."""

    parts: list[bytes] = field(default_factory=list[bytes])
    """One for each event with wanted lines, in order: JSON, or lines of text."""
    seq: int = 0
    """Everything up to this number was searched; for the last lines, everything from it on."""
    is_complete: bool = False
    """Whether nothing is left to search."""

    def add(self, entry: dict[str, Any], form: str) -> int:
        """Add an event as text or JSON. Return its size in bytes."""
        text = jsonio.dumps(entry) if form == "json" else "\n".join([*entry["lines"], ""])
        self.parts.append(text.encode("utf-8", "replace"))
        return len(self.parts[-1])


def lines_after(read: Read, within: Range, wanted: LineFilter, form: str) -> Found:
    """Return the wanted lines of a range, from its beginning.

    ``read`` opens a transaction; ``form`` is text or json.
    """
    found, budget = Found(seq=within.after), _Budget()
    while found.seq < within.last:
        with read() as tx:
            batch = log_batches.forward(tx, within.job, found.seq, within.last, wanted.since)
        for event, entry in _entries(batch, wanted):
            if entry is not None:
                budget.size_bytes += found.add(entry, form)
            found.seq = event.seq
            if budget.is_spent():
                break
        else:
            found.seq = batch.seq
        if budget.is_spent():
            break
    found.is_complete = found.seq >= within.last
    return found


def last_lines(read: Read, within: Range, wanted: LineFilter, form: str, num: int) -> Found:
    """Return the last ``num`` wanted lines of a range; the other arguments as of `lines_after`."""
    found, budget = Found(seq=within.last + 1), _Budget()
    while found.seq > within.after + 1:
        with read() as tx:
            batch = log_batches.backward(tx, within.job, found.seq, within.after + 1, wanted.since)
        for event, entry in _entries(batch, wanted):
            if entry is not None:
                entry |= {name: entry[name][-num:] for name in ("lines", "levels")}
                num -= len(entry["lines"])
                budget.size_bytes += found.add(entry, form)
            found.seq = event.seq
            if num <= 0 or budget.is_spent():
                break
        else:
            found.seq = batch.seq
        if num <= 0 or budget.is_spent():
            break
    found.parts.reverse()
    found.is_complete = num <= 0 or found.seq <= within.after + 1
    return found


def _entries(
    batch: LogBatch, wanted: LineFilter
) -> Iterator[tuple[LoggedEvent, dict[str, Any] | None]]:
    for event in batch.events:
        yield event, wanted.apply(event)


class _Budget:
    """What a search may still take."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._end = time.monotonic() + SEARCH_S

    def is_spent(self) -> bool:
        return self.size_bytes >= MAX_BYTES or time.monotonic() > self._end
