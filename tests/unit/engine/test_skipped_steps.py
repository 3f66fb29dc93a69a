"""A step that is skipped makes no update: averages and schedules stay where they are.

As where somebody steps torch's scheduler and ``AveragedModel`` only behind an update that was made.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

from tests.unit.engine.runs import losses, of_type, run, spec, write_table

ROWS, SIZE, STEPS = 160, 16, 20
BAD = {3, 4, 8}
"""Of an epoch's ten steps those with a target that is NaN."""
LOW = {"precision": "float16", "grad_scaler": {"init_scale": 2.0**20, "growth_interval": 4}}
SKIPS = {"guards": {"nonfinite": {"action": "skip_step"}}}
AVERAGES = [
    {"type": "ema", "decay": 0.8},
    {"type": "swa", "start_step": 2},
    {"type": "window", "average_window_rate": 1.0, "min_average_window": 3,
     "max_average_window": 3},
]  # fmt: skip
SCHEDULERS: list[tuple[dict[str, Any], Any]] = [
    (
        {"type": "ExponentialLR", "args": {"gamma": 0.9}},
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    ),
    (
        {"type": "StepLR", "args": {"step_size": 2, "gamma": 0.5}, "unit": "epochs"},
        lambda o: lr_scheduler.StepLR(o, 20, 0.5),  # of 20 steps: never
    ),
    (
        {"type": "StepLR", "args": {"step_size": 5 * SIZE, "gamma": 0.5}, "unit": "samples"},
        lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    ),
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 5)).astype(np.float32)
    y = generator.normal(size=(ROWS, 2)).astype(np.float32)
    bad = y.copy()
    for step in BAD:
        bad[SIZE * step + 1, 0] = np.nan
    columns = {"x": x, "y": y, "bad": bad}
    return write_table(tmp_path_factory.mktemp("t"), columns, {"train": slice(None)})


