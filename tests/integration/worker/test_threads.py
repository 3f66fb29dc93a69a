"""Jobs that name no number of threads share the cores of a worker and change between steps."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.worker.harness import Harness, endless
from tests.integration.worker.test_pausing import pause
from tests.integration.worker.test_ranks import TWO
from tests.waiting import until

FLEXIBLE: dict[str, Any] = {"devices": {"type": "cpu"}}


def adjusted(harness: Harness, job_id: str) -> list[tuple[int, int]]:
    """The numbers of threads from and to which a job has changed."""
    found = [one for one in harness.payloads(job_id, "adjusted") if one["what"] == "threads"]
    assert all(one["by"] == "scheduler" and one["step"] > 0 for one in found)
    return [(one["from"], one["to"]) for one in found]


def cores(harness: Harness, job_id: str) -> list[str]:
    """The cores that the job's row shows; its devices are the same then."""
    shown = [device["id"] for device in harness.job(job_id).devices]
    held = [device.id for device in harness.devices() if device.job == job_id]
    return shown if shown == held else []


def wait_cores(harness: Harness, job_id: str, *ids: str) -> None:
    until(lambda: cores(harness, job_id) == [*ids])


def wait_adjusted(harness: Harness, job_id: str, *changes: tuple[int, int]) -> None:
    until(lambda: adjusted(harness, job_id) == [*changes])


@pytest.mark.parametrize("leaves", [Harness.cancel, pause])
@pytest.mark.shared_worker
def test_a_job_gives_a_core_to_the_next_one_and_gets_it_back(
    leaves: Callable[[Harness, str], None], harness: Harness
):
    dataset = harness.dataset()
    first = harness.submit(endless(dataset, **FLEXIBLE))
    harness.wait_step(first, 5)
    assert cores(harness, first) == ["cpu:0", "cpu:1"]
    second = harness.submit(endless(dataset, **FLEXIBLE))
    harness.wait_step(second, 5)
    wait_cores(harness, first, "cpu:0")
    wait_cores(harness, second, "cpu:1")
    wait_adjusted(harness, first, (2, 1))
    leaves(harness, second)
    wait_adjusted(harness, first, (2, 1), (1, 2))
    wait_cores(harness, first, "cpu:0", "cpu:1")
    assert adjusted(harness, second) == []
    harness.wait_more(first)


@pytest.mark.shared_worker
def test_a_job_that_names_its_threads_starts_at_once_and_never_changes(harness: Harness):
    dataset = harness.dataset()
    first = harness.submit(endless(dataset, **FLEXIBLE))
    harness.wait_step(first, 5)
    exact = harness.submit(endless(dataset))
    harness.wait_step(exact, 5)
    wait_adjusted(harness, first, (2, 1))
    harness.cancel(first)
    harness.wait(first)
    harness.wait_more(exact)
    assert cores(harness, exact) == ["cpu:1"]
    assert adjusted(harness, exact) == []


@pytest.mark.shared_worker
def test_a_killed_job_returns_its_cores_until_it_runs_again(harness: Harness):
    dataset = harness.dataset()
    first = harness.submit(endless(dataset, **FLEXIBLE))
    harness.wait_step(first, 5)
    retry = {"retry": {"max_restarts": 0}}
    second = harness.submit(endless(dataset, **FLEXIBLE, **retry))
    harness.wait_step(second, 5)
    wait_adjusted(harness, first, (2, 1))
    os.kill(harness.rank_pid(second), signal.SIGKILL)
    harness.wait(second, "failed")
    wait_adjusted(harness, first, (2, 1), (1, 2))


def test_the_processes_of_a_job_change_together(harness: Harness):
    harness.start_worker(CPU_CORES="4")
    dataset = harness.dataset()
    short = harness.submit(endless(dataset, devices={"type": "cpu", "threads": 2}))
    harness.wait_step(short)
    pair = harness.submit(endless(dataset, **FLEXIBLE, **TWO))
    harness.wait_step(pair, 5)
    assert len(cores(harness, pair)) == 2
    pids = [harness.rank_pid(pair, rank=rank) for rank in (0, 1)]
    before = [num_threads(pid) for pid in pids]
    harness.cancel(short)
    wait_adjusted(harness, pair, (1, 2))
    until(lambda: [num_threads(pid) for pid in pids] == [count + 1 for count in before])
    assert len(cores(harness, pair)) == 4
    harness.wait_more(pair)


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))
