"""Clipped gradients: the updates that torch makes by hand, and both points of the gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from engine.optim.gradient_clipping import Clip
from glasshouse.spec import GradClip
from tests.unit.engine.runs import captured, cnn, errors, losses, of_type, planned, run, spec

LIMITS = {"value": 0.002, "norm": 0.05, "global_norm": 0.2}
NAMES = {"0": "conv1", "5": "fc"}


def clip_by_hand(kind: str, network: nn.Module) -> float | None:
    limit = LIMITS[kind]
    if kind == "value":
        clip_grad_value_(network.parameters(), limit)
    elif kind == "global_norm":
        return float(clip_grad_norm_(network.parameters(), limit))
    else:
        for item in network.parameters():
            item.grad = item.grad * min(1.0, limit / (float(item.grad.norm()) + 1e-6))  # pyright: ignore
    return None


def by_hand(table: Any, kind: str, num_steps: int) -> tuple[list[float], dict[Any, Any], list[Any]]:
    """Losses, gradients at both points, and global norms."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.manual_seed(3)
    network = cnn()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003))
    told: list[float] = []
    gradients: dict[Any, Any] = {}
    norms: list[Any] = []
    for step in range(num_steps):
        rows = order[step * 64 : (step + 1) * 64]
        loss = nn.functional.cross_entropy(network(images[rows].float() / 255), labels[rows])
        loss.backward()
        for point in ("raw", "clipped"):
            if point == "clipped":
                norms.append(clip_by_hand(kind, network))
            for key, item in network.named_parameters():
                name = f"{NAMES[key[0]]}{key[1:]}"
                gradients[point, step, name] = item.grad.clone()  # pyright: ignore
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told.append(loss.item())
    return told, gradients, norms


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("point", ["raw", "clipped"])
def test_clipped_training_is_that_of_torch_and_both_points_can_be_seen(
    kind, point, digits, tmp_path
):
    probe = {"layers": ["*"], "kinds": ["param_grad", "update"], "every": 1, "point": point}
    clip = {"type": kind, "max": LIMITS[kind]}
    job = spec(grad_clip=clip, probes=[{**probe, "want": ["stats", "full"]}], stop={"steps": 4})
    records = run(tmp_path / "watched", job, digits)
    told, gradients, norms = by_hand(digits, kind, 4)
    same = pytest.approx(told, rel=1e-6) if kind == "norm" else told
    assert losses(records) == same
    assert losses(records) == losses(run(tmp_path / "plain", {**job, "probes": []}, digits))
    kept = captured(records, tmp_path / "watched")
    for (where, step, name), expected in gradients.items():
        if where == point:
            found = kept[step, name, "param_grad"]
            if kind == "norm":
                torch.testing.assert_close(found, expected)
            else:
                assert torch.equal(found, expected), (step, name)
    figures = [r["values"] for r in of_type(records, "metrics") if "loss" in r["values"]]
    if kind == "global_norm":
        assert [item["grad_norm"] for item in figures] == norms
        assert min(norms) > LIMITS[kind]  # else nothing was clipped
    else:
        assert all("grad_norm" not in item for item in figures)


