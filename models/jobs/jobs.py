"""Jobs as their owners see them: submitted, listed, changed, cancelled, deleted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sqlalchemy import delete as sql_delete
from sqlalchemy import func, insert, literal, select, update
from sqlalchemy.orm import Session, undefer_group

from glasshouse.errors import CheckpointInUse, JobEnded, JobNotEnded, JobNotFound
from glasshouse.ids import new_id
from models.jobs import commands, names, pausing
from models.observations import events, probes
from models.observations.events import NewEvent
from models.state import ENDED, STATES
from models.storage import pending_deletions
from models.storage import references as uses
from models.tables import (
    Checkpoint,
    Command,
    Job,
    JobLabel,
    JobSpec,
    JobUse,
    Time,
    now,
)
from models.telemetry import tracing

WHOLE = undefer_group("spec")
"""Has a query of jobs bring their ``spec``, ``resolved`` and ``plan`` too."""


def add(  # noqa: PLR0913 (a job is made of these, and of nothing less)
    tx: Session,
    *,
    owner: str,
    spec: dict[str, Any],
    resolved: dict[str, Any],
    plan: dict[str, Any],
    uses: Iterable[str] = (),
    parent: str | None = None,
    created_by: str | None = None,
    stem: str | None = None,
) -> Job:
    """Store a queued job and its first event, in this one transaction.

    ``stem``: what the name begins with where the spec gives none; by default, the job's kind.
    """
    time = now()
    job = Job(
        id=new_id("job"),
        owner=owner,
        created_by=created_by,
        kind=spec["kind"],
        name=spec.get("name") or names.make(tx, owner, stem or spec["kind"]),
        state="queued",
        warnings=list(plan.get("warnings", [])),
        labels=dict(spec.get("labels", {})),
        priority=spec.get("priority", 0),
        wants=resolved.get("devices", {}),
        parent=parent,
        created_at=time,
        queued_at=time,
        devices=[],
        summary={},
        traceparent=tracing.traceparent(),
    )
    tx.add(job)
    tx.flush()
    tx.execute(insert(JobSpec).values(job=job.id, spec=spec, resolved=resolved, plan=plan))
    _index_labels(tx, job)
    used = [{"job": job.id, "used": name} for name in sorted(set(uses))]
    if used:
        tx.execute(insert(JobUse), used)
    events.append(tx, job.id, events.moved(time, None, "queued"))
    probes.add_those_of_spec(tx, job, resolved, plan)
    tx.flush()
    tx.refresh(job)
    return job


def get(tx: Session, job_id: str, owner: str | None, *, lock: bool = False) -> Job:
    """One job. ``owner`` None sees everybody's.

    Args:
        tx: the transaction.
        job_id: the id of the job.
        owner: who asks.
        lock: lock the row until the transaction ends, and read it as the last commit left it.
            What is decided from a job and then written to it needs this.

    Raises:
        JobNotFound: there is none, or it is somebody else's.
    """
    return _found(tx, job_id, owner, with_for_update=lock or None)


def whole(tx: Session, job_id: str, owner: str | None) -> Job:
    """One job with its ``spec``, ``resolved`` and ``plan``, which may take megabytes.

    Raises:
        JobNotFound: there is none, or it is somebody else's.
    """
    return _found(tx, job_id, owner, options=[WHOLE])


def _found(tx: Session, job_id: str, owner: str | None, **how: Any) -> Job:
    job = tx.get(Job, job_id, populate_existing=True, **how)
    if job is None or job.deleted_at is not None or (owner is not None and job.owner != owner):
        raise JobNotFound(f"No job has the id {job_id}.")
    return job


class JobProgress(NamedTuple):
    """How far a job is, without its spec and plan."""

    state: str
    last_seq: int
    version: int

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it changes any more."""
        return self.state in ENDED


