"""Derived series against torch by hand."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from engine.data.batches.rows import shuffled
from engine.metrics.derived import Derived
from engine.network.network import Network
from glasshouse.spec import TrainJob, parse_job
from tests.unit.engine.runs import (
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
)

PADDLE = {"type": "mean_abs_diff", "inputs": ["left", "right"], "every": 25}


def by_name(records: list, name: str) -> dict[int, float]:
    """A metric's values by step."""
    told = of_type(records, "metrics")
    return {r["step"]: r["values"][name] for r in told if name in r["values"]}


def batches(table, seed: int = 3, epochs: int = 2):
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    for epoch in range(epochs):
        order = shuffled(len(images), seed, epoch)
        for start in range(0, len(images), 64):
            rows = order[start : start + 64]
            yield images[rows].to(torch.float32) / 255, labels[rows]


TWO_HEADS = [
    {"name": "flat", "type": "Flatten"},
    {"name": "left", "type": "Linear", "args": {"out_features": 10}},
    {"name": "right", "type": "Linear", "args": {"out_features": 10}, "inputs": ["flat"]},
    {"name": "both", "type": "add", "inputs": ["left", "right"]},
]


def two_heads(**changes):
    loss = {"type": "CrossEntropyLoss", "inputs": ["both", "label"]}
    return spec(network={"layers": copy.deepcopy(TWO_HEADS)}, loss=loss, **changes)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 10), nn.Linear(64, 10)


