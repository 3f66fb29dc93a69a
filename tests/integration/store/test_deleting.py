"""A deleted job: gone at once for everybody, and its rows and files a little later."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Event_
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, func, select, update

from glasshouse.errors import CheckpointInUse, CheckpointNotFound, JobNotFound
from models import marks
from models.access import quotas
from models.database import Database
from models.fleet import workers
from models.jobs import attempts, checkpoints, jobs
from models.jobs.commands import add as ask
from models.jobs.jobs import Filter
from models.observations import events, probes
from models.observations.probes import CheckedProbe
from models.purge import Purge
from models.settings import Settings
from models.storage import pending_deletions
from models.storage.artifacts import LocalArtifacts
from models.tables import Event, Job, Mark, Metric, Table, core
from worker import cleanup

from .factories import losses, make_job, make_worker, purge_deleted, running, saved, ship

BODY: dict[str, Any] = {"layers": ["fc"], "kinds": ["output"], "want": ["stats"], "every": 1}


@contextmanager
def statements(database: Database) -> Generator[list[str]]:
    """What is sent to the database meanwhile."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        found.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def make_full(database: Database, num_steps: int = 30) -> Job:
    """An ended job with rows in every table that refers to one."""
    job = make_job(database, labels={"a": "1"}, name="full")
    claim = running(database, job)
    batch = losses(*((step, float(step)) for step in range(num_steps)))
    batch.stats = [{"step": 0, "phase": "train", "rows": [["fc", "output", *[0.5] * 9]]}]
    batch.captures = [
        {"id": f"cap_{job.id[4:]}", "step": 0, "layer": "fc", "kind": "output", "phase": "train"}
        | {"shape": [1], "dtype": "float32", "size_bytes": 48, "form": "full", "slice": None}
        | {"captured_from": [1], "key": f"jobs/{job.id}/1/captures/c", "tensor": "tensor"}
    ]
    batch.checkpoints = [saved(2, key=f"jobs/{job.id}/1/checkpoints/2", size_bytes=100)]
    batch.artifacts = [{"name": "a", "media_type": "x/y", "size_bytes": 7, "key": f"jobs/{job.id}"}]
    assert ship(database, claim, batch, (0, 1))
    with database.write() as tx:
        probes.add(tx, job, CheckedProbe(BODY, ["fc"], 8), by="ada")
        ask(tx, job, {"do": "checkpoint"}, by="ada")
        assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    return job


def delete(database: Database, job: Job) -> None:
    with database.write() as tx:
        jobs.delete(tx, jobs.get(tx, job.id, "ada", lock=True))


def hanging(database: Database) -> dict[str, int]:
    """Rows of every table that names a job by a foreign key, and of the jobs themselves."""
    found: dict[str, int] = {}
    with database.read() as tx:
        for mapper in Table.registry.mappers:
            table = core(mapper.class_)
            names_job = any(key.column.table.name == "jobs" for key in table.foreign_keys)
            if names_job or table.name in ("jobs", "stats_chunks"):
                found[table.name] = tx.scalar(select(func.count()).select_from(table)) or 0
    return found


def test_deleting_takes_as_many_statements_for_a_long_job_as_for_a_short_one(database: Database):
    make_worker(database, cores=8)
    told: list[list[str]] = []
    for num_steps in (3, 600):
        job = make_full(database, num_steps)
        with statements(database) as found:
            delete(database, job)
        told.append(found)
        with database.read() as tx:
            left = tx.scalar(select(func.count()).where(Event.job == job.id)) or 0
            assert left > num_steps
            assert tx.scalar(select(func.count()).where(Metric.job == job.id)) == num_steps
    assert told[0] == told[1]
    deleting = [line for line in told[1] if line.startswith("DELETE")]
    assert [line.split()[2] for line in deleting] == ["checkpoints"]


