"""How many replicas a serve job has.

The serve job is the first replica itself. Each further one is a job of its own, a child, which is
queued, given devices, retried and logged like any job. The sweep of every worker compares the
children of each serve job with what its spec and the newest reports of its replicas ask for.
`decide` is pure; `scale` is its transaction. It locks the serve job's row and decides again, so
workers that sweep at the same time never create too many, and a lost worker leaves nothing half
done.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

import structlog
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from glasshouse.errors import JobEnded, QuotaExceeded
from glasshouse.spec.jobs.serve_job import DEFAULT_IDLE_S, IDLE
from models.access import quotas
from models.database import database_time
from models.jobs import jobs, pausing, replicas
from models.jobs.replicas import SERVING
from models.settings import Settings
from models.state import OPEN
from models.storage import references
from models.tables import Job, JobSpec, JobUse, Replica

_log: Any = structlog.get_logger()

QUEUE_MS = 50.0
"""Beyond ``max_delay_ms``, the median time in the queue above which requests wait too long."""
SHORT_S = 4.0
"""How long requests must wait too long before another replica is added."""
SPARE = 0.5
"""A replica is spare if the others would compute at most this part of their time without it."""
REPORTED_S = 20.0
"""Older reports are those of a replica that stands still. An idle one reports every 10 s."""
FAILED_S = 300.0
"""After a child has failed, none is created for so long: the next one would fail too."""
REPLICA_OF = "replica_of"
"""The label of children: the id of the serve job."""
MAX_LABELS = 50
_GONE: tuple[None, Mapping[str, Any], Mapping[str, int]] = (None, {}, {})
NOT_NEEDED = "no longer needed as a replica"
PARENT_GONE = "its serve job does not run any more"


class Member(NamedTuple):
    """A job that is a replica."""

    job: str
    state: str
    traffic: Mapping[str, Any] | None
    """Its newest report; empty: none since it listens. None: it does not listen, or is silent."""


@dataclass(frozen=True)
class ReplicaGroup:
    """A serve job and its children that have not ended."""

    job: str
    state: str | None
    """Of the serve job; None: it has ended or was deleted."""
    spec: Mapping[str, Any]
    """The resolved spec of the serve job."""
    first: Member | None
    children: tuple[Member, ...] = ()
    """Oldest first."""
    scaling: Mapping[str, int] = field(default_factory=dict[str, int])
    """Since when requests wait too long (``short_ms``), or a replica is spare (``spare_ms``)."""
    has_failed: bool = False
    """Whether a child has failed lately."""

    @property
    def staying(self) -> tuple[Member, ...]:
        """The children that are not being cancelled."""
        return tuple(child for child in self.children if child.state != "cancelling")


class Decision(NamedTuple):
    """What to change."""

    create: int = 0
    """Number of children to create."""
    cancel: tuple[str, ...] = ()
    """Ids of children to cancel."""
    pauses: bool = False
    """Whether to pause the serve job until a request comes."""
    scaling: Mapping[str, int] = {}

    @property
    def acts(self) -> bool:
        """Whether jobs are changed."""
        return bool(self.create or self.cancel or self.pauses)


def decide(group: ReplicaGroup, at: datetime) -> Decision:
    """Decide what to change now; ``at`` is by the database's clock."""
    children, spec = group.staying, group.spec
    if group.state not in SERVING or group.first is None:
        return Decision(cancel=tuple(child.job for child in children))
    least, most = max(1, spec["replicas"]["min"]), spec["replicas"]["max"]
    num, time_ms = 1 + len(children), round(at.timestamp() * 1000)
    if num < least:
        return Decision(create=0 if group.has_failed else least - num)
    reports = [one.traffic for one in (group.first, *children) if one.traffic is not None]
    if len(reports) == num and _is_short(reports, spec):
        since = group.scaling.get("short_ms", time_ms)
        grows = time_ms - since >= SHORT_S * 1000 and num < most and not group.has_failed
        return Decision(create=1) if grows else Decision(scaling={"short_ms": since})
    idle_ms = (spec.get("idle_s") or DEFAULT_IDLE_S) * 1000
    if num > least and sum(one.get("busy", 0.0) for one in reports) <= SPARE * (num - 1):
        since = group.scaling.get("spare_ms", time_ms)
        if time_ms - since >= idle_ms:
            return Decision(cancel=(_last(children).job,))
        return Decision(scaling={"spare_ms": since})
    is_alone = most > 1 and not group.children and group.state == "running"
    can_pause = spec["replicas"]["min"] == 0 and is_alone and len(reports) == 1
    return Decision(pauses=can_pause and reports[0].get("idle_s", 0.0) * 1000 >= idle_ms)


def _is_short(reports: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]) -> bool:
    """Return whether requests wait too long in the queues of all replicas."""
    waited = [one["queue_ms"]["p50"] for one in reports if "queue_ms" in one]
    waiting = sum(one.get("waiting", 0) for one in reports)
    mean_ms = sum(waited) / len(waited) if waited else 0.0
    is_late = mean_ms > QUEUE_MS + spec["max_delay_ms"]
    return is_late or waiting > len(reports) * spec["max_queue"] / 2


def _last(children: Sequence[Member]) -> Member:
    """Return the child to end: one that does not run if there is one, else the youngest."""
    return max(children, key=lambda one: (one.state != "running", one.job))


