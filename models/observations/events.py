"""The event log of a job: append with gapless numbers, read by cursor."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, func, insert, or_, select, update
from sqlalchemy.orm import Session

from glasshouse import jsonio
from glasshouse.errors import JobNotFound
from models.access import webhooks
from models.observations import lineage
from models.observations.lineage import AttemptFilter
from models.state import ENDED
from models.tables import Event, Job, core

REPEATED = ("metrics", "stats")
"""Types of events that repeat values of the series. Retention deletes them before all others."""


class NewEvent(NamedTuple):
    """An event that has no number yet."""

    type: str
    at: datetime
    payload: dict[str, Any]
    step: int | None = None
    """The step that it belongs to, or the last step before it."""
    announce: bool = False
    """Whether webhooks are notified of it. They always are of state changes."""


class LoggedEvent(NamedTuple):
    """An event as read from the database."""

    job: str
    seq: int
    attempt: int
    at: datetime
    type: str
    payload: str
    """The type's own fields, as JSON text."""

    def as_json(self) -> str:
        """Return the whole event as one JSON object, for polling and streams."""
        at = f"{self.at:%Y-%m-%dT%H:%M:%S}.{self.at.microsecond // 1000:03d}Z"
        head = (
            f'{{"job":"{self.job}","seq":{self.seq},"attempt":{self.attempt},'
            f'"at":"{at}","type":"{self.type}"'
        )
        return head + ("}" if self.payload == "{}" else f",{self.payload[1:]}")


def moved(at: datetime, before: str | None, to: str, reason: str | None = None) -> list[NewEvent]:
    """Return the events of a state change, including the ``end`` event if the job ends."""
    payload: dict[str, Any] = {"from": before, "to": to, "reason": reason}
    ends = [NewEvent("end", at, {"state": to})] if to in ENDED else []
    return [NewEvent("state", at, payload), *ends]


def append(tx: Session, job: str, events: Sequence[NewEvent], **changes: Any) -> None:
    """Append events with the next numbers, and change the job in the same statement.

    The lock on the job's row makes the numbers ascend in commit order. So a reader that asks for
    everything after a number never misses a later commit.
    """
    attempt, last = tx.execute(
        update(Job)
        .where(Job.id == job)
        .values(last_seq=Job.last_seq + len(events), version=Job.version + 1, **changes)
        .returning(Job.attempt, Job.last_seq)
    ).one()
    write(tx, job, attempt, last - len(events), events)


def write(tx: Session, job: str, attempt: int, after: int, events: Sequence[NewEvent]) -> None:
    """Insert events with numbers that were already reserved in the job's row."""
    if not events:
        return
    rows = [
        {
            "job": job,
            "seq": seq,
            "attempt": attempt,
            "at": event.at,
            "type": event.type,
            "step": event.step,
            "payload": jsonio.dumps(event.payload),
        }
        for seq, event in enumerate(events, start=after + 1)
    ]
    tx.execute(insert(core(Event)), rows)
    news = [
        _news(event, seq)
        for seq, event in enumerate(events, start=after + 1)
        if event.type == "state" or event.announce
    ]
    if news:
        webhooks.announce(tx, job, news)


def _news(event: NewEvent, seq: int) -> webhooks.News:
    at = f"{event.at:%Y-%m-%dT%H:%M:%S}.{event.at.microsecond // 1000:03d}Z"
    if event.type == "state":
        return webhooks.News(seq, at, f"job.{event.payload['to']}", event.payload)
    return webhooks.News(seq, at, f"job.{event.type}", {event.type: event.payload})


def after(
    tx: Session,
    job: str,
    seq: int,
    *,
    types: Sequence[str] | None = None,
    limit: int = 500,
    where: Sequence[ColumnElement[bool]] = (),
) -> list[LoggedEvent]:
    """Return the next events after a number, in order. ``types`` limits them to those types."""
    query = (
        select(Event.job, Event.seq, Event.attempt, Event.at, Event.type, Event.payload)
        .where(Event.job == job, Event.seq > seq, *where)
        .order_by(Event.seq)
        .limit(limit)
    )
    if types is not None:
        query = query.where(Event.type.in_(types))
    return [LoggedEvent(*row) for row in tx.execute(query)]


