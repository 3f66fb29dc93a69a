"""Clipped gradients: the updates that torch makes by hand, and both points of the gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.unit.engine.making import captured, cnn, errors, losses, of_type, planned, run, spec

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


def test_a_norm_that_is_not_finite_is_told_and_training_goes_on(digits, tmp_path):
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
        ({"type": "value", "max": 1.0, "min": 0.0}, "/grad_clip/min"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(clip, pointer):
    assert list(errors(spec(grad_clip=clip))) == [pointer]
