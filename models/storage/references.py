"""Protect datasets and checkpoints that jobs read from being deleted.

To store a job, share-lock the rows that it reads until it is stored. To delete rows, lock them
first and then look for readers. So neither misses the other: on SQLite because writes are
serialized, on PostgreSQL because of these locks.
"""

from collections.abc import Collection, Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from models.state import ENDED
from models.tables import Checkpoint, Dataset, Job, JobUse

Deletable = type[Dataset] | type[Checkpoint]


def share(tx: Session, used: Iterable[str]) -> None:
    """Prevent the deletion of rows, by id, until the transaction ends. Look them up afterwards."""
    ids = sorted(set(used))
    for table in (Dataset, Checkpoint):
        query = select(table.id).where(table.id.in_(ids)).order_by(table.id)
        tx.execute(query.with_for_update(read=True, key_share=True))


def unused(tx: Session, table: Deletable, ids: Collection[str]) -> set[str]:
    """Lock rows and return those that no unfinished job reads, also until this transaction ends."""
    if not ids:
        return set()
    tx.execute(select(table.id).where(table.id.in_(ids)).order_by(table.id).with_for_update())
    reading = (
        select(JobUse.used)
        .join(Job, Job.id == JobUse.job)
        .where(JobUse.used.in_(ids), Job.state.not_in(ENDED))
    )
    return set(ids) - set(tx.scalars(reading))