def standing(tx: Session, job_id: str, owner: str | None) -> JobProgress:
    """How far a job is. ``owner`` None sees everybody's.

    Raises:
        JobNotFound: there is none, or it is somebody else's.
    """
    query = select(Job.state, Job.last_seq, Job.version)
    query = query.where(Job.id == job_id, Job.deleted_at.is_(None))
    if owner is not None:
        query = query.where(Job.owner == owner)
    row = tx.execute(query).one_or_none()
    if row is None:
        raise JobNotFound(f"No job has the id {job_id}.")
    return JobProgress(*row)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs to list. None or empty means all."""

    owner: str | None = None
    states: tuple[str, ...] = ()
    kind: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    parent: str | None = None
    text: str | None = None
    """Part of the name or the id, in any case."""
    name: str | None = None
    """The whole name."""


def find(
    tx: Session,
    wanted: Filter,
    *,
    after: str | None,
    limit: int,
    order: Literal["desc", "asc"] = "desc",
) -> list[Job]:
    """Jobs by the time they were made, newest first unless told otherwise."""
    query = select(Job).where(Job.deleted_at.is_(None))
    if wanted.owner is not None:
        query = query.where(Job.owner == wanted.owner)
    if wanted.states:
        query = query.where(Job.state.in_(wanted.states))
    if wanted.kind is not None:
        query = query.where(Job.kind == wanted.kind)
    if wanted.parent is not None:
        query = query.where(Job.parent == wanted.parent)
    if wanted.name is not None:
        query = query.where(Job.name == wanted.name)
    if wanted.text:
        query = query.where(
            func.lower(Job.name).contains(wanted.text.lower(), autoescape=True)
            | Job.id.contains(wanted.text.lower(), autoescape=True)
        )
    for name, value in wanted.labels.items():
        has = (JobLabel.name == name, JobLabel.value == value)
        query = query.where(Job.id.in_(select(JobLabel.job).where(*has)))
    if after is not None:
        query = query.where(Job.id < after if order == "desc" else Job.id > after)
    query = query.order_by(Job.id.desc() if order == "desc" else Job.id.asc())
    return list(tx.scalars(query.limit(limit)))


def patch(tx: Session, job: Job, changes: Mapping[str, Any]) -> Job:
    """Change the name, the labels or the priority of a job that this transaction has locked.

    A name that is set to null is made anew.
    """
    if "name" in changes and changes["name"] is None:
        changes = {**changes, "name": names.make(tx, job.owner, job.kind)}
    for key in ("name", "labels", "priority"):
        if key in changes:
            setattr(job, key, changes[key])
    job.version += 1
    tx.flush()
    if "labels" in changes:
        tx.execute(sql_delete(JobLabel).where(JobLabel.job == job.id))
        _index_labels(tx, job)
    return job


def _index_labels(tx: Session, job: Job) -> None:
    rows = [{"job": job.id, "name": name, "value": value} for name, value in job.labels.items()]
    if rows:
        tx.execute(insert(JobLabel), rows)


def request_cancel(tx: Session, job: Job, *, by: str, force: bool) -> Job:
    """Ask a job to stop. One that no worker has taken is cancelled at once.

    Raises:
        JobEnded: it has ended already.
    """
    before = pausing.locked(tx, job)
    if before in ENDED:
        raise JobEnded(f"The job has ended: it {before}.")
    time = now()
    reason = "cancelled by its owner"
    command = new_id("cmd")
    at_once = before in ("queued", "paused")
    if at_once:
        new = events.moved(time, before, "cancelled", reason)
        changes = pausing.of_job(tx, job.id).ended(time)
        changes |= {"state": "cancelled", "state_reason": reason}
        changes |= {"ended_at": time, "cancel_requested_at": time}
        events.append(tx, job.id, new, **changes)
        probes.close(tx, job.id)
        commands.reject_pending(tx, job.id)
    else:
        _ask_worker_to_stop(tx, job.id, before, reason)
    tx.add(
        Command(
            id=command,
            job=job.id,
            body={"do": "cancel", "force": force},
            by=by,
            state="applied" if at_once else "pending",
            created_at=time,
        )
    )
    tx.flush()
    tx.refresh(job)
    return job


def _ask_worker_to_stop(tx: Session, job_id: str, before: str, reason: str) -> None:
    time = now()
    moved: list[NewEvent] = []
    if before in ("starting", "running", "pausing"):
        moved = events.moved(time, before, "cancelling", reason)
        tx.execute(update(Job).where(Job.id == job_id).values(state="cancelling"))
    events.append(
        tx,
        job_id,
        moved,
        cancel_requested_at=func.coalesce(Job.cancel_requested_at, literal(time, Time)),
        num_commands=Job.num_commands + 1,
        state_reason=reason,
    )


def delete(tx: Session, job: Job) -> None:
    """Delete an ended job: from the commit on nobody sees it or anything of it.

    What would take long, its events, series and files, the purge deletes later.

    Raises:
        JobNotEnded: it may still be written to.
        CheckpointInUse: a job that has not ended begins with a checkpoint of it, or reads one.
    """
    if job.state not in ENDED:
        raise JobNotEnded(f"The job is {job.state}; cancel it first.")
    saved = list(tx.scalars(select(Checkpoint.id).where(Checkpoint.job == job.id)))
    used = set(saved) - uses.unused(tx, Checkpoint, saved)
    if used:
        detail = f"A job that has not ended uses {min(used)}, a checkpoint of this job."
        raise CheckpointInUse(detail)
    tx.execute(sql_delete(Checkpoint).where(Checkpoint.job == job.id))
    job.deleted_at = now()
    job.version += 1
    tx.flush()
    pending_deletions.add(tx, [f"jobs/{job.id}"])


def count_by_state(tx: Session) -> dict[str, int]:
    """How many jobs there are in each state."""
    query = select(Job.state, func.count()).group_by(Job.state)
    found = {state: int(count) for state, count in tx.execute(query)}
    # counted apart, so that the first query reads an index and no rows
    for state, count in tx.execute(query.where(Job.deleted_at.is_not(None))):
        found[state] -= count
    return {state: found.get(state, 0) for state in STATES}


def commands_pending(tx: Session, job_id: str) -> list[Command]:
    """What was asked of a job and is not done, oldest first."""
    query = select(Command).where(Command.job == job_id, Command.state == "pending")
    return list(tx.scalars(query.order_by(Command.created_at, Command.id)))
