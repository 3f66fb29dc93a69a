"""Signals to a worker, in each of its states: jobs are in order afterwards, and nobody is left."""

import os
import signal
from itertools import product

import psutil
import pytest

from glasshouse import processes
from tests.integration.worker.harness import Harness, endless
from tests.waiting import until

STATES = ("idle", "starting", "training", "checkpointing", "cancelling")
SIGNALS = {
    "TERM": [signal.SIGTERM],
    "QUIT": [signal.SIGQUIT],
    "INT": [signal.SIGINT],
    "2xINT": [signal.SIGINT, signal.SIGINT],
    "HUP": [signal.SIGHUP],
    "KILL": [signal.SIGKILL],
}
IN_SHORT = (("TERM", "checkpointing"),)
ALL = tuple(case for case in product(SIGNALS, STATES) if case not in IN_SHORT)
PLACES = {"starting": "start", "training": "2", "checkpointing": "save", "cancelling": "2"}


def brought_to(harness: Harness, state: str) -> str | None:
    """Bring a worker's job to a state that it stays in for some seconds."""
    if state == "idle":
        return None
    reached = harness.home / "there"
    labels = {"misbehave": "doze", "at": PLACES[state], "reached": str(reached)}
    job_id = harness.submit(
        endless(harness.dataset(), labels=labels, checkpoint={"every_steps": 2})
    )
    until(reached.exists)
    if state == "cancelling":
        harness.wait_step(job_id)
        harness.cancel(job_id)
    return job_id


def signalled(harness: Harness, name: str, state: str) -> None:
    worker = harness.start_worker(misbehaving=True, LEASE_S="3")
    job_id = brought_to(harness, state)
    children = psutil.Process(worker.pid).children(recursive=True)
    everyone = [found for one in children if (found := processes.identify(one.pid)) is not None]
    for number in SIGNALS[name]:
        os.kill(worker.pid, number)
    status = worker.wait(60)
    assert status == (-signal.SIGKILL if name == "KILL" else 0), harness.logs()
    until(lambda: not any(processes.alive(one) for one in everyone))
    if job_id is None:
        return
    if name != "KILL" and state != "cancelling":
        job = harness.job(job_id)
        assert (job.state, job.infra_failures) == ("queued", 0)
        assert [one.exit_kind for one in harness.attempts(job_id)] == ["interrupted"]
        assert all(device.job is None for device in harness.devices())
    (harness.home / "w1.log").write_text("")
    harness.start_worker(LEASE_S="3")
    if state != "cancelling":
        harness.wait_runs_again(job_id)
    assert harness.wait(job_id).state == "cancelled"
    assert [event.type for event in harness.events(job_id)].count("end") == 1


@pytest.mark.parametrize(("name", "state"), IN_SHORT)
def test_a_signal_ends_a_worker_in_order(name: str, state: str, harness: Harness):
    signalled(harness, name, state)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "state"), ALL)
def test_any_signal_in_any_state_ends_a_worker_in_order(name: str, state: str, harness: Harness):
    signalled(harness, name, state)
