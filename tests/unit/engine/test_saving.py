"""Saving during training: what is saved, when, and what an error does."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.checkpoint import checkpoint, saving
from engine.checkpoint.retention import CheckpointRetention
from engine.checkpoint.saving import Saver
from engine.checkpoint.training_state import OptimizerState, Weights
from engine.core.snapshot import Staging, take
from engine.core.spool import read_frames
from glasshouse.spec import Checkpoint, TrainJob, parse_job
from tests.unit.engine.runs import errors, losses, of_type, planned, run, spec, write_job

SOON_S = 60


class Bench:
    """A saver of a small network, and what it said."""

    def __init__(self, directory: Path, **when: Any) -> None:
        job = parse_job(json.dumps(spec(checkpoint=when)))
        assert isinstance(job, TrainJob)
        self.directory = directory
        self.network = nn.Linear(2, 2)
        self.records: list[dict[str, Any]] = []
        self.saver = Saver(job, directory, self.records.append, lambda: None)
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self.saver.parts |= {
            "model": Weights(self.network),
            "optimizer": OptimizerState(optimizer, self.network),
        }

    def fill(self, value: float) -> None:
        with torch.no_grad():
            self.network.weight.fill_(value)
            self.network.bias.fill_(value)

    def save(self, step: int, **how: Any) -> None:
        self.saver.save({"step": step, "epoch": 0, "batch": step}, {"loss": 1.0}, **how)

    def saved(self, step: int) -> set[float]:
        """The different values in a saved network."""
        checkpoint.read(self.directory / "checkpoints" / f"step-{step}")
        other = nn.Linear(2, 2)
        checkpoint.load_model(self.directory / "checkpoints" / f"step-{step}", other)
        return {*other.weight.flatten().tolist(), *other.bias.tolist()}


@pytest.fixture
def gate(monkeypatch):
    """Holds every writer just before its files, for a write is too fast to be met in the middle."""
    held = threading.Event()
    arrived = threading.Semaphore(0)
    plain = checkpoint.write

    def write(*args: Any) -> Any:
        arrived.release()
        assert held.wait(SOON_S)
        return plain(*args)

    monkeypatch.setattr(saving.checkpoint, "write", write)
    yield held, arrived
    held.set()


def test_what_changes_after_save_returns_is_not_in_the_file(tmp_path, gate):
    held, arrived = gate
    bench = Bench(tmp_path)
    bench.fill(1.0)
    bench.save(1)
    bench.fill(2.0)
    assert arrived.acquire(timeout=SOON_S)
    assert bench.saver.is_busy
    assert not bench.records, "it was reported before it was durable"
    held.set()
    bench.saver.wait()
    assert bench.saved(1) == {1.0}
    assert [record["dir"] for record in bench.records] == ["checkpoints/step-1"]


def test_a_second_save_waits_for_the_first_and_nothing_is_mixed(tmp_path, gate):
    held, arrived = gate
    bench = Bench(tmp_path)
    bench.fill(1.0)
    bench.save(1)
    assert arrived.acquire(timeout=SOON_S)
    bench.fill(2.0)
    second = threading.Thread(target=bench.save, args=(2,))
    second.start()
    assert not arrived.acquire(timeout=0.2), "two are being written at once"
    held.set()
    second.join(SOON_S)
    bench.saver.wait()
    assert (bench.saved(1), bench.saved(2)) == ({1.0}, {2.0})
    assert [record["step"] for record in bench.records] == [1, 2]


def test_checkpoints_by_time_do_not_wait_for_the_slot(tmp_path, gate):
    held, _ = gate
    saver = (bench := Bench(tmp_path, every_steps=10, every_s=1e-9)).saver
    assert saver.choose(1, due=False) == "save"
    bench.save(1)
    assert saver.choose(2, due=False) is None
    assert saver.choose(2, due=True) == "save"
    held.set()
    saver.wait()
    assert saver.choose(3, due=False) == "save"


def test_without_time_only_what_is_due_is_saved(tmp_path):
    saver = Bench(tmp_path, every_steps=10, every_s=None).saver
    assert saver.choose(1, due=False) is None
    assert saver.choose(1, due=True) == "save"
    saver = Bench(tmp_path, every_steps=10).saver
    assert saver.choose(1, due=False) is None, "300 s have not passed"


# --- what nobody has named may take a twentieth of the time ---------------------------------------

LEAST = {"metric": "validation/loss", "mode": "min"}


class Clock:
    """The time that a saver sees; writing takes what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, copy_s: float, write_s: float) -> None:
        self.now = 1000.0
        self.copy_s, self.write_s = copy_s, write_s
        plain_take, plain_write = saving.take, checkpoint.write

        def take(*args: Any) -> Any:
            self.now += self.copy_s
            return plain_take(*args)

        def write(*args: Any) -> Any:
            self.now += self.write_s
            return plain_write(*args)

        monkeypatch.setattr(saving.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(saving, "take", take)
        monkeypatch.setattr(saving.checkpoint, "write", write)


def by_default(directory: Path, monkeypatch: pytest.MonkeyPatch, **times: float) -> tuple[Any, ...]:
    """A bench whose saves nobody has named, and are too large to be free; and its clock."""
    clock = Clock(monkeypatch, **times)
    bench = Bench(directory, every_s=None, keep_best=LEAST)
    monkeypatch.setattr(saving, "FREE_BYTES", 0)
    return bench, clock


def epoch(bench: Bench, clock: Clock, step: int, *, seconds: float, loss: float) -> str | None:
    """Let an epoch end with a validation loss; what became of its state."""
    clock.now += seconds
    bench.fill(step)
    bench.saver.judge({"validation/loss": loss}, step)
    choice = bench.saver.choose(step, due=True)
    position = {"step": step, "epoch": step, "batch": 1}
    metrics = {"validation/loss": loss}
    if choice == "save":
        bench.saver.save(position, metrics)
        bench.saver.wait()
    elif choice == "hold":
        bench.saver.hold(position, metrics)
    return choice


def test_saves_by_default_take_a_twentieth_of_the_time_from_the_first_epoch_on(
    tmp_path, monkeypatch
):
    bench, clock = by_default(tmp_path, monkeypatch, copy_s=0.01, write_s=1.0)
    began, checkpoints = clock.now, 0.0
    for step in range(1, 2001):
        before = clock.now
        epoch(bench, clock, step, seconds=0.15, loss=1 / step)  # each is the best
        checkpoints += clock.now - before - 0.15
        if step > 10:  # the first save is judged by its size, which says little here
            assert checkpoints - 1.01 <= 0.05 * (clock.now - began)
    steps = [record["step"] for record in bench.records]
    assert len(steps) > 5
    assert {*bench.saved(steps[-1])} == {float(steps[-1])}


def test_what_is_large_is_not_saved_before_it_was_measured(tmp_path, monkeypatch):
    bench, clock = by_default(tmp_path, monkeypatch, copy_s=0.01, write_s=1.0)
    bench.saver.__dict__["_num_bytes"] = 384_000_000  # judged to take 3.84 s
    assert epoch(bench, clock, 1, seconds=0.15, loss=1.0) is None
    assert epoch(bench, clock, 2, seconds=150.0, loss=2.0) is None
    assert epoch(bench, clock, 3, seconds=10.0, loss=2.0) == "save"


def test_the_best_state_that_was_skipped_is_there_at_the_end(tmp_path, monkeypatch):
    """Five epochs get better, and then worse: the fifth is held, and written before the last."""
    bench, clock = by_default(tmp_path, monkeypatch, copy_s=0.001, write_s=10.0)
    epoch(bench, clock, 0, seconds=500.0, loss=9.0)  # measured, and its share used up
    values = [5.0, 4.0, 3.0, 2.0, 1.0, 2.0, 3.0, 4.0]
    chosen = [epoch(bench, clock, n, seconds=1.0, loss=x) for n, x in enumerate(values, 1)]
    assert chosen == ["hold"] * 5 + [None] * 3
    assert [record["step"] for record in bench.records] == [0]
    bench.fill(9.0)
    bench.save(9, final=True, wait=True)
    assert [record["step"] for record in bench.records] == [0, 5, 9]
    assert bench.records[1]["metrics"] == {"validation/loss": 1.0}
    assert (bench.saved(5), bench.saved(9)) == ({5.0}, {9.0})


def test_a_held_state_gives_way_to_a_better_one_that_is_saved(tmp_path, monkeypatch):
    bench, clock = by_default(tmp_path, monkeypatch, copy_s=0.001, write_s=10.0)
    epoch(bench, clock, 0, seconds=500.0, loss=9.0)
    assert epoch(bench, clock, 1, seconds=1.0, loss=2.0) == "hold"
    assert epoch(bench, clock, 2, seconds=500.0, loss=1.0) == "save"
    assert [record["step"] for record in bench.records] == [0, 2]
    assert epoch(bench, clock, 3, seconds=1.0, loss=0.5) == "hold"
    assert epoch(bench, clock, 4, seconds=2000.0, loss=0.7) == "save"
    assert [record["step"] for record in bench.records] == [0, 2, 3, 4], "the best goes first"
    assert bench.saved(3) == {3.0}


def test_the_best_is_held_while_another_one_is_written(tmp_path, gate):
    held, arrived = gate
    bench = Bench(tmp_path, every_s=None, keep_best=LEAST)
    bench.fill(1.0)
    bench.save(1)
    assert arrived.acquire(timeout=SOON_S)
    bench.saver._started -= 1000
    for step in (2, 3):
        bench.fill(step)
        bench.saver.judge({"validation/loss": 1 / step}, step)
        assert bench.saver.choose(step, due=False) == "hold"
        bench.saver.hold({"step": step, "epoch": 0, "batch": step}, {})
    bench.fill(4.0)
    held.set()
    bench.save(4, wait=True)
    assert [record["step"] for record in bench.records] == [1, 3, 4]
    assert (bench.saved(1), bench.saved(3), bench.saved(4)) == ({1.0}, {3.0}, {4.0})


def test_a_best_state_that_is_in_no_checkpoint_is_reported(tmp_path, monkeypatch):
    """A copy takes more than an epoch: what was not asked for may not cost as much."""
    bench, clock = by_default(tmp_path, monkeypatch, copy_s=1.0, write_s=10.0)
    epoch(bench, clock, 0, seconds=500.0, loss=9.0)
    bench.saver._held_s = 1e9
    assert epoch(bench, clock, 1, seconds=0.1, loss=1.0) is None
    assert epoch(bench, clock, 2, seconds=0.1, loss=2.0) is None
    bench.save(3, final=True, wait=True)
    (told,) = of_type(bench.records, "dropped")
    assert "validation/loss 1.0 after 1 steps" in told["what"]
    bench.save(4, final=True, wait=True)
    assert len(of_type(bench.records, "dropped")) == 1, "once"


def test_what_is_tiny_is_saved_at_the_first_ten_ends_of_epochs(tmp_path):
    named, unnamed = Bench(tmp_path / "a", every_epochs=1), Bench(tmp_path / "b")
    for bench in (named, unnamed):
        for step in range(saving.FREE_SAVES):
            assert bench.saver.choose(step, due=True) == "save"
            bench.save(step)
        bench.saver.wait()
        bench.saver._spent_s = 1e9  # as if writing had taken nearly all the time
    assert named.saver.choose(99, due=True) == "save"
    assert unnamed.saver.choose(99, due=True) is None


def test_snapshots_use_the_same_memory_again(tmp_path):
    bench = Bench(tmp_path)
    staging = Staging()
    bench.fill(1.0)
    first = take(bench.saver.parts, {}, staging)
    places = {name: item.data_ptr() for name, item in first.tensors["model"].items()}
    bench.fill(2.0)
    assert (first.tensors["model"]["weight"] == 1.0).all(), "a copy"
    second = take(bench.saver.parts, {}, staging)
    assert {name: item.data_ptr() for name, item in second.tensors["model"].items()} == places
    assert (second.tensors["model"]["weight"] == 2.0).all()
    bench.network.weight.data = torch.full((3, 2), 3.0)  # as a state that grows
    third = take(bench.saver.parts, {}, staging)
    assert torch.equal(third.tensors["model"]["weight"], torch.full((3, 2), 3.0))


def test_a_save_that_is_waited_for_is_there_and_raises_what_prevents_it(tmp_path):
    bench = Bench(tmp_path)
    bench.save(1, wait=True)
    assert [record["step"] for record in bench.records] == [1]
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    (tmp_path / "checkpoints").write_text("a file where the directory was")
    with pytest.raises(OSError, match="checkpoints"):
        bench.save(2, wait=True)


def test_a_save_that_fails_is_reported_and_the_next_one_works(tmp_path, capfd):
    bench = Bench(tmp_path)
    bench.save(1, wait=True)
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    (tmp_path / "checkpoints").write_text("a file where the directory was")
    bench.save(2)
    bench.saver.wait()
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "away").rename(tmp_path / "checkpoints")
    bench.save(3)
    bench.saver.wait()
    assert [record["type"] for record in bench.records] == ["checkpoint", "dropped", "checkpoint"]
    assert bench.records[1]["what"].startswith("checkpoint: ")
    assert bench.saved(1)
    assert bench.saved(3)
    assert "Traceback" in capfd.readouterr().err


