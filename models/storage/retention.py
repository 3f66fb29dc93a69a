"""Retention: rows of ended jobs are deleted in small transactions, their files afterwards.

Data that an unfinished job reads stays, for example a checkpoint that it uses. So does a checkpoint
that a model publishes, with its job, which has the network. The last event of an ended job stays
too.

A value is stored twice only temporarily: as a row of its series, which is the record, and in the
event that streams replay. Old events of this kind (``REPEATED``) are deleted from running jobs,
too. ``first_seq`` is the number from which on the log has all events, so that a reader with an
older cursor gets a gap event.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, true, tuple_, update
from sqlalchemy.orm import Session

from models.access.idempotency import KEPT
from models.observations.events import REPEATED
from models.settings import Settings
from models.state import ENDED
from models.storage import pending_deletions, references
from models.tables import (
    Capture,
    Checkpoint,
    Delivery,
    Device,
    Event,
    Idempotency,
    Job,
    JobUse,
    Key,
    Metric,
    MetricSpan,
    ModelVersion,
    ServedRequest,
    StatsBlock,
    StatsChunk,
    StatsFold,
    StatsSeries,
    Table,
    Worker,
    core,
    now,
)

DELIVERED = ("delivered", "failed")


@dataclass(frozen=True, slots=True)
class Deleted:
    """The result of one small transaction."""

    rows: int = 0
    files: int = 0
    """Number of files that may be deleted now, stored as pending deletions."""
    more: bool = False
    """There may be more to delete although this transaction deleted nothing."""


@dataclass(frozen=True, slots=True)
class DependentRows:
    """Rows that depend on a job and may be deleted after its end."""

    name: str
    left: Callable[[], ColumnElement[bool]]
    """Condition, in a query of jobs, that a job has any of these rows."""
    some: Callable[[Session, str, int], Deleted]
    """Delete some of a job's rows. If nothing was deleted, nothing is left."""
    count: Callable[[Session, Sequence[str]], tuple[int, int]]
    """Number of rows of these jobs, and their bytes if known."""


def ended_before(tx: Session, kind: DependentRows, before: datetime, *, limit: int) -> list[str]:
    """Return ended jobs that still have rows of a kind, earliest end first."""
    query = (
        select(Job.id)
        .where(Job.state.in_(ENDED), Job.ended_at < before, kind.left(), Job.deleted_at.is_(None))
        .order_by(Job.ended_at)
        .limit(limit)
    )
    return list(tx.scalars(query))


def jobs_with_old_values(
    tx: Session, before: datetime, *, limit: int, after: str = ""
) -> list[str]:
    """Return jobs whose first unchecked event is older than a time, by id."""
    first = (
        select(Event.at).where(Event.job == Job.id, Event.seq == Job.first_seq).scalar_subquery()
    )
    query = (
        select(Job.id)
        .where(Job.id > after, Job.created_at < before, Job.first_seq < Job.last_seq)
        .where(first < before)
        .order_by(Job.id)
        .limit(limit)
    )
    return list(tx.scalars(query))


def forget_values(tx: Session, job: str, before: datetime, limit: int) -> Deleted:
    """Delete old events that repeat stored values, among the next events of a log.

    It scans a range of numbers, which the primary key finds quickly; ``first_seq`` moves past it.
    """
    row = tx.execute(select(Job.first_seq, Job.last_seq).where(Job.id == job)).one_or_none()
    if row is None or row.first_seq >= row.last_seq:
        return Deleted()
    upto = min(row.first_seq + limit, row.last_seq)
    within = (Event.job == job, Event.seq >= row.first_seq, Event.seq < upto)
    newer = tx.scalar(select(func.min(Event.seq)).where(*within, Event.at >= before))
    upto = upto if newer is None else newer
    if upto == row.first_seq:
        return Deleted()
    tx.execute(update(Job).where(Job.id == job, Job.first_seq < upto).values(first_seq=upto))
    old = delete(Event).where(*within, Event.seq < upto, Event.type.in_(REPEATED))
    found: Any = tx.execute(old)
    return Deleted(int(found.rowcount), more=True)


