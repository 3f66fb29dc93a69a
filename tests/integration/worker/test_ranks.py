"""Jobs of several processes: they end together, and the one that failed first is named."""

import os
import signal
from typing import Any

import psutil
import pytest

from tests.integration.worker.harness import Harness, endless, train_spec
from tests.waiting import until

TWO = {"parallel": {"strategy": "data", "processes": 2}}
EACH_STEP = {"checkpoint": {"every_steps": 5}}


def pids(harness: Harness, job_id: str, num: int = 2) -> list[int]:
    """The processes of the newest attempt, by rank."""
    return [harness.rank_pid(job_id, rank=rank) for rank in range(num)]


def are_gone(found: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in found)


def kinds(harness: Harness, job_id: str) -> list[str | None]:
    return [one.exit_kind for one in harness.attempts(job_id)]


@pytest.mark.shared_worker
def test_a_job_of_two_processes_holds_the_cores_of_both_and_frees_them(harness: Harness):
    job_id = harness.submit(train_spec(harness.dataset(), **TWO))
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())
    (attempt,) = harness.attempts(job_id)
    assert sorted(device["id"] for device in attempt.devices) == ["cpu:0", "cpu:1"]
    assert harness.steps(job_id) == [*range(20)]
    assert are_gone(pids(harness, job_id))
    assert all(device.job is None for device in harness.devices())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.shared_worker
def test_a_killed_process_ends_the_others_and_the_job_resumes(rank: int, harness: Harness):
    job_id = harness.submit(endless(harness.dataset(), **TWO, **EACH_STEP))
    harness.wait_step(job_id, 20)
    first = pids(harness, job_id)
    os.kill(first[rank], signal.SIGKILL)
    harness.wait_runs_again(job_id)
    assert kinds(harness, job_id)[0] == "killed_from_outside"
    assert are_gone(first)
    steps = harness.steps(job_id)
    assert sorted(set(steps)) == [*range(max(steps) + 1)]


@pytest.mark.parametrize(
    ("at", "rank"), [("start", 0), ("start", 1), ("3", 0), ("3", 1), ("save", 0)]
)
@pytest.mark.shared_worker("misbehaving")
def test_a_process_that_crashes_is_named_as_the_cause(at: str, rank: int, harness: Harness):
    labels = {"misbehave": "crash", "at": at, "rank": str(rank)}
    spec = endless(harness.dataset(), labels=labels, retry={"max_restarts": 0}, **TWO, **EACH_STEP)
    job = harness.wait(harness.submit(spec))
    assert job.error is not None
    assert (job.error["code"], job.error["rank"]) == ("rank_died", rank)
    assert "SIGSEGV" in job.error["message"]
    assert are_gone(pids(harness, job.id))


@pytest.mark.shared_worker("misbehaving")
def test_a_failure_with_a_name_is_that_of_its_process(harness: Harness):
    labels = {"misbehave": "lose-the-device", "at": "3", "rank": "1"}
    spec = endless(harness.dataset(), labels=labels, retry={"max_restarts": 0}, **TWO)
    job = harness.wait(harness.submit(spec))
    assert job.error is not None
    assert (job.error["code"], job.error["rank"], job.error["step"]) == ("device_failed", 1, 3)
    assert "unspecified launch failure" in job.error["log_tail"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.shared_worker
def test_a_stopped_process_stalls_the_job_which_ends_as_a_whole(rank: int, harness: Harness):
    spec = endless(harness.dataset(), on_stall="fail", stall_timeout_s=2.0, **TWO)
    job_id = harness.submit(spec)
    harness.wait_step(job_id, 5)
    found = pids(harness, job_id)
    os.kill(found[rank], signal.SIGSTOP)
    job = harness.wait(job_id)
    assert job.error is not None
    assert (job.error["code"], job.error["rank"]) == ("stalled", rank)
    assert are_gone(found)
    assert all(device.job is None for device in harness.devices())


def stopped(harness: Harness, job_id: str, how: Any, *states: str) -> None:
    """Stop a running job, and see both processes gone."""
    harness.wait_step(job_id, 5)
    found = pids(harness, job_id)
    how()
    harness.wait(job_id, *states)
    until(lambda: are_gone(found))


@pytest.mark.shared_worker
def test_a_cancelled_job_ends_in_all_processes(harness: Harness):
    job_id = harness.submit(endless(harness.dataset(), **TWO))
    stopped(harness, job_id, lambda: harness.cancel(job_id), "cancelled")
    assert kinds(harness, job_id) == ["cancelled"]
    forced = harness.submit(endless(harness.dataset(), **TWO))
    stopped(harness, forced, lambda: harness.cancel(forced, force=True), "cancelled")


@pytest.mark.shared_worker
def test_what_each_process_prints_is_logged_under_its_number(harness: Harness):
    """Process 0 is killed and prints nothing; process 1 prints that it has lost it."""
    job_id = harness.submit(endless(harness.dataset(), **TWO, retry={"max_restarts": 0}))
    harness.wait_step(job_id, 5)
    os.kill(harness.rank_pid(job_id, rank=0), signal.SIGKILL)
    harness.wait(job_id)
    lines = [
        (one["rank"], line) for one in harness.payloads(job_id, "log") for line in one["lines"]
    ]
    assert any(rank == 1 and "Connection" in line for rank, line in lines), lines
    assert not any(rank == 0 for rank, _ in lines), lines
