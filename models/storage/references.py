"""Protect datasets and checkpoints that jobs read, or models publish, from being deleted.

To store a job or to publish a checkpoint, share-lock the rows that it needs until it is stored. To
delete rows, lock them first and then look for what needs them. So neither misses the other: on
SQLite because writes are serialized, on PostgreSQL because of these locks.
"""

from collections.abc import Collection, Iterable

from sqlalchemy import ColumnElement, exists, select
from sqlalchemy.orm import Session

from models.state import ENDED
from models.tables import Checkpoint, Dataset, Job, JobUse, ModelVersion, PublishedModel

Deletable = type[Dataset] | type[Checkpoint]


def share(tx: Session, used: Iterable[str]) -> None:
    """Prevent the deletion of rows, by id, until the transaction ends. Look them up afterwards."""
    ids = sorted(set(used))
    for table in (Dataset, Checkpoint):
        query = select(table.id).where(table.id.in_(ids)).order_by(table.id)
        tx.execute(query.with_for_update(read=True, key_share=True))


def lock(tx: Session, table: Deletable, ids: Collection[str]) -> None:
    """Lock rows, by id, until the transaction ends: nothing starts to need them in the meantime."""
    tx.execute(select(table.id).where(table.id.in_(ids)).order_by(table.id).with_for_update())


def read_by_jobs(tx: Session, ids: Collection[str]) -> set[str]:
    """Return those that an unfinished job reads."""
    reading = (
        select(JobUse.used)
        .join(Job, Job.id == JobUse.job)
        .where(JobUse.used.in_(ids), Job.state.not_in(ENDED))
    )
    return set(tx.scalars(reading))


def unused(tx: Session, table: Deletable, ids: Collection[str]) -> set[str]:
    """Lock rows and return those that nothing needs, also until this transaction ends.

    That is, no unfinished job reads them, and no model publishes them.
    """
    if not ids:
        return set()
    lock(tx, table, ids)
    published = select(ModelVersion.checkpoint).where(ModelVersion.checkpoint.in_(ids))
    return set(ids) - read_by_jobs(tx, ids) - set(tx.scalars(published))


def is_published(which: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a version of a model, of which ``which`` is true, exists."""
    return exists(select(ModelVersion.number).where(which))


def why_used(tx: Session, checkpoint_ids: Collection[str]) -> str:
    """Return what needs one of these checkpoints, for the message of an error."""
    query = (
        select(Checkpoint.id, Checkpoint.owner, PublishedModel, ModelVersion.number)
        .join(ModelVersion, ModelVersion.checkpoint == Checkpoint.id)
        .join(PublishedModel, PublishedModel.id == ModelVersion.model)
        .where(Checkpoint.id.in_(checkpoint_ids))
        .order_by(Checkpoint.id, PublishedModel.name, ModelVersion.number)
        .limit(1)
    )
    found = tx.execute(query).first()
    if found is None:
        return f"A job that has not ended uses {min(checkpoint_ids)}."
    checkpoint, owner, model, number = found
    if model.owner != owner:
        return f"A model of another owner has {checkpoint} as a version."
    fix = f"delete that version (DELETE /models/{model.name}/versions/{number}) or the model first"
    return f"The model {model.name!r} has {checkpoint} as version {number}: {fix}."
