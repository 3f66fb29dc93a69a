"""Times that processes share, by the database's clock: whose turn it is, when it was done."""

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from models.database import insert_into, now_ms
from models.tables import Mark


def note(tx: Session, name: str, by: str) -> int:
    """Note that something was done now. Return the time in Unix milliseconds."""
    values = {"at_ms": now_ms(), "by": by}
    query = insert_into(tx, Mark).values(name=name, **values)
    query = query.on_conflict_do_update(index_elements=["name"], set_=values)
    return tx.scalars(query.returning(Mark.at_ms)).one()


def read(tx: Session, name: str) -> tuple[int, str] | None:
    """Return when something was last noted, and by whom."""
    row = tx.execute(select(Mark.at_ms, Mark.by).where(Mark.name == name)).one_or_none()
    return None if row is None else (row[0], row[1])


def take(tx: Session, name: str, by: str, *, every_ms: int) -> bool:
    """Take a turn that only one process may have per interval. False: another process has it.

    The last holder keeps the turn by taking it again.
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
    except IntegrityError:  # on PostgreSQL, two processes may get here at once
        return False
    return True
