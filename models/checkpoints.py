"""Saved networks of jobs."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete as sql_delete
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from glasshouse.errors import CheckpointInUse, CheckpointMissing, CheckpointNotFound
from models import doomed, jobs
from models.tables import Checkpoint, Job


def add(tx: Session, job: str, attempt: int, rows: Sequence[dict[str, Any]]) -> None:
    """Store rows of a checkpoint's columns; its files are durable already."""
    if rows:
        tx.execute(insert(Checkpoint), [{"job": job, "attempt": attempt, **row} for row in rows])


def get(tx: Session, checkpoint_id: str, owner: str | None) -> Checkpoint:
    """One checkpoint. ``owner`` None sees everybody's.

    Raises:
        CheckpointNotFound: there is none, or it is somebody else's.
    """
    found = tx.get(Checkpoint, checkpoint_id)
    if found is None or (owner is not None and found.owner != owner):
        raise CheckpointNotFound(f"No checkpoint has the id {checkpoint_id}.")
    return found


def of_job(tx: Session, job_id: str) -> list[Checkpoint]:
    """A job's checkpoints, oldest first."""
    query = select(Checkpoint).where(Checkpoint.job == job_id)
    return list(tx.scalars(query.order_by(Checkpoint.attempt, Checkpoint.step, Checkpoint.id)))


def newest(tx: Session, job: Job) -> Checkpoint:
    """The newest complete checkpoint of a job.

    Raises:
        CheckpointMissing: it has none.
    """
    found = of_job(tx, job.id)
    if not found:
        raise CheckpointMissing(f"{job.id} has no complete checkpoint; it is {job.state}.")
    return found[-1]


def superseded(tx: Session, job_id: str, keep_last: int) -> list[Checkpoint]:
    """Forget all but the newest checkpoints that no job uses; their files may go after commit."""
    old = of_job(tx, job_id)[:-keep_last]
    gone = [row for row in old if not row.final and not jobs.in_use(tx, row.id)]
    if gone:
        tx.execute(sql_delete(Checkpoint).where(Checkpoint.id.in_([row.id for row in gone])))
        doomed.add(tx, [row.key for row in gone])
    return gone


def delete(tx: Session, checkpoint: Checkpoint) -> None:
    """Forget one checkpoint; its files may go after commit.

    Raises:
        CheckpointInUse: a job that has not ended reads it.
    """
    if jobs.in_use(tx, checkpoint.id):
        raise CheckpointInUse("A job that has not ended uses this checkpoint.")
    tx.execute(sql_delete(Checkpoint).where(Checkpoint.id == checkpoint.id))
    doomed.add(tx, [checkpoint.key])
