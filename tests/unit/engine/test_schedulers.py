"""Learning rates: those of torch's schedulers, used by hand."""

import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from engine.optim.lr_schedulers import scheduler_classes
from engine.plan.catalog import section
from tests.unit.engine.runs import by_hand as by_hand_of
from tests.unit.engine.runs import errors, losses, of_type, planned, run, spec
from tests.unit.engine.test_commands import Scheduled, train, weights

# of 300 rows in batches of 20: 15 steps an epoch, 60 steps in all
DATA = {"batch_size": 20}
NUM_STEPS, PER_EPOCH = 60, 15
WARM = {"type": "LinearLR", "args": {"start_factor": 0.1, "total_iters": 5}}
ARGS: dict[str, dict[str, Any]] = {
    "ConstantLR": {"factor": 0.5, "total_iters": 7},
    "CosineAnnealingLR": {"T_max": 20, "eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {"T_0": 7, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 6, "mode": "triangular2"},
    "ExponentialLR": {"gamma": 0.95},
    "LinearLR": {"start_factor": 0.1, "total_iters": 10},
    "MultiStepLR": {"milestones": [5, 20, 21], "gamma": 0.5},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 60, "three_phase": True},
    "PolynomialLR": {"total_iters": 40, "power": 2.0},
    "StepLR": {"step_size": 9, "gamma": 0.3},
    "SWALR": {"swa_lr": 0.05, "anneal_epochs": 12, "anneal_strategy": "linear"},
}
WITHIN: dict[str, dict[str, Any]] = {
    "SequentialLR": {
        "schedulers": [WARM, {"type": "CosineAnnealingLR", "args": {"T_max": 55}}],
        "milestones": [5],
    },
    "ChainedScheduler": {
        "schedulers": [WARM, {"type": "ExponentialLR", "args": {"gamma": 0.9}}],
    },
}
LR = 0.1


def an_optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=LR, momentum=0.9)


def by_hand(name: str, units: list[int]) -> tuple[list[float], list[float]]:
    """Learning rates and momenta of steps that each advance by some units."""
    optimizer = an_optimizer()
    if name == "SequentialLR":
        warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=55)
        made: Any = lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[5])
    elif name == "ChainedScheduler":
        warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
        made = lr_scheduler.ChainedScheduler([warm, lr_scheduler.ExponentialLR(optimizer, 0.9)])
    else:
        cls = swa_utils.SWALR if name == "SWALR" else getattr(lr_scheduler, name)
        made = cls(optimizer, **ARGS[name])
    rates: list[float] = []
    momenta: list[float] = []
    for count in units:
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        for _ in range(count):
            made.step()
    return rates, momenta


def rates(records: list[dict[str, Any]]) -> list[float]:
    return [r["values"]["lr"] for r in of_type(records, "metrics") if "lr" in r["values"]]


def job(name: str, unit: str = "steps", **more: Any) -> dict[str, Any]:
    scheduler = {"type": name, "args": (ARGS | WITHIN)[name], "unit": unit}
    return spec(data={**spec()["data"], **DATA}, stop={"epochs": 4}, scheduler=scheduler, **more)


def test_every_scheduler_of_torch_is_known_and_tried_here():
    torchs = {
        name
        for name, item in vars(lr_scheduler).items()
        if isinstance(item, type) and issubclass(item, lr_scheduler.LRScheduler)
    } - {"LRScheduler", "_LRScheduler"}
    functions = {"LambdaLR", "MultiplicativeLR"}
    own = {"InverseTimeLR"}
    assert set(scheduler_classes()) == torchs - functions | {"SWALR"} | own
    assert set(scheduler_classes()) == set(ARGS | WITHIN) | {"ReduceLROnPlateau"} | own
    listed = {entry["name"]: entry["schema"] for entry in section("schedulers")}
    assert set(listed) == set(scheduler_classes())
    assert listed["StepLR"]["required"] == ["step_size"]
    assert "optimizer" not in listed["StepLR"]["properties"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ARGS, *WITHIN])
def test_the_learning_rate_of_each_step_is_that_of_torch(name, digits, tmp_path):
    records = run(tmp_path, job(name), digits)
    expected, momenta = by_hand(name, [1] * NUM_STEPS)
    assert rates(records) == expected
    state = json.loads((tmp_path / "checkpoints/step-60/state.json").read_text())
    if name in ("OneCycleLR", "CyclicLR"):  # they move the momentum too
        assert len(set(momenta)) > 1
        assert state["parts"]["optimizer"]["param_groups"][0]["momentum"] in momenta


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["StepLR", "SequentialLR", "CosineAnnealingWarmRestarts"])
@pytest.mark.parametrize("unit", ["epochs", "samples"])
def test_a_scheduler_can_count_epochs_and_rows(name, unit, digits, tmp_path):
    ends = [(step + 1) % PER_EPOCH == 0 for step in range(NUM_STEPS)]
    units = [int(end) for end in ends] if unit == "epochs" else [20] * NUM_STEPS
    assert rates(run(tmp_path, job(name, unit), digits)) == by_hand(name, units)[0]