def test_the_same_step_twice_has_two_names(tmp_path):
    """The first one may already be on its way to where the service keeps them."""
    bench = Bench(tmp_path)
    bench.save(1)
    bench.save(1, final=True, wait=True)
    names = [record["dir"] for record in bench.records]
    assert names == ["checkpoints/step-1", "checkpoints/step-1-2"]


def test_no_thread_is_started_before_the_first_save(tmp_path):
    before = threading.active_count()
    bench = Bench(tmp_path)
    bench.save(1, wait=True)
    assert threading.active_count() == before


# --- a disk that is full -----------------------------------------------------------------------

FULL = """
import resource, sys, threading
from pathlib import Path
from engine.process.rank import Assignment, run
from engine.training.report import Outputs
from engine.core.spool import SpoolWriter

directory, from_step, to_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
spool = SpoolWriter(directory / "spool")

class Control:
    cancel_requested, ends_as, orders = False, "cancelled", ()
    wanted = threads = listen = None

first_is_there = threading.Event()

def emit(record):
    spool.append(record)
    if record["type"] == "checkpoint":
        first_is_there.set()
    if record["type"] == "metrics" and "loss" in record["values"]:
        full = from_step <= record["step"] < to_step
        if full:
            assert first_is_there.wait(60)
        limit = int(sys.argv[4]) if full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

out = Outputs(directory, emit, spool.settle, spool.flush)
state = run(Assignment.read(directory / "job.json"), control=Control(), out=out).state
spool.append({"type": "end", "state": state})
spool.close()
"""


