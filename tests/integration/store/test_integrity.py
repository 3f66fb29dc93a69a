"""The daily look at SQLite's file."""

from contextlib import closing
from pathlib import Path
from sqlite3 import connect

from sqlalchemy import update

from models.database import Database
from models.migrate import migrate
from models.storage import integrity
from models.storage.integrity import EVERY_MS, check_if_due, found_last
from models.tables import Mark
from tests.integration.store.factories import make_job


def test_integrity_is_checked_once_a_day_and_never_on_postgresql(database: Database):
    first = check_if_due(database)
    assert first == (integrity.WHOLE if database.is_sqlite else None)
    assert check_if_due(database) is None
    if database.is_sqlite:
        with database.write() as tx:
            tx.execute(update(Mark).values(at_ms=Mark.at_ms - EVERY_MS - 1))
        assert check_if_due(database) == integrity.WHOLE
    with database.read() as tx:
        assert found_last(tx) == integrity.WHOLE


def test_damage_is_found_and_remembered_for_all_to_read(tmp_path: Path):
    path = tmp_path / "glasshouse.db"
    opened = Database(f"sqlite:///{path}")
    migrate(opened, lock_file=tmp_path / "migrate.lock")
    for _ in range(50):
        make_job(opened)
    opened.close()
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'ix_jobs_owner_id'"
        (root,) = connection.execute(query).fetchone()
    data = bytearray(path.read_bytes())
    data[(root - 1) * 4096 + 8 : (root - 1) * 4096 + 60] = b"\xff" * 52
    path.write_bytes(data)
    opened = Database(f"sqlite:///{path}")
    assert check_if_due(opened) not in (None, integrity.WHOLE)
    with opened.read() as tx:
        assert found_last(tx) != integrity.WHOLE
    opened.close()
