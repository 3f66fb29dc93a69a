"""Files that no row names go; the others, and those of attempts that still write, stay."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from glasshouse.ids import new_id
from models.database import Database
from models.jobs import attempts, jobs
from models.jobs.shipments import Batch
from models.storage.artifacts import LocalArtifacts
from worker.cleanup import OLD_S, Leftovers, remove_unnamed

from .factories import make_job, make_worker, next_attempt, running, saved, ship


def file(store: LocalArtifacts, key: str, age_s: float) -> Path:
    path = store.root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def station_of(database: Database, store: LocalArtifacts) -> Any:
    """As much of a worker's station as looking for leftovers takes."""
    return SimpleNamespace(database=database, artifacts=store)


def test_what_no_row_names_goes_when_it_is_old_and_its_attempt_over(
    database: Database, tmp_path: Path
):
    make_worker(database)
    store = LocalArtifacts(tmp_path / "artifacts")
    job = make_job(database)
    first = running(database, job)
    root = f"jobs/{job.id}"
    named = new_id("ckpt")
    row = saved(3, id=named, key=f"{root}/1/checkpoints/{named}")
    assert ship(database, first, Batch(checkpoints=[row]), (0, 1))
    running_claim = next_attempt(database, job, first)
    old, young = 2 * OLD_S, OLD_S / 2
    stays = [
        file(store, f"{root}/1/checkpoints/{named}/model.safetensors", old),
        file(store, f"{root}/1/checkpoints/{new_id('ckpt')}", young),
        file(store, f"{root}/1/checkpoints/somebody-elses", old),
        file(store, f"{root}/1/notes/{new_id('ckpt')}", old),
        file(store, f"{root}/{running_claim.attempt}/checkpoints/{new_id('ckpt')}", old),
        file(store, f"jobs/mine/1/checkpoints/{new_id('ckpt')}", old),
        file(store, "datasets/ds_x/meta.json", old),
    ]
    goes = [
        file(store, f"{root}/1/checkpoints/{new_id('ckpt')}", old),
        file(store, f"{root}/1/checkpoints/.{new_id('ckpt')}.incoming", old),
        file(store, f"{root}/1/captures/{new_id('cap')}.safetensors", old),
        file(store, f"{root}/1/artifacts/samples-3.safetensors", old),
    ]
    look = Leftovers(station_of(database, store))
    look()
    assert [path for path in stays if not path.exists()] == []
    assert [path for path in goes if path.exists()] == []
    assert remove_unnamed(station_of(database, store), first, 0.0) == 0
    assert not stays[1].exists()  # a worker that starts again does not wait for a day
    assert stays[0].exists()


def test_the_files_of_a_job_that_was_deleted_go(database: Database, tmp_path: Path):
    make_worker(database)
    store = LocalArtifacts(tmp_path / "artifacts")
    job = make_job(database)
    claim = running(database, job)
    kept = file(store, f"jobs/{job.id}/1/captures/{new_id('cap')}.safetensors", 0)
    with database.write() as tx:
        assert attempts.finish(tx, claim, "failed", exit_kind="internal")
    look = Leftovers(station_of(database, store))
    look()
    assert kept.exists()
    with database.write() as tx:
        jobs.delete(tx, jobs.get(tx, job.id, None))
    look()
    assert kept.exists()  # of today: perhaps somebody is deleting it now
    os.utime(store.root / "jobs" / job.id, (time.time() - 2 * OLD_S,) * 2)
    look()
    assert not kept.exists()