WIDE = [
    {"name": "flat", "type": "Flatten"},
    {"name": "wide", "type": "Linear", "args": {"out_features": 1000}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]


@pytest.mark.long
def test_no_room_for_a_checkpoint_ends_nothing_and_harms_nothing(digits, tmp_path):
    """The kernel refuses to write: old files stay, training continues, the next save works."""
    job = spec(network={"layers": WIDE}, checkpoint={"every_steps": 2})
    expected = losses(run(tmp_path / "plain", job, digits))
    directory = write_job(tmp_path / "full", planned(job)["spec"], digits)
    command = [sys.executable, "-c", FULL, str(directory), "3", "6", "100000"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["state"] == "succeeded"
    assert losses(records) == expected
    dropped = [record["what"] for record in of_type(records, "dropped")]
    assert dropped
    assert all("File too large" in what for what in dropped)
    steps = [record["step"] for record in of_type(records, "checkpoint")]
    assert steps[0] == 2
    assert steps[-2:] == [8, 10]
    assert 4 not in steps
    there = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert there == sorted(f"step-{step}" for step in steps)
    for name in there:
        checkpoint.read(directory / "checkpoints" / name)


# --- what the spec says --------------------------------------------------------------------------


def _steps(records: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in of_type(records, "checkpoint")]


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        ({}, [5, 10, 15]),
        ({"every_epochs": 2}, [10, 15]),
        ({"every_steps": 4}, [4, 8, 12, 15]),
        ({"every_steps": 100}, [15]),
    ],
)
def test_checkpoints_come_when_the_spec_says(digits, tmp_path, when, steps):
    records = run(tmp_path, spec(stop={"epochs": 3}, checkpoint=when), digits)
    assert _steps(records) == steps
    assert [record["final"] for record in of_type(records, "checkpoint")][-1]
    for record in of_type(records, "checkpoint"):
        assert checkpoint.read(tmp_path / record["dir"]).step == record["step"]
        before = records[: records.index(record)]
        assert len(losses(before)) >= record["step"], "a checkpoint before its steps"


