"""Datasets: a row from the first byte of the upload on, ready once the file could be read."""

from typing import Any

from sqlalchemy import delete as sql_delete
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from glasshouse.errors import DatasetInUse, DatasetNotFound, DatasetNotReady
from glasshouse.ids import new_id
from models import doomed, uses
from models.tables import Dataset, now


def add(  # noqa: PLR0913 (a dataset is made of these)
    tx: Session,
    *,
    owner: str,
    name: str,
    format: str,  # noqa: A002 (the public name of the field)
    size_bytes: int,
    sha256: str | None,
    dataset_id: str | None = None,
    resize: str | None = None,
) -> Dataset:
    """Store a pending dataset. Its id may have been made before, to receive its file."""
    dataset_id = dataset_id or new_id("ds")
    row = Dataset(
        id=dataset_id,
        owner=owner,
        name=name,
        format=format,
        state="pending",
        size_bytes=size_bytes,
        sha256=sha256,
        columns=[],
        splits={},
        resize=resize,
        key=f"datasets/{dataset_id}",
        created_at=now(),
        version=1,
    )
    tx.add(row)
    tx.flush()
    return row


def get(tx: Session, dataset_id: str, owner: str | None, *, lock: bool = False) -> Dataset:
    """One dataset. ``owner`` None sees everybody's. ``lock``: until the transaction ends.

    Raises:
        DatasetNotFound: there is none, or it is somebody else's.
    """
    found = tx.get(Dataset, dataset_id, populate_existing=True, with_for_update=lock or None)
    if found is None or (owner is not None and found.owner != owner):
        raise DatasetNotFound(f"No dataset has the id {dataset_id}.")
    return found


def ready(tx: Session, dataset_id: str, owner: str | None) -> Dataset:
    """One dataset that can be used now.

    Raises:
        DatasetNotFound: there is none, or it is somebody else's.
        DatasetNotReady: its file is still being read, or could not be.
    """
    found = get(tx, dataset_id, owner)
    if found.state != "ready":
        raise DatasetNotReady(f"The dataset {dataset_id} is {found.state}.")
    return found


def find(
    tx: Session, *, owner: str | None, after: str | None, limit: int, sha256: str | None = None
) -> list[Dataset]:
    """Datasets, newest first. ``sha256``: only those whose file has this digest."""
    query = select(Dataset).order_by(Dataset.id.desc()).limit(limit)
    if owner is not None:
        query = query.where(Dataset.owner == owner)
    if sha256 is not None:
        query = query.where(Dataset.sha256 == sha256)
    if after is not None:
        query = query.where(Dataset.id < after)
    return list(tx.scalars(query))


def read(
    tx: Session,
    dataset_id: str,
    *,
    columns: list[Any],
    splits: dict[str, Any],
    key: str | None = None,
) -> bool:
    """The file could be read: pending becomes ready. ``key``: where its columns lie.

    False: it is not pending; it was deleted, or another process has read it.
    """
    place = {} if key is None else {"key": key}
    return _settle(tx, dataset_id, state="ready", columns=columns, splits=splits, **place)


def unreadable(tx: Session, dataset_id: str, problem: dict[str, Any]) -> bool:
    """The file could not be read: pending becomes failed, with the problem."""
    return _settle(tx, dataset_id, state="failed", problem=problem)


def pending(tx: Session) -> list[Dataset]:
    """Datasets whose file is still to be read."""
    return list(tx.scalars(select(Dataset).where(Dataset.state == "pending")))


def delete(tx: Session, dataset: Dataset) -> None:
    """Forget a dataset; its files may go after commit.

    Raises:
        DatasetInUse: a job that has not ended reads it.
    """
    if not uses.unused(tx, Dataset, [dataset.id]):
        raise DatasetInUse("A job that has not ended uses this dataset.")
    tx.execute(sql_delete(Dataset).where(Dataset.id == dataset.id))
    doomed.add(tx, [f"datasets/{dataset.id}"])


def _settle(tx: Session, dataset_id: str, **changes: Any) -> bool:
    settled = tx.scalar(
        update(Dataset)
        .where(Dataset.id == dataset_id, Dataset.state == "pending")
        .values(version=Dataset.version + 1, **changes)
        .returning(Dataset.id)
    )
    return settled is not None
