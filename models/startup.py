"""Checks of API and worker before they start: the schema's revision, and unfinished restores."""

from functools import cache
from pathlib import Path

from sqlalchemy import inspect, text

import migrations
from glasshouse.errors import DatabaseUnavailable
from models.database import Database, Transaction
from models.settings import Settings

UNFINISHED = ".restoring"
"""Marker in the artifacts directory: a restore has begun and not finished."""
BROKEN_OFF = (
    "A restore into {} did not finish. Empty that directory, drop the database and create it again "
    "(SQLite: delete its file), then run 'glasshouse restore' again."
)


def refusal(settings: Settings, database: Database) -> str | None:
    """Return why this process must not start on the stored data, and what to do; None: it may.

    An unavailable database is no reason: API and worker wait for it.
    """
    if is_unfinished(settings):
        return BROKEN_OFF.format(settings.artifacts)
    if database.is_sqlite and not Path(database.url.removeprefix("sqlite:///")).exists():
        return mismatch(None)
    try:
        with database.read() as tx:
            return mismatch(revision(tx))
    except DatabaseUnavailable:
        return None


def is_unfinished(settings: Settings) -> bool:
    """Return whether a restore was aborted or is in progress."""
    return (settings.artifacts / UNFINISHED).exists()


def revision(tx: Transaction) -> str | None:
    """Return the revision of the database's schema; None without a schema."""
    if not inspect(tx.connection()).has_table("alembic_version"):
        return None
    return tx.scalars(text("SELECT version_num FROM alembic_version")).one_or_none()


def mismatch(found: str | None) -> str | None:
    """Return why this version cannot work with a schema, and what to do; None: they match."""
    if found == head():
        return None
    if found is None:
        return "The database has no tables yet. Run 'glasshouse migrate', then start again."
    return newer(found) or (
        f"The database is at schema revision {found}; this version of Glasshouse needs {head()}. "
        "Stop every API and worker, run 'glasshouse backup DIRECTORY' and 'glasshouse migrate', "
        "then start again."
    )


def newer(found: str | None) -> str | None:
    """Return what to do about the schema of a newer version; None: it is not newer."""
    if found is None or found in _known():
        return None
    return (
        f"The database is at schema revision {found}; this version of Glasshouse knows revisions "
        f"up to {head()}. A newer version has migrated the database: start that version, or "
        "restore the backup from before the upgrade."
    )


def head() -> str:
    """Return the schema revision that this version needs."""
    return _known()[0]


@cache
def _known() -> tuple[str, ...]:
    """Return every revision that this version knows, newest first, from the file names.

    Alembic would import all of them.
    """
    files = (Path(migrations.__file__).parent / "versions").glob("[0-9]*_*.py")
    return tuple(sorted((file.name.partition("_")[0] for file in files), reverse=True))
