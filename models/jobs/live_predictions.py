"""Training jobs that answer requests for predictions: who was asked, and where each listens.

A request for a prediction asks the current attempt of the job to listen, in the job's row of
``replicas``. The number of commands of the job grows with it, so that its supervisor looks. The
next attempt is asked again by the next request.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from models.database import database_time, insert_into
from models.jobs.leases import Claim
from models.state import LIVE, OPEN
from models.tables import Job, Replica


class LiveRoute(NamedTuple):
    """A training job that was asked to answer requests and has not ended."""

    job: str
    owner: str
    state: str
    attempt: int
    """The current attempt of the job."""
    is_asked: bool
    """Whether it was this attempt that was asked, and it has not ended."""
    address: str
    """Where it listens; empty: it does not yet, or cannot."""
    token: str
    problem: str | None
    """Why it cannot."""


def routes(tx: Session) -> list[LiveRoute]:
    """Return the training jobs that were asked and have not ended."""
    query = (
        select(Job.id, Job.owner, Job.state, Job.attempt, Replica)
        .join(Replica, Replica.job == Job.id)
        .where(Job.kind == "train", Job.state.in_(OPEN), Job.deleted_at.is_(None))
    )
    found: list[LiveRoute] = []
    for job, owner, state, attempt, row in cast("Iterable[Any]", tx.execute(query)):
        if row.attempt != attempt or state not in LIVE:
            found.append(LiveRoute(job, owner, state, attempt, False, "", "", None))
            continue
        where = (row.address, row.token, row.traffic.get("problem"))
        found.append(LiveRoute(job, owner, state, attempt, True, *where))
    return found


def ask(tx: Session, job: Job) -> None:
    """Ask the current attempt of a job, whose row is locked, to listen; only once."""
    if was_asked(tx, job):
        return
    values: dict[str, Any] = {"attempt": job.attempt, "address": "", "token": "", "traffic": {}}
    values["updated_at"] = database_time(tx)
    query = insert_into(tx, Replica).values(job=job.id, starts=0, models=[], scaling={}, **values)
    tx.execute(query.on_conflict_do_update(index_elements=["job"], set_=values))
    tx.execute(update(Job).where(Job.id == job.id).values(num_commands=Job.num_commands + 1))


def was_asked(tx: Session, job: Job) -> bool:
    """Return whether the current attempt of a job was asked."""
    return asked_attempt(tx, job) == job.attempt


def asked_attempt(tx: Session, job: Job) -> int | None:
    """Return the newest attempt of a job that was asked; None: none was."""
    return tx.scalar(select(Replica.attempt).where(Replica.job == job.id))


def is_asked(tx: Session, claim: Claim) -> bool:
    """Return whether an attempt was asked to listen and does not yet."""
    query = select(Replica.attempt, Replica.address).where(Replica.job == claim.job)
    return tx.execute(query).one_or_none() == (claim.attempt, "")


def store(tx: Session, job_id: str, attempt: int, values: Mapping[str, Any]) -> None:
    """Store what an attempt reported: ``address`` and ``token``, and ``problem`` if it cannot."""
    problem = values["problem"]
    tx.execute(
        update(Replica)
        .where(Replica.job == job_id, Replica.attempt == attempt)
        .values(
            address=values["address"],
            token=values["token"],
            traffic={} if problem is None else {"problem": problem},
            updated_at=database_time(tx),
        )
    )
