import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from sqlalchemy import text

from glasshouse import jsonio
from glasshouse.errors import DatabaseUnavailable
from models.database import Database
from models.fleet import workers
from models.jobs import attempts, jobs, leases, shipments
from models.observations import events, metrics, stats
from models.state import ENDED, LIVE, MOVES, STATES
from tests.waiting import until

from .factories import LEASE_MS, losses, make_job, make_worker, running, ship, start


def log(database: Database, job_id: str) -> list[dict[str, object]]:
    with database.read() as tx:
        return [jsonio.loads(event.as_json()) for event in events.after(tx, job_id, 0)]


def state(database: Database, job_id: str) -> str:
    with database.read() as tx:
        return jobs.get(tx, job_id, None).state


def free_devices(database: Database) -> list[str]:
    with database.read() as tx:
        found = workers.all_devices(tx, lease_ms=LEASE_MS)
    return [device.id for device, _ in found if device.job is None]


def test_every_move_of_the_state_machine_ends_in_a_known_state_and_ends_stay():
    assert set(MOVES) == set(STATES)
    assert all(target in MOVES for targets in MOVES.values() for target in targets)
    assert all(not MOVES[end] for end in ENDED)
    assert all(MOVES[live] for live in LIVE)


def test_a_job_runs_to_its_end_with_a_dense_log_and_one_terminal_event(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    assert free_devices(database) == ["cpu:1"]
    assert ship(database, claim, losses((0, 2.3), (1, 2.1)), (0, 100))
    assert ship(database, claim, losses((2, 1.9)), (100, 150))
    with database.write() as tx:
        assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    entries = log(database, job.id)
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
    assert [entry["type"] for entry in entries] == [
        *["state", "state", "attempt", "state"],
        *["metrics", "metrics", "metrics", "state", "end"],
    ]
    assert entries[-1]["state"] == "succeeded"
    assert state(database, job.id) == "succeeded"
    assert free_devices(database) == ["cpu:0", "cpu:1"]


def test_one_wakeup_of_many_claims_the_attempt(database: Database):
    make_worker(database)
    job = make_job(database)
    start_claims = []
    with database.write() as tx:
        free = [device for device, _ in workers.all_devices(tx, lease_ms=LEASE_MS)]
        assert attempts.assign(tx, job.id, "w1", free[:1], LEASE_MS)
    barrier = threading.Barrier(8)

    def ring() -> None:
        barrier.wait()
        for _ in range(5):
            with database.write() as tx:
                start_claims.append(attempts.claim(tx, job.id, "w1"))

    threads = [threading.Thread(target=ring) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(start_claims) == 40
    assert sum(taken is not None for taken in start_claims) == 1


def test_two_dispatchers_cannot_assign_one_job_twice(database: Database):
    make_worker(database, cores=16)
    queued = [make_job(database) for _ in range(8)]
    won: list[str] = []
    barrier = threading.Barrier(4)

    def dispatch() -> None:
        barrier.wait()
        for job in queued:
            with database.write() as tx:
                workers.lock_queue(tx)
                free = [
                    device
                    for device, _ in workers.all_devices(tx, lease_ms=LEASE_MS)
                    if device.job is None
                ]
                if attempts.assign(tx, job.id, "w1", free[:1], LEASE_MS):
                    won.append(job.id)

    threads = [threading.Thread(target=dispatch) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(won) == sorted(job.id for job in queued)
    assert len(free_devices(database)) == 8


def test_a_record_that_is_read_again_is_not_stored_again(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    assert ship(database, claim, losses((0, 1.0)), (0, 40))
    with pytest.raises(RuntimeError, match="offset"):
        ship(database, claim, losses((0, 1.0)), (0, 40))
    with database.read() as tx:
        assert [point.step for point in metrics.query(tx, job.id, "loss")] == [0]
        assert attempts.of_job(tx, job.id)[0].spool_offset == 40


def test_a_supervisor_with_an_old_fence_can_write_nothing(database: Database):
    make_worker(database)
    job = make_job(database)
    old = running(database, job, lease_ms=1)
    assert ship(database, old, losses((0, 1.0)), (0, 10))
    with database.write() as tx:
        assert attempts.give_up(tx, old, exit_kind="lease_lost", reason="lease")
    before = log(database, job.id)

    def writes() -> Iterator[object]:
        with database.write() as tx:
            yield attempts.run(tx, old, lease_ms=LEASE_MS)
        with database.write() as tx:
            yield leases.beat(tx, old, lease_ms=LEASE_MS)
        with database.write() as tx:
            yield shipments.ship(tx, old, losses((1, 1.0)), offsets=(10, 20), lease_ms=LEASE_MS)
        with database.write() as tx:
            yield attempts.finish(tx, old, "failed", exit_kind="internal") or None
        with database.write() as tx:
            yield (attempts.give_up(tx, old, exit_kind="lease_lost", reason="late") or None)

    assert list(writes()) == [None] * 5  # queued again, not yet assigned
    new = running(database, job)
    assert new.fence > old.fence
    in_between = log(database, job.id)
    assert list(writes()) == [None] * 5  # while the next attempt runs
    assert log(database, job.id) == in_between
    assert len(in_between) > len(before)


def test_an_attempt_whose_lease_ran_out_is_found_and_its_job_queued_again(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job, lease_ms=1)

    def expired() -> list[leases.Claim]:
        with database.read() as tx:
            return leases.expired(tx)

    assert until(expired) == [claim]
    with database.write() as tx:
        assert leases.still_expired(tx, claim)
        assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="lease")
    assert state(database, job.id) == "queued"
    assert free_devices(database) == ["cpu:0", "cpu:1"]
    with database.read() as tx:
        assert leases.expired(tx) == []


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_lease_has_not_run_out_while_its_holder_is_just_writing(database: Database):
    """The sweep neither waits for who writes, nor ends an attempt whose lease that renews."""
    make_worker(database)
    claim = running(database, make_job(database), lease_ms=-1)
    with database.write() as writing:
        assert leases.beat(writing, claim, lease_ms=LEASE_MS)
        with database.write() as tx:
            assert leases.expired(tx) == [claim]
            assert not leases.still_expired(tx, claim)
    with database.write() as tx:
        assert not leases.still_expired(tx, claim)


@pytest.mark.parametrize("renews", [False, True])
def test_a_lease_that_a_long_transaction_renews_at_its_end_outlives_it(
    renews: bool, database: Database
):
    make_worker(database)
    claim = running(database, make_job(database))
    with database.write() as tx:
        assert leases.beat(tx, claim, lease_ms=300)
        time.sleep(0.5)
        if renews:
            leases.renew(tx, claim, lease_ms=60_000)
    with database.read() as tx:
        assert (claim in leases.expired(tx)) is not renews


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_transaction_that_stands_still_is_ended_by_the_database(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    job = make_job(database)  # its connection stays as patient as usual
    monkeypatch.setattr("models.database.IDLE_IN_TRANSACTION_S", 1)
    other = Database(database.url)
    with pytest.raises(DatabaseUnavailable), other.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)
        with database.write() as mine:  # waits until the lock is free
            jobs.request_cancel(mine, jobs.get(mine, job.id, None), by="bob", force=False)
        jobs.get(tx, job.id, None)
        tx.execute(text("SELECT 1"))
    other.close()
    assert state(database, job.id) == "cancelled"


def test_a_job_that_loses_its_worker_too_often_fails_and_says_so(database: Database):
    make_worker(database)
    job = make_job(database)
    for _ in range(4):
        claim = running(database, job)
        with database.write() as tx:
            assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="x")
    with database.read() as tx:
        found = jobs.get(tx, job.id, None)
    assert found.state == "failed"
    assert found.error is not None
    assert found.error["code"] == "worker_lost"
    assert log(database, job.id)[-1]["type"] == "end"


def test_values_of_a_lost_attempt_give_way_to_those_of_the_next(database: Database):
    make_worker(database)
    job = make_job(database)
    first = running(database, job)
    batch = losses((0, 1.0), (1, 1.1), (2, 1.2))
    batch.stats = [
        {"step": step, "phase": "train", "rows": [["fc", "output", *[float(step)] * 9]]}
        for step in range(3)
    ]
    assert ship(database, first, batch, (0, 10))
    with database.write() as tx:
        assert attempts.give_up(tx, first, exit_kind="lease_lost", reason="lease")
    second = running(database, job)
    assert ship(database, second, losses((0, 1.0), (1, 1.1)), (0, 10))
    with database.read() as tx:
        assert [(p.step, p.value) for p in metrics.query(tx, job.id, "loss")] == [
            (0, 1.0),
            (1, 1.1),
        ]
        assert list(stats.query(tx, job.id)) == []
        assert metrics.names(tx, job.id)[0].num_values == 2


def test_nonfinite_values_come_back_as_they_were(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    batch = losses((0, math.nan), (1, math.inf), (2, -math.inf), (3, 0.5))
    batch.stats = [{"step": 7, "phase": "train", "rows": [["fc", "output", *[math.nan] * 9]]}]
    batch.job = {"summary": {"loss": {"last": math.nan}}}
    assert ship(database, claim, batch, (0, 10))
    with database.read() as tx:
        values = [point.value for point in metrics.query(tx, job.id, "loss")]
        summary = metrics.names(tx, job.id)[0]
        ((_, found),) = stats.query(tx, job.id, layer="f*")
        assert jobs.get(tx, job.id, None).summary == {"loss": {"last": "NaN"}}
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 0.5]
    assert (summary.min, summary.max, summary.first_nonfinite_step) == (0.5, 0.5, 0)
    assert np.isnan(found.values).all()


def test_cancelling_a_queued_job_ends_it_at_once(database: Database):
    job = make_job(database)
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, job.id, "ada"), by="ada", force=False)
    assert [entry["type"] for entry in log(database, job.id)] == ["state", "state", "end"]
    assert state(database, job.id) == "cancelled"


