"""The request log of serve jobs: bounded, newest first."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, func, insert, select
from sqlalchemy.orm import Session

from models.tables import Job, JobSpec, Replica, ServedRequest, core

PAGE_BYTES = 8 * 2**20


class RequestFilter(NamedTuple):
    """Which requests are wanted."""

    model: str | None = None
    """The name of a model."""
    statuses: Collection[int] = ()
    """Empty: any."""


class RequestPage(NamedTuple):
    """Requests, newest first, and the cursor to continue from."""

    rows: list[ServedRequest]
    cursor: str | None
    """None: these are the last ones."""


def add(tx: Session, replica: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Store requests that a replica recorded, and delete the oldest beyond the job's limits.

    Args:
        tx: the transaction.
        replica: the job whose process answered them.
        entries: ``id``, ``at``, ``model``, ``version``, ``status``, ``code``, ``details`` of each.
    """
    if not entries:
        return
    parent = tx.scalar(select(Replica.parent).where(Replica.job == replica)) or replica
    resolved = tx.scalar(
        select(JobSpec.resolved)
        .join(Job, Job.id == JobSpec.job)
        .where(Job.id == parent, Job.deleted_at.is_(None))
    )
    limits = None if resolved is None else resolved.get("request_log")
    if limits is None:  # the job was deleted
        return
    own = {"job": parent, "replica": replica}
    rows = [{**own, **one, "size_bytes": len(one["details"].encode())} for one in entries]
    tx.execute(insert(core(ServedRequest)), rows)
    _drop_oldest(tx, parent, int(limits["max_requests"]), int(limits["max_bytes"]))


def _drop_oldest(tx: Session, job: str, max_requests: int, max_bytes: int) -> None:
    """Delete the oldest requests beyond a number, or beyond a number of bytes of all."""
    newest_first = ServedRequest.id.desc()
    ranked = (
        select(
            ServedRequest.id,
            func.row_number().over(order_by=newest_first).label("number"),
            func.sum(ServedRequest.size_bytes).over(order_by=newest_first).label("bytes"),
        )
        .where(ServedRequest.job == job)
        .subquery()
    )
    is_over = (ranked.c.number > max_requests) | (ranked.c.bytes > max_bytes)
    last = tx.scalar(select(func.max(ranked.c.id)).where(is_over))
    if last is not None:
        tx.execute(delete(ServedRequest).where(ServedRequest.job == job, ServedRequest.id <= last))


def read(
    tx: Session, job: Job, wanted: RequestFilter, *, after: str | None, limit: int
) -> RequestPage:
    """Return requests of a serve job, or of one of its further replicas, newest first.

    ``after``: the cursor of the page before. A page has at most about 8 MiB.
    """
    which = [*_of(job)]
    if after is not None:
        which.append(ServedRequest.id < after)
    if wanted.model is not None:
        which.append(ServedRequest.model == wanted.model)
    if wanted.statuses:
        which.append(ServedRequest.status.in_(wanted.statuses))
    order = ServedRequest.id.desc()
    sizes = tx.execute(
        select(ServedRequest.id, ServedRequest.size_bytes)
        .where(*which)
        .order_by(order)
        .limit(limit + 1)
    ).all()
    taken, size = 0, 0
    for row in sizes[:limit]:
        size += row.size_bytes
        if taken and size > PAGE_BYTES:
            break
        taken += 1
    ids = [row.id for row in sizes[:taken]]
    rows = tx.scalars(select(ServedRequest).where(ServedRequest.id.in_(ids)).order_by(order))
    return RequestPage([*rows], ids[-1] if len(sizes) > taken else None)


def clear(tx: Session, job: Job) -> int:
    """Delete the requests of a serve job, or of one of its further replicas; return how many."""
    found: Any = tx.execute(delete(ServedRequest).where(*_of(job)))
    return int(found.rowcount)


def _of(job: Job) -> tuple[ColumnElement[bool], ...]:
    if job.parent is None:
        return (ServedRequest.job == job.id,)
    return (ServedRequest.job == job.parent, ServedRequest.replica == job.id)
