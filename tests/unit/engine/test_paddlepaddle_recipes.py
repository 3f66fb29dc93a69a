"""Old numbers: the rules of PaddlePaddle's first version by their formulas, and the spec for each.

There gradients are sums over the batch, clipped element by element, then decayed. The page *From
PaddlePaddle* has two recipes: convert their numbers for the mean, or take the sum with theirs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.runs import losses, run, spec

BATCH, NUM_STEPS = 50, 30
LAYERS: list[dict[str, Any]] = [
    {"name": "flat", "type": "Flatten"},
    {"name": "hidden", "type": "Linear", "args": {"out_features": 12}},
    {"name": "tanh", "type": "Tanh"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
MEAN: dict[str, Any] = {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]}
SUM: dict[str, Any] = {**MEAN, "args": {"reduction": "sum"}}
State = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, State, int], Tensor]
"""What is added to a weight: of its summed gradient (decay included), itself, its state, step."""


def theirs(table: Path, rule: Rule, *, clip: float = 0.0, l2: float = 0.0, error: float = 0.0):
    """Costs by the formulas, each the mean over its batch, as they were printed."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy")).float() / 255
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.manual_seed(3)
    hidden, fc = nn.Linear(64, 12), nn.Linear(12, 10)
    weights = [*hidden.parameters(), *fc.parameters()]
    states: list[State] = [{} for _ in weights]
    told: list[float] = []
    for epoch in range(NUM_STEPS * BATCH // 300):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        for rows in order.split(BATCH):
            middle = torch.tanh(hidden(images[rows].flatten(1)))
            if error:
                middle.register_hook(lambda gradient: gradient.clamp(-error, error))
            cost = nn.functional.cross_entropy(fc(middle), labels[rows], reduction="sum")
            cost.backward()
            with torch.no_grad():
                for weight, state in zip(weights, states, strict=True):
                    gradient: Any = weight.grad
                    if clip:
                        gradient = gradient.clamp(-clip, clip)
                    weight.add_(rule(gradient + l2 * weight, weight, state, len(told) + 1))
                    weight.grad = None
            told.append(cost.item() / BATCH)
    return told


def ours(directory: Path, table: Path, loss: dict[str, Any], **changes: Any) -> list[float]:
    """The printed costs of a job."""
    layers = [{**item, **changes.get(item["name"], {})} for item in LAYERS]
    rest = {key: item for key, item in changes.items() if key not in {x["name"] for x in LAYERS}}
    whole = spec(
        network={"layers": layers},
        loss=loss,
        data={"batch_size": BATCH},
        stop={"steps": NUM_STEPS},
        **rest,
    )
    found = losses(run(directory, whole, table))
    return [item / BATCH for item in found] if loss is SUM else found


def momentum(lr: float, mu: float) -> Rule:
    """m ← μm - L(g + λw); w ← w + m."""

    def rule(gradient: Tensor, _weight: Tensor, state: State, _step: int) -> Tensor:
        state["m"] = mu * state.get("m", torch.zeros(())) - lr * gradient
        return state["m"]

    return rule


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_sums_are_means_with_the_rate_times_the_batch(mu, digits, tmp_path):
    """The FAQ's own numbers: lr 0.1/128 and L2 0.0005 · 128 are those of a mean, converted."""
    lr, clip, l2 = 0.0008, 1.5, 2.0
    expected = theirs(digits, momentum(lr, mu), clip=clip, l2=l2)
    args = {"lr": lr * BATCH, "momentum": mu, "weight_decay": l2 / BATCH}
    mean = ours(
        tmp_path / "mean", digits, MEAN,
        optimizer={"type": "SGD", "args": args},
        grad_clip={"type": "value", "max": clip / BATCH},
    )  # fmt: skip
    summed = ours(
        tmp_path / "sum", digits, SUM,
        optimizer={"type": "SGD", "args": {"lr": lr, "momentum": mu, "weight_decay": l2}},
        grad_clip={"type": "value", "max": clip},
    )  # fmt: skip
    assert mean == pytest.approx(expected, rel=1e-4)
    assert summed == pytest.approx(expected, rel=1e-4)
    unclipped = theirs(digits, momentum(lr, mu), l2=l2)
    undecayed = theirs(digits, momentum(lr, mu), clip=clip)
    for other in (unclipped, undecayed):  # else neither would be shown
        assert other != pytest.approx(expected, rel=1e-3)


def test_errors_are_clipped_at_their_threshold_over_the_batch(digits, tmp_path):
    """``error_clipping_threshold``, of a layer's output after its activation."""
    lr, error = 0.0008, 0.05
    expected = theirs(digits, momentum(lr, 0.0), error=error)
    sgd = {"type": "SGD", "args": {"lr": lr * BATCH}}
    clipped = {"output_grad_clip": error / BATCH}
    assert ours(tmp_path / "a", digits, MEAN, optimizer=sgd, tanh=clipped) == pytest.approx(
        expected, rel=1e-4
    )
    sgd = {"type": "SGD", "args": {"lr": lr}}
    clipped = {"output_grad_clip": error}
    assert ours(tmp_path / "b", digits, SUM, optimizer=sgd, tanh=clipped) == pytest.approx(
        expected, rel=1e-4
    )
    assert theirs(digits, momentum(lr, 0.0)) != pytest.approx(expected, rel=1e-3)


def adagrad(gradient: Tensor, _weight: Tensor, state: State, _step: int) -> Tensor:
    state["a"] = state.get("a", torch.zeros(())) + gradient**2
    return -0.05 * gradient / (state["a"] + 1e-6).sqrt()


def adadelta(gradient: Tensor, _weight: Tensor, state: State, _step: int) -> Tensor:
    zero = torch.zeros(())
    state["g"] = 0.95 * state.get("g", zero) + 0.05 * gradient**2
    change = gradient * ((state.get("x", zero) + 1e-6) / (state["g"] + 1e-6)).sqrt()
    state["x"] = 0.95 * state.get("x", zero) + 0.05 * change**2
    return -1.0 * change


def adam(gradient: Tensor, _weight: Tensor, state: State, step: int) -> Tensor:
    """The bias is corrected in the rate; ε is added to the root that is not corrected."""
    zero = torch.zeros(())
    state["m"] = 0.9 * state.get("m", zero) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", zero) + 0.001 * gradient**2
    rate = 0.01 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
    return -rate * state["m"] / (state["v"].sqrt() + 1e-8)


def adamax(gradient: Tensor, _weight: Tensor, state: State, step: int) -> Tensor:
    zero = torch.zeros(())
    state["m"] = 0.9 * state.get("m", zero) + 0.1 * gradient
    state["u"] = torch.maximum(0.999 * state.get("u", zero), gradient.abs())
    return -0.01 / (1 - 0.9**step) * state["m"] / state["u"].clamp(min=1e-30)


RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "adagrad": (adagrad, {"type": "Adagrad", "args": {"lr": 0.05, "eps": 1e-6}}),
    "adadelta": (
        adadelta,
        {"type": "Adadelta", "args": {"lr": 1.0, "rho": 0.95, "eps": 1e-6}},
    ),
    "adam": (adam, {"type": "Adam", "args": {"lr": 0.01}}),
    "adamax": (adamax, {"type": "Adamax", "args": {"lr": 0.01}}),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_that_do_not_depend_on_the_scale_keep_their_rate(name, digits, tmp_path):
    """Only the threshold is converted; sums with their numbers give the same."""
    rule, optimizer = RULES[name]
    expected = theirs(digits, rule, clip=1.5)
    summed = ours(
        tmp_path / "sum", digits, SUM, optimizer=optimizer, grad_clip={"type": "value", "max": 1.5}
    )
    assert summed == pytest.approx(expected, rel=5e-3)  # ε inside the root there
    if name == "adadelta":  # whose ε is of the size of its first steps
        return
    mean = ours(
        tmp_path / "mean", digits, MEAN, optimizer=optimizer,
        grad_clip={"type": "value", "max": 1.5 / BATCH},
    )  # fmt: skip
    assert mean == pytest.approx(expected, rel=2e-2)


def test_the_first_step_of_their_rmsprop_is_another(digits, tmp_path):
    """As the page says: centred, begun with the whole first square; torch's is larger at first."""

    def rmsprop(gradient: Tensor, _weight: Tensor, state: State, _step: int) -> Tensor:
        first = "a" not in state
        square, mean = gradient**2, gradient
        state["a"] = square if first else 0.95 * state["a"] + 0.05 * square
        state["f"] = 0.05 * mean if first else 0.95 * state["f"] + 0.05 * mean
        return -0.001 * gradient / (state["a"] - state["f"] ** 2 + 1e-6).sqrt()

    args = {"lr": 0.001, "alpha": 0.95, "eps": 1e-6, "centered": True}
    found = ours(tmp_path, digits, SUM, optimizer={"type": "RMSprop", "args": args})
    expected = theirs(digits, rmsprop)
    assert found[0] == pytest.approx(expected[0])
    assert found[1] < expected[1]
    assert found != pytest.approx(expected, rel=1e-3)