class EventPage(NamedTuple):
    """A page of a log, and how far it reaches."""

    events: list[LoggedEvent]
    seq: int
    """Everything up to this number was read; resume from it."""
    last_seq: int
    """The newest number of the log at the time of reading."""


def read(  # noqa: PLR0913 (each is a filter)
    tx: Session,
    job: str,
    seq: int,
    *,
    types: Sequence[str] | None = None,
    limit: int = 500,
    max_bytes: int = 1 << 20,
    attempt_filter: AttemptFilter = None,
    with_end: bool = False,
) -> EventPage:
    """Return the next events after a number. Stop after about ``max_bytes`` of payload.

    Events that a later attempt replaced are hidden unless ``attempt_filter`` selects others.
    ``with_end``: the job's end counts as an event of every attempt. If retention has deleted the
    next events, the page is one ``gap`` event, whatever the types. Types other than ``REPEATED``
    are kept longer: a reader of only those sees no gap while they exist.

    Raises:
        JobNotFound: The job is gone.
    """
    query = select(Job.last_seq, Job.first_seq).where(Job.id == job, Job.deleted_at.is_(None))
    row = tx.execute(query).one_or_none()
    if row is None:
        raise JobNotFound(f"No job has the id {job}.")
    last = row.last_seq
    if seq + 1 < row.first_seq:
        first = _first(tx, job, row.first_seq, types)
        if seq + 1 < first:
            return EventPage([_gap(tx, job, first)], first - 1, last)
    found = _shown_after(tx, job, seq, types, limit, attempt_filter, with_end=with_end)
    size = 0
    for place, event in enumerate(found):
        size += len(event.payload)
        if size > max_bytes:
            found = found[: place + 1]
            return EventPage(found, found[-1].seq, last)
    if len(found) == limit:
        return EventPage(found, found[-1].seq, last)
    # the number was read first, so the second statement sees every event up to it
    return EventPage(found, max([last, seq, *(event.seq for event in found[-1:])]), last)


def _shown_after(  # noqa: PLR0913 (what a page is asked for)
    tx: Session,
    job: str,
    seq: int,
    types: Sequence[str] | None,
    limit: int,
    attempt_filter: AttemptFilter,
    *,
    with_end: bool,
) -> list[LoggedEvent]:
    if attempt_filter is not None:
        where = lineage.shown(tx, job, Event.attempt, Event.step, attempt_filter)
        if with_end and where:
            where = [or_(*where, Event.type == "end")]
        return after(tx, job, seq, types=types, limit=limit, where=where)
    cuts = lineage.cuts(tx, job)
    found: list[LoggedEvent] = []
    for _ in range(2):
        where = lineage.condition(cuts, Event.attempt, Event.step)
        found = after(tx, job, seq, types=types, limit=limit, where=where)
        newest = max((event.attempt for event in found), default=0)
        if newest <= max([1, *(cut.attempt for cut in cuts)]):
            break
        cuts = lineage.cuts(tx, job)  # an attempt started between: what does it hide?
    return found


def _first(tx: Session, job: str, first_seq: int, types: Sequence[str] | None) -> int:
    """Return the number from which on the log has all events of the types."""
    if types is None or not set(types).isdisjoint(REPEATED):
        return first_seq
    oldest = tx.scalar(select(func.min(Event.seq)).where(Event.job == job))
    return first_seq if oldest is None else min(first_seq, oldest)


def _gap(tx: Session, job: str, first_seq: int) -> LoggedEvent:
    """Return the event that replaces deleted events; the same for every reader."""
    attempt, at = tx.execute(
        select(Job.attempt, func.coalesce(Job.ended_at, Job.created_at)).where(Job.id == job)
    ).one()
    payload = jsonio.dumps({"first_available": first_seq})
    return LoggedEvent(job, first_seq - 1, attempt, at, "gap", payload)
