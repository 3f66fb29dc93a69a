"""Every pair of options that a resume depends on, in runs that are stopped and resumed.

The options are combined pairwise: each value of an option meets each value of every other one in
at least one case. Every case is compared, bit for bit, with the run that was never interrupted.
The control, without one part of the state, is in ``test_resuming.py``.
"""

import itertools
import json
import signal
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint import saving
from engine.core.spool import read_frames
from engine.learner import tuning
from engine.process import rank
from engine.process.rank import Assignment
from engine.training.report import Outputs
from glasshouse.failpoints import chosen
from tests.unit.engine.processes import forking
from tests.unit.engine.runs import losses, of_type, planned, run, spec, write_job

DROPOUT = {"name": "drop", "type": "Dropout", "args": {"p": 0.25}}
LAYERS = [
    {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 6, "kernel_size": 3}},
    {"name": "norm", "type": "BatchNorm2d"},
    {"name": "relu1", "type": "ReLU"},
    {"name": "conv2", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 3}},
    {"name": "relu2", "type": "ReLU"},
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adagrad": {"lr": 0.05},
}
AVERAGES: dict[str, dict[str, Any]] = {
    "newest": {},
    "ema": {"average": {"type": "ema", "decay": 0.8}},
    "swa": {"average": {"type": "swa", "start_step": 2}},
    "window": {
        "average": {"type": "window", "min_average_window": 2, "max_average_window": 3},
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous_format": {},
    "channels_last": {"memory_format": "channels_last"},
    "tune": {"tune": True},
}
OPTIONS: dict[str, Sequence[Any]] = {
    "optimizer": tuple(OPTIMIZERS),
    "kernel": ("default", "foreach", "fused"),
    "layout": tuple(LAYOUTS),
    "precision": ("float32", "bfloat16", "float16"),
    "accumulate": (1, 4),
    "average": tuple(AVERAGES),
    "scheduler": (None, "OneCycleLR"),
    "dropout": (False, True),
    "shuffle": (False, True),
    "workers": (0, 2),
    "step": (3, 5),  # of two epochs of five: in the middle of one, and at its end
    "end": ("pause", "SIGKILL"),
}
PARTS = ("model", "newest", "averages", "optimizer", "generators")

Pair = tuple[tuple[str, Any], tuple[str, Any]]
Case = dict[str, Any]


def pairs_of(case: Mapping[str, Any]) -> list[Pair]:
    return list(itertools.combinations(case.items(), 2))


def all_pairs(options: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases in which each pair of values is met: greedy, and the same at each call."""
    missing = {
        pair: None
        for (one, values), (other, others) in itertools.combinations(options.items(), 2)
        for pair in itertools.product(((one, v) for v in values), ((other, v) for v in others))
    }
    cases: list[Case] = []
    while missing:
        case = dict(next(iter(missing)))
        for name in [name for name in options if name not in case]:
            case = max(
                ({**case, name: value} for value in options[name]),
                key=lambda one: sum(pair in missing for pair in pairs_of(_sorted(one, options))),
            )
        cases.append(_sorted(case, options))
        for pair in pairs_of(cases[-1]):
            missing.pop(pair, None)
    return cases


def _sorted(case: Case, options: Iterable[str]) -> Case:
    return {name: case[name] for name in options if name in case}


CASES = all_pairs(OPTIONS)


def job_of(case: Case) -> dict[str, Any]:
    args = dict(OPTIMIZERS[case["optimizer"]])
    if case["kernel"] != "default":
        args[case["kernel"]] = True
    more: dict[str, Any] = {**AVERAGES[case["average"]], **LAYOUTS[case["layout"]]}
    if case["scheduler"]:
        cycles = case["optimizer"] != "Adagrad"  # which has no momentum
        rates = {"max_lr": 2 * args["lr"], "cycle_momentum": cycles}
        more["scheduler"] = {"type": case["scheduler"], "args": rates}
    if case["precision"] == "float16":
        more["grad_scaler"] = {"init_scale": 2.0**10, "growth_interval": 2}
    shuffle = {"buffer_size": 128} if case["shuffle"] else {"enabled": False}
    return spec(
        network={"layers": [*LAYERS[:-1], *([DROPOUT] if case["dropout"] else []), LAYERS[-1]]},
        optimizer={"type": case["optimizer"], "args": args},
        precision=case["precision"],
        accumulate=case["accumulate"],
        data={
            "shuffle": shuffle,
            "workers": case["workers"],
            "batch_size": 64 // case["accumulate"],
        },
        checkpoint={"every_steps": case["step"], "every_s": None, "keep_last": 9},
        **more,
    )


class PauseAfter:
    """A control that asks for a pause once so many steps were reported."""

    wanted = None
    listen = None
    threads = None
    ends_as = "paused"

    def __init__(self, num_steps: int) -> None:
        self.orders: deque[dict[str, Any]] = deque()
        self.seen: list[dict[str, Any]] = []
        self._num_steps = num_steps

    @property
    def cancel_requested(self) -> bool:
        return len(losses(self.seen)) >= self._num_steps


def paused(directory: Path, step: int) -> list[dict[str, Any]]:
    """Run a job until it is paused; its records."""
    control = PauseAfter(step)
    assignment = Assignment.read(directory / "job.json")
    ended = rank.run(assignment, control=control, out=Outputs(directory, control.seen.append))
    assert ended.state == "paused"
    return control.seen


def killed(directory: Path) -> list[dict[str, Any]]:
    """Run a job in a process that is killed as soon as its first checkpoint is durable."""
    process = forking().Process(target=_die_at_the_first_checkpoint, args=(directory,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    return read_frames(directory / "spool", 0, 10**6)[0]


def _die_at_the_first_checkpoint(directory: Path) -> None:
    tuning.Tuned._times = _channels_last_wins
    saving.failpoint = chosen({"FAILPOINTS": "checkpoint.durable=kill"})
    rank.main(directory)


def _channels_last_wins(_self: object, once: Any, _device: object) -> dict[str, float]:
    once()
    return {"contiguous_format": 1.0, "channels_last": 0.5}


def test_each_pair_of_options_is_in_a_case():
    met = {pair for case in CASES for pair in pairs_of(case)}
    for (one, values), (other, others) in itertools.combinations(OPTIONS.items(), 2):
        for first, second in itertools.product(values, others):
            assert ((one, first), (other, second)) in met
    assert len(CASES) < 30, "so many are not needed"


@pytest.mark.parametrize(
    "case", CASES, ids=["-".join(str(value) for value in case.values()) for case in CASES]
)
@pytest.mark.long
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
):
    monkeypatch.setattr(tuning.Tuned, "_times", _channels_last_wins)
    step, job = case["step"], job_of(case)
    records = run(tmp_path / "whole", job, digits)
    whole = losses(records)
    meta = json.loads((digits / "meta.json").read_text())
    first = write_job(tmp_path / "first", planned(job, meta)["spec"], digits)
    said = losses(paused(first, step) if case["end"] == "pause" else killed(first))
    assert said == whole[: len(said)], "it is the same run"
    there = {"dir": str(first / "checkpoints" / f"step-{step}"), "step": step}
    rest = run(tmp_path / "rest", job, digits, resume=there)
    assert losses(rest) == whole[step:]
    assert not of_type(rest, "adjusted"), "what was chosen is not chosen again"
    mine, theirs = (tmp_path / name / "checkpoints" / "step-10" for name in ("rest", "whole"))
    for name in (f"{part}.safetensors" for part in PARTS):
        assert (mine / name).exists() == (theirs / name).exists()
        if (mine / name).exists():
            assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
