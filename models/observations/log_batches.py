"""Read the ``log`` events of a job in batches, so that no statement and no transaction is long."""

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from models.observations.events import LoggedEvent
from models.tables import Event

BATCH = 64
"""Events per batch. Each has the lines of at most 64 KiB, of earlier releases more."""
WINDOW = 20_000
"""Numbers that a statement covers: there may be millions of other events between two of a log."""


class LogBatch(NamedTuple):
    """Events of a log, and how far the batch reaches."""

    events: list[LoggedEvent]
    """In the order of reading."""
    seq: int
    """Everything up to this number was read; backward: everything down to it. It is included."""


def forward(tx: Session, job: str, after: int, last: int, since: datetime | None) -> LogBatch:
    """Return the next events of the log with ``after < seq <= last``, in ascending order.

    ``since``: only events from that time on.
    """
    stop = min(last, after + WINDOW)
    found = _between(tx, job, after + 1, stop, since, newest_first=False)
    return LogBatch(found, found[-1].seq if len(found) == BATCH else max(after, stop))


def backward(tx: Session, job: str, before: int, first: int, since: datetime | None) -> LogBatch:
    """Return the next events of the log with ``first <= seq < before``, in descending order."""
    stop = max(first, before - WINDOW)
    found = _between(tx, job, stop, before - 1, since, newest_first=True)
    return LogBatch(found, found[-1].seq if len(found) == BATCH else min(before, stop))


def _between(
    tx: Session, job: str, first: int, last: int, since: datetime | None, *, newest_first: bool
) -> list[LoggedEvent]:
    query = (
        select(Event.job, Event.seq, Event.attempt, Event.at, Event.type, Event.payload)
        .where(Event.job == job, Event.seq >= first, Event.seq <= last, Event.type == "log")
        .order_by(Event.seq.desc() if newest_first else Event.seq)
        .limit(BATCH)
    )
    if since is not None:
        query = query.where(Event.at >= since)
    return [LoggedEvent(*row) for row in tx.execute(query)]
