"""A worker dies at any point: nothing of its jobs runs on, and each job runs again or has ended."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from glasshouse import processes
from models.state import ENDED
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.integration.worker.misbehaving_worker import EARLY, LATE
from tests.waiting import until

IN_SHORT = ("rank.forked",)
ALL = tuple(name for name in (*EARLY, *LATE) if name not in IN_SHORT)
SAVING = {"every_steps": 2, "keep_last": 1}


def family(pid: int) -> list[processes.Identity]:
    children = psutil.Process(pid).children(recursive=True)
    return [found for one in children if (found := processes.identify(one.pid)) is not None]


def misbehaving(harness: Harness, way: str, **more: str) -> tuple[str, processes.Identity]:
    """A job whose rank has begun to misbehave."""
    reached = harness.home / "there"
    labels = {"misbehave": way, "at": "2", "reached": str(reached), **more}
    job_id = harness.submit(endless(harness.dataset(), labels=labels))
    until(reached.exists)
    leader = processes.identify(harness.rank_pid(job_id))
    assert leader is not None
    return job_id, leader


def dies_at(harness: Harness, name: str) -> None:
    worker = harness.start_worker(misbehaving=True, LEASE_S="3")
    (harness.home / "point").write_text(f"{name} kill")
    job_id = harness.submit(train_spec(harness.dataset(), checkpoint=SAVING))
    assert worker.wait(60) == -signal.SIGKILL
    reached = harness.job(job_id)
    (harness.home / "w1.log").write_text("")
    harness.start_worker(misbehaving=True, LEASE_S="3")
    job = harness.wait(job_id)
    assert job.state == "succeeded", (job.error, harness.logs())
    types = [event.type for event in harness.events(job_id)]
    assert types.count("end") == 1
    assert types[-1] == "end"
    if reached.state in ENDED:
        assert job.attempt == reached.attempt  # what had ended is not touched again
    until(lambda: all(device.job is None for device in harness.devices()))
    until(lambda: not list((harness.home / "work" / "w1").glob("job_*")))
    until(lambda: not list((harness.home / "work" / "w1" / "ranks").iterdir()))


@pytest.mark.parametrize("name", IN_SHORT)
def test_a_worker_that_dies_loses_no_job(name: str, harness: Harness):
    dies_at(harness, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_worker_that_dies_at_any_point_loses_no_job(name: str, harness: Harness):
    dies_at(harness, name)


@pytest.mark.parametrize(
    "way", [pytest.param("hold-the-gil", marks=pytest.mark.slow), "leave-children"]
)
def test_what_a_killed_worker_leaves_is_gone_soon(way: str, harness: Harness):
    """Also where every thread of the rank is stuck, and no lifeline can be heard."""
    worker = harness.start_worker(misbehaving=True)
    _, leader = misbehaving(harness, way)
    until(lambda: len(processes.session_of(leader)) == (3 if way == "leave-children" else 1))
    worker.kill()
    worker.wait()
    until(lambda: not processes.alive(leader))
    if way == "leave-children":
        harness.start_worker()  # children of a rank are no children of ours: the next life's task
    until(lambda: processes.session_of(leader) == [])


@pytest.mark.slow
def test_a_killed_fork_server_also_ends_stuck_ranks(harness: Harness):
    worker = harness.start_worker(misbehaving=True)
    job_id, leader = misbehaving(harness, "hold-the-gil", attempts="1")
    (fork_server,) = psutil.Process(worker.pid).children()
    fork_server.kill()
    until(lambda: not processes.alive(leader))
    harness.wait_runs_again(job_id)
    assert harness.attempts(job_id)[0].exit_kind == "fork_server_lost"


def test_leftovers_are_killed_before_the_first_claim_of_the_next_life(harness: Harness):
    worker = harness.start_worker(misbehaving=True)
    job_id, leader = misbehaving(harness, "hold-the-gil")
    os.kill(leader.pid, signal.SIGSTOP)
    everyone = family(worker.pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        worker.send_signal(number)
    worker.wait()
    (harness.home / "w1.log").write_text("")
    harness.start_worker(misbehaving=True)
    assert not any(processes.alive(one) for one in everyone)
    until(lambda: harness.attempts(job_id)[0].exit_kind == "worker_lost")
    harness.cancel(job_id)
    assert harness.wait(job_id).state == "cancelled"


@pytest.mark.shared_worker
def test_the_supervisor_and_its_worker_know_neither_torch_nor_numpy(harness: Harness):
    worker = harness.workers["w1"]
    probe: dict[str, Any] = {"layers": ["fc*"], "kinds": ["output"], "every": 5, "want": ["stats"]}
    job_id = harness.submit(train_spec(harness.dataset(), probes=[probe]))
    assert harness.wait(job_id).state == "succeeded"
    mapped = Path(f"/proc/{worker.pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "libc10" not in mapped
