"""Pause a job and resume it.

Each is one change under the lock of the job's row. A paused job has no running attempt, keeps its
checkpoints and holds no device, but it has not ended.
"""

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from glasshouse.errors import CannotPause, JobEnded, JobNotFound, JobNotPaused
from models.database import database_time
from models.observations import events
from models.state import ENDED
from models.tables import Job, now

PAUSED = "paused by its owner"
RESUMED = "resumed by its owner"


def request_pause(tx: Session, job: Job, *, reason: str = PAUSED) -> Job:
    """Ask a job to pause. A queued job is paused at once; a paused job stays paused.

    If no request comes for a serve job, it is paused for that ``reason``, and the next request
    resumes it. A pause by its owner replaces that reason.

    Raises:
        JobEnded: It has already ended.
        CannotPause: It is being cancelled, or its kind saves no checkpoints.
    """
    before = locked(tx, job)
    if before in ENDED:
        raise JobEnded(f"The job has ended: it {before}.")
    if before == "cancelling":
        raise CannotPause("The job is being cancelled.")
    if before == "queued":
        _move(tx, job.id, before, "paused", reason, paused_at=database_time(tx))
    elif before in ("starting", "running"):
        if job.kind not in ("train", "infer", "serve"):
            detail = f"This job is {before} and of the kind {job.kind}, which keeps no checkpoint"
            raise CannotPause(f"{detail}: let it end, or cancel it.")
        _move(tx, job.id, before, "pausing", reason)
    else:
        events.append(tx, job.id, [], resume_requested=False, state_reason=reason)
    tx.refresh(job)
    return job


def request_resume(tx: Session, job: Job) -> Job:
    """Queue a paused job again, or a pausing job as soon as it is paused.

    Raises:
        JobEnded: It has already ended.
        JobNotPaused: It is neither paused nor pausing.
    """
    before = locked(tx, job)
    if before in ENDED:
        raise JobEnded(f"The job has ended: it {before}.")
    if before == "paused":
        _queue(tx, job.id)
    elif before == "pausing":
        events.append(tx, job.id, [], resume_requested=True)
    else:
        raise JobNotPaused(f"The job is {before}, not paused.")
    tx.refresh(job)
    return job


def locked(tx: Session, job: Job) -> str:
    """Lock the row of a job until the end of the transaction and return its state.

    Raises:
        JobNotFound: It was deleted in the meantime.
    """
    query = select(Job.state).where(Job.id == job.id, Job.deleted_at.is_(None))
    state = tx.scalar(query.with_for_update())
    if state is None:
        raise JobNotFound(f"No job has the id {job.id}.")
    return state


def settle(tx: Session, job_id: str) -> None:
    """Queue a job again after its attempt ended in a pause, if a resume was requested meanwhile."""
    if tx.scalar(select(Job.resume_requested).where(Job.id == job_id)):
        _queue(tx, job_id)


class Paused(NamedTuple):
    """The pauses of a job."""

    since: datetime | None
    before_ms: int

    def ended(self, at: datetime) -> dict[str, Any]:
        """Return the columns of the job after the current pause ends."""
        if self.since is None:
            return {}
        passed = round((at - self.since).total_seconds() * 1000)
        return {"paused_at": None, "paused_ms": self.before_ms + max(0, passed)}


def of_job(tx: Session, job_id: str) -> Paused:
    """Return the pauses of a job."""
    row = tx.execute(select(Job.paused_at, Job.paused_ms).where(Job.id == job_id)).one()
    return Paused(*row)


def _queue(tx: Session, job_id: str) -> None:
    changes = of_job(tx, job_id).ended(database_time(tx))
    changes |= {"queued_at": now(), "resume_requested": False}
    _move(tx, job_id, "paused", "queued", RESUMED, **changes)


def _move(tx: Session, job_id: str, before: str, to: str, reason: str, **changes: Any) -> None:
    new = events.moved(now(), before, to, reason)
    events.append(tx, job_id, new, state=to, state_reason=reason, **changes)
