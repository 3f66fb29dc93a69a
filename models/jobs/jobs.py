"""Jobs as their owners see them: submit, list, update, cancel, delete."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sqlalchemy import delete as sql_delete
from sqlalchemy import func, insert, literal, select, update
from sqlalchemy.orm import Session, undefer_group

from glasshouse.errors import CheckpointInUse, JobEnded, JobNotEnded, JobNotFound
from glasshouse.ids import new_id
from models.jobs import commands, names, needs, pausing
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
"""Makes a query of jobs load ``spec``, ``resolved`` and ``plan`` too."""


def add(  # noqa: PLR0913 (the columns of a job)
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
    """Store a queued job and its first event, in this transaction.

    ``stem``: prefix of the name if the spec has none. Default: the job's kind.
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
        wants=needs.wants(resolved),
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
    """Return one job. ``owner`` None sees those of all owners.

    Args:
        tx: The transaction.
        job_id: The id of the job.
        owner: The caller's owner.
        lock: Lock the row until the transaction ends, and read it as of the last commit. Required
            if you read a job, decide, and then write to it.

    Raises:
        JobNotFound: It does not exist, or belongs to someone else.
    """
    return _found(tx, job_id, owner, with_for_update=lock or None)


def whole(tx: Session, job_id: str, owner: str | None) -> Job:
    """Return one job with its ``spec``, ``resolved`` and ``plan``, which may be megabytes.

    Raises:
        JobNotFound: It does not exist, or belongs to someone else.
    """
    return _found(tx, job_id, owner, options=[WHOLE])


def _found(tx: Session, job_id: str, owner: str | None, **how: Any) -> Job:
    job = tx.get(Job, job_id, populate_existing=True, **how)
    if job is None or job.deleted_at is not None or (owner is not None and job.owner != owner):
        raise JobNotFound(f"No job has the id {job_id}.")
    return job


class JobProgress(NamedTuple):
    """The progress of a job, without its spec and plan."""

    state: str
    last_seq: int
    version: int

    @property
    def has_ended(self) -> bool:
        """Return whether the job has ended, so nothing changes any more."""
        return self.state in ENDED


def progress(tx: Session, job_id: str, owner: str | None) -> JobProgress:
    """Return the progress of a job. ``owner`` None sees those of all owners.

    Raises:
        JobNotFound: It does not exist, or belongs to someone else.
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
    """Part of the name or the id, ignoring case."""
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
    """List jobs by creation time, newest first by default."""
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

    A name set to null is generated again.
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


def request_cancel(
    tx: Session, job: Job, *, by: str, force: bool, reason: str = "cancelled by its owner"
) -> Job:
    """Ask a job to stop. A queued or paused job is cancelled at once.

    Raises:
        JobEnded: It has already ended.
    """
    before = pausing.locked(tx, job)
    if before in ENDED:
        raise JobEnded(f"The job has ended: it {before}.")
    time = now()
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
    """Delete an ended job. After the commit, nobody sees it or any of its data.

    The purge later deletes its events, series and files, which takes long.

    Raises:
        JobNotEnded: It may still be written to.
        CheckpointInUse: A job that has not ended uses one of its checkpoints, or a model publishes
            it.
    """
    if job.state not in ENDED:
        raise JobNotEnded(f"The job is {job.state}; cancel it first.")
    saved = list(tx.scalars(select(Checkpoint.id).where(Checkpoint.job == job.id)))
    used = set(saved) - uses.unused(tx, Checkpoint, saved)
    if used:
        raise CheckpointInUse(uses.why_used(tx, used))
    tx.execute(sql_delete(Checkpoint).where(Checkpoint.job == job.id))
    job.deleted_at = now()
    job.version += 1
    tx.flush()
    pending_deletions.add(tx, [f"jobs/{job.id}"])


def count_by_state(tx: Session) -> dict[str, int]:
    """Return the number of jobs in each state."""
    query = select(Job.state, func.count()).group_by(Job.state)
    found = {state: int(count) for state, count in tx.execute(query)}
    # counted separately, so that the first query reads only an index
    for state, count in tx.execute(query.where(Job.deleted_at.is_not(None))):
        found[state] -= count
    return {state: found.get(state, 0) for state in STATES}


def commands_pending(tx: Session, job_id: str) -> list[Command]:
    """List the pending commands of a job, oldest first."""
    query = select(Command).where(Command.job == job_id, Command.state == "pending")
    return list(tx.scalars(query.order_by(Command.created_at, Command.id)))
