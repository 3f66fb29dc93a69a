"""One name, one worker: what becomes of a second process that asks for it."""

import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from models.database import Database
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.tables import Device, Worker
from tests.integration.store.factories import make_job, make_worker, running
from tests.integration.worker.conftest import open_broker
from tests.integration.worker.harness import Harness, endless
from tests.waiting import until

LEASE_MS = 30_000


@pytest.fixture
def harness(postgres_url: str, tmp_path: Path) -> Generator[Harness]:
    for broker in open_broker():
        opened = Harness(postgres_url, broker.url, tmp_path)
        opened.variables["LEASE_S"] = "4"
        yield opened
        opened.close()


def start_other(harness: Harness, log_name: str) -> subprocess.Popen[bytes]:
    """Another worker named ``w1``, as on another host: it shares no work directory."""
    work = str(harness.home / f"work-{log_name}")
    first = harness.workers.pop("w1")
    other = harness.start_worker("w1", wait=False, WORK_DIR=work)
    harness.workers |= {"w1": first, log_name: other}
    (harness.home / f"{log_name}.log").touch()
    return other


def state_of(harness: Harness, name: str) -> str | None:
    with harness.database.read() as tx:
        states = {row.id: state for row, state in workers.all_workers(tx, lease_ms=4000)}
    return states.get(name)


def row_of(harness: Harness) -> Worker:
    with harness.database.read() as tx:
        return tx.get_one(Worker, "w1")


@pytest.mark.slow
def test_a_second_worker_of_a_name_does_not_start_and_takes_nothing(harness: Harness):
    harness.start_worker("w1")
    job = harness.submit(endless(harness.dataset()))
    harness.wait_step(job)
    other = start_other(harness, "other")
    assert other.wait(60) == 1
    assert "already runs on the host" in harness.log("w1")
    assert "--name or GLASSHOUSE_WORKER_NAME" in harness.log("w1")
    harness.wait_more(job)
    assert harness.job(job).attempt == 1
    assert state_of(harness, "w1") == "active"


@pytest.mark.slow
def test_a_worker_whose_name_was_taken_while_it_slept_ends(harness: Harness):
    first = harness.start_worker("w1")
    job = harness.submit(endless(harness.dataset()))
    harness.wait_step(job)
    first.send_signal(signal.SIGSTOP)
    try:
        heard_ms = row_of(harness).beat_ms
        other = start_other(harness, "other")
        until(lambda: len(harness.logged("w1", "worker_ready")) == 2, 120)
        assert row_of(harness).started_at.timestamp() * 1000 >= heard_ms + 4000, (
            "not within a lease"
        )
        harness.wait_step(job)
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 0
    assert other.poll() is None
    assert state_of(harness, "w1") == "active"
    harness.wait_runs_again(job, attempt=harness.job(job).attempt)


def test_a_name_is_free_when_its_worker_was_stopped_is_silent_or_is_known_to_have_ended(
    database: Database,
):
    make_worker(database)
    with database.write() as tx:
        tx.get_one(Worker, "w1").instance = "one"
    with database.write() as tx:
        found = workers.other_process(tx, "w1", known=("two", ""), lease_ms=LEASE_MS)
        assert found is not None
        assert (found.host, found.pid) == ("w1", 1)
        assert workers.other_process(tx, "w1", known=("two", "one"), lease_ms=LEASE_MS) is None
        assert workers.other_process(tx, "w1", known=("two", ""), lease_ms=0) is None
        assert workers.other_process(tx, "w2", known=("two", ""), lease_ms=LEASE_MS) is None
        workers.retire(tx, "w1", instance="one")
        assert workers.other_process(tx, "w1", known=("two", ""), lease_ms=LEASE_MS) is None


def test_a_process_that_lost_its_name_changes_nothing_of_the_worker(database: Database):
    make_worker(database)
    with database.write() as tx:
        tx.get_one(Worker, "w1").instance = "new"
    with database.write() as tx:
        assert not workers.beat(tx, "w1", instance="old")
        workers.retire(tx, "w1", instance="old")
        workers.refresh_devices(tx, "w1", [], instance="old")
        with pytest.raises(workers.WorkerNotFound):
            workers.drain(tx, "w1", instance="old")
    with database.read() as tx:
        assert [state for _, state in workers.all_workers(tx, lease_ms=LEASE_MS)] == ["active"]
        assert len(workers.all_devices(tx, lease_ms=LEASE_MS)) == 2


def test_a_worker_that_runs_or_has_jobs_is_not_removed(database: Database):
    make_worker(database)
    job = make_job(database)
    running(database, job)
    with database.write() as tx, pytest.raises(workers.WorkerRunning, match="runs on w1"):
        workers.remove(tx, "w1", lease_ms=LEASE_MS)
    with database.write() as tx:
        workers.retire(tx, "w1")
    with database.write() as tx, pytest.raises(workers.WorkerRunning, match=job.id):
        workers.remove(tx, "w1", lease_ms=LEASE_MS)
    with database.write() as tx:
        for device in ("cpu:0", "cpu:1"):
            tx.get_one(Device, ("w1", device)).job = None
        tx.flush()
        workers.remove(tx, "w1", lease_ms=LEASE_MS)
        assert workers.all_devices(tx, lease_ms=LEASE_MS) == []
        with pytest.raises(workers.WorkerNotFound):
            workers.remove(tx, "w1", lease_ms=LEASE_MS)


def test_a_device_that_is_gone_stays_while_a_job_has_it(database: Database):
    make_worker(database)
    running(database, make_job(database))
    with database.write() as tx:
        workers.refresh_devices(tx, "w1", [FoundDevice("cpu:2", "cpu", 2, "core")])
    with database.read() as tx:
        found = {row.id: row for row, _ in workers.all_devices(tx, lease_ms=LEASE_MS)}
    assert set(found) == {"cpu:0", "cpu:2"}
    assert not found["cpu:0"].healthy