A, B = 0.002, 0.75
PADDLE: dict[str, tuple[str, dict[str, Any], Any]] = {
    "poly": ("InverseTimeLR", {"gamma": A, "power": B}, lambda n: LR * (1 + A * n) ** -B),
    "caffe_poly": (
        "PolynomialLR",
        {"total_iters": 500, "power": B},
        lambda n: LR * (1 - n / 500) ** B if n < 500 else 0.0,
    ),
    "exp": ("ExponentialLR", {"gamma": 0.5 ** (1 / 300)}, lambda n: LR * 0.5 ** (n / 300)),
    "discexp": ("StepLR", {"step_size": 90, "gamma": 0.5}, lambda n: LR * 0.5 ** (n // 90)),
    "linear": (
        "LinearLR",
        {"start_factor": 1.0, "end_factor": 0.2, "total_iters": 400},
        lambda n: max(LR - 0.0002 * n, 0.02),
    ),
    "manual": (
        "MultiStepLR",
        {"milestones": [100, 250], "gamma": 0.5},
        lambda n: LR * (1 if n < 100 else 0.5 if n < 250 else 0.25),
    ),
}


@pytest.mark.parametrize("name", PADDLE)
def test_schedules_of_paddlepaddle_by_their_formulas(name, digits, tmp_path):
    """The table of the page; ``n`` samples before the step, 20 a step."""
    kind, args, rate = PADDLE[name]
    scheduler = {"type": kind, "args": args, "unit": "samples"}
    data = {**spec()["data"], **DATA}
    records = run(tmp_path, spec(data=data, stop={"epochs": 2}, scheduler=scheduler), digits)
    assert rates(records) == pytest.approx([rate(20 * step) for step in range(30)], abs=1e-12)


def test_weights_follow_the_schedule(digits, tmp_path):
    """What the metric says is what the update was made with."""
    halved = spec(stop={"steps": 3}, scheduler={"type": "ExponentialLR", "args": {"gamma": 0.5}})
    records = run(tmp_path / "a", halved | {"probes": [UPDATES]}, digits)
    plain = run(tmp_path / "b", spec(stop={"steps": 3}) | {"probes": [UPDATES]}, digits)
    first, second = (
        [row for r in of_type(one, "stats") for row in r["rows"] if row[1] == "update"]
        for one in (records, plain)
    )
    l2 = [entry[6] for entry in first], [entry[6] for entry in second]
    assert l2[0][0] == l2[1][0]
    assert l2[0][-1] < 0.5 * l2[1][-1]


UPDATES = {"layers": ["fc.weight"], "kinds": ["update"], "every": 1, "max_overhead": None}


def test_a_length_that_is_omitted_is_that_of_the_training(digits):
    def scheduler(**given: Any) -> dict[str, Any]:
        whole = planned(spec(data={**spec()["data"], **DATA}, stop={"epochs": 4}, scheduler=given))
        return whole["spec"]["scheduler"]

    one = scheduler(type="OneCycleLR", args={"max_lr": 1.0})
    assert one["args"] == {"max_lr": 1.0, "total_steps": 60}
    cosine = scheduler(type="CosineAnnealingLR", unit="epochs")
    assert cosine["args"] == {"T_max": 4}
    rows = scheduler(type="CosineAnnealingLR", unit="samples")
    assert rows["args"] == {"T_max": 1200}
    both = scheduler(
        type="SequentialLR",
        args={"schedulers": [WARM, {"type": "CosineAnnealingLR"}], "milestones": [5]},
    )
    assert both["args"]["schedulers"][1]["args"] == {"T_max": 55}


@pytest.mark.parametrize(
    ("scheduler", "pointer", "words"),
    [
        ({"type": "Cosine"}, "/scheduler/type", "torch has no scheduler"),
        ({"type": "LambdaLR"}, "/scheduler/type", "functions"),
        ({"type": "StepLR"}, "/scheduler/args/step_size", "needs"),
        ({"type": "StepLR", "args": {"T_max": 3}}, "/scheduler/args/T_max", "step_size"),
        ({"type": "StepLR", "args": {"step_size": "x"}}, "/scheduler/args/step_size", "integer"),
        ({"type": "StepLR", "args": {"step_size": 0}}, "/scheduler/args", "cannot continue"),
        (
            {"type": "OneCycleLR", "args": {"max_lr": 1.0, "total_steps": 5}},
            "/scheduler/args/total_steps",
            "training takes 10",
        ),
        ({"type": "ChainedScheduler"}, "/scheduler/args/schedulers", "list"),
        (
            {"type": "ChainedScheduler", "args": {"schedulers": []}},
            "/scheduler/args/schedulers",
            "must not be empty",
        ),
        (
            {"type": "ChainedScheduler", "args": {"schedulers": [{"type": "StepLR", "x": 1}]}},
            "/scheduler/args/schedulers/0/x",
            "no such field",
        ),
        (
            {"type": "ChainedScheduler", "args": {"schedulers": [{"type": "Nothing"}]}},
            "/scheduler/args/schedulers/0/type",
            "no scheduler",
        ),
        (
            {"type": "ChainedScheduler", "args": {"schedulers": [{"type": "StepLR"}]}},
            "/scheduler/args/schedulers/0/args/step_size",
            "needs",
        ),
        (
            {"type": "ChainedScheduler", "args": {"schedulers": [{"type": "CyclicLR"}]}},
            "/scheduler/args/schedulers/0/type",
            "one of several",
        ),
        (
            {"type": "SequentialLR", "args": {"schedulers": [WARM, WARM], "milestones": [5, 6]}},
            "/scheduler/args",
            "SequentialLR refuses",
        ),
        (  # the training takes 10 steps
            {
                "type": "SequentialLR",
                "args": {"schedulers": [WARM, {"type": "CosineAnnealingLR"}], "milestones": [10]},
            },
            "/scheduler/args/schedulers/1/args/T_max",
            "lower the milestones",
        ),
    ],
)
def test_an_invalid_scheduler_is_refused_with_its_place(scheduler, pointer, words):
    found = errors(spec(scheduler=scheduler))
    [(where, detail)] = found.items()
    assert where.startswith(pointer)
    assert words in detail


def test_without_a_known_length_it_must_be_given():
    found = errors(spec(stop={"seconds": 5.0}, scheduler={"type": "CosineAnnealingLR"}))
    assert "not known" in found["/scheduler/args/T_max"]


JUDGED = {
    "data": {**spec()["data"], "validation": {"dataset": "ds_1", "split": "test"}},
    "evaluate": {"every_steps": 1},
}
PLATEAU = {
    "type": "ReduceLROnPlateau",
    "metric": "validation/loss",
    "args": {"patience": 0, "factor": 0.5, "threshold": 0.05},
}


def test_a_plateau_is_judged_by_the_evaluations(digits, tmp_path):
    records = run(tmp_path, spec(**JUDGED, stop={"steps": 12}, scheduler=PLATEAU), digits)
    judged = [
        r["values"]["validation/loss"]
        for r in of_type(records, "metrics")
        if "validation/loss" in r["values"]
    ]
    optimizer = an_optimizer()
    by_torch = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.05)
    expected: list[float] = []
    for loss in judged:
        expected.append(optimizer.param_groups[0]["lr"])
        by_torch.step(loss)
    assert rates(records) == expected
    assert expected[-1] < LR  # else nothing was judged


def test_a_plateau_needs_a_metric_that_evaluations_give():
    found = errors(spec(**JUDGED, scheduler=PLATEAU | {"metric": "validation/accuracy"}))
    assert "validation/loss" in found["/scheduler/metric"]


def test_another_rate_is_another_base_of_the_schedule(digits, tmp_path):
    """``set optimizer.lr`` in the middle: what follows is scaled, and the event says the bases."""
    order = {"id": "cmd_1", "set": {"optimizer.lr": 0.2}}
    scheduler = {"type": "ExponentialLR", "args": {"gamma": 0.9}}
    _, records = train(tmp_path, digits, {4: [order]}, scheduler=scheduler)
    found = rates(records)
    assert found[:4] == pytest.approx([0.1 * 0.9**step for step in range(4)])
    assert found[4:] == pytest.approx([0.2 * 0.9**step for step in range(4, 10)])
    [told] = of_type(records, "command")
    assert (told["state"], told["old"], told["new"]) == (
        "applied",
        {"optimizer.lr": 0.1},
        {"optimizer.lr": 0.2},
    )


def annealed(step: int, lr: float, swa_lr: float, *, over: int, strategy: str) -> float:
    """SWALR in closed form: from ``lr`` to ``swa_lr``, along a line or half a cosine."""
    part = min(1.0, step / over)
    alpha = part if strategy == "linear" else (1 - math.cos(math.pi * part)) / 2
    return swa_lr * alpha + lr * (1 - alpha)


class Remembering(Scheduled):
    """By hand: the parameters after each update are kept."""

    def __init__(self, parameters: Any, rates: dict[int, float]) -> None:
        self.seen: list[list[torch.Tensor]] = []
        super().__init__(parameters, rates)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.seen.append([item.detach().clone() for item in self.param_groups[0]["params"]])


@pytest.mark.parametrize("strategy", ["linear", "cos"])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_another_rate_scales_swa_lr_and_the_average_is_of_what_follows(
    at, strategy, digits, tmp_path
):
    """Set during the annealing over 5 steps, before it and after it; 10 steps in all."""
    order = {"id": "cmd_1", "set": {"optimizer.lr": 0.2}}
    args = {"swa_lr": 0.04, "anneal_epochs": 5, "anneal_strategy": strategy}
    more = {"average": {"type": "swa", "start_step": 4}, "stop": {"steps": 10}}
    scheduler = {"type": "SWALR", "args": args}
    _, records = train(tmp_path, digits, {at: [order]}, scheduler=scheduler, **more)
    rule = partial(annealed, over=5, strategy=strategy)
    expected = [rule(n, 0.1, 0.04) if n < at else rule(n, 0.2, 0.08) for n in range(10)]
    assert rates(records) == pytest.approx(expected, rel=1e-12)
    made: list[Remembering] = []

    def optimizer(parameters: Any) -> Remembering:
        made.append(Remembering(parameters, dict(enumerate(expected))))
        return made[0]

    expected_losses, newest = by_hand_of(digits, optimizer)
    assert losses(records) == pytest.approx(expected_losses, rel=1e-5)
    found = weights(tmp_path, records)
    averages = [torch.stack(items).mean(0) for items in zip(*made[0].seen[4:], strict=True)]
    for name, average in zip(newest, averages, strict=True):
        torch.testing.assert_close(found[name], average, rtol=1e-4, atol=1e-6)


def test_a_rate_set_before_the_first_step_is_that_of_a_job_that_has_it_from_the_start(
    digits, tmp_path
):
    """``swa_lr`` goes with it, so the other job has the scaled one."""
    order = {"id": "cmd_1", "set": {"optimizer.lr": 0.2}}
    more = {"average": {"type": "swa", "start_step": 4}, "stop": {"steps": 10}}
    args = {"swa_lr": 0.04, "anneal_epochs": 5}
    _, changed = train(
        tmp_path / "a", digits, orders=[order], scheduler={"type": "SWALR", "args": args}, **more
    )
    _, direct = train(
        tmp_path / "b",
        digits,
        scheduler={"type": "SWALR", "args": args | {"swa_lr": 0.08}},
        optimizer={"type": "SGD", "args": {"lr": 0.2, "momentum": 0.9}},
        **more,
    )
    assert rates(changed) == pytest.approx(rates(direct), rel=1e-12)
    assert losses(changed) == pytest.approx(losses(direct), rel=1e-5)
    of_changed, of_direct = weights(tmp_path / "a", changed), weights(tmp_path / "b", direct)
    assert of_changed.keys() == of_direct.keys()
    for name, item in of_direct.items():
        torch.testing.assert_close(of_changed[name], item, rtol=1e-4, atol=1e-6)


def test_a_schedule_that_makes_its_own_rate_does_not_take_another(digits, tmp_path):
    order = {"id": "cmd_1", "set": {"optimizer.lr": 0.2}}
    scheduler = {"type": "OneCycleLR", "args": {"max_lr": 0.1}}
    _, records = train(tmp_path, digits, {4: [order]}, scheduler=scheduler)
    [told] = of_type(records, "command")
    assert told["state"] == "rejected"
    assert told["problem"]["pointer"] == "/set/optimizer.lr"


def test_training_that_was_made_longer_keeps_the_last_rate_of_one_cycle(digits, tmp_path):
    order = {"id": "cmd_1", "set": {"stop.epochs": 3}}
    scheduler = {"type": "OneCycleLR", "args": {"max_lr": 0.1}}
    _, records = train(tmp_path, digits, {4: [order]}, scheduler=scheduler)
    found = rates(records)
    assert len(found) == 15
    assert len(set(found[10:])) == 1
    assert found[10] < min(found[:9])


def test_a_job_that_continues_from_another_is_where_its_schedule_would_be(digits, tmp_path):
    step = {"type": "StepLR", "args": {"step_size": 2, "gamma": 0.5}}
    run(tmp_path / "a", spec(scheduler=step, checkpoint={"every_steps": 1}), digits)
    there = {"dir": str(tmp_path / "a/checkpoints/step-5")}
    faster = {"type": "StepLR", "args": {"step_size": 1, "gamma": 0.5}}
    init = {"checkpoint": "ckpt_x", "load": "all"}
    resolved = planned(spec(scheduler=step), None)["spec"]
    more = {"checkpoint": there, "trained_by": resolved}
    records = run(tmp_path / "b", spec(scheduler=faster, init=init), digits, **more)
    assert rates(records) == pytest.approx([LR * 0.5**k for k in range(5, 10)])