def test_a_value_may_have_a_lower_end_of_its_own(digits, tmp_path):
    """PaddlePaddle's ClipGradByValue has both; clamp by hand."""
    low, high = -0.0004, 0.002
    images = torch.from_numpy(np.load(digits / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(digits / "train" / "1.npy"))
    torch.manual_seed(3)
    network = cnn()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    told: list[float] = []
    bites = {"low": 0, "high": 0}
    for epoch in range(10):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        for rows in order.split(64):
            loss = nn.functional.cross_entropy(network(images[rows].float() / 255), labels[rows])
            loss.backward()
            for item in network.parameters():
                bites["low"] += int((item.grad < low).sum())  # pyright: ignore
                bites["high"] += int((item.grad > high).sum())  # pyright: ignore
                item.grad.clamp_(low, high)  # pyright: ignore
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
    clip = {"type": "value", "max": high, "min": low}
    records = run(tmp_path / "job", spec(grad_clip=clip, stop={"epochs": 10}), digits)
    assert losses(records) == told
    assert min(bites.values()) > 0
    even = run(
        tmp_path / "even", spec(grad_clip={"type": "value", "max": high, "min": -high}), digits
    )
    plain = run(tmp_path / "plain", spec(grad_clip={"type": "value", "max": high}), digits)
    assert losses(even) == losses(plain)


def test_either_end_is_enough_for_a_step_to_count_as_clipped():
    gradient = torch.tensor([-0.5, 0.2])
    parameter = nn.Parameter(torch.zeros(2))
    for low, high, bites in ((-1.0, 0.1, True), (-0.4, 1.0, True), (-0.5, 0.2, False)):
        parameter.grad = gradient.clone()
        spec_ = GradClip(type="value", max=high, min=low)
        figures = Clip(spec_, [(spec_, [parameter])])()
        assert bool(figures["clipped_steps"]) == bites
        assert torch.equal(parameter.grad, gradient.clamp(low, high))


def test_both_ends_can_be_set_while_it_runs(digits, tmp_path):
    order = {"id": "cmd_1", "by": None, "set": {"grad_clip.min": -0.001, "grad_clip.max": 0.01}}
    old = {"grad_clip.min": 0.0, "grad_clip.max": 0.5}
    applied = order | {"step": 0, "old": old, "new": order["set"]}
    clip = {"type": "value", "max": 0.5, "min": 0}
    records = run(tmp_path / "a", spec(grad_clip=clip), digits, commands=[applied])
    set_from_the_start = spec(grad_clip={"type": "value", "max": 0.01, "min": -0.001})
    assert losses(records) == losses(run(tmp_path / "b", set_from_the_start, digits))


def test_a_norm_that_is_nan_or_inf_is_reported_and_training_continues(digits, tmp_path):
    job = spec(
        grad_clip={"type": "global_norm", "max": 1.0},
        optimizer={"type": "SGD", "args": {"lr": 1e30}},
        stop={"steps": 4},
    )
    records = run(tmp_path, job, digits)
    norms = [r["values"]["grad_norm"] for r in of_type(records, "metrics") if "loss" in r["values"]]
    assert len(norms) == 4
    assert norms[-1] in ("NaN", "Infinity")


def test_without_clipping_both_points_are_one(digits, tmp_path):
    probes = [
        {"layers": ["fc"], "kinds": ["param_grad"], "every": 1, "point": point, "want": ["full"]}
        for point in ("raw", "clipped")
    ]
    found = [
        captured(run(tmp_path / str(n), spec(probes=p), digits), tmp_path / str(n))
        for n, p in enumerate([probes[:1], probes[1:], probes])
    ]
    assert len(found[0]) == 20
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(item, other[key]) for key, item in found[0].items())


def test_one_gradient_at_two_points_is_refused():
    probes = [
        {"layers": ["fc"], "kinds": ["param_grad"], "every": 1},
        {"layers": ["conv1"], "kinds": ["param_grad"], "every": 1, "point": "clipped"},
        {"layers": ["*"], "kinds": ["output", "param_grad"], "every": 9, "point": "clipped"},
    ]
    clip = {"type": "value", "max": 1.0}
    assert len(planned(spec(probes=probes[:2], grad_clip=clip))["probes"]) == 2
    found = errors(spec(probes=probes, grad_clip=clip))
    assert list(found) == ["/probes/2/point"]
    assert "taken raw by probe 0" in found["/probes/2/point"]
    assert len(planned(spec(probes=probes))["probes"]) == 3


@pytest.mark.parametrize(
    ("clip", "pointer"),
    [
        ({"type": "value", "max": 0.0}, "/grad_clip/max"),
        ({"type": "norm", "max": -1.0}, "/grad_clip/max"),
        ({"type": "mean", "max": 1.0}, "/grad_clip/type"),
        ({"type": "value"}, "/grad_clip/max"),
        ({"type": "value", "max": 1.0, "min": 0.5}, "/grad_clip/min"),
        ({"type": "norm", "max": 1.0, "min": -0.5}, "/grad_clip/min"),
        ({"type": "global_norm", "max": 1.0, "min": 0.0}, "/grad_clip/min"),
    ],
)
def test_an_invalid_limit_is_refused(clip, pointer):
    assert list(errors(spec(grad_clip=clip))) == [pointer]
