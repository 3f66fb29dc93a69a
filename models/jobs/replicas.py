"""Replicas: where the processes of serve jobs listen, and what they serve."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, cast

from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session, aliased

from glasshouse.spec.model_names import parse_model_reference
from models.database import database_time, insert_into
from models.state import OPEN
from models.tables import Job, JobSpec, JobUse, Replica

SERVING = ("queued", "starting", "running")
"""States of a serve job whose further replicas work."""
_EMPTY: Mapping[str, Any] = {
    "attempt": 0,
    "starts": 0,
    "address": "",
    "token": "",
    "models": [],
    "traffic": {},
    "drift": [],
    "parent": None,
    "scaling": {},
}


class Route(NamedTuple):
    """A serve job that has not ended, and where its replica listens."""

    job: str
    owner: str
    state: str
    state_reason: str | None
    spec: Mapping[str, Any]
    """The resolved spec."""
    attempt: int | None
    """Of the replica that listens; None: none does."""
    address: str
    token: str
    models: tuple[Mapping[str, Any], ...]
    """What it serves: ``reference``, ``model``, ``version`` of each."""
    parent: str | None
    """The serve job that it is a further replica of; None: it is the first one."""


class Served(NamedTuple):
    """A published model that a serve job which has not ended names."""

    job: str
    owner: str
    state: str
    """Of the job."""
    reference: str
    """As the spec names it."""
    model: str
    """The name of the model."""
    version: int | None
    """The version that answers; None: no replica listens."""


def served(tx: Session, owner: str | None) -> list[Served]:
    """Return the models that serve jobs name, oldest job first. ``owner`` None: of all owners."""
    found: list[Served] = []
    for route in routes(tx, owner):
        versions = {str(one["reference"]): int(one["version"]) for one in route.models}
        for entry in route.spec["models"]:
            reference = entry if isinstance(entry, str) else str(entry["model"])
            wanted = parse_model_reference(reference)
            name = reference if wanted is None else wanted.name
            facts = (route.job, route.owner, route.state, reference, name)
            found.append(Served(*facts, versions.get(reference)))
    return found


def routes(tx: Session, owner: str | None = None) -> list[Route]:
    """Return the serve jobs that have not ended, oldest first. ``owner`` None: of all owners.

    A further replica gets no requests once its serve job is paused, cancelled or has ended.
    """
    first = aliased(Job)
    query = (
        select(
            Job.id, Job.owner, Job.state, Job.state_reason, Job.attempt, JobSpec.resolved, Replica
        )
        .add_columns(first.state)
        .join(JobSpec, JobSpec.job == Job.id)
        .outerjoin(Replica, Replica.job == Job.id)
        .outerjoin(first, first.id == Replica.parent)
        .where(Job.kind == "serve", Job.state.in_(OPEN), Job.deleted_at.is_(None))
        .order_by(Job.id)
    )
    if owner is not None:
        query = query.where(Job.owner == owner)
    found: list[Route] = []
    for *columns, replica, first_state in cast("Iterable[Any]", tx.execute(query)):
        job, owned_by, state, reason, attempt, spec = columns
        parent = None if replica is None else replica.parent
        is_wanted = parent is None or first_state in SERVING
        is_there = replica is not None and replica.attempt == attempt and state == "running"
        if replica is None or not (is_there and is_wanted):
            found.append(Route(job, owned_by, state, reason, spec, None, "", "", (), parent))
            continue
        where = (replica.address, replica.token, tuple(replica.models))
        found.append(Route(job, owned_by, state, reason, spec, attempt, *where, parent))
    return found


def store(tx: Session, job_id: str, attempt: int, values: Mapping[str, Any]) -> None:
    """Store what the replica of an attempt reported.

    That is ``address`` and ``token``, ``models``, ``traffic`` and ``drift``.

    The checkpoints of the models, ``checkpoints`` of each, cannot be deleted from now on; those
    that it no longer serves can.
    """
    changes: dict[str, Any] = {"updated_at": database_time(tx)}
    changes |= {
        key: values[key] for key in ("address", "token", "traffic", "drift") if key in values
    }
    if "models" in values:
        known = ("reference", "model", "version")
        changes["models"] = [{key: entry[key] for key in known} for entry in values["models"]]
        used = {saved for entry in values["models"] for saved in entry["checkpoints"]}
        use(tx, job_id, used)
    made = {**_EMPTY, **changes}
    made |= {"job": job_id, "attempt": attempt, "starts": int("address" in values)}
    query = insert_into(tx, Replica).values(made)
    if "address" in values:
        changes = {"traffic": {}, "drift": [], **changes}  # those of the attempt before say nothing
        changes |= {"attempt": attempt, "starts": Replica.starts + 1}
    tx.execute(query.on_conflict_do_update(index_elements=["job"], set_=changes))


def use(tx: Session, job_id: str, checkpoints: set[str]) -> None:
    """Replace the checkpoints that a serve job reads."""
    tx.execute(delete(JobUse).where(JobUse.job == job_id))
    rows = [{"job": job_id, "used": saved} for saved in sorted(checkpoints)]
    if rows:
        tx.execute(insert(JobUse), rows)


def also_use(tx: Session, job_id: str, checkpoint: str) -> None:
    """Keep another checkpoint from being deleted while a serve job loads it."""
    row = {"job": job_id, "used": checkpoint}
    tx.execute(insert_into(tx, JobUse).values(row).on_conflict_do_nothing())


def add_child(tx: Session, job_id: str, parent: str) -> None:
    """Note that a new job is a further replica of a serve job."""
    own = {"job": job_id, "parent": parent, "updated_at": database_time(tx)}
    tx.execute(insert(Replica).values({**_EMPTY, **own}))


def note_scaling(tx: Session, job_id: str, scaling: Mapping[str, int]) -> None:
    """Store what the next decision on the number of replicas needs to know."""
    tx.execute(update(Replica).where(Replica.job == job_id).values(scaling=dict(scaling)))


def num_starts(tx: Session, job_id: str) -> int:
    """Return how many attempts of a job have listened."""
    return tx.scalar(select(Replica.starts).where(Replica.job == job_id)) or 0


def of_jobs(tx: Session, jobs: Collection[Job]) -> dict[str, Replica]:
    """Return the replicas of those jobs that serve models and have ever listened, by job."""
    ids = [job.id for job in jobs if job.kind == "serve"]
    if not ids:
        return {}
    return {row.job: row for row in tx.scalars(select(Replica).where(Replica.job.in_(ids)))}
