"""Heartbeats: canaries, sweeps and counters of workers; metrics of the whole database."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from models.database import now_ms
from models.fleet import workers
from models.tables import (
    Attempt,
    Capture,
    Checkpoint,
    Dataset,
    Delivery,
    Job,
    JobArtifact,
    Webhook,
    Worker,
)

GONE = ("stopped", "lost")
"""States of workers that do not run."""
MISSED_CANARIES = 3
"""A worker that misses this many of its own wake-ups is unresponsive."""


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The health of one worker, as the database shows it."""

    worker: str
    state: str
    """active, draining, stopped, lost."""
    unresponsive: bool
    """It runs, but does not receive its wake-ups."""
    swept_ago_s: float | None
    figures: dict[str, Any]


def received_canary(tx: Session, worker: str, *, instance: str = "") -> None:
    """Note that the worker received its own wake-up."""
    _note(tx, worker, instance, canary_ms=now_ms())


def swept(tx: Session, worker: str, *, instance: str = "") -> int:
    """Note that the worker runs and sweeps. Return the database's time in Unix milliseconds."""
    time_ms = tx.scalars(select(now_ms())).one()
    _note(tx, worker, instance, beat_ms=time_ms, sweep_ms=time_ms)
    return time_ms


def note(tx: Session, worker: str, figures: dict[str, Any], *, instance: str = "") -> None:
    """Store the counters of a worker."""
    _note(tx, worker, instance, figures=figures)


def _note(tx: Session, worker: str, instance: str, **values: Any) -> None:
    """Change a worker's row, unless another process has taken its name."""
    mine = (Worker.id == worker, Worker.instance == instance)
    tx.execute(update(Worker).where(*mine).values(values))


def signs(tx: Session, *, lease_ms: int, canary_s: float) -> list[WorkerHealth]:
    """Return the health of every known worker."""
    time = tx.scalars(select(now_ms())).one()
    unresponsive_ms = MISSED_CANARIES * canary_s * 1000
    return [
        WorkerHealth(
            worker=row.id,
            state=state,
            unresponsive=state not in GONE
            and row.canary_ms is not None
            and time - row.canary_ms > unresponsive_ms,
            swept_ago_s=None if row.sweep_ms is None else (time - row.sweep_ms) / 1000,
            figures=row.figures or {},
        )
        for row, state in workers.all_workers(tx, lease_ms=lease_ms)
    ]


def low_on_disk(tx: Session, least_bytes: int) -> set[str]:
    """Return workers that last reported a disk with less free space than this."""
    rows = tx.execute(select(Worker.id, Worker.figures).where(Worker.figures.is_not(None)))
    return {
        worker
        for worker, figures in rows
        if figures
        and min(figures.get("free_bytes", {}).values(), default=least_bytes) < least_bytes
    }


def queue_age_s(tx: Session) -> float:
    """Return the wait of the oldest queued job in seconds; 0 without one."""
    time = tx.scalars(select(now_ms())).one()
    oldest = tx.scalar(select(func.min(Job.queued_at)).where(Job.state == "queued"))
    return 0.0 if oldest is None else max(0.0, time / 1000 - oldest.timestamp())


def ended_attempts(tx: Session, *, limit: int = 50) -> dict[str, int]:
    """Return the number of ended attempts by exit kind."""
    count = func.count()
    query = (
        select(Attempt.exit_kind, count)
        .where(Attempt.exit_kind.is_not(None))
        .group_by(Attempt.exit_kind)
        .order_by(count.desc())
        .limit(limit)
    )
    return {str(kind): int(number) for kind, number in tx.execute(query)}


def deliveries(tx: Session) -> dict[str, int]:
    """Return the number of webhook messages in each state."""
    query = select(Delivery.state, func.count()).group_by(Delivery.state)
    return {state: int(count) for state, count in tx.execute(query)}


def disabled_webhooks(tx: Session) -> int:
    """Return the number of disabled webhooks."""
    query = select(func.count()).select_from(Webhook).where(Webhook.disabled_at.is_not(None))
    return tx.scalars(query).one()


def stored_bytes(tx: Session) -> dict[str, int]:
    """Return the bytes of the artifacts by type, from their rows."""
    sizes = {
        "datasets": Dataset.size_bytes,
        "checkpoints": Checkpoint.size_bytes,
        "captures": Capture.size_bytes,
        "artifacts": JobArtifact.size_bytes,
    }
    return {name: int(tx.scalar(select(func.sum(size))) or 0) for name, size in sizes.items()}


def database_bytes(tx: Session) -> int:
    """Return the size of the database in bytes."""
    if tx.get_bind().dialect.name == "postgresql":
        return int(tx.scalars(text("SELECT pg_database_size(current_database())")).one())
    pages = tx.scalars(text("PRAGMA page_count")).one()
    return int(pages) * int(tx.scalars(text("PRAGMA page_size")).one())
