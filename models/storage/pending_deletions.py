"""Files to delete: named in the transaction that deletes their rows, so that no crash keeps them.

A file that a row names is always there; one that no row names any more goes a little later.
"""

from collections.abc import Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from models.database import insert_into
from models.tables import DoomedFile, now


def add(tx: Session, keys: Sequence[str]) -> None:
    """The rows of these artifacts are deleted in this transaction."""
    rows = [{"key": key, "created_at": now()} for key in sorted(set(keys))]
    if rows:  # in order: two transactions that give up the same files do not deadlock
        tx.execute(insert_into(tx, DoomedFile).on_conflict_do_nothing(), rows)


def find(tx: Session, *, limit: int) -> list[str]:
    """Artifacts whose rows are deleted."""
    return list(tx.scalars(select(DoomedFile.key).order_by(DoomedFile.key).limit(limit)))


def gone(tx: Session, keys: Sequence[str]) -> None:
    """The files are deleted too."""
    tx.execute(delete(DoomedFile).where(DoomedFile.key.in_(keys)))
