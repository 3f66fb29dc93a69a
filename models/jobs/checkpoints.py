"""Checkpoints: store, list, hold and delete them, and find where the next attempt starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import delete as sql_delete
from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from glasshouse.errors import CheckpointInUse, CheckpointMissing, CheckpointNotFound
from models.database import now_ms
from models.jobs import jobs
from models.observations import lineage
from models.observations.events import NewEvent
from models.state import ENDED
from models.storage import pending_deletions, references
from models.tables import Checkpoint, Job, now


@dataclass(frozen=True, slots=True)
class RefusedCheckpoint:
    """A checkpoint that an attempt could not start from, and why."""

    checkpoint: str
    detail: str
    is_damaged: bool = True
    """Permanent. False: its files are unavailable, but may be back for the next attempt."""


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where an attempt starts, with the job's progress and summary at that step."""

    checkpoint: str | None = None
    """None: from scratch."""
    step: int = 0
    progress: dict[str, Any] | None = None
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    refused: tuple[RefusedCheckpoint, ...] = ()
    """Newer checkpoints that cannot be read."""


SCRATCH = StartPoint()
HOLD_MS = 60_000
"""How long a checkpoint is held: longer than the planning of a job takes."""


def add(tx: Session, job: str, attempt: int, rows: Sequence[dict[str, Any]]) -> None:
    """Store rows of a checkpoint's columns. Its files are already durable."""
    if rows:
        tx.execute(insert(Checkpoint), [{"job": job, "attempt": attempt, **row} for row in rows])


def get(tx: Session, checkpoint_id: str, owner: str | None) -> Checkpoint:
    """Return one checkpoint. ``owner`` None sees those of all owners.

    Raises:
        CheckpointNotFound: It does not exist, or belongs to someone else.
    """
    found = tx.get(Checkpoint, checkpoint_id)
    if found is None or (owner is not None and found.owner != owner):
        raise CheckpointNotFound(f"No checkpoint has the id {checkpoint_id}.")
    return found


def upload(tx: Session, **columns: Any) -> Checkpoint:
    """Store an uploaded checkpoint. Its files are already durable."""
    row = Checkpoint(step=0, epoch=0, final=True, metrics={}, created_at=now(), **columns)
    tx.add(row)
    tx.flush()
    return row


def trained(tx: Session, saved: Checkpoint) -> dict[str, Any]:
    """Return its network and fields: from the resolved spec of its job, or as uploaded with it."""
    if saved.job is not None:
        return jobs.whole(tx, saved.job, None).resolved
    return saved.network or {}


def find(
    tx: Session, *, owner: str | None, sha256: str | None, after: str | None, limit: int
) -> list[Checkpoint]:
    """List checkpoints, newest first. ``sha256``: only uploads with this digest."""
    query = select(Checkpoint).order_by(Checkpoint.id.desc()).limit(limit)
    if owner is not None:
        query = query.where(Checkpoint.owner == owner)
    if after is not None:
        query = query.where(Checkpoint.id < after)
    if sha256 is not None:
        query = query.where(Checkpoint.sha256 == sha256)
    return list(tx.scalars(query))


def uploaded(tx: Session) -> set[str]:
    """Return the ids of all uploaded checkpoints."""
    return set(tx.scalars(select(Checkpoint.id).where(Checkpoint.job.is_(None))))


def of_job(
    tx: Session, job_id: str, attempt_filter: lineage.AttemptFilter = None
) -> list[Checkpoint]:
    """List a job's checkpoints by step, without those of steps that a later attempt ran again."""
    # a checkpoint of step s was saved after step s - 1, so it counts with that step
    where = lineage.shown(tx, job_id, Checkpoint.attempt, Checkpoint.step - 1, attempt_filter)
    query = select(Checkpoint).where(Checkpoint.job == job_id, *where)
    return list(tx.scalars(query.order_by(Checkpoint.step, Checkpoint.attempt, Checkpoint.id)))


def resumable(tx: Session, job_id: str) -> list[Checkpoint]:
    """List the checkpoints that the next attempt may start from, the best first.

    A row is stored together with all events up to its step, so every row has its events. If it was
    saved at the end of training, the engine finds that nothing is left to do.
    """
    return [row for row in of_job(tx, job_id) if row.state == "complete"][::-1]


