"""Which settings can be changed while a job trains, against torch itself."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from engine.core.problems import SpecProblems
from engine.optim.optimizers import build_optimizer, optimizer_classes
from engine.plan.plan import parse_spec
from engine.process.planner import answer
from engine.training.settable import changed_job, optimizer_settings, settable
from glasshouse.spec import Optimizer, TrainJob
from tests.unit.engine.runs import planned, spec

EFFECTIVE = {"lr", "weight_decay", "betas", "momentum", "alpha", "rho", "lambd"}


def job(**changes: Any) -> TrainJob:
    parsed = parse_spec(planned(spec(**changes))["spec"])
    assert isinstance(parsed, TrainJob)
    return parsed


def refused(job: TrainJob, changes: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(SpecProblems) as caught:
        changed_job(job, changes)
    (found,) = caught.value.problems
    return found.pointer, found.detail


def optimizer(name: str) -> Optimizer:
    args = {"momentum": 0.9} if name in {"SGD", "RMSprop"} else {}
    return Optimizer(type=name, args=args)


def steps(made: torch.optim.Optimizer, count: int, *, sparse: bool) -> None:
    (parameter,) = made.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        grad = torch.randn((4, 4), generator=generator)
        parameter.grad = grad.to_sparse(1) if sparse else grad
        made.step()


@pytest.mark.parametrize("name", sorted(optimizer_classes()))
def test_what_can_be_set_of_an_optimizer_changes_what_it_does(name: str):
    known = optimizer(name)
    for setting in sorted(EFFECTIVE.intersection(optimizer_settings(known))):
        twins = [build_optimizer(known, [nn.Parameter(torch.ones(4, 4))]) for _ in range(2)]
        for made in twins:
            steps(made, 2, sparse=name == "SparseAdam")
        group = twins[1].param_groups[0]
        value = group[setting]
        other = tuple(part / 2 for part in value) if isinstance(value, tuple) else value / 2 + 0.01
        group[setting] = other
        for made in twins:
            steps(made, 3, sparse=name == "SparseAdam")
        first, second = (made.param_groups[0]["params"][0] for made in twins)
        is_of_the_average = (name, setting) == ("ASGD", "alpha")  # which is not used here
        assert is_of_the_average or not torch.equal(first, second), (name, setting)


def test_what_torch_reads_at_its_first_step_only_cannot_be_set():
    assert "lr" not in optimizer_settings(Optimizer(type="Rprop"))
    assert "initial_accumulator_value" not in optimizer_settings(Optimizer(type="Adagrad"))


def test_the_paths_are_those_of_the_spec():
    found = settable(job(grad_clip={"type": "value", "max": 1.0}))
    assert {"optimizer.lr", "optimizer.momentum", "optimizer.weight_decay"} <= set(found)
    assert {"grad_clip.max", "stop.epochs"} <= set(found)
    assert "optimizer.nesterov" not in found
    assert not {"stop.steps", "evaluate.every_steps", "seed"} & set(found)


def test_a_changed_job_is_the_job_with_the_new_values():
    changed = changed_job(job(), {"optimizer.lr": 0.5, "stop.epochs": 7})
    assert changed.optimizer.args == {"lr": 0.5, "momentum": 0.9}
    assert changed.stop.epochs == 7
    assert changed.data == job().data


@pytest.mark.parametrize(
    ("changes", "pointer", "why"),
    [
        ({"optimizer.lr": -1.0}, "/set/optimizer.lr", "Invalid learning rate"),
        ({"optimizer.lr": "fast"}, "/set/optimizer.lr", "must be number"),
        ({"optimizer.lr": None}, "/set/optimizer.lr", "must be number"),
        ({"optimizer.nesterov": True}, "/set/optimizer.nesterov", "optimizer.lr"),
        ({"optimizer.speed": 1}, "/set/optimizer.speed", "optimizer.momentum"),
        ({"stop.steps": 5}, "/set/stop.steps", "stop.epochs"),
        ({"stop.epochs": 0}, "/set/stop.epochs", "at least 1"),
        ({"stop.epochs": 1.5}, "/set/stop.epochs", "whole number"),
        ({"grad_clip.max": 1.0}, "/set/grad_clip.max", "cannot be changed"),
        ({"seed": 4}, "/set/seed", "cannot be changed"),
        ({"probes.prb_1.every": 4}, "/set/probes.prb_1.every", "PATCH"),
        ({"a/b~c": 4}, "/set/a~1b~0c", "cannot be changed"),
        ({}, "/set", "at least one"),
    ],
)
def test_what_cannot_be_set_is_named_with_the_reason(
    changes: dict[str, Any], pointer: str, why: str
):
    found, detail = refused(job(), changes)
    assert found == pointer
    assert why in detail


def test_an_optimizer_that_keeps_nothing_for_it_refuses_a_momentum():
    plain = job(optimizer={"type": "RMSprop", "args": {"lr": 0.01}})
    pointer, detail = refused(plain, {"optimizer.momentum": 0.9})
    assert pointer == "/set/optimizer.momentum"
    assert "fork" in detail
    started_so = job(optimizer={"type": "RMSprop", "args": {"lr": 0.01, "momentum": 0.1}})
    assert changed_job(started_so, {"optimizer.momentum": 0.9}).optimizer.args["momentum"] == 0.9


def test_checking_draws_no_random_number():
    before = torch.get_rng_state()
    changed_job(job(), {"optimizer.lr": 0.5})
    assert torch.equal(before, torch.get_rng_state())


def test_the_planner_answers_for_the_api():
    asked = {"id": 3, "do": "set", "spec": planned(spec())["spec"]}
    good = answer(json.loads(json.dumps(asked | {"set": {"optimizer.lr": 0.2}})))
    assert good["ok"]
    assert "optimizer.lr" in good["settable"]
    bad = answer(asked | {"set": {"optimizer.lr": -0.2}})
    assert not bad["ok"]
    assert bad["errors"][0]["pointer"] == "/set/optimizer.lr"
