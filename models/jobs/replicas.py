"""Replicas: where the processes of serve jobs listen, and what they serve."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from models.database import insert_into
from models.jobs.leases import Claim
from models.state import ENDED
from models.tables import Job, JobSpec, JobUse, Replica, now


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


def routes(tx: Session) -> list[Route]:
    """Return all serve jobs that have not ended, oldest first."""
    query = (
        select(
            Job.id, Job.owner, Job.state, Job.state_reason, Job.attempt, JobSpec.resolved, Replica
        )
        .join(JobSpec, JobSpec.job == Job.id)
        .outerjoin(Replica, Replica.job == Job.id)
        .where(Job.kind == "serve", Job.state.not_in(ENDED), Job.deleted_at.is_(None))
        .order_by(Job.id)
    )
    found: list[Route] = []
    for *columns, replica in cast("Iterable[Any]", tx.execute(query)):
        job, owner, state, reason, attempt, spec = columns
        if replica is None or replica.attempt != attempt or state != "running":
            found.append(Route(job, owner, state, reason, spec, None, "", "", ()))
            continue
        where = (replica.address, replica.token, tuple(replica.models))
        found.append(Route(job, owner, state, reason, spec, attempt, *where))
    return found


def store(tx: Session, claim: Claim, values: Mapping[str, Any]) -> None:
    """Store what the replica of an attempt reported: ``address`` and ``token``, ``models``, counts.

    The checkpoints of the models, ``checkpoints`` of each, cannot be deleted from now on; those
    that it no longer serves can.
    """
    changes: dict[str, Any] = {"updated_at": now()}
    changes |= {key: values[key] for key in ("address", "token", "traffic") if key in values}
    if "models" in values:
        known = ("reference", "model", "version")
        changes["models"] = [{key: entry[key] for key in known} for entry in values["models"]]
        used = {saved for entry in values["models"] for saved in entry["checkpoints"]}
        use(tx, claim.job, used)
    made: dict[str, Any] = {"address": "", "token": "", "models": [], "traffic": {}, **changes}
    made |= {"job": claim.job, "attempt": claim.attempt, "starts": int("address" in values)}
    query = insert_into(tx, Replica).values(made)
    if "address" in values:
        changes |= {"attempt": claim.attempt, "starts": Replica.starts + 1}
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


def num_starts(tx: Session, job_id: str) -> int:
    """Return how many attempts of a job have listened."""
    return tx.scalar(select(Replica.starts).where(Replica.job == job_id)) or 0


def of_job(tx: Session, job_id: str) -> Replica | None:
    """Return the replica of a serve job, if one has ever listened."""
    return tx.get(Replica, job_id)
