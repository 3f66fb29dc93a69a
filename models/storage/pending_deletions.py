"""Pending deletions of files, stored in the transaction that deletes their rows.

So no crash leaves files behind. A file with a row always exists; one without a row is deleted a
little later.
"""

from collections.abc import Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from models.database import insert_into
from models.tables import DoomedFile, now


def add(tx: Session, keys: Sequence[str]) -> None:
    """Note files whose rows are deleted in this transaction."""
    rows = [{"key": key, "created_at": now()} for key in sorted(set(keys))]
    if rows:  # sorted, so that two transactions with the same files do not deadlock
        tx.execute(insert_into(tx, DoomedFile).on_conflict_do_nothing(), rows)


def find(tx: Session, *, limit: int) -> list[str]:
    """Return artifacts whose rows are deleted."""
    return list(tx.scalars(select(DoomedFile.key).order_by(DoomedFile.key).limit(limit)))


def gone(tx: Session, keys: Sequence[str]) -> None:
    """Note that the files are deleted too."""
    tx.execute(delete(DoomedFile).where(DoomedFile.key.in_(keys)))
