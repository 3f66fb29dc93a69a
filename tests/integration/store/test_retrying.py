"""When a job that failed through no fault of its own is tried again, on both databases."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.database import Database
from models.fleet import workers
from models.jobs import attempts, checkpoints, jobs
from models.jobs.endings import CRASH_LOOP, FATES, Backoff, ExitKind, is_over, max_restarts
from models.jobs.leases import Claim
from models.tables import Job, now

from .factories import LEASE_MS, make_worker, running, start

SOON = Backoff(0.001, 0.002)
LATER = Backoff(600, 600)


def job_with(database: Database, **resolved: Any) -> Job:
    with database.write() as tx:
        return jobs.add(tx, owner="ada", spec={"kind": "train"}, resolved=resolved, plan={})


def lose(database: Database, claim: Claim, kind: ExitKind = "lease_lost", **more: Any) -> Job:
    given = {"reason": "a test", "backoff": SOON, "counted": FATES[kind] != "returns"} | more
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind=kind, **given)
    with database.read() as tx:
        return jobs.get(tx, claim.job, None)


def save(database: Database, claim: Claim, step: int) -> None:
    row = {"id": f"ckpt_{claim.attempt}_{step}", "owner": "ada", "step": step, "epoch": 0}
    row |= {"final": False, "files": {}, "size_bytes": 1, "metrics": {}, "key": "k"}
    with database.write() as tx:
        checkpoints.add(tx, claim.job, claim.attempt, [row | {"created_at": now()}])


def asked_for(database: Database) -> list[str]:
    with database.read() as tx:
        return [job for job, *_ in workers.asked_for(tx)]


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_the_restarts_that_a_spec_allows_and_no_more(allowed: int, database: Database):
    make_worker(database)
    job = job_with(database, retry={"max_restarts": allowed})
    for number in range(1, allowed + 2):
        found = lose(database, running(database, job))
        assert found.state == ("queued" if number <= allowed else "failed")
        assert found.infra_failures == number
    assert found.error is not None
    assert found.error["code"] == "worker_lost"
    assert str(allowed + 1) in found.error["message"]


def test_progress_begins_the_count_anew(database: Database):
    make_worker(database)
    job = job_with(database, retry={"max_restarts": 1})
    for attempt in range(1, 8):
        claim = running(database, job)
        save(database, claim, step=10 * attempt)
        found = lose(database, claim)
        assert (found.state, found.infra_failures) == ("queued", 1)
    claim = running(database, job)
    save(database, claim, step=70)  # again, and no further
    assert lose(database, claim).state == "failed"


def test_crashes_without_progress_are_a_loop_whatever_the_spec_allows(database: Database):
    make_worker(database)
    job = job_with(database, retry={"max_restarts": 1000})
    error = {"code": "rank_died", "message": "x", "rank": 0, "layer": None, "step": 7}
    lose(database, running(database, job), "lease_lost")
    for _ in range(CRASH_LOOP - 1):
        assert lose(database, running(database, job), "crash", error=error).state == "queued"
    found = lose(database, running(database, job), "crash", reason="by SIGSEGV", error=error)
    assert found.state == "failed"
    assert found.error is not None
    assert (found.error["code"], found.error["step"]) == ("crash_loop", 7)
    assert "SIGSEGV" in found.error["message"]


def test_crashes_with_something_else_between_them_are_no_loop(database: Database):
    make_worker(database)
    job = job_with(database, retry={"max_restarts": 1000})
    for kind in ("crash", "crash", "fork_server_lost", "crash", "crash"):
        assert lose(database, running(database, job), kind).state == "queued"


def test_crashes_between_which_there_is_progress_are_no_loop(database: Database):
    make_worker(database)
    job = job_with(database)
    for attempt in range(1, 8):
        claim = running(database, job)
        save(database, claim, step=attempt)
        assert lose(database, claim, "crash").state == "queued"


def test_a_worker_that_is_stopped_counts_for_nothing_and_makes_nobody_wait(database: Database):
    make_worker(database)
    job = job_with(database, retry={"max_restarts": 0})
    for _ in range(5):
        found = lose(database, running(database, job), "interrupted", backoff=LATER)
        assert (found.state, found.infra_failures, found.not_before_ms) == ("queued", 0, None)
    assert asked_for(database) == [job.id]


def test_a_delayed_job_is_not_dispatched_and_is_swept_only_when_due(database: Database):
    make_worker(database)
    job = job_with(database)
    found = lose(database, running(database, job), backoff=LATER)
    assert found.not_before_ms is not None
    assert asked_for(database) == []
    with database.read() as tx:
        assert not workers.any_waits(tx)
    with database.write() as tx:  # the wait is over
        jobs.get(tx, job.id, None, lock=True).not_before_ms = found.not_before_ms - 601_000
    assert len(asked_for(database)) == 1
    with database.read() as tx:
        assert workers.any_waits(tx)
    start(database, job)
    with database.read() as tx:
        assert jobs.get(tx, job.id, None).not_before_ms is None


def test_a_job_that_waits_can_be_cancelled(database: Database):
    make_worker(database)
    job = job_with(database)
    lose(database, running(database, job), backoff=LATER)
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)
    with database.read() as tx:
        assert jobs.get(tx, job.id, None).state == "cancelled"


def test_the_devices_of_a_stuck_attempt_are_given_to_nobody(database: Database):
    make_worker(database)
    job = job_with(database)
    claim = running(database, job)
    with database.write() as tx:
        workers.quarantine(tx, claim, "stuck")
        assert attempts.finish(tx, claim, "failed", exit_kind="unkillable")
        devices = [row for row, _ in workers.all_devices(tx, lease_ms=LEASE_MS)]
    assert [(row.id, row.job, row.healthy, row.reason) for row in devices] == [
        ("cpu:0", None, False, "stuck"),
        ("cpu:1", None, True, None),
    ]


@given(st.integers(1, 200), st.floats(0.01, 60), st.floats(60, 3600))
def test_the_wait_doubles_up_to_its_limit(failures: int, first_s: float, max_s: float):
    waits = Backoff(first_s, max_s)
    assert waits.after_s(1) == first_s
    wait_s = waits.after_s(failures)
    assert first_s <= wait_s <= max_s
    assert waits.after_s(failures + 1) == min(max_s, 2 * wait_s)


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50))
def test_more_allowance_never_ends_a_job_sooner(failures: int, crashes: int, restarts: int):
    for kind in FATES:
        less = is_over(kind, failures=failures, crashes=crashes, restarts=restarts)
        more = is_over(kind, failures=failures, crashes=crashes, restarts=restarts + 1)
        assert less or not more


def test_a_job_stored_before_the_policy_existed_has_the_default():
    assert max_restarts({}) == max_restarts({"retry": None}) == 3
