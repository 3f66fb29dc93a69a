"""Check SQLite's file once a day and store the result as a mark for all processes."""

from sqlalchemy import text

from models import marks
from models.database import Database, Transaction, now_ms

MARK = "quick_check"
WHOLE = "ok"
EVERY_MS = 24 * 3600 * 1000


def check_if_due(database: Database) -> str | None:
    """Check the whole file unless it was checked within a day. Return ``ok``, or the damage.

    None: it was not due, or the database is not SQLite.
    """
    if not database.is_sqlite:
        return None
    with database.read() as tx:
        last = marks.read(tx, MARK)
        time = int(tx.scalar(now_ms().select()) or 0)
    if last is not None and time - last[0] < EVERY_MS:
        return None
    with database.write() as tx:  # before the check, which is slow: no other process starts one
        marks.note(tx, MARK, WHOLE if last is None else last[1])
    with database.read() as tx:
        said = str(tx.scalars(text("PRAGMA quick_check(1)")).first())
    with database.write() as tx:
        marks.note(tx, MARK, said[:500])
    return said


def found_last(tx: Transaction) -> str:
    """Return the result of the last check: ``ok``, or the damage; ``ok`` before the first."""
    last = marks.read(tx, MARK)
    return WHOLE if last is None else last[1]