def test_the_difference_of_two_layers_scores_every_25_batches(digits, tmp_path):
    """PaddlePaddle's own example: two lines of JSON."""
    job = two_heads(metrics=[PADDLE], stop={"epochs": 11})
    found = by_name(run(tmp_path, job, digits), "mean_abs_diff(left,right)")
    torch.manual_seed(3)
    heads = Heads()
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1, momentum=0.9)
    expected = {}
    for step, (x, y) in enumerate(batches(digits, epochs=11)):
        left, right = heads.left(x.flatten(1)), heads.right(x.flatten(1))
        if step % 25 == 0:
            expected[step] = (left - right).abs().mean().item()
        nn.functional.cross_entropy(left + right, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found == expected
    assert list(found) == [0, 25, 50]


EVERY_TYPE = [
    {"type": "mean_abs_diff", "inputs": ["left", "right"]},
    {"type": "mean_squared_diff", "inputs": ["left", "right"], "name": "mse"},
    {"type": "cosine_similarity", "inputs": ["left/output_grad", "right"]},
    {"type": "l2_ratio", "inputs": ["left.weight/update", "left.weight/param"], "name": "rate"},
    {"type": "l2_ratio", "inputs": ["left.weight/param_grad", "left.weight/param"]},
    {"type": "correct_fraction", "inputs": ["both", "label"]},
    {"type": "mean", "inputs": ["label"]},
    {"type": "l2", "inputs": ["right.bias/param_grad"]},
]


def test_each_type_equals_torch_by_hand_and_training_stays_bit_identical(digits, tmp_path):
    records = run(tmp_path / "a", two_heads(metrics=EVERY_TYPE), digits)
    assert losses(records) == losses(run(tmp_path / "b", two_heads(), digits))
    torch.manual_seed(3)
    heads = Heads()
    optimizer = torch.optim.SGD(heads.parameters(), lr=0.1, momentum=0.9)
    norm = torch.linalg.vector_norm
    for step, (x, y) in enumerate(batches(digits)):
        left, right = heads.left(x.flatten(1)), heads.right(x.flatten(1))
        left.retain_grad()
        nn.functional.cross_entropy(left + right, y).backward()
        with torch.no_grad():
            before = heads.left.weight.clone()
            grad = heads.left.weight.grad.clone()
            bias_grad = heads.right.bias.grad.clone()
            optimizer.step()
            update = heads.left.weight - before
            expected = {
                "mean_abs_diff(left,right)": (left - right).abs().mean(),
                "mse": (left - right).square().mean(),
                "cosine_similarity(left/output_grad,right)": (left.grad * right).sum()
                / (norm(left.grad) * norm(right)),
                "rate": norm(update) / norm(before),
                "l2_ratio(left.weight/param_grad,left.weight/param)": norm(grad) / norm(before),
                "correct_fraction(both,label)": ((left + right).argmax(1) == y).float().mean(),
                "mean(label)": y.float().mean(),
                "l2(right.bias/param_grad)": norm(bias_grad),
            }
        optimizer.zero_grad()
        for name, value in expected.items():
            assert by_name(records, name)[step] == pytest.approx(value.item(), rel=1e-6), name
        assert by_name(records, "rate")[step] == expected["rate"].item()


def test_what_an_in_place_layer_overwrites_is_seen_before_it(digits, tmp_path):
    metrics = [
        {"type": "mean", "inputs": ["conv1"]},
        {"type": "mean", "inputs": ["relu1"]},
        {"type": "mean_abs_diff", "inputs": ["conv1", "relu1"]},
    ]
    records = run(tmp_path, spec(metrics=metrics, stop={"steps": 1}), digits)
    torch.manual_seed(3)
    conv = nn.Conv2d(1, 6, 3)
    x, _ = next(batches(digits))
    with torch.no_grad():
        before = conv(x)
        after = before.relu()
    assert by_name(records, "mean(conv1)")[0] == before.mean().item()
    assert by_name(records, "mean(relu1)")[0] == after.mean().item()
    assert by_name(records, "mean_abs_diff(conv1,relu1)")[0] == (before - after).abs().mean().item()


def test_accuracy_may_be_named_and_be_due_on_some_steps(digits, tmp_path):
    metrics = [
        {"type": "accuracy", "inputs": ["fc", "label"], "name": "right", "every": 4},
        {"type": "accuracy", "inputs": ["fc", "label"]},
        {"type": "correct_fraction", "inputs": ["fc", "label"]},
    ]
    parts = {"validation": {"dataset": "ds_1", "split": "test"}}
    job = spec(metrics=metrics, data=parts, evaluate={"every_epochs": 1})
    records = run(tmp_path, job, digits)
    every = by_name(records, "accuracy")
    assert by_name(records, "right") == {step: every[step] for step in (0, 4, 8)}
    assert by_name(records, "correct_fraction(fc,label)") == pytest.approx(every)
    judged = by_name(records, "validation/right")
    assert judged == by_name(records, "validation/accuracy")
    assert list(judged) == [4, 9]
    assert not by_name(records, "validation/correct_fraction(fc,label)")


def test_a_statistic_of_an_empty_tensor_is_nan_and_training_continues(digits, tmp_path):
    job = spec(
        optimizer={"type": "SGD", "args": {"lr": 0.0}},
        metrics=[{"type": "l2_ratio", "inputs": ["fc.weight/update", "fc.bias/update"]}],
        stop={"steps": 2},
    )
    records = run(tmp_path, job, digits)
    assert list(by_name(records, "l2_ratio(fc.weight/update,fc.bias/update)").values()) == [
        "NaN",
        "NaN",
    ]


def test_leaves_of_a_tuple_and_gradients_of_its_first(tmp_path, digits):
    layers = [
        {"name": "rows", "type": "squeeze", "args": {"dim": 1}},
        {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 5, "batch_first": True}},
        {"name": "last", "type": "select", "args": {"dim": 1, "index": -1}, "inputs": ["lstm"]},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    metrics = [
        {"type": "l2", "inputs": ["lstm.1.0"]},
        {"type": "l2", "inputs": ["lstm"]},
        {"type": "l2", "inputs": ["lstm/output_grad"]},
        {"type": "l2", "inputs": ["last"]},
    ]
    job = spec(network={"layers": layers}, metrics=metrics, stop={"steps": 2})
    records = run(tmp_path, job, digits)
    assert by_name(records, "l2(lstm.1.0)") == pytest.approx(by_name(records, "l2(last)"))
    assert min(by_name(records, "l2(lstm/output_grad)").values()) > 0


def _network() -> tuple[Network, TrainJob]:
    metrics = [{"type": "mean", "inputs": ["fc"], "every": 3}]
    job = parse_job(json.dumps(planned(spec(metrics=metrics))["spec"]))
    return Network(job.network, ("fc",)), job


def test_no_hook_is_there_on_steps_that_are_not_due_and_none_stays(digits):
    network, job = _network()
    derived = Derived(network, job.metrics, emit=lambda _: None)
    x = {"image": torch.randn(2, 1, 8, 8), "label": torch.zeros(2, dtype=torch.int64)}

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in network.layers.values())

    seen = []
    for step in range(7):
        with derived.at(step, x):
            seen.append(hooks())
            network(x)
        assert hooks() == 0
        assert bool(derived.take()) == (step % 3 == 0)
    assert seen == [1, 0, 0, 1, 0, 0, 1]


