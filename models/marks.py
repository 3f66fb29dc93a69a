"""Times that the processes share, by the database's clock: a turn to take, a sign of life."""

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from models.database import now_ms
from models.tables import Mark


def note(tx: Session, name: str, by: str) -> int:
    """Note that something was done now; gives the time, Unix milliseconds."""
    values = {"at_ms": now_ms(), "by": by}
    changed = update(Mark).where(Mark.name == name).values(values).returning(Mark.at_ms)
    found = tx.scalar(changed)
    if found is None:
        found = tx.scalars(insert(Mark).values(name=name, **values).returning(Mark.at_ms)).one()
    return found


def read(tx: Session, name: str) -> tuple[int, str] | None:
    """When something was noted last, and by whom."""
    row = tx.execute(select(Mark.at_ms, Mark.by).where(Mark.name == name)).one_or_none()
    return None if row is None else (row[0], row[1])


def take(tx: Session, name: str, by: str, *, every_ms: int) -> bool:
    """Take a turn that only one process may have in so long. False: somebody had it.

    The one who had it last keeps it by taking it again.
    """
    free = (Mark.at_ms <= now_ms() - every_ms) | (Mark.by == by)
    mine = {"at_ms": now_ms(), "by": by}
    query = update(Mark).where(Mark.name == name, free).values(mine).returning(Mark.name)
    if tx.scalar(query) is not None:
        return True
    if read(tx, name) is not None:
        return False
    try:
        with tx.begin_nested():
            tx.execute(insert(Mark).values(name=name, **mine))
    except IntegrityError:  # on PostgreSQL two may come this far together
        return False
    return True
