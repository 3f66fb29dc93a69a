"""Pausing, resuming and cancelling in the database layer, on both databases."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from glasshouse import jsonio
from glasshouse.errors import CannotPause, Conflict, JobEnded, JobNotPaused
from models.database import Database
from models.fleet import workers
from models.jobs import attempts, jobs, leases, pausing
from models.jobs.leases import Claim
from models.observations import events
from models.state import MOVES
from models.tables import Job

from .factories import LEASE_MS, make_job, make_worker, running, start


def pause(database: Database, job: Job) -> Job:
    with database.write() as tx:
        return pausing.request_pause(tx, jobs.get(tx, job.id, None))


def resume(database: Database, job: Job) -> Job:
    with database.write() as tx:
        return pausing.request_resume(tx, jobs.get(tx, job.id, None))


def cancel(database: Database, job: Job) -> Job:
    with database.write() as tx:
        return jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)


def stop(database: Database, claim: Claim, exit_kind: str = "paused") -> bool:
    with database.write() as tx:
        return attempts.give_up(tx, claim, exit_kind=exit_kind, reason="t", counted=False)


def job_of(database: Database, job: Job) -> Job:
    with database.read() as tx:
        return jobs.get(tx, job.id, None)


def moves(database: Database, job: Job) -> list[tuple[str | None, str]]:
    with database.read() as tx:
        found = events.after(tx, job.id, 0, types=["state"], limit=10_000)
    told = [jsonio.loads(event.payload) for event in found]
    return [(one["from"], one["to"]) for one in told]


def free(database: Database) -> int:
    with database.read() as tx:
        return sum(row.job is None for row, _ in workers.all_devices(tx, lease_ms=LEASE_MS))


def test_a_running_job_is_paused_when_its_attempt_has_ended_and_then_queued(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    assert pause(database, job).state == "pausing"
    assert free(database) == 1
    assert stop(database, claim)
    paused = job_of(database, job)
    assert (paused.state, paused.worker, paused.devices) == ("paused", None, [])
    assert paused.paused_at is not None
    assert free(database) == 2
    with database.read() as tx:
        (attempt,) = attempts.of_job(tx, job.id)
        assert (attempt.state, attempt.exit_kind) == ("ended", "paused")
        last = events.after(tx, job.id, 0, limit=1000)[-1]
    assert last.type == "state"  # no end: the stream stays open
    with database.write() as tx:  # nothing of it may be written any more
        assert leases.beat(tx, claim, lease_ms=LEASE_MS) is None
        assert leases.expired(tx) == []
    back = resume(database, job)
    assert (back.state, back.paused_at) == ("queued", None)
    assert back.queued_at >= paused.paused_at
    with database.read() as tx:
        assert job.id in [one.job for one in workers.asked_for(tx)]
    second = running(database, job)
    assert second.fence > claim.fence
    assert moves(database, job) == [
        (None, "queued"),
        ("queued", "starting"),
        ("starting", "running"),
        ("running", "pausing"),
        ("pausing", "paused"),
        ("paused", "queued"),
        ("queued", "starting"),
        ("starting", "running"),
    ]


def test_the_time_of_all_pauses_is_kept(database: Database):
    job = make_job(database)
    for _ in range(2):
        pause(database, job)
        time.sleep(0.02)  # the thing measured
        resume(database, job)
    assert job_of(database, job).paused_ms >= 40


def test_a_queued_job_is_paused_and_cancelled_at_once(database: Database):
    job = make_job(database)
    assert pause(database, job).state == "paused"
    assert pause(database, job).state == "paused"
    with database.write() as tx, pytest.raises(Conflict):
        jobs.delete(tx, jobs.get(tx, job.id, None))
    ended = cancel(database, job)
    assert (ended.state, ended.paused_at) == ("cancelled", None)
    assert moves(database, job)[1:] == [("queued", "paused"), ("paused", "cancelled")]
    for act in (pause, resume):
        with pytest.raises(JobEnded):
            act(database, job)


def test_a_job_that_is_resumed_while_it_pauses_is_queued_once_it_is_paused(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    pause(database, job)
    assert resume(database, job).state == "pausing"
    assert stop(database, claim)
    assert moves(database, job)[-2:] == [("pausing", "paused"), ("paused", "queued")]
    assert not job_of(database, job).resume_requested
    with pytest.raises(JobNotPaused):
        resume(database, job)


def test_a_second_pause_overrides_an_earlier_resume(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    pause(database, job)
    resume(database, job)
    pause(database, job)
    assert stop(database, claim)
    assert job_of(database, job).state == "paused"


def test_cancelling_while_it_pauses_wins(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    pause(database, job)
    assert cancel(database, job).state == "cancelling"
    with pytest.raises(CannotPause):
        pause(database, job)
    assert stop(database, claim)
    assert job_of(database, job).state == "cancelled"


@pytest.mark.parametrize("end", ["succeeded", "failed"])
def test_a_job_that_ends_while_it_pauses_has_ended(database: Database, end: str):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    pause(database, job)
    error = {"code": "data_failed"} if end == "failed" else None
    with database.write() as tx:
        assert attempts.finish(tx, claim, end, exit_kind=end, error=error)
    assert job_of(database, job).state == end


def test_a_job_whose_worker_is_lost_while_it_pauses_is_paused(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = start(database, job)
    assert pause(database, job).state == "pausing"
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="t")
    assert job_of(database, job).state == "paused"


def test_what_keeps_nothing_is_paused_only_while_it_is_queued(database: Database):
    make_worker(database)
    waits, runs = make_job(database, kind="diagnose"), make_job(database, kind="diagnose")
    assert pause(database, waits).state == "paused"
    running(database, runs)
    with pytest.raises(CannotPause, match="checkpoint"):
        pause(database, runs)


@pytest.mark.parametrize("seed", range(4))
def test_twenty_calls_at_once_end_in_a_legal_state(database: Database, seed: int):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    chosen = random.Random(seed)  # noqa: S311 (no secret)
    kinds = [pause, resume, pause, resume, cancel] if seed else [pause, resume]
    acts = [chosen.choice(kinds) for _ in range(20)]
    barrier = threading.Barrier(21)
    unexpected: list[Exception] = []

    def call(act: Callable[[Database, Job], Job]) -> None:
        barrier.wait()
        try:
            act(database, job)
        except Conflict:
            pass
        except Exception as error:
            unexpected.append(error)

    def supervise() -> None:
        barrier.wait()
        stop(database, claim, "interrupted")

    threads = [threading.Thread(target=call, args=(act,)) for act in acts]
    threads.append(threading.Thread(target=supervise))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unexpected == []
    told = moves(database, job)
    assert all(before is None or after in MOVES[before] for before, after in told)
    assert [after for _, after in told[:-1]] == [before for before, _ in told[1:]]
    found = job_of(database, job)
    assert found.state == told[-1][1]
    assert found.state in {"queued", "paused", "cancelled"}
    assert (found.paused_at is not None) == (found.state == "paused")
    assert free(database) == 2
