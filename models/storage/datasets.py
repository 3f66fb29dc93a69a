"""Datasets: a row exists from the upload on, and is ready once the file has been read."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, or_, select, update
from sqlalchemy import delete as sql_delete
from sqlalchemy.orm import Session, aliased

from glasshouse.errors import DatasetInUse, DatasetNotFound, DatasetNotReady
from glasshouse.ids import is_id, new_id
from glasshouse.spec.data import BUILTINS
from models.database import now_ms
from models.storage import pending_deletions, references
from models.tables import Dataset, now

_MANY = 1000
_LISTED = 5

BUILTIN = "builtin:"
"""Format prefix of a dataset without a file."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The right of a worker to read one dataset's file."""

    dataset: str
    format: str
    resize: str | None
    header: bool | None
    tries: int
    """Number of attempts to read the file, including this one."""

    @property
    def builtin(self) -> str | None:
        """Return the name of the built-in dataset; None if there is a file."""
        return self.format.removeprefix(BUILTIN) if self.format.startswith(BUILTIN) else None


def add(  # noqa: PLR0913 (the columns of a dataset)
    tx: Session,
    *,
    owner: str,
    name: str,
    format: str,  # noqa: A002 (the public name of the field)
    size_bytes: int,
    sha256: str | None,
    dataset_id: str | None = None,
    resize: str | None = None,
    header: bool | None = None,
) -> Dataset:
    """Store a pending dataset. Its id may exist already, to receive its file."""
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
        header=header,
        key=f"datasets/{dataset_id}",
        created_at=now(),
        version=1,
    )
    tx.add(row)
    tx.flush()
    return row


def get(tx: Session, dataset_id: str, owner: str | None, *, lock: bool = False) -> Dataset:
    """Return one dataset. ``owner`` None sees those of all owners.

    ``lock``: lock the row until the transaction ends.

    Raises:
        DatasetNotFound: It does not exist, or belongs to someone else.
    """
    found = tx.get(Dataset, dataset_id, populate_existing=True, with_for_update=lock or None)
    if found is None or (owner is not None and found.owner != owner):
        raise DatasetNotFound(f"No dataset has the id {dataset_id}.")
    return found


def referred(tx: Session, reference: str, *, owner: str, sees: str | None) -> Dataset:
    """Return the dataset that an id or a name refers to.

    A name refers to the owner's own dataset, or else to a visible one of another owner. If several
    have the same content, it refers to the newest.

    Raises:
        DatasetNotFound: There is none, or several differ in content.
    """
    if is_id(reference, "ds"):
        return get(tx, reference, sees)
    query = select(Dataset).where(Dataset.name == reference).order_by(Dataset.id.desc())
    if sees is not None:
        query = query.where(Dataset.owner == sees)
    rows = list(tx.scalars(query.limit(_MANY)))
    rows = [row for row in rows if row.owner == owner] or rows
    rows = [row for row in rows if row.state != "failed"] or rows
    contents = {(row.format, row.sha256, row.resize, row.header) for row in rows}
    if not rows:
        detail = f"There is no dataset with the id or name {reference[:100]!r}."
        if reference in BUILTINS:
            detail += f' Create it: POST /datasets with {{"builtin": "{reference}"}}.'
        raise DatasetNotFound(detail)
    if len(contents) > 1:
        listed = ", ".join(row.id for row in rows[:_LISTED])
        raise DatasetNotFound(
            f"Several datasets have the name {reference[:100]!r}: give the id of one ({listed})."
        )
    return rows[0]


def builtin(tx: Session, owner: str, format: str, name: str) -> Dataset | None:  # noqa: A002
    """Return the owner's newest dataset of a built-in format and name that has not failed."""
    mine = (Dataset.owner == owner, Dataset.format == format, Dataset.name == name)
    query = select(Dataset).where(*mine, Dataset.state != "failed")
    return tx.scalars(query.order_by(Dataset.id.desc()).limit(1)).first()


def ready(tx: Session, dataset_id: str, owner: str | None) -> Dataset:
    """Return one dataset that can be used now.

    Raises:
        DatasetNotFound: It does not exist, or belongs to someone else.
        DatasetNotReady: Its file is still being read, or reading failed.
    """
    found = get(tx, dataset_id, owner)
    if found.state != "ready":
        raise DatasetNotReady(f"The dataset {dataset_id} is {found.state}.")
    return found