def test_a_short_time_saves_at_many_steps(digits, tmp_path):
    records = run(tmp_path, spec(checkpoint={"every_epochs": 99, "every_s": 1e-6}), digits)
    assert len(_steps(records)) >= 2


LOWEST = {"metric": "loss", "mode": "min"}


def _errors(best: dict[str, Any], **changes: Any) -> dict[str, str]:
    return errors(spec(checkpoint={"keep_best": best}, **changes))


def test_the_best_are_kept_by_a_metric_that_the_job_has():
    judged = {
        "data": {"validation": {"dataset": "ds_1", "split": "test"}},
        "evaluate": {"every_epochs": 1},
        "metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}],
    }
    for metric in ("loss", "accuracy", "validation/accuracy", "validation/loss"):
        planned(spec(checkpoint={"keep_best": {"metric": metric, "mode": "max"}}, **judged))
    for metric, changes in [("validation/loss", {}), ("accuracy", {}), ("grad_norm", judged)]:
        found = _errors({"metric": metric, "mode": "min"}, **changes)
        assert metric in found["/checkpoint/keep_best/metric"]
        assert "loss" in found["/checkpoint/keep_best/metric"]


@pytest.mark.parametrize(
    ("when", "place"),
    [
        ({"every_s": 0}, "/checkpoint/every_s"),
        ({"every_s": "often"}, "/checkpoint/every_s"),
        ({"keep_best": {"metric": "loss"}}, "/checkpoint/keep_best/mode"),
        ({"keep_best": {"metric": "loss", "mode": "up"}}, "/checkpoint/keep_best/mode"),
        ({"keep_best": {**LOWEST, "count": 0}}, "/checkpoint/keep_best/count"),
        ({"every_epochs": 1, "every_steps": 1}, "/checkpoint"),
    ],
)
def test_a_wrong_rule_is_refused_at_its_place(when, place):
    assert any(pointer.startswith(place) for pointer in errors(spec(checkpoint=when)))