def count_values(tx: Session, job: str, before: datetime) -> int:
    """Return how many events ``forget_values`` would delete."""
    query = select(func.count()).select_from(Event).join(Job, Job.id == Event.job)
    old = (Event.seq >= Job.first_seq, Event.seq < Job.last_seq, Event.at < before)
    return tx.scalars(query.where(Job.id == job, *old, Event.type.in_(REPEATED))).one()


def jobs_ended_before(
    tx: Session, before: datetime, *, limit: int, after: tuple[datetime, str] | None = None
) -> list[tuple[datetime, str]]:
    """Return ended jobs that nothing needs any more, earliest end first."""
    own = select(Checkpoint.id).where(Checkpoint.job == Job.id)
    query = select(Job.ended_at, Job.id).where(
        Job.state.in_(ENDED),
        Job.ended_at < before,
        Job.deleted_at.is_(None),
        ~_in_use(JobUse.used == Job.id),
        ~_in_use(JobUse.used.in_(own)),
        ~references.is_published(ModelVersion.checkpoint.in_(own)),
    )
    if after is not None:
        query = query.where(tuple_(Job.ended_at, Job.id) > after)
    rows = tx.execute(query.order_by(Job.ended_at, Job.id).limit(limit))
    return [(ended_at, job) for ended_at, job in rows if ended_at is not None]


def forget_job(tx: Session, job: str, before: datetime) -> bool:
    """Delete an ended job itself, after its large data. False: it is still needed.

    It is needed as long as it has a checkpoint: `_some_checkpoints` deletes all that nothing needs.
    """
    query = (
        delete(Job)
        .where(Job.id == job, Job.state.in_(ENDED), Job.ended_at < before)
        .where(~_in_use(JobUse.used == job))
        .where(~exists(select(Checkpoint.id).where(Checkpoint.job == job)))
    )
    if tx.scalar(query.returning(Job.id)) is None:
        return False
    pending_deletions.add(tx, [f"jobs/{job}"])
    return True


def deleted_jobs(tx: Session, *, limit: int) -> list[str]:
    """Return deleted jobs that still have rows, earliest deletion first."""
    query = select(Job.id).where(Job.deleted_at.is_not(None))
    return list(tx.scalars(query.order_by(Job.deleted_at).limit(limit)))


def forget_deleted(tx: Session, job: str) -> bool:
    """Delete the row of a deleted job, after its large data. False: it is gone."""
    query = delete(Job).where(Job.id == job, Job.deleted_at.is_not(None)).returning(Job.id)
    return tx.scalar(query) is not None


def forget_small(tx: Session, settings: Settings, limit: int) -> int:
    """Delete some rows that depend on no job and have no files. Return how many."""
    time = now()
    rows = _delete_some(tx, Idempotency, Idempotency.created_at < time - KEPT, limit)
    if settings.keep_keys_days is not None:
        before = time - timedelta(days=settings.keep_keys_days)
        rows += _delete_some(tx, Key, useless(before), limit)
    if settings.keep_workers_days is not None:
        before = time - timedelta(days=settings.keep_workers_days)
        rows += _delete_some(tx, Worker, gone(before), limit)
    if settings.keep_deliveries_days is not None:
        before = time - timedelta(days=settings.keep_deliveries_days)
        old = Delivery.state.in_(DELIVERED) & (Delivery.ended_at < before)
        rows += _delete_some(tx, Delivery, old, limit)
    return rows


