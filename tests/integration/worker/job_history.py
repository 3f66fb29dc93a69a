"""All that a client can see of a job, to be compared with what an undisturbed one left."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from safetensors.numpy import load_file

from glasshouse import jsonio
from glasshouse.events import is_upkeep
from models.jobs import checkpoints
from models.observations import captures, events, metrics
from models.state import ENDED
from tests.integration.worker.harness import Harness, train_spec
from tests.waiting import until

NUM_STEPS = 80
SAVED_EVERY = 7
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
class JobHistory:
    """All that a client can see of a job, without what is another run's by nature."""

    log: dict[str, list[Any]]
    series: dict[str, list[tuple[int, str]]]
    tensors: dict[tuple[str, str, int], bytes]
    weights: dict[str, bytes]
    summary: dict[str, Any]

    @staticmethod
    def of(harness: Harness, job_id: str) -> "JobHistory":
        with harness.database.read() as tx:
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
            (row.layer, row.kind, row.step): load_file(harness.artifacts.local(row.key))[
                row.tensor
            ].tobytes()
            for row in kept
        }
        weights = load_file(harness.artifacts.local(saved.key) / "model.safetensors")
        raw = {name: item.tobytes() for name, item in weights.items()}
        return JobHistory(dict(log), series, tensors, raw, harness.job(job_id).summary)

    def check(self, other: "JobHistory") -> None:
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

    def check_but_counted(self, other: "JobHistory", kind: str) -> None:
        """As `check`, but some events of a kind are missing, and events ``dropped`` count them."""
        mine, theirs = self.log.get(kind, []), other.log[kind]
        lost = [one for one in theirs if one not in mine]
        assert [one for one in mine if one not in theirs] == []
        assert sum(one["count"] for one in self.log.pop("dropped")) == len(lost)
        assert self.tensors.items() <= other.tensors.items()
        whole = {**self.log, kind: theirs}
        JobHistory(whole, self.series, other.tensors, self.weights, other.summary).check(other)


def _timeless(event: dict[str, Any]) -> dict[str, Any] | None:
    if event["type"] in ("state", "attempt", "log"):
        return None
    if event["type"] == "metrics":
        values = {key: value for key, value in event["values"].items() if not is_upkeep(key)}
        if not values:
            return None
        event["values"] = values
    return {name: value for name, value in event.items() if name not in OURS}


def survive(harness: Harness, job_id: str, worker: str = "w1") -> None:
    """Start the worker again whenever it dies, until the job has ended."""

    def ended() -> bool:
        if harness.workers[worker].poll() is not None:
            harness.start_worker(worker, wait=False)
        return harness.job(job_id).state in ENDED

    until(ended, 300)
    assert harness.job(job_id).state == "succeeded", (harness.job(job_id).error, harness.logs())


def check_attempts(harness: Harness, job_id: str) -> list[int | None]:
    """From which steps the attempts resumed; the log says the same."""
    claimed = [one for one in harness.attempts(job_id) if one.claimed_at]
    begun = [one.resumed_from_step for one in claimed]
    told = [one["resumed_from_step"] for one in harness.payloads(job_id, "attempt")]
    assert told == begun
    assert begun[0] == (None if claimed[0].n == 1 else 0)  # those before it never came to run
    assert all(step is not None and step % SAVED_EVERY in (0, NUM_STEPS % SAVED_EVERY)
               for step in begun[1:])  # fmt: skip
    return begun
