"""Dispatch and supervision against both databases."""

import sqlite3
import threading

import pytest

from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import attempts, shipments
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.waiting import until
from worker.dispatch import Choice, dispatch


def register(harness: Harness, *names: str, cores: int = 4) -> None:
    devices = [FoundDevice(f"cpu:{n}", "cpu", n, "core") for n in range(cores)]
    for name in names:
        with harness.database.write() as tx:
            workers.register(
                tx, worker=name, host=name, pid=1, version="0", info={}, devices=devices
            )


def one_core(count: int, harness: Harness) -> list[str]:
    return [harness.submit(train_spec("ds"), ring=False) for _ in range(count)]


def test_dispatchers_that_race_give_each_job_and_each_device_once(any_harness: Harness):
    register(any_harness, "a", "b")
    waiting = one_core(12, any_harness)
    given: list[Choice] = []
    start = threading.Barrier(6)

    def race() -> None:
        start.wait()
        given.extend(dispatch(any_harness.database, any_harness.settings))

    racers = [threading.Thread(target=race) for _ in range(6)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(choice.job for choice in given) == sorted(waiting)[:8]
    held = [(choice.worker, device) for choice in given for device in choice.devices]
    assert len(set(held)) == 8


def test_one_wakeup_of_many_takes_the_attempt(any_harness: Harness):
    register(any_harness, "a")
    (job_id,) = one_core(1, any_harness)
    dispatch(any_harness.database, any_harness.settings)
    taken: list[object] = []

    def claim() -> None:
        with any_harness.database.write() as tx:
            taken.append(attempts.claim(tx, job_id, "a"))

    racers = [threading.Thread(target=claim) for _ in range(16)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len([claim for claim in taken if claim is not None]) == 1


def test_draining_and_silent_workers_get_nothing(any_harness: Harness):
    register(any_harness, "a", "b", "c", cores=1)
    with any_harness.database.write() as tx:
        workers.drain(tx, "a")
        workers.retire(tx, "b")
    one_core(3, any_harness)
    given = dispatch(any_harness.database, any_harness.settings)
    assert [choice.worker for choice in given] == ["c"]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_job_runs_on_postgresql_too(any_harness: Harness):
    any_harness.start_worker()
    probe = {"layers": ["fc*"], "kinds": ["output"], "every": 10, "want": ["stats", "full"]}
    probe["max_overhead"] = None
    job_id = any_harness.submit(train_spec(any_harness.dataset(), probes=[probe]))
    job = any_harness.wait(job_id)
    assert job.state == "succeeded", (job.error, any_harness.logs())
    assert any_harness.steps(job_id) == list(range(20))
    any_harness.cancel(endless_id := any_harness.submit(endless(any_harness.dataset())))
    assert any_harness.wait(endless_id).state == "cancelled"


def test_a_second_attempt_may_make_the_same_artifacts_and_steps(any_harness: Harness):
    register(any_harness, "a")
    (job_id,) = one_core(1, any_harness)
    lease_ms = 30_000
    for attempt in (1, 2):
        dispatch(any_harness.database, any_harness.settings)
        with any_harness.database.write() as tx:
            taken = attempts.claim(tx, job_id, "a")
        assert taken is not None
        claim = taken[0]
        row = {"name": "outputs.npz", "media_type": "x/y", "size_bytes": attempt, "key": "k"}
        value = {"step": 1, "epoch": 0, "name": "loss", "value": 1.0}
        batch = shipments.Batch(artifacts=[row], metrics=[value, value | {"value": 2.0}])
        with any_harness.database.write() as tx:
            assert attempts.run(tx, claim, lease_ms=lease_ms)
            assert shipments.ship(tx, claim, batch, offsets=(0, 9), lease_ms=lease_ms)
        with any_harness.database.write() as tx:
            assert shipments.num_shipments(tx, claim) == 1
            assert [one.job for one in attempts.held(tx, "a")] == [job_id]
            assert attempts.give_up(tx, claim, exit_kind="interrupted", reason="t", counted=False)
    job = any_harness.job(job_id)
    assert (job.state, job.infra_failures) == ("queued", 0)


def test_a_database_that_is_unavailable_for_a_while_stops_no_training(harness: Harness):
    harness.start_worker(LEASE_S="3")
    job_id = harness.submit(endless(harness.dataset()))
    before = harness.wait_step(job_id).progress
    assert before is not None
    lock = sqlite3.connect(harness.home / "test.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    # that is after the ten seconds for which a connection waits, three times as long as the lease
    until(lambda: harness.logged("w1", "database_unavailable"))
    lock.execute("ROLLBACK")
    lock.close()
    harness.wait_step(job_id, before["step"] + 200)
    assert len(harness.attempts(job_id)) == 1
    harness.cancel(job_id)
    # it has said much meanwhile, and all of it is stored before it ends
    assert harness.wait(job_id).state == "cancelled"
    steps = harness.steps(job_id)
    assert steps == list(range(len(steps)))
