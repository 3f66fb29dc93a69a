"""Saving while training goes on: what is saved, when, and what an error does."""

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

from engine import checkpoint, saving
from engine.keeping import Keeping
from engine.saving import Saver
from engine.spool import read_frames
from engine.stateful import OptimizerState, Weights
from glasshouse.spec import Checkpoint, TrainJob, parse_job
from tests.unit.engine.making import errors, losses, of_type, planned, run, spec, write_job

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
    assert not bench.records, "it was told of before it was durable"
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


def test_by_time_nobody_waits_for_the_slot(tmp_path, gate):
    held, _ = gate
    bench = Bench(tmp_path, every_steps=10, every_s=1e-9)
    assert bench.saver.wants(due=False)
    bench.save(1)
    assert not bench.saver.wants(due=False)
    assert bench.saver.wants(due=True)
    held.set()
    bench.saver.wait()
    assert bench.saver.wants(due=False)


def test_without_time_only_what_is_due_is_saved(tmp_path):
    saver = Bench(tmp_path, every_steps=10, every_s=None).saver
    assert not saver.wants(due=False)
    assert saver.wants(due=True)
    assert not Bench(tmp_path, every_steps=10).saver.wants(due=False), "300 s have not passed"


def test_ends_of_epochs_that_nobody_named_may_take_a_small_part_of_the_time(tmp_path, gate):
    held, _ = gate
    held.set()
    named, unnamed = Bench(tmp_path / "a", every_epochs=1), Bench(tmp_path / "b")
    for bench in (named, unnamed):
        for step in range(saving.FREE_SAVES):
            assert bench.saver.wants(due=True)
            bench.save(step)
            bench.saver.wait()
        bench.saver._spent_s = 1e9  # as if writing had taken nearly all the time
    assert named.saver.wants(due=True)
    assert not unnamed.saver.wants(due=True)


def test_a_save_that_is_waited_for_is_there_and_raises_what_prevents_it(tmp_path):
    bench = Bench(tmp_path)
    bench.save(1, wait=True)
    assert [record["step"] for record in bench.records] == [1]
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    (tmp_path / "checkpoints").write_text("a file where the directory was")
    with pytest.raises(OSError, match="checkpoints"):
        bench.save(2, wait=True)


def test_a_save_that_fails_is_told_and_the_next_one_works(tmp_path, capfd):
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
from engine.rank import Assignment, run
from engine.report import Outputs
from engine.spool import SpoolWriter

directory, from_step, to_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
spool = SpoolWriter(directory / "spool")

class Control:
    cancel_requested, ends_as, wanted, orders = False, "cancelled", None, ()

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


def test_no_room_for_a_checkpoint_ends_nothing_and_harms_nothing(digits, tmp_path):
    """The kernel refuses to write: what was there stays, training goes on, the next one is made."""
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


LEAST = {"metric": "loss", "mode": "min"}


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
        ({"keep_best": {**LEAST, "count": 0}}, "/checkpoint/keep_best/count"),
        ({"every_epochs": 1, "every_steps": 1}, "/checkpoint"),
    ],
)
def test_a_wrong_rule_is_refused_at_its_place(when, place):
    assert any(pointer.startswith(place) for pointer in errors(spec(checkpoint=when)))


def test_the_last_and_the_best_stay():
    best = {"metric": "validation/accuracy", "mode": "max", "count": 2}
    keeping = Keeping(Checkpoint.model_validate({"keep_last": 1, "keep_best": best}))
    values = [0.5, 0.9, float("nan"), 0.7, 0.8, 0.1]
    gone = [
        keeping.superseded(str(number), {"validation/accuracy": value})
        for number, value in enumerate(values)
    ]
    assert gone == [[], [], [], ["0", "2"], ["3"], []]
    keeping = Keeping(Checkpoint.model_validate({"keep_last": 1, "keep_best": LEAST}))
    gone = [keeping.superseded(str(n), {"loss": value}) for n, value in enumerate([3, 1, 2, 1])]
    assert gone == [[], ["0"], [], ["2"]], "of equals the earlier one stays"