def count_small(tx: Session, settings: Settings) -> dict[str, int]:
    """Return how many rows ``forget_small`` would delete, by type."""
    time = now()
    wanted: dict[str, tuple[type[Table], ColumnElement[bool]]] = {
        "idempotency": (Idempotency, Idempotency.created_at < time - KEPT)
    }
    if settings.keep_keys_days is not None:
        before = time - timedelta(days=settings.keep_keys_days)
        wanted["keys"] = (Key, useless(before))
    if settings.keep_workers_days is not None:
        before = time - timedelta(days=settings.keep_workers_days)
        wanted["workers"] = (Worker, gone(before))
    if settings.keep_deliveries_days is not None:
        before = time - timedelta(days=settings.keep_deliveries_days)
        old = Delivery.state.in_(DELIVERED) & (Delivery.ended_at < before)
        wanted["deliveries"] = (Delivery, old)
    return {
        name: tx.scalars(select(func.count()).select_from(table).where(which)).one()
        for name, (table, which) in wanted.items()
    }


def useless(before: datetime) -> ColumnElement[bool]:
    """Return the condition for keys, sessions and tickets that ended before a time."""
    return or_(Key.revoked_at < before, Key.expires_at < before)


def gone(before: datetime) -> ColumnElement[bool]:
    """Return the condition for workers without a heartbeat since a time and without jobs."""
    return and_(
        Worker.started_at < before,
        Worker.beat_ms < int(before.timestamp() * 1000),
        ~exists(select(Device.id).where(Device.worker == Worker.id, Device.job.is_not(None))),
    )


def _in_use(which: ColumnElement[bool]) -> ColumnElement[bool]:
    reader = select(Job.state).where(Job.id == JobUse.job).correlate(JobUse).scalar_subquery()
    return exists(select(JobUse.job).where(which, reader.not_in(ENDED)))


def _delete_some(tx: Session, table: type[Table], which: ColumnElement[bool], limit: int) -> int:
    columns: list[Any] = list(core(table).primary_key.columns)
    some = select(*columns).where(which).limit(limit)
    found: Any = tx.execute(delete(table).where(tuple_(*columns).in_(some)))
    return int(found.rowcount)


# --- data that depends on a job -----------------------------------------------------------


def _some_events(tx: Session, job: str, limit: int) -> Deleted:
    oldest = select(func.min(Event.seq)).where(Event.job == Job.id).scalar_subquery()
    query = select(Job.last_seq, oldest).where(Job.id == job, Job.state.in_(ENDED))
    row = tx.execute(query).one_or_none()
    if row is None or row[1] >= row[0]:
        return Deleted()
    last, first = row
    upto = min(first + limit, last)
    tx.execute(update(Job).where(Job.id == job, Job.first_seq < upto).values(first_seq=upto))
    found: Any = tx.execute(delete(Event).where(Event.job == job, Event.seq < upto))
    return Deleted(int(found.rowcount))


def _count_events(tx: Session, jobs: Sequence[str]) -> tuple[int, int]:
    query = select(func.count()).select_from(Event).join(Job, Job.id == Event.job)
    return tx.scalars(query.where(Job.id.in_(jobs), Event.seq < Job.last_seq)).one(), 0


def _some_metrics(tx: Session, job: str, limit: int) -> Deleted:
    tx.execute(delete(MetricSpan).where(MetricSpan.job == job))  # summaries read these
    return Deleted(_delete_some(tx, Metric, Metric.job == job, limit))


def _some_statistics(tx: Session, job: str, limit: int) -> Deleted:
    mine = select(StatsSeries.id).where(StatsSeries.job == job)
    for table, which in (
        (StatsBlock, StatsBlock.job == job),
        (StatsChunk, StatsChunk.series.in_(mine)),
        (StatsSeries, StatsSeries.job == job),
        (StatsFold, StatsFold.job == job),
    ):
        rows = _delete_some(tx, table, which, limit)
        if rows:
            return Deleted(rows)
    return Deleted()


