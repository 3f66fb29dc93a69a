"""A database of before resuming: what its jobs show after the migration."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Text, inspect, text

from glasshouse.errors import CheckpointInUse, KeyInvalid
from glasshouse.ids import new_id
from models import backup, keys
from models.database import Database
from models.jobs import checkpoints, jobs
from models.jobs.jobs import Filter
from models.migrate import config, migrate
from models.observations import events, lineage, metrics
from models.tables import Checkpoint, core

from .factories import losses, make_job, make_worker, next_attempt, running, saved, ship


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


def test_a_job_of_an_earlier_release_has_no_known_creator(database: Database, tmp_path: Path):
    job = make_job(database)
    with database.engine.connect() as connection:
        command.downgrade(config(connection), "0015")
        connection.commit()
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.read() as tx:
        assert jobs.get(tx, job.id, "ada").created_by is None


def test_a_migration_that_rebuilds_a_table_deletes_no_row_that_refers_to_it(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    assert ship(database, claim, losses((0, 1.0)), (0, 1))

    how: Any = "always" if database.is_sqlite else "never"

    def rebuild(configured: Config, _revision: str) -> None:
        context = MigrationContext.configure(configured.attributes["connection"])
        with Operations(context).batch_alter_table("jobs", recreate=how) as jobs:
            jobs.add_column(Column("new", Text))

    with database.read() as tx:
        before = events.read(tx, job.id, 0).events
    monkeypatch.setattr(command, "upgrade", rebuild)
    migrate(database, lock_file=tmp_path / "migrate.lock")
    assert "new" in {found["name"] for found in inspect(database.engine).get_columns("jobs")}
    with database.read() as tx:
        assert events.read(tx, job.id, 0).events == before
    with database.write() as tx:  # and they are enforced again
        tx.execute(text("DELETE FROM jobs"))
        assert tx.scalar(text("SELECT count(*) FROM events")) == 0


def downgrade(database: Database, revision: str) -> None:
    with database.engine.connect() as connection:
        command.downgrade(config(connection), revision)
        connection.commit()


def test_labels_and_specs_of_before_are_where_they_are_looked_for(
    database: Database, tmp_path: Path
):
    plan: dict[str, Any] = {
        "warnings": [{"code": "waits", "detail": "é"}],
        "layers": [{"name": "fc"}],
        "worst": float("nan"),
    }
    with database.write() as tx:
        made: list[str] = []
        for n in range(1203):  # more than one page of the migration
            spec = {"kind": "train", "labels": {"n": str(n % 3), "ü": "a'b"} if n % 2 else {}}
            given = plan if n == 1 else {}
            job = jobs.add(tx, owner="ada", spec=spec, resolved={"seed": n}, plan=given)
            made.append(job.id)
    downgrade(database, "0016")
    assert "job_labels" not in inspect(database.engine).get_table_names()
    with database.read() as tx:
        row = tx.execute(text("SELECT plan FROM jobs WHERE id = :id"), {"id": made[1]}).one()
        assert "é" in row.plan
    migrate(database, lock_file=tmp_path / "migrate.lock")
    assert "plan" not in {found["name"] for found in inspect(database.engine).get_columns("jobs")}
    with database.read() as tx:
        wanted = Filter(labels={"n": "1", "ü": "a'b"})
        found = jobs.find(tx, wanted, after=None, limit=1000, order="asc")
        assert [job.id for job in found] == [
            job for n, job in enumerate(made) if n % 2 and n % 3 == 1
        ]
        old = jobs.whole(tx, made[1], "ada")
        assert (old.spec["kind"], old.resolved) == ("train", {"seed": 1})
        assert old.plan["layers"] == [{"name": "fc"}]
        assert old.warnings == plan["warnings"]
        assert jobs.get(tx, made[0], "ada").warnings == []


def upload(database: Database, **columns: Any) -> str:
    given: dict[str, Any] = {
        "id": new_id("ckpt"),
        "owner": "ada",
        "name": "é",
        "network": {"network": {"type": "graph"}, "fields": {}},
        "files": {"model.safetensors": {"size_bytes": 7, "sha256": "ab"}},
        "size_bytes": 7,
        "sha256": "ab",
        "key": "checkpoints/one",
    }
    with database.write() as tx:
        return checkpoints.upload(tx, **given | columns).id


def all_checkpoints(database: Database) -> dict[str, dict[str, Any]]:
    with database.read() as tx:
        rows = tx.execute(core(Checkpoint).select()).mappings()
        return {row["id"]: dict(row) for row in rows}


def test_uploaded_checkpoints_of_before_are_those_that_were_uploaded(
    database: Database, tmp_path: Path
):
    make_worker(database)
    trained = make_job(database)
    batch = losses((0, 1.0))
    batch.checkpoints = [saved(1)]
    assert ship(database, running(database, trained), batch, (0, 1))
    used = upload(database)
    unused = upload(database, owner="bob", name=None, sha256="cd", key="checkpoints/two")
    with database.write() as tx:
        spec = {"kind": "infer", "checkpoint": used}
        reader = jobs.add(tx, owner="ada", spec=spec, resolved=spec, plan={}, uses=[used])
    before = all_checkpoints(database)
    downgrade(database, "0023")
    with database.read() as tx:
        moved = set(tx.scalars(text("SELECT id FROM uploads")))
        stayed = set(tx.scalars(text("SELECT id FROM checkpoints")))
        assert (moved, stayed) == ({used, unused}, set(before) - moved)
        # by the advice "glasshouse backup, then glasshouse migrate"
        assert {row["key"] for row in before.values()} <= set(backup._keys(tx))
    migrate(database, lock_file=tmp_path / "migrate.lock")
    assert "uploads" not in inspect(database.engine).get_table_names()
    assert all_checkpoints(database) == before
    with database.read() as tx:
        found = checkpoints.get(tx, used, "ada")
        assert (found.job, found.attempt, found.step, found.final) == (None, None, 0, True)
        assert checkpoints.trained(tx, found) == {"network": {"type": "graph"}, "fields": {}}
        assert checkpoints.uploaded(tx) == {used, unused}
        assert set(tx.scalars(text("SELECT used FROM job_uses"))) == {used}
        assert [row.job for row in checkpoints.of_job(tx, trained.id)] == [trained.id]
    with database.write() as tx, pytest.raises(CheckpointInUse):
        checkpoints.delete(tx, checkpoints.get(tx, used, "ada"))
    with database.write() as tx:
        tx.execute(text("DELETE FROM jobs WHERE id = :id"), {"id": trained.id})
    assert set(all_checkpoints(database)) == {used, unused}
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, reader.id, "ada"), by="ada", force=False)
        checkpoints.delete(tx, checkpoints.get(tx, used, "ada"))
    assert set(all_checkpoints(database)) == {unused}


def test_sessions_and_tickets_of_before_belong_to_their_key_and_end_with_it(
    database: Database, tmp_path: Path
):
    with database.write() as tx:
        key, secret = keys.create(tx, name="laptop", owner="ada", scopes=["read"])
        session = keys.derive(tx, key.id, "session", timedelta(hours=1))
        ticket = keys.derive(tx, key.id, "ticket", timedelta(hours=1))
        orphan = keys.derive(tx, key.id, "session", timedelta(hours=1))
    downgrade(database, "0024")
    query = text("SELECT kind, name FROM keys ORDER BY kind")
    with database.write() as tx:
        names = [tuple(row) for row in tx.execute(query)]
        assert names == [("key", "laptop"), *[("session", key.id)] * 2, ("ticket", key.id)]
        # as one whose key retention has deleted
        gone = text("UPDATE keys SET name = 'key_gone' WHERE sha256 = :sha256")
        tx.execute(gone, {"sha256": keys.hash_of(orphan)})
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.write() as tx:
        assert keys.check(tx, secret).parent is None
        row = keys.check(tx, session, kind="session")
        assert (row.parent, row.name, keys.api_key_of(tx, row).id) == (key.id, "laptop", key.id)
        assert keys.redeem(tx, ticket) == key.id
        with pytest.raises(KeyInvalid):
            keys.api_key_of(tx, keys.check(tx, orphan, kind="session"))
        keys.revoke(tx, key.id)
        with pytest.raises(KeyInvalid):
            keys.check(tx, session, kind="session")
