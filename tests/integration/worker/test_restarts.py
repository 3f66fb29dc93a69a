"""A job whose processes are killed at every turn ends as one that nobody touched."""

import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from glasshouse import jsonio
from glasshouse.events import is_upkeep
from models import captures, checkpoints, events, metrics
from models.state import ENDED
from tests.integration.worker.conftest import Broker
from tests.integration.worker.shop import Shop, train_spec, until

NUM_STEPS = 80
SAVED_EVERY = 7
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
OURS = ("job", "seq", "attempt", "at", "capture", "href", "checkpoint", "size_bytes")
"""Fields that are another run's by nature: names, times, and the size of a file that has times."""


def spec_of(dataset: str) -> dict[str, Any]:
    """About 200 events: losses, evaluations, statistics, tensors, checkpoints."""
    probe = {"layers": ["fc*"], "kinds": ["output", "param_grad"], "every": 6}
    probe |= {"want": ["stats", "full"], "max_overhead": None, "lossless": True}
    spec = train_spec(dataset, stop={"steps": NUM_STEPS}, evaluate={"every_steps": 10})
    spec |= {"checkpoint": {"every_steps": SAVED_EVERY}, "probes": [probe]}
    spec |= {"retry": {"max_restarts": 1000}}
    spec["metrics"] = [{"type": "accuracy", "inputs": ["fc2", "y"]}]
    spec["data"] |= {
        "train": {"dataset": dataset, "split": "train", "fraction": [0, 0.75]},
        "validation": {"dataset": dataset, "split": "train", "fraction": [0.75, 1]},
    }
    spec["network"]["layers"].insert(2, {"name": "drop", "type": "Dropout", "args": {"p": 0.2}})
    spec["network"]["layers"][3]["inputs"] = ["drop"]
    spec["network"]["layers"][2]["inputs"] = ["act"]
    return spec


@dataclass
class Story:
    """All that a client can see of a job, without what is another run's by nature."""

    log: dict[str, list[Any]]
    series: dict[str, list[tuple[int, str]]]
    tensors: dict[tuple[str, str, int], bytes]
    weights: dict[str, bytes]
    summary: dict[str, Any]

    @staticmethod
    def of(shop: Shop, job_id: str) -> "Story":
        with shop.database.read() as tx:
            page = events.read(tx, job_id, 0, limit=100_000, max_bytes=1 << 30)
            names = [row.name for row in metrics.names(tx, job_id) if not is_upkeep(row.name)]
            series = {
                name: [(p.step, repr(p.value)) for p in metrics.query(tx, job_id, name)]
                for name in names
            }
            kept = captures.find(tx, job_id, limit=10_000)
            saved = checkpoints.of_job(tx, job_id)[-1]
        log: dict[str, list[Any]] = defaultdict(list)
        for event in page.events:
            told = _timeless(jsonio.loads(event.as_json()))
            if told is not None:
                log[told.pop("type")].append(told)
        tensors = {
            (row.layer, row.kind, row.step): load_file(shop.artifacts.local(row.key))[
                row.tensor
            ].tobytes()
            for row in kept
        }
        weights = load_file(shop.artifacts.local(saved.key) / "model.safetensors")
        raw = {name: item.tobytes() for name, item in weights.items()}
        return Story(dict(log), series, tensors, raw, shop.job(job_id).summary)

    def check(self, other: "Story") -> None:
        """Compare with what should be; piece by piece, for a message that can be read."""
        for kind in sorted(self.log.keys() | other.log.keys()):
            mine, theirs = self.log.get(kind, []), other.log.get(kind, [])
            assert [one.get("step") for one in mine] == [one.get("step") for one in theirs], kind
            assert mine == theirs, kind
        assert self.series == other.series
        assert self.tensors.keys() == other.tensors.keys()
        assert self.tensors == other.tensors
        assert self.weights == other.weights
        assert self.summary == other.summary


def _timeless(event: dict[str, Any]) -> dict[str, Any] | None:
    if event["type"] in ("state", "attempt", "log"):
        return None
    if event["type"] == "metrics":
        values = {key: value for key, value in event["values"].items() if not is_upkeep(key)}
        if not values:
            return None
        event["values"] = values
    return {name: value for name, value in event.items() if name not in OURS}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The story of a job that nothing happens to."""
    home = tmp_path_factory.mktemp("undisturbed")
    with tempfile.TemporaryDirectory(prefix="gh", dir="/tmp") as directory:
        broker = Broker(Path(directory))
        broker.start()
        shop = Shop(f"sqlite:///{home / 'test.db'}", broker.url, home)
        try:
            shop.start_worker()
            job_id = shop.submit(spec_of(shop.dataset()))
            assert shop.wait(job_id).state == "succeeded", shop.logs()
            story = Story.of(shop, job_id)
        finally:
            shop.close()
            broker.kill()
    assert len([one for some in story.log.values() for one in some]) > 180
    assert [step for step, _ in story.series["loss"]] == list(range(NUM_STEPS))
    return story


@pytest.fixture
def any_shop(database_url: str, broker: Broker, tmp_path: Path) -> Generator[Shop]:
    opened = Shop(database_url, broker.url, tmp_path)
    opened.variables |= {"RETRY_MAX_S": "0.3"}
    yield opened
    opened.close()


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Sets failpoints for the processes that start from now on; each is followed once."""
    once = tmp_path / "once"
    once.mkdir()

    def set_points(rules: str) -> Path:
        monkeypatch.setenv("FAILPOINTS", rules)
        monkeypatch.setenv("FAILPOINTS_ONCE", str(once))
        return once

    return set_points


def survive(shop: Shop, job_id: str) -> None:
    """Start the worker again whenever it dies, until the job has ended."""

    def ended() -> bool:
        if shop.workers["w1"].poll() is not None:
            shop.start_worker(wait=False)
        return shop.job(job_id).state in ENDED

    until(ended, 300)
    assert shop.job(job_id).state == "succeeded", (shop.job(job_id).error, shop.logs())


def check_attempts(shop: Shop, job_id: str) -> list[int | None]:
    """From which steps the attempts resumed; the log says the same."""
    begun = [one.resumed_from_step for one in shop.attempts(job_id) if one.claimed_at]
    told = [one["resumed_from_step"] for one in shop.payloads(job_id, "attempt")]
    assert told == begun
    assert begun[0] is None
    assert all(step is not None and step % SAVED_EVERY in (0, NUM_STEPS % SAVED_EVERY)
               for step in begun[1:])  # fmt: skip
    return begun


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


@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
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