def job(target: str = "y", **changes: Any) -> dict[str, Any]:
    network = {"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 2}}]}
    whole = spec(
        network=network,
        loss={"type": "MSELoss", "inputs": ["fc", target]},
        optimizer={"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9}},
        stop={"steps": STEPS},
        **changes,
    )
    fields = {name: {"type": "dense", "fill": "NaN"} for name in ("x", target)}
    whole["data"] |= {"fields": fields, "batch_size": SIZE, "shuffle": {"enabled": False}}
    return whole


class ByHand:
    """Plain torch: the scaler skips a step, or the caller that sees a loss of NaN or Inf."""

    def __init__(self, table: Path, target: str, make: Any = None, average: Any = None) -> None:
        x, y, bad = (torch.from_numpy(np.load(table / "train" / f"{n}.npy")) for n in range(3))
        target_of = {"y": y, "bad": bad}[target]
        torch.manual_seed(3)
        self.network = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(self.network.parameters(), 0.1, 0.9)
        scheduler = None if make is None else make(optimizer)
        scaler = torch.amp.GradScaler("cpu", **LOW["grad_scaler"], enabled=target == "y")
        self.rates: list[float] = []
        self.skipped: set[int] = set()
        kept: list[list[torch.Tensor]] = []
        for step in range(STEPS):
            rows = slice(SIZE * (step % 10), SIZE * (step % 10 + 1))
            with torch.autocast("cpu", dtype=torch.float16, enabled=target == "y"):
                found = self.network(x[rows])
            loss = nn.functional.mse_loss(found.float(), target_of[rows])
            self.rates.append(optimizer.param_groups[0]["lr"])
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            if loss.isfinite():
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if not loss.isfinite() or scaler.get_scale() < scale:
                self.skipped.add(step)
                continue
            if scheduler is not None:
                scheduler.step()
            if average is not None and step >= average.get("start_step", 0):
                kept.append([copy.deepcopy(p.detach()) for p in self.network.parameters()])
        self.averages = [self._average(average, list(each)) for each in zip(*kept, strict=True)]

    @staticmethod
    def _average(average: Any, kept: list[torch.Tensor]) -> torch.Tensor:
        if average["type"] == "ema":
            mean = kept[0]
            for item in kept[1:]:
                mean = 0.8 * mean + 0.2 * item
            return mean
        if average["type"] == "swa":
            return torch.stack(kept).double().mean(0).float()
        full = len(kept) // 3 * 3  # a window of three gives way to the next; the last two stay
        return torch.stack(kept[max(0, full - 3) :]).double().mean(0).float()


def rates_of(records: list[dict[str, Any]]) -> list[float]:
    return [r["values"]["lr"] for r in of_type(records, "metrics") if "loss" in r["values"]]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("number", range(len(SCHEDULERS)))
@pytest.mark.parametrize(("target", "why"), [("y", LOW), ("bad", SKIPS)])
def test_a_schedule_counts_the_updates_that_were_made(target, why, number, table, tmp_path):
    scheduler, make = SCHEDULERS[number]
    records = run(tmp_path, job(target, scheduler=scheduler, **why), table)
    expected = ByHand(table, target, make)
    assert len(expected.skipped) >= 3
    if target == "bad":
        assert {step % 10 for step in expected.skipped} == BAD
    assert rates_of(records) == pytest.approx(expected.rates, rel=1e-12)
    assert len(losses(records)) == STEPS


def test_a_schedule_of_epochs_counts_an_epoch_that_ends_with_a_skipped_step(table, tmp_path):
    scheduler = {"type": "StepLR", "args": {"step_size": 1, "gamma": 0.5}, "unit": "epochs"}
    whole = job("bad", scheduler=scheduler, **SKIPS)
    whole["data"] |= {"batch_size": 36, "drop_last": True}  # four steps; the last is bad
    whole["stop"] = {"steps": 12}
    rates = rates_of(run(tmp_path, whole, table))
    assert rates == [0.1] * 4 + [0.05] * 4 + [0.025] * 4


@pytest.mark.parametrize("number", range(len(AVERAGES)))
@pytest.mark.parametrize(("target", "why"), [("y", LOW), ("bad", SKIPS)])
def test_averages_are_of_the_updates_that_were_made(target, why, number, table, tmp_path):
    average = AVERAGES[number]
    run(tmp_path, job(target, average=average, **why), table)
    expected = ByHand(table, target, average=average)
    kept = load_file(tmp_path / f"checkpoints/step-{STEPS}/model.safetensors")
    newest = load_file(tmp_path / f"checkpoints/step-{STEPS}/newest.safetensors")
    for name, mean in zip(("weight", "bias"), expected.averages, strict=True):
        torch.testing.assert_close(kept[f"fc.{name}"], mean, rtol=1e-5, atol=1e-7)
        mine = dict(expected.network.named_parameters())[name].detach()
        assert torch.equal(newest[f"fc.{name}"], mine)


@pytest.mark.parametrize(("target", "why"), [("y", LOW), ("bad", SKIPS)])
def test_a_run_that_was_stopped_behind_a_skipped_step_resumes_bit_for_bit(
    target, why, table, tmp_path
):
    more = {"average": AVERAGES[0], "scheduler": SCHEDULERS[0][0], "checkpoint": {"every_steps": 1}}
    whole = job(target, **more, **why)
    whole["checkpoint"]["keep_last"] = 100
    records = run(tmp_path / "a", whole, table)
    for step in (4, 5, 9, 10):
        there = {"dir": str(tmp_path / f"a/checkpoints/step-{step}"), "step": step}
        again = run(tmp_path / str(step), whole, table, resume=there)
        assert rates_of(again) == rates_of(records)[step:]
        assert losses(again) == losses(records)[step:]
        both = [
            (tmp_path / at / f"checkpoints/step-{STEPS}/model.safetensors").read_bytes()
            for at in ("a", str(step))
        ]
        assert both[0] == both[1]