def test_nobody_sees_a_deleted_job(database: Database, tmp_path: Path):
    make_worker(database, cores=8)
    gone, kept = make_full(database), make_full(database)
    with database.read() as tx:
        (checkpoint,) = checkpoints.of_job(tx, gone.id)
        before = quotas.stored_bytes(tx, "ada")
    delete(database, gone)
    with database.read() as tx:
        for look in (
            lambda: jobs.get(tx, gone.id, None),
            lambda: jobs.whole(tx, gone.id, None),
            lambda: jobs.progress(tx, gone.id, None),
            lambda: events.read(tx, gone.id, 0),
        ):
            with pytest.raises(JobNotFound):
                look()
        with pytest.raises(CheckpointNotFound):
            checkpoints.get(tx, checkpoint.id, None)
        for wanted in (Filter(), Filter(labels={"a": "1"}), Filter(text="full"), Filter("ada")):
            assert [job.id for job in jobs.find(tx, wanted, after=None, limit=10)] == [kept.id]
        assert jobs.count_by_state(tx)["succeeded"] == 1
        assert attempts.open_attempt(tx, gone.id) is None
        assert workers.owners(tx, [gone.id, kept.id]) == {kept.id: "ada"}
        assert quotas.stored_bytes(tx, "ada") == before / 2
    with database.write() as tx, pytest.raises(JobNotFound):
        jobs.request_cancel(tx, gone, by="ada", force=False)
    with database.write() as tx, pytest.raises(JobNotFound):
        jobs.delete(tx, jobs.get(tx, gone.id, None))


def test_the_purge_deletes_what_a_deleted_job_has_left_and_nothing_else(
    database: Database, tmp_path: Path
):
    make_worker(database, cores=8)
    store = LocalArtifacts(tmp_path / "artifacts")
    kept = make_full(database)
    alone = hanging(database)
    job = make_full(database)
    assert all(hanging(database)[name] == 2 * count for name, count in alone.items()), alone
    assert all(alone[name] for name in ("events", "metrics", "captures", "job_specs", "job_labels"))
    for one in (job, kept):
        with store.receive(f"jobs/{one.id}/1/captures/c") as path:
            path.write_bytes(b"x")
    delete(database, job)
    settings = Settings(home=tmp_path, keep_captures_days=0)
    plan = Purge(settings, database, store).plan()
    assert (plan.rows["jobs"], plan.files) == (1, 1)
    done = purge_deleted(database, tmp_path)
    assert done.rows["jobs"] == 1
    assert hanging(database) == alone
    assert not (store.root / "jobs" / job.id).exists()
    assert (store.root / "jobs" / kept.id / "1/captures/c").exists()
    with database.read() as tx:
        assert pending_deletions.find(tx, limit=10) == []
    assert purge_deleted(database, tmp_path).rows == {}


def test_a_job_whose_checkpoint_is_in_use_is_not_deleted(database: Database):
    make_worker(database, cores=8)
    job = make_full(database)
    with database.read() as tx:
        (checkpoint,) = checkpoints.of_job(tx, job.id)
    with database.write() as tx:
        spec = {"kind": "train"}
        jobs.add(tx, owner="ada", spec=spec, resolved={}, plan={}, uses=[checkpoint.id])
    with pytest.raises(CheckpointInUse):
        delete(database, job)
    with database.read() as tx:
        assert jobs.get(tx, job.id, "ada").deleted_at is None
        assert len(checkpoints.of_job(tx, job.id)) == 1


def test_a_purge_that_is_ended_continues_the_next_time(database: Database, tmp_path: Path):
    make_worker(database, cores=8)
    job = make_full(database, 50)
    delete(database, job)
    settings = Settings(home=tmp_path, purge_chunk=7)
    store = LocalArtifacts(settings.artifacts)
    turns = iter([True] * 3)
    stopped = Purge(settings, database, store, stays_mine=lambda _: next(turns, False))
    stopped.run_deleted()
    left = hanging(database)
    assert 0 < left["events"] < 50
    assert left["jobs"] == 1
    with database.read() as tx, pytest.raises(JobNotFound):
        jobs.get(tx, job.id, None)
    purge_deleted(database, tmp_path)
    assert set(hanging(database).values()) == {0}


def test_a_worker_deletes_what_deleted_jobs_have_left_and_asks_for_no_turn_without_any(
    database: Database, tmp_path: Path
):
    make_worker(database, cores=8)
    settings = Settings(home=tmp_path)
    store = LocalArtifacts(settings.artifacts)
    context: Any = SimpleNamespace(
        database=database, artifacts=store, settings=settings, name="w1", stopping=Event_()
    )
    kept = make_full(database)
    cleanup.purge_deleted(context)
    with database.read() as tx:
        assert marks.read(tx, "purge.deleted") is None
    alone = hanging(database)
    job = make_full(database)
    delete(database, job)
    with database.write() as tx:  # another worker is at it
        assert marks.take(tx, "purge.deleted", "w2", every_ms=0)
    cleanup.purge_deleted(context)
    assert hanging(database)["jobs"] == 2
    with database.write() as tx:
        tx.execute(update(Mark).values(at_ms=0))
    cleanup.purge_deleted(context)
    assert hanging(database) == alone
    with database.read() as tx:
        assert jobs.get(tx, kept.id, "ada").deleted_at is None
