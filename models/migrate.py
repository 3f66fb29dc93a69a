"""Migrate the database to the newest revision: ``python -m models.migrate``.

Any number of processes may run it at once; one of them works and the others wait.
"""

import argparse
import fcntl
import gc
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # there is no garbage yet, and looking for it takes a sixth of the import time

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

import migrations
from models import startup
from models.database import Database
from models.settings import Settings


def migrate(database: Database, *, lock_file: Path) -> None:
    """Run the missing migrations. ``lock_file`` serializes processes on SQLite."""
    with _alone(database, lock_file), database.engine.connect() as connection:
        if database.is_sqlite:
            # otherwise, rebuilding a table would cascade its deletion to the rows that refer to it
            _enforce_foreign_keys(connection, on=False)
        else:
            connection.execute(text("SELECT pg_advisory_lock(7241310)"))
            connection.commit()
        command.upgrade(config(connection), "head")
        connection.commit()
        if database.is_sqlite:
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
            if broken:
                raise RuntimeError(f"the migration left broken references: {broken[:5]}")
            connection.rollback()
            _enforce_foreign_keys(connection, on=True)
        else:
            connection.execute(text("SELECT pg_advisory_unlock(7241310)"))
            connection.commit()


def _enforce_foreign_keys(connection: Connection, *, on: bool) -> None:
    """Set the pragma through the driver: SQLite ignores it in the transaction of SQLAlchemy."""
    driver: Any = connection.connection.driver_connection
    driver.execute(f"PRAGMA foreign_keys = {int(on)}")


def config(connection: Connection) -> Config:
    """Return Alembic's configuration for one open connection."""
    found = Config()
    found.set_main_option("script_location", str(Path(migrations.__file__).parent))
    found.set_main_option("path_separator", "os")
    found.attributes["connection"] = connection
    return found


@contextmanager
def _alone(database: Database, lock_file: Path) -> Generator[None]:
    if not database.is_sqlite:
        yield
        return
    lock_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock_file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Migrate the database of the settings."""
    parser = argparse.ArgumentParser(prog="python -m models.migrate", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help="say at which revision it is then")
    options = parser.parse_args()
    gc.enable()
    settings = Settings()
    if startup.is_unfinished(settings):
        sys.stderr.write(startup.BROKEN_OFF.format(settings.artifacts) + "\n")
        return 1
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = Database(settings.database)
    with database.read() as tx:
        found = startup.revision(tx)
    problem = startup.newer(found)
    if startup.mismatch(found) is not None and problem is None:
        migrate(database, lock_file=settings.home / "run" / "migrate.lock")
    database.close()
    if problem is not None:
        sys.stderr.write(problem + "\n")
        return 1
    if options.json:
        sys.stdout.write(json.dumps({"revision": startup.head()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