def test_a_running_job_learns_of_its_cancellation_by_its_next_write(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, job.id, "ada"), by="ada", force=True)
    with database.write() as tx:
        beat = leases.beat(tx, claim, lease_ms=LEASE_MS)
        assert beat is not None
        assert beat.cancel_requested
        assert beat.num_commands == 1
        pending = jobs.commands_pending(tx, job.id)
        assert [command.body for command in pending] == [{"do": "cancel", "force": True}]
        attempts.applied(tx, claim, [pending[0].id], step=4)
        assert attempts.finish(tx, claim, "cancelled", exit_kind="cancelled")
    entries = log(database, job.id)
    assert entries[-1]["state"] == "cancelled"
    assert entries[-2]["reason"] == "cancelled by its owner"
    assert free_devices(database) == ["cpu:0", "cpu:1"]


def test_a_cancelled_job_whose_worker_is_lost_is_cancelled_not_queued(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = start(database, job)
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, job.id, "ada"), by="ada", force=False)
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="lease")
    assert state(database, job.id) == "cancelled"


def test_a_reader_that_polls_by_cursor_misses_no_event_of_concurrent_writers(database: Database):
    make_worker(database, cores=1)
    job = make_job(database)
    claim = running(database, job)
    total = 60
    seen: list[int] = []
    finished = threading.Event()

    def read() -> None:
        cursor = 0
        while True:
            last_round = finished.is_set()
            with database.read() as tx:
                page = events.after(tx, job.id, cursor, limit=7)
            seen.extend(event.seq for event in page)
            cursor = seen[-1] if seen else 0
            if last_round and not page:
                return

    def cancel_once() -> None:
        with database.write() as tx:
            jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)

    reader, other = threading.Thread(target=read), threading.Thread(target=cancel_once)
    reader.start()
    for step in range(total):
        if step == total // 2:
            other.start()
        assert ship(database, claim, losses((step, 1.0)), (step, step + 1))
    other.join()
    finished.set()
    reader.join()
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) == 4 + total + 1


def test_updates_from_many_threads_are_not_lost(database: Database):
    job = make_job(database)

    def bump() -> None:
        for _ in range(25):
            with database.write() as tx:
                row = jobs.get(tx, job.id, None)
                jobs.patch(tx, row, {"priority": row.priority + 1})

    if not database.is_sqlite:  # there, a read without FOR UPDATE takes no lock, by design
        return
    threads = [threading.Thread(target=bump) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with database.read() as tx:
        assert jobs.get(tx, job.id, None).priority == 200