def test_the_last_and_the_best_stay():
    best = {"metric": "validation/accuracy", "mode": "max", "count": 2}
    keeping = CheckpointRetention(Checkpoint.model_validate({"keep_last": 1, "keep_best": best}))
    values = [0.5, 0.9, float("nan"), 0.7, 0.8, 0.1]
    gone = [
        keeping.superseded(str(number), {"validation/accuracy": value})
        for number, value in enumerate(values)
    ]
    assert gone == [[], [], [], ["0", "2"], ["3"], []]
    keeping = CheckpointRetention(Checkpoint.model_validate({"keep_last": 1, "keep_best": LOWEST}))
    gone = [keeping.superseded(str(n), {"loss": value}) for n, value in enumerate([3, 1, 2, 1])]
    assert gone == [[], ["0"], [], ["2"]], "of equals the earlier one stays"


# --- the best is kept by default -----------------------------------------------------------------

JUDGED: dict[str, Any] = {
    "data": {"validation": {"dataset": "ds_1", "split": "test"}},
    "metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}],
}
EARLY = {"metric": "validation/accuracy", "mode": "max", "patience": 9}


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (JUDGED, ("validation/loss", "min")),
        ({**JUDGED, "checkpoint": {"keep_last": 1}}, ("validation/loss", "min")),
        ({**JUDGED, "stop": {"epochs": 2, "early": EARLY}}, ("validation/accuracy", "max")),
        ({**JUDGED, "checkpoint": {"keep_best": None}}, None),
        ({**JUDGED, "evaluate": None}, None),
        ({}, None),
    ],
)
def test_the_best_is_kept_by_early_stopping_s_metric_or_the_validation_loss(more, rule):
    resolved = planned(spec(**more))["spec"]
    best = resolved["checkpoint"]["keep_best"]
    assert (best and (best["metric"], best["mode"])) == rule
    again = planned(resolved)["spec"]
    assert again["checkpoint"] == resolved["checkpoint"], "what runs can be submitted again"


def test_a_job_that_saves_nothing_in_between_still_has_its_best_state(
    digits, tmp_path, monkeypatch
):
    """No time for a save before the end: the best is held, and not the newest."""
    monkeypatch.setattr(saving, "FREE_SAVES", 0)
    monkeypatch.setattr(saving, "MAX_SAVED_FRACTION", 0.0)
    monkeypatch.setattr(saving, "MAX_FRACTION", 1e9)
    growing = {"type": "ExponentialLR", "args": {"gamma": 2.0}}
    job = spec(**JUDGED, evaluate={"every_steps": 1}, scheduler=growing)
    records = run(tmp_path, job, digits)
    judged = {
        record["step"] + 1: record["values"]["validation/loss"]
        for record in of_type(records, "metrics")
        if "validation/loss" in record["values"]
    }
    best = min(judged, key=lambda step: judged[step])
    assert best != 10, "it got worse in the end"
    assert _steps(records) == [best, 10]
    held = of_type(records, "checkpoint")[0]
    assert held["metrics"]["validation/loss"] == judged[best]
    state = checkpoint.read_state(tmp_path / held["dir"])
    assert (state["step"], state["final"]) == (best, False)
    there = {"dir": str(tmp_path / held["dir"]), "step": best}
    rest = run(tmp_path / "rest", job, digits, resume=there)
    assert losses(rest) == losses(records)[best:]
    assert _steps(rest) == [10], "what was the best before is still better"