def newest(tx: Session, job: Job, *, hold: bool = False) -> Checkpoint:
    """Return the newest complete checkpoint of a job. ``hold`` holds it as `hold` does.

    Raises:
        CheckpointMissing: The job has none.
    """
    while found := resumable(tx, job.id):
        if not hold or _hold(tx, found[0].id):  # a newer one may just have superseded it
            return found[0]
    raise CheckpointMissing(f"{job.id} has no complete checkpoint; it is {job.state}.")


def hold(tx: Session, checkpoint_id: str) -> None:
    """Keep a checkpoint from being superseded while a job that reads it is planned.

    Raises:
        CheckpointNotFound: It is gone.
    """
    if not _hold(tx, checkpoint_id):
        raise CheckpointNotFound(f"No checkpoint has the id {checkpoint_id}.")


def held(tx: Session, job_id: str) -> set[str]:
    """Return the ids of the checkpoints of a job that are held now."""
    mine = (Checkpoint.job == job_id, Checkpoint.held_until_ms > now_ms())
    return set(tx.scalars(select(Checkpoint.id).where(*mine)))


def _hold(tx: Session, checkpoint_id: str) -> bool:
    held = update(Checkpoint).where(Checkpoint.id == checkpoint_id)
    held = held.values(held_until_ms=now_ms() + HOLD_MS).returning(Checkpoint.id)
    return tx.scalar(held) is not None


def newest_step(tx: Session, job_id: str) -> int:
    """Return the highest step of a job's complete checkpoints, in updates done; 0 without any."""
    mine = (Checkpoint.job == job_id, Checkpoint.state == "complete")
    return tx.scalar(select(func.max(Checkpoint.step)).where(*mine)) or 0


def take(tx: Session, job_id: str, start: StartPoint) -> None:
    """Check, in the transaction that claims an attempt, that its start checkpoint still exists.

    Raises:
        CheckpointNotFound: It does not.
    """
    if start.checkpoint is None:
        return
    # the same lock as for deleting one
    tx.scalar(select(Job.id).where(Job.id == job_id).with_for_update())
    query = select(Checkpoint.id).where(
        Checkpoint.id == start.checkpoint,
        Checkpoint.job == job_id,
        Checkpoint.step == start.step,
        Checkpoint.state == "complete",
    )
    if tx.scalar(query) is None:
        raise CheckpointNotFound(f"The checkpoint {start.checkpoint} is gone.")


def refuse(tx: Session, refused: RefusedCheckpoint) -> NewEvent:
    """Mark a damaged checkpoint so that nothing resumes from it; return the log event about it."""
    row = tx.get(Checkpoint, refused.checkpoint)
    step = None if row is None else row.step
    if refused.is_damaged:
        mine = update(Checkpoint).where(Checkpoint.id == refused.checkpoint)
        tx.execute(mine.values(state="damaged"))
    line = f"glasshouse: the checkpoint {refused.checkpoint} of step {step} cannot be used: "
    printed = {"lines": [line + refused.detail], "levels": ["warning"]}
    payload = {"rank": 0, "stream": "stderr", **printed}
    return NewEvent("log", now(), payload)


def delete(tx: Session, checkpoint: Checkpoint) -> None:
    """Delete the row of a checkpoint. Its files may be deleted after the commit.

    Raises:
        CheckpointInUse: A job that has not ended reads it, or would resume from it; or a model
            publishes it.
    """
    if not references.unused(tx, Checkpoint, [checkpoint.id]):
        raise CheckpointInUse(references.why_used(tx, [checkpoint.id]))
    if checkpoint.job is not None and _is_next_start(tx, checkpoint.job, checkpoint.id):
        raise CheckpointInUse("The job has not ended, and would resume from this checkpoint.")
    tx.execute(sql_delete(Checkpoint).where(Checkpoint.id == checkpoint.id))
    pending_deletions.add(tx, [checkpoint.key])


def _is_next_start(tx: Session, job_id: str, checkpoint_id: str) -> bool:
    """Return whether an unfinished job would resume from this checkpoint. Locks the job's row."""
    state = tx.scalar(select(Job.state).where(Job.id == job_id).with_for_update())
    return state not in ENDED and [row.id for row in resumable(tx, job_id)[:1]] == [checkpoint_id]
