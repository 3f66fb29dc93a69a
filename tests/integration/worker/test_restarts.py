"""A job whose processes are killed at every turn ends as one that nobody touched."""

import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from models.jobs import checkpoints
from models.state import ENDED
from tests.integration.worker.conftest import Broker
from tests.integration.worker.shop import Shop
from tests.integration.worker.story import Story, check_attempts, spec_of, survive
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
def any_shop(database_url: str, broker: Broker, tmp_path: Path) -> Generator[Shop]:
    opened = Shop(database_url, broker.url, tmp_path)
    opened.variables |= {"RETRY_MAX_S": "0.3"}
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
def test_a_rank_killed_at_one_record_after_another_leaves_the_log_of_one_run(
    any_shop: Shop, points: Callable[[str], Path], undisturbed: Story
):
    once = points(";".join(f"spool.append=kill@{n}" for n in BOUNDARIES))
    any_shop.start_worker()
    dataset = any_shop.dataset()
    num_killed = 0
    while num_killed < len(BOUNDARIES):  # each attempt dies at the first boundary that is left
        job_id = any_shop.submit(spec_of(dataset))
        survive(any_shop, job_id)
        Story.of(any_shop, job_id).check(undisturbed)
        begun = check_attempts(any_shop, job_id)
        types = [event.type for event in any_shop.events(job_id)]
        assert (types.count("end"), types[-1]) == (1, "end")
        assert len(begun) > 1
        num_killed += len(begun) - 1
        assert len(list(once.iterdir())) == num_killed


@pytest.mark.slow
def test_a_worker_killed_at_its_commits_and_moves_leaves_the_log_of_one_run(
    any_shop: Shop, points: Callable[[str], Path], undisturbed: Story
):
    once = points(";".join(RULES))
    any_shop.start_worker()
    job_id = any_shop.submit(spec_of(any_shop.dataset()))
    survive(any_shop, job_id)
    Story.of(any_shop, job_id).check(undisturbed)
    check_attempts(any_shop, job_id)
    assert len(list(once.iterdir())) >= len(RULES) - 3  # a fast worker passes some fewer times
    with any_shop.database.read() as tx:
        rows = checkpoints.of_job(tx, job_id, "all")
    files = (any_shop.settings.artifacts / "jobs" / job_id).glob("*/checkpoints/*")
    named = {str(any_shop.settings.artifacts / row.key) for row in rows}
    assert named <= {str(path) for path in files}


@pytest.mark.parametrize(
    "how",
    ["altered", *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut short", "gone"))],
)
def test_a_checkpoint_that_is_no_good_gives_way_to_the_one_before(
    shop: Shop, points: Callable[[str], Path], undisturbed: Story, how: str
):
    points("spool.append=kill@120")
    worker = shop.start_worker()
    shop.variables |= {"RETRY_MAX_S": "0.3"}
    job_id = shop.submit(spec_of(shop.dataset()))

    def two_are_saved() -> bool:
        return len(shop.payloads(job_id, "checkpoint")) >= 2

    until(lambda: two_are_saved() or shop.job(job_id).state in ENDED)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert shop.job(job_id).state not in ENDED, "it was too fast to be interrupted"
    with shop.database.read() as tx:
        newest, older, *_ = checkpoints.resumable(tx, job_id)
    path = shop.artifacts.local(newest.key) / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        middle = len(data) // 2
        odd = bytes([data[middle] ^ 1])
        path.write_bytes(
            data[:-1] if how == "cut short" else data[:middle] + odd + data[middle + 1 :]
        )
    (shop.home / "w1.log").write_text("")
    shop.start_worker(wait=False)
    survive(shop, job_id)
    Story.of(shop, job_id).check(undisturbed)
    assert older.step in [one.resumed_from_step for one in shop.attempts(job_id)]
    printed = [line for one in shop.payloads(job_id, "log") for line in one["lines"]]
    assert [line for line in printed if f"{newest.id} of step {newest.step} cannot be used" in line]