def find(
    tx: Session,
    *,
    owner: str | None,
    after: str | None,
    limit: int,
    sha256: str | None = None,
    name: str | None = None,
) -> list[Dataset]:
    """List datasets, newest first.

    ``sha256``: only those whose file has this digest. ``name``: only those with this name.
    """
    query = select(Dataset).order_by(Dataset.id.desc()).limit(limit)
    if owner is not None:
        query = query.where(Dataset.owner == owner)
    if sha256 is not None:
        query = query.where(Dataset.sha256 == sha256)
    if name is not None:
        query = query.where(Dataset.name == name)
    if after is not None:
        query = query.where(Dataset.id < after)
    return list(tx.scalars(query))


def source_key(dataset_id: str) -> str:
    """Return the key of an uploaded file that waits to be read."""
    return f"uploads/{dataset_id}"


def pending(tx: Session) -> set[str]:
    """Return the ids of datasets whose file is still needed."""
    return set(tx.scalars(select(Dataset.id).where(Dataset.state == "pending")))


def is_unread(tx: Session) -> bool:
    """Return whether a file waits that no worker reads."""
    return tx.scalar(select(_unread().exists())) is True


def claim(tx: Session, reader: str, *, lease_ms: int) -> Reading | None:
    """Claim the dataset to read next; None: there is none.

    The owner with the fewest files being read comes first, so that many uploads of one owner do not
    delay others. Workers that claim at the same time get different datasets.
    """
    other = aliased(Dataset)
    being_read = (
        select(func.count())
        .where(other.owner == Dataset.owner, other.state == "pending")
        .where(other.reading_until_ms >= now_ms())
        .scalar_subquery()
    )
    query = _unread().order_by(being_read, Dataset.id).limit(1)
    chosen = tx.scalar(query.with_for_update(skip_locked=True))
    if chosen is None:
        return None
    row = tx.execute(
        update(Dataset)
        .where(Dataset.id == chosen)
        .values(reader=reader, reading_until_ms=now_ms() + lease_ms, reads=Dataset.reads + 1)
        .returning(Dataset.id, Dataset.format, Dataset.resize, Dataset.header, Dataset.reads)
    ).one()
    return Reading(*row)


def renew(tx: Session, reading: Reading, *, lease_ms: int) -> bool:
    """Extend the claim. False: it is lost, or the dataset was deleted."""
    return _change(tx, reading, reading_until_ms=now_ms() + lease_ms)


def give_back(tx: Session, reading: Reading) -> bool:
    """Let another worker read the file at once. This try does not count."""
    return _change(tx, reading, reading_until_ms=None, reads=Dataset.reads - 1)


def read(
    tx: Session,
    reading: Reading,
    *,
    columns: list[Any],
    splits: dict[str, Any],
    key: str,
    notes: list[Any] | None = None,
) -> bool:
    """Mark a dataset as read: pending becomes ready. ``key``: the location of its columns.

    False: the claim is lost, or the dataset was deleted. If the outcome of a commit is unknown,
    call it again with the same key.
    """
    found: dict[str, Any] = {"columns": columns, "splits": splits, "notes": notes or []}
    if _settle(tx, reading, state="ready", key=key, **found):
        return True
    kept = select(Dataset.id).where(Dataset.id == reading.dataset, Dataset.key == key)
    return tx.scalar(kept) is not None


def unreadable(tx: Session, reading: Reading, problem: dict[str, Any]) -> bool:
    """Mark a dataset as unreadable: pending becomes failed, with the problem."""
    return _settle(tx, reading, state="failed", problem=problem)


def delete(tx: Session, dataset: Dataset) -> None:
    """Delete the row of a dataset. Its files may be deleted after the commit.

    Raises:
        DatasetInUse: A job that has not ended reads it.
    """
    if not references.unused(tx, Dataset, [dataset.id]):
        raise DatasetInUse("A job that has not ended uses this dataset.")
    tx.execute(sql_delete(Dataset).where(Dataset.id == dataset.id))
    pending_deletions.add(tx, [f"datasets/{dataset.id}"])


def _unread() -> Select[str]:
    free = or_(Dataset.reading_until_ms.is_(None), Dataset.reading_until_ms < now_ms())
    return select(Dataset.id).where(Dataset.state == "pending", free)


def _settle(tx: Session, reading: Reading, **changes: Any) -> bool:
    """End a reading. The next purge deletes the uploaded file."""
    settled = _change(tx, reading, version=Dataset.version + 1, reading_until_ms=None, **changes)
    if settled and reading.builtin is None:
        pending_deletions.add(tx, [source_key(reading.dataset)])
    return settled


def _change(tx: Session, reading: Reading, **changes: Any) -> bool:
    claimed = update(Dataset).where(
        Dataset.id == reading.dataset, Dataset.state == "pending", Dataset.reads == reading.tries
    )
    return tx.scalar(claimed.values(**changes).returning(Dataset.id)) is not None
