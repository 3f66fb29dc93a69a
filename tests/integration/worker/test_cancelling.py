"""A job is cancelled at every point of its way: it ends, soon, and nothing is left."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from glasshouse import processes
from glasshouse.errors import JobEnded
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.integration.worker.misbehaving_worker import EARLY, LATE
from tests.waiting import until

SAVING = {"every_steps": 2, "keep_last": 1}
OF_THE_RANK = (
    *("start", "0", "3", "save", "evaluate", "rank.begin"),
    *("spool.append", "spool.write", "spool.written"),
)


def cancelled_there(harness: Harness, spec: dict[str, Any], reached: Path) -> str:
    """Submit a job, cancel it where it is said to have come, and wait for its end."""
    reached.unlink(missing_ok=True)
    job_id = harness.submit(spec)
    until(reached.exists)
    with contextlib.suppress(JobEnded):
        harness.cancel(job_id)
    job = harness.wait(job_id)
    assert [event.type for event in harness.events(job_id)][-1] == "end"
    assert [event.type for event in harness.events(job_id)].count("end") == 1
    return job.state


def test_there_are_many_points():
    assert len({*EARLY, *LATE, *OF_THE_RANK}) >= 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cancel_at_every_point_of_the_worker_ends_the_job(harness: Harness):
    harness.start_worker(misbehaving=True)
    dataset = harness.dataset()
    for name in (*EARLY, *LATE):
        (harness.home / "point").write_text(f"{name} pause")
        late = name in LATE
        spec = train_spec(dataset, checkpoint=SAVING) if late else endless(dataset)
        state = cancelled_there(harness, spec, harness.home / "reached")
        assert state == "cancelled" or (late and state == "succeeded"), (name, state)
    until(lambda: all(device.job is None for device in harness.devices()))
    until(lambda: not list((harness.home / "work" / "w1").glob("job_*")))
    until(lambda: not list((harness.home / "work" / "w1" / "ranks").iterdir()))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_cancel_reaches_a_rank_that_says_more_than_the_database_takes(any_harness: Harness):
    """A shipment takes longer than a fifth of the lease, so that it has twenty records."""
    harness = any_harness
    harness.start_worker(misbehaving=True, LEASE_S="5")
    job_id = harness.submit(endless(harness.dataset()))
    harness.wait_step(job_id)
    (harness.home / "slow").write_text("1.2")
    backlog = harness.home / "work" / "w1" / job_id / "1" / "spool"
    said = backlog.stat().st_size
    until(lambda: backlog.stat().st_size > said + 60_000)
    rank = processes.identify(harness.rank_pid(job_id))
    assert rank is not None
    harness.cancel(job_id)
    until(lambda: not processes.session_of(rank), 60)
    assert harness.job(job_id).state == "cancelling", "all of it was stored: it was not behind"
    (harness.home / "slow").unlink()
    assert harness.wait(job_id).state == "cancelled"
    steps = harness.steps(job_id)
    assert steps == [*range(len(steps))]


@pytest.mark.shared_worker("misbehaving")
def test_a_cancel_at_every_place_of_the_rank_ends_the_job(harness: Harness):
    dataset = harness.dataset()
    reached = harness.home / "there"
    for place in OF_THE_RANK:
        labels = {"misbehave": "pause", "at": place, "reached": str(reached)}
        spec = endless(dataset, checkpoint=SAVING, labels=labels)
        spec["data"]["validation"] = spec["data"]["train"]
        spec["evaluate"] = {"every_steps": 2}
        assert cancelled_there(harness, spec, reached) == "cancelled", place
    until(lambda: all(device.job is None for device in harness.devices()))
