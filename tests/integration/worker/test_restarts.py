"""A job whose processes are killed at every turn ends as one that nobody touched."""

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from models.jobs import checkpoints
from models.state import ENDED
from tests.integration.worker.conftest import Broker
from tests.integration.worker.harness import Harness
from tests.integration.worker.job_history import JobHistory, check_attempts, spec_of, survive
from tests.waiting import until

BOUNDARIES = [1, 2, 3, 5, 9, 14, 21, 27, 33, 40, 52, 61, 75, 90]
"""Of the records of an attempt, those at which its process is killed."""
if "EVERYWHERE" in os.environ:
    BOUNDARIES = list(range(1, 201))
RULES = ("rank.forked=kill", "ship.moved=kill@2", "ship.committed=kill@2",
         "artifact.renamed=kill@3", "end.committed=kill")  # fmt: skip
"""Where the worker is killed, once each."""
if "EVERYWHERE" in os.environ:
    RULES = (*RULES, "claim.committed=kill", "ship.commit=kill@2", "keep.commit=kill@2",
             "workplace.made=kill@5", "end.commit=kill")  # fmt: skip


@pytest.fixture
def any_harness(database_url: str, broker: Broker, tmp_path: Path) -> Generator[Harness]:
    opened = Harness(database_url, broker.url, tmp_path)
    opened.variables |= {"RETRY_MAX_S": "0.3"}
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
def test_a_rank_killed_at_one_record_after_another_leaves_the_log_of_one_run(
    any_harness: Harness, points: Callable[[str], Path], undisturbed: JobHistory
):
    once = points(";".join(f"spool.append=kill@{n}" for n in BOUNDARIES))
    any_harness.start_worker()
    dataset = any_harness.dataset()
    num_killed = 0
    while num_killed < len(BOUNDARIES):  # each attempt dies at the first boundary that is left
        job_id = any_harness.submit(spec_of(dataset))
        survive(any_harness, job_id)
        JobHistory.of(any_harness, job_id).check(undisturbed)
        begun = check_attempts(any_harness, job_id)
        types = [event.type for event in any_harness.events(job_id)]
        assert (types.count("end"), types[-1]) == (1, "end")
        assert len(begun) > 1
        num_killed += len(begun) - 1
        assert len(list(once.iterdir())) == num_killed


@pytest.mark.slow
def test_a_worker_killed_at_its_commits_and_moves_leaves_the_log_of_one_run(
    any_harness: Harness, points: Callable[[str], Path], undisturbed: JobHistory
):
    once = points(";".join(RULES))
    any_harness.start_worker()
    job_id = any_harness.submit(spec_of(any_harness.dataset()))
    survive(any_harness, job_id)
    JobHistory.of(any_harness, job_id).check(undisturbed)
    check_attempts(any_harness, job_id)
    assert len(list(once.iterdir())) >= len(RULES) - 3  # a fast worker passes some fewer times
    with any_harness.database.read() as tx:
        rows = checkpoints.of_job(tx, job_id, "all")
    files = (any_harness.settings.artifacts / "jobs" / job_id).glob("*/checkpoints/*")
    named = {str(any_harness.settings.artifacts / row.key) for row in rows}
    assert named <= {str(path) for path in files}


@pytest.mark.parametrize(
    "how",
    ["altered", *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut short", "gone"))],
)
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(
    harness: Harness, points: Callable[[str], Path], undisturbed: JobHistory, how: str
):
    points("spool.append=kill@120")
    worker = harness.start_worker()
    harness.variables |= {"RETRY_MAX_S": "0.3"}
    job_id = harness.submit(spec_of(harness.dataset()))

    def two_are_saved() -> bool:
        return len(harness.payloads(job_id, "checkpoint")) >= 2

    until(lambda: two_are_saved() or harness.job(job_id).state in ENDED)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert harness.job(job_id).state not in ENDED, "it was too fast to be interrupted"
    with harness.database.read() as tx:
        newest, older, *_ = checkpoints.resumable(tx, job_id)
    path = harness.artifacts.local(newest.key) / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        middle = len(data) // 2
        odd = bytes([data[middle] ^ 1])
        path.write_bytes(
            data[:-1] if how == "cut short" else data[:middle] + odd + data[middle + 1 :]
        )
    (harness.home / "w1.log").write_text("")
    harness.start_worker(wait=False)
    survive(harness, job_id)
    JobHistory.of(harness, job_id).check(undisturbed)
    assert older.step in [one.resumed_from_step for one in harness.attempts(job_id)]
    printed = [line for one in harness.payloads(job_id, "log") for line in one["lines"]]
    assert [line for line in printed if f"{newest.id} of step {newest.step} cannot be used" in line]