def due(tx: Session) -> list[str]:
    """Return the ids of serve jobs of which something is to be changed."""
    at = database_time(tx)
    return [group.job for group in _groups(tx, at) if _changes(group, decide(group, at))]


def scale(tx: Session, job_id: str, settings: Settings) -> Decision:
    """Create and cancel children of a serve job as is needed now, or pause it."""
    query = select(Job.owner).where(Job.id == job_id)
    if (owner := tx.scalar(query)) is not None:
        quotas.lock(tx, owner)  # in this order, as a submission does
        tx.execute(query.with_for_update())
    at = database_time(tx)
    group = next(iter(_groups(tx, at, job_id)), None)
    if group is None:
        return Decision()
    decision = decide(group, at)
    if not _changes(group, decision):
        return decision
    why = NOT_NEEDED if group.state in SERVING else PARENT_GONE
    for child in decision.cancel:
        job = jobs.get(tx, child, None)
        with suppress(JobEnded):  # in the meantime
            jobs.request_cancel(tx, job, by=job.owner, force=False, reason=why)
    if decision.pauses:
        pausing.request_pause(tx, jobs.get(tx, job_id, None), reason=IDLE)
    if decision.create and not _admits(tx, job_id, settings):
        decision = decision._replace(create=0)
    for _ in range(decision.create):
        _add_child(tx, jobs.whole(tx, job_id, None))
    replicas.note_scaling(tx, job_id, decision.scaling)
    return decision


def _changes(group: ReplicaGroup, decision: Decision) -> bool:
    return decision.acts or dict(decision.scaling) != dict(group.scaling)


def _admits(tx: Session, job_id: str, settings: Settings) -> bool:
    job = jobs.get(tx, job_id, None)
    try:
        quotas.admit_job(tx, job.owner, settings)
    except QuotaExceeded as error:  # the next sweep tries again
        _log.warning("replica_not_admitted", job=job_id, error=str(error))
        return False
    return True


def _add_child(tx: Session, parent: Job) -> None:
    """Queue another replica: a job with the spec of a serve job, for one process."""
    labels = dict(list(parent.labels.items())[: MAX_LABELS - 1]) | {REPLICA_OF: parent.id}
    own = {"labels": labels, "priority": parent.priority}
    used = list(tx.scalars(select(JobUse.used).where(JobUse.job == parent.id)))
    references.share(tx, used)
    spec = {key: parent.spec[key] for key in parent.spec if key not in ("name", "replicas")}
    spec.pop("idle_s", None)
    alone = {"name": None, "replicas": {"min": 1, "max": 1}, "idle_s": None}
    child = jobs.add(
        tx,
        owner=parent.owner,
        spec=spec | own,
        resolved=parent.resolved | own | alone,
        plan=parent.plan,
        uses=used,
        parent=parent.id,
        created_by=parent.created_by,
        stem=f"{parent.name}-replica",
    )
    replicas.add_child(tx, child.id, parent.id)


def _groups(tx: Session, at: datetime, job_id: str | None = None) -> list[ReplicaGroup]:
    """Return serve jobs that may have children, or have some; ``job_id``: only this one."""
    query = (
        select(Job.id, Job.state, Job.attempt, JobSpec.resolved, Replica)
        .join(JobSpec, JobSpec.job == Job.id)
        .outerjoin(Replica, Replica.job == Job.id)
        .where(Job.kind == "serve", Job.state.in_(OPEN), Job.deleted_at.is_(None))
        .order_by(Job.id)
    )
    if job_id is not None:
        query = query.where(or_(Job.id == job_id, Replica.parent == job_id))
    # as of the last commit: a row may be known from before it was locked
    rows = tx.execute(query.execution_options(populate_existing=True))
    firsts: dict[str, tuple[Member | None, Mapping[str, Any], Mapping[str, int]]] = {}
    children: dict[str, list[Member]] = {}
    for job, state, attempt, spec, replica in cast("Iterable[Any]", rows):
        member = Member(job, state, _report(replica, state, attempt, at))
        if replica is not None and replica.parent is not None:
            children.setdefault(replica.parent, []).append(member)
        else:
            firsts[job] = (member, spec, {} if replica is None else replica.scaling)
    wanted = [job for job, (_, spec, _) in firsts.items() if spec["replicas"]["max"] > 1]
    named = dict.fromkeys([*wanted, *children])
    failed = _failed(tx, named, at)
    found: list[ReplicaGroup] = []
    for job in named:
        first, spec, scaling = firsts.get(job, _GONE)
        state = None if first is None else first.state
        own = tuple(children.get(job, ()))
        found.append(ReplicaGroup(job, state, spec, first, own, scaling, job in failed))
    return found


def _report(
    replica: Replica | None, state: str, attempt: int, at: datetime
) -> Mapping[str, Any] | None:
    if replica is None or replica.attempt != attempt or state != "running":
        return None
    is_fresh = at - replica.updated_at < timedelta(seconds=REPORTED_S)
    return replica.traffic if replica.address and is_fresh else None


def _failed(tx: Session, jobs_: Iterable[str], at: datetime) -> set[str]:
    """Return the serve jobs of which a child has failed lately."""
    since = at - timedelta(seconds=FAILED_S)
    query = (
        select(Replica.parent)
        .join(Job, Job.id == Replica.job)
        .where(Replica.parent.in_(list(jobs_)), Job.state == "failed", Job.ended_at > since)
    )
    return {parent for parent in tx.scalars(query) if parent is not None}
