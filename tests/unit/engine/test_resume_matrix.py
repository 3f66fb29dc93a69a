"""What may stand between a job and its going on exactly, each with each.

{dropout, shuffle, AdamW, OneCycleLR, accumulation, EMA, bfloat16} x workers {0, 2} x {mid-epoch,
epoch end} x {pause, SIGKILL}. The control, without one generator, is in ``test_resuming.py``.
"""

import json
import multiprocessing
import signal
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from engine import rank, saving
from engine.rank import Assignment
from engine.report import Outputs
from engine.spool import read_frames
from glasshouse.failpoints import chosen
from tests.unit.engine.making import CNN, losses, planned, run, spec, write_job

PLAIN = {"layers": [layer for layer in CNN if layer["type"] != "Dropout"]}
KINDS: dict[str, dict[str, Any]] = {
    "dropout": {},
    "shuffle": {"network": PLAIN, "optimizer": {"type": "SGD", "args": {"lr": 0.1}}},
    "AdamW": {"network": PLAIN, "optimizer": {"type": "AdamW", "args": {"lr": 0.01}}},
    "OneCycleLR": {
        "network": PLAIN,
        "scheduler": {"type": "OneCycleLR", "args": {"max_lr": 0.2}},
    },
    "accumulation": {"network": PLAIN, "accumulate": 4},
    "EMA": {"network": PLAIN, "average": {"type": "ema", "decay": 0.8}},
    "bfloat16": {"precision": "bfloat16"},
}
PLACES = {"mid-epoch": 3, "epoch end": 5}
"""The step at which it ends, of two epochs of five."""
IN_SHORT = {("dropout", 2, "mid-epoch"), ("EMA", 0, "epoch end")}
PARTS = ("model", "newest", "averages", "optimizer", "generators")


class PauseAfter:
    """A control that asks for a pause once so many steps were reported."""

    wanted = None
    ends_as = "paused"

    def __init__(self, num_steps: int) -> None:
        self.orders: deque[dict[str, Any]] = deque()
        self.seen: list[dict[str, Any]] = []
        self._num_steps = num_steps

    @property
    def cancel_requested(self) -> bool:
        return len(losses(self.seen)) >= self._num_steps


def job_of(kind: str, workers: int, step: int) -> dict[str, Any]:
    data = {"shuffle": {"buffer_size": 128}, "workers": workers}
    data["batch_size"] = 16 if kind == "accumulation" else 64
    saving_ = {"every_steps": step, "every_s": None, "keep_last": 9}
    return spec(**KINDS[kind], data=data, checkpoint=saving_)


def paused(directory: Path, step: int) -> list[dict[str, Any]]:
    """Run a job until it is paused; what it said."""
    control = PauseAfter(step)
    assignment = Assignment.read(directory / "job.json")
    ended = rank.run(assignment, control=control, out=Outputs(directory, control.seen.append))
    assert ended.state == "paused"
    return control.seen


def killed(directory: Path) -> list[dict[str, Any]]:
    """Run a job in a process that is killed as soon as its first checkpoint is durable."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine.rank"])
    process = context.Process(target=_die_at_the_first_checkpoint, args=(directory,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    return read_frames(directory / "spool", 0, 10**6)[0]


def _die_at_the_first_checkpoint(directory: Path) -> None:
    saving.failpoint = chosen({"FAILPOINTS": "checkpoint.durable=kill"})
    rank.main(directory)


@pytest.mark.parametrize("end", ["pause", "SIGKILL"])
@pytest.mark.parametrize(
    ("kind", "workers", "place"),
    [
        pytest.param(*case, marks=() if case in IN_SHORT else pytest.mark.slow)
        for case in ((k, w, p) for k in KINDS for w in (0, 2) for p in PLACES)
    ],
)
def test_what_comes_after_an_end_is_what_would_have_come(
    digits: Path, tmp_path: Path, kind: str, workers: int, place: str, end: str
):
    step = PLACES[place]
    job = job_of(kind, workers, step)
    whole = losses(run(tmp_path / "whole", job, digits))
    meta = json.loads((digits / "meta.json").read_text())
    first = write_job(tmp_path / "first", planned(job, meta)["spec"], digits)
    said = losses(paused(first, step) if end == "pause" else killed(first))
    assert said == whole[: len(said)], "it is the same run"
    there = {"dir": str(first / "checkpoints" / f"step-{step}"), "step": step}
    rest = run(tmp_path / "rest", job, digits, resume=there)
    assert losses(rest) == whole[step:]
    mine, theirs = (tmp_path / name / "checkpoints" / "step-10" for name in ("rest", "whole"))
    for name in (f"{part}.safetensors" for part in PARTS):
        assert (mine / name).exists() == (theirs / name).exists()
        if (mine / name).exists():
            assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
