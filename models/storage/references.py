"""What jobs read, which nobody deletes under them: datasets and checkpoints.

Who is about to store a job that reads a row shares the row until it is stored; who is about to
delete rows takes them first, and looks then who reads them. So neither misses the other: on SQLite
since one writes at a time, on PostgreSQL by these locks.
"""

from collections.abc import Collection, Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from models.state import ENDED
from models.tables import Checkpoint, Dataset, Job, JobUse

Deletable = type[Dataset] | type[Checkpoint]


def share(tx: Session, used: Iterable[str]) -> None:
    """Let nobody delete rows, by their ids, until the transaction ends; look for them then."""
    ids = sorted(set(used))
    for table in (Dataset, Checkpoint):
        query = select(table.id).where(table.id.in_(ids)).order_by(table.id)
        tx.execute(query.with_for_update(read=True, key_share=True))


def unused(tx: Session, table: Deletable, ids: Collection[str]) -> set[str]:
    """Those of some rows that no job reads which has not ended, nor will until this ends."""
    if not ids:
        return set()
    tx.execute(select(table.id).where(table.id.in_(ids)).order_by(table.id).with_for_update())
    reading = (
        select(JobUse.used)
        .join(Job, Job.id == JobUse.job)
        .where(JobUse.used.in_(ids), Job.state.not_in(ENDED))
    )
    return set(ids) - set(tx.scalars(reading))