def _count_statistics(tx: Session, jobs: Sequence[str]) -> tuple[int, int]:
    mine = select(StatsSeries.id).where(StatsSeries.job.in_(jobs))
    rows = size = 0
    for table, which in (
        (StatsBlock, StatsBlock.job.in_(jobs)),
        (StatsChunk, StatsChunk.series.in_(mine)),
    ):
        found = tx.execute(select(func.count(), func.sum(func.length(table.data))).where(which))
        count, bytes_ = found.one()
        rows, size = rows + int(count), size + int(bytes_ or 0)
    return rows, size


def _some_requests(tx: Session, job: str, limit: int) -> Deleted:
    return Deleted(_delete_some(tx, ServedRequest, ServedRequest.job == job, limit))


def _some_captures(tx: Session, job: str, limit: int) -> Deleted:
    keys = list(tx.scalars(select(Capture.key).where(Capture.job == job).distinct().limit(limit)))
    if not keys:
        return Deleted()
    keys = keys[: max(1, limit // 8)]  # one file may have several rows
    found: Any = tx.execute(delete(Capture).where(Capture.job == job, Capture.key.in_(keys)))
    pending_deletions.add(tx, keys)
    return Deleted(int(found.rowcount), len(keys))


def _some_checkpoints(tx: Session, job: str, limit: int) -> Deleted:
    query = (
        select(Checkpoint.id, Checkpoint.key)
        .where(Checkpoint.job == job, _is_unused())
        .limit(limit)
    )
    rows = tx.execute(query).all()
    if not rows:
        return Deleted()
    unused = references.unused(tx, Checkpoint, [row.id for row in rows])
    rows = [row for row in rows if row.id in unused]
    tx.execute(delete(Checkpoint).where(Checkpoint.id.in_(unused)))
    pending_deletions.add(tx, [row.key for row in rows])
    return Deleted(len(rows), len(rows))


def _is_unused() -> ColumnElement[bool]:
    """Return the condition that no unfinished job reads a checkpoint and no model publishes it."""
    is_published = references.is_published(ModelVersion.checkpoint == Checkpoint.id)
    return ~_in_use(JobUse.used == Checkpoint.id) & ~is_published


def _counted(
    table: type[Capture] | type[Checkpoint] | type[ServedRequest],
    which: Callable[[], ColumnElement[bool]] = true,
) -> Any:
    def count(tx: Session, jobs: Sequence[str]) -> tuple[int, int]:
        query = select(func.count(), func.sum(table.size_bytes)).where(table.job.in_(jobs), which())
        rows, size = tx.execute(query).one()
        return int(rows), int(size or 0)

    return count


def _count_metrics(tx: Session, jobs: Sequence[str]) -> tuple[int, int]:
    query = select(func.count()).select_from(Metric).where(Metric.job.in_(jobs))
    return tx.scalars(query).one(), 0


def _has(table: Any) -> Callable[[], ColumnElement[bool]]:
    return lambda: exists(select(table.job).where(table.job == Job.id))


KINDS: tuple[DependentRows, ...] = (
    DependentRows(
        "events",
        lambda: exists(select(Event.job).where(Event.job == Job.id, Event.seq < Job.last_seq)),
        _some_events,
        _count_events,
    ),
    DependentRows("metrics", _has(Metric), _some_metrics, _count_metrics),
    DependentRows(
        "statistics",
        lambda: or_(_has(StatsBlock)(), _has(StatsSeries)(), _has(StatsFold)()),
        _some_statistics,
        _count_statistics,
    ),
    DependentRows("requests", _has(ServedRequest), _some_requests, _counted(ServedRequest)),
    DependentRows("captures", _has(Capture), _some_captures, _counted(Capture)),
    DependentRows(
        "checkpoints",
        lambda: exists(select(Checkpoint.id).where(Checkpoint.job == Job.id, _is_unused())),
        _some_checkpoints,
        _counted(Checkpoint, _is_unused),
    ),
)
"""In the order of deletion. The setting of each is ``keep_<name>_days``."""