def test_a_figure_that_cannot_be_computed_is_reported_and_switched_off(capfd):
    network, job = _network()
    told: list = []
    derived = Derived(network, job.metrics, emit=told.append)
    x = {"image": torch.randn(2, 1, 8, 8)}
    for step in range(0, 15, 3):
        with derived.at(step, x):
            pass  # the layer is never called
        assert derived.take() == {}
    assert [item["type"] for item in told] == ["dropped"] * 3
    assert "mean(fc)" in told[0]["what"]
    assert "off" in told[-1]["what"]
    assert "Traceback" in capfd.readouterr().err


def _metric(kind: str, *inputs: str, **more) -> dict:
    return {"metrics": [{"type": kind, "inputs": list(inputs), **more}]}


WRONG = {
    "no such layer": (_metric("mean", "zz"), "/metrics/0/inputs/0", "no layer or data field 'zz'"),
    "no such leaf": (_metric("mean", "fc.1"), "/metrics/0/inputs/0", "fc.1"),
    "no such parameter": (
        _metric("l2", "relu1.weight/param"), "/metrics/0/inputs/0", "no parameter"),
    "a parameter without its kind": (
        _metric("l2", "fc.weight"), "/metrics/0/inputs/0", "'fc.weight/param'"),
    "a gradient of data": (
        _metric("l2", "image/output_grad"), "/metrics/0/inputs/0", "no gradient reaches"),
    "two shapes": (_metric("mean_abs_diff", "fc", "flat"), "/metrics/0/inputs", "[64, 54]"),
    "scores and floats": (_metric("correct_fraction", "fc", "image"), "/metrics/0/inputs", "int"),
    "too many inputs": (_metric("mean", "fc", "flat"), "/metrics/0/inputs", "takes 1 input"),
    "too few inputs": (_metric("l2_ratio", "fc"), "/metrics/0/inputs", "takes 2 inputs"),
    "a kind that is none": (_metric("mean", "fc/weights"), "/metrics/0/inputs/0", "match"),
    "a type that is none": (_metric("median", "fc"), "/metrics/0/type", "mean_abs_diff"),
    "a name that is taken": (_metric("mean", "fc", name="loss"), "/metrics/0/name", "reserved"),
    "a name of the time": (_metric("mean", "fc", name="time/step"), "/metrics/0/name", "reserved"),
    "no interval": (_metric("mean", "fc", every=0), "/metrics/0/every", "greater than 0"),
    "the best of no accuracy": (_metric("mean", "fc", top_k=2), "/metrics/0/top_k", "top_k"),
    "an accuracy of gradients": (
        _metric("accuracy", "fc/output_grad", "label"), "/metrics/0/inputs/0", "outputs"),
    "one name twice": (
        {"metrics": [{"type": "mean", "inputs": [name], "name": "m"} for name in ("fc", "flat")]},
        "/metrics", "same"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_computed_is_refused_with_its_place(case):
    changes, pointer, part = WRONG[case]
    found = errors(spec(**changes))
    assert pointer in found, found
    assert part in found[pointer]


def test_a_layer_that_is_called_twice_has_an_output_of_each_call(digits, tmp_path):
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "square", "type": "Linear", "args": {"out_features": 64}},
        {"name": "again", "shared_with": "square"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    metrics = [
        {"type": "mean_abs_diff", "inputs": ["square", "again"]},
        {"type": "l2", "inputs": ["again/output_grad"]},
    ]
    job = spec(network={"layers": layers}, metrics=metrics, stop={"steps": 1})
    records = run(tmp_path, job, digits)
    torch.manual_seed(3)
    square, fc = nn.Linear(64, 64), nn.Linear(64, 10)
    x, y = next(batches(digits))
    once = square(x.flatten(1))
    twice = square(once)
    twice.retain_grad()
    nn.functional.cross_entropy(fc(twice), y).backward()
    difference = (once - twice).abs().mean().item()
    assert by_name(records, "mean_abs_diff(square,again)") == {0: difference}
    norm = torch.linalg.vector_norm(twice.grad).item()
    assert by_name(records, "l2(again/output_grad)") == {0: norm}


def test_clipping_reports_its_norm_beside_derived_series_of_the_raw_gradient(digits, tmp_path):
    job = spec(
        grad_clip={"type": "global_norm", "max": 1e-3},
        metrics=[{"type": "l2", "inputs": ["fc.weight/param_grad"]}],
        stop={"steps": 2},
    )
    records = run(tmp_path, job, digits)
    raw, whole = by_name(records, "l2(fc.weight/param_grad)"), by_name(records, "grad_norm")
    assert all(1e-3 < raw[step] <= whole[step] for step in (0, 1))
