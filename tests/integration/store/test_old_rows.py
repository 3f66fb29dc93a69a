"""A database of before resuming: what its jobs show after the migration."""

from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import text

from models import checkpoints, events, jobs, lineage, metrics
from models.database import Database
from models.migrate import config, migrate

from .making import losses, make_job, make_worker, next_attempt, running, saved, ship


@pytest.fixture
def old(database: Database) -> tuple[Database, str]:
    """A job whose second attempt began anew, in the tables of revision 0005."""
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    batch = losses((0, 1.0), (1, 1.0), (2, 1.0))
    batch.checkpoints = [saved(2)]
    assert ship(database, claim, batch, (0, 1))
    claim = next_attempt(database, job, claim)
    assert ship(database, claim, losses((0, 2.0), (1, 2.0)), (0, 1))
    with database.write() as tx:
        tx.execute(text("UPDATE attempts SET resumed_from_step = NULL"))
    with database.engine.connect() as connection:
        command.downgrade(config(connection), "0005")
        connection.commit()
    return database, job.id


def test_a_later_attempt_of_before_hides_what_it_ran_again(
    old: tuple[Database, str], tmp_path: Path
):
    database, job = old
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.read() as tx:
        page = events.read(tx, job, 0)
        told: list[Any] = [(e.attempt, e.type) for e in page.events if e.type == "metrics"]
        points = metrics.query(tx, job, "loss")
        assert lineage.cuts(tx, job) == [(2, 0)]
        assert checkpoints.of_job(tx, job) == []
    assert told == [(2, "metrics")] * 2
    assert [(p.attempt, p.value) for p in points] == [(2, 2.0), (2, 2.0)]


def test_a_job_of_before_was_made_by_nobody_that_is_known(database: Database, tmp_path: Path):
    job = make_job(database)
    with database.engine.connect() as connection:
        command.downgrade(config(connection), "0015")
        connection.commit()
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.read() as tx:
        assert jobs.get(tx, job.id, "ada").created_by is None
