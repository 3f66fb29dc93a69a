"""Mixed precision: what torch.autocast does by hand, and float32 where sums are made."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.core import precision
from tests.unit.engine.runs import (
    CNN,
    by_hand,
    captured,
    cnn,
    losses,
    of_type,
    planned,
    run,
    spec,
)

LOW = {"precision": "bfloat16"}


def autocast_by_hand(table: Any, num_steps: int) -> tuple[list[float], nn.Module]:
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.manual_seed(3)
    network = cnn()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003))
    told: list[float] = []
    for rows in order.split(64)[:num_steps]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = network(images[rows].float() / 255)
        assert scores.dtype == torch.bfloat16
        loss = nn.functional.cross_entropy(scores.float(), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told, network


def test_training_is_that_of_autocast_by_hand_bit_for_bit(digits, tmp_path):
    records = run(tmp_path, spec(**LOW, stop={"steps": 5}), digits)
    told, network = autocast_by_hand(digits, 5)
    assert losses(records) == told
    kept = load_file(tmp_path / "checkpoints" / "step-5" / "model.safetensors")
    assert all(item.dtype == torch.float32 for item in kept.values())
    assert torch.equal(kept["fc.weight"], network[5].weight)  # pyright: ignore
    exact, _ = by_hand(digits, lambda p: torch.optim.SGD(p, 0.1, 0.9), steps=5)
    assert told != exact
    assert told == pytest.approx(exact, rel=0.02)


def test_evaluations_are_in_the_same_precision_and_their_loss_in_float32(digits, tmp_path):
    data = {"validation": {"dataset": "ds_1", "split": "test"}}
    whole = spec(**LOW, data=data, evaluate={"every_epochs": 1}, stop={"steps": 5})
    records = run(tmp_path, whole, digits)
    _, network = autocast_by_hand(digits, 5)
    network.eval()
    images = torch.from_numpy(np.load(digits / "test" / "0.npy")).float() / 255
    labels = torch.from_numpy(np.load(digits / "test" / "1.npy"))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        sums = [
            nn.functional.cross_entropy(network(x).float(), y, reduction="sum").double()
            for x, y in zip(images.split(64), labels.split(64), strict=True)
        ]
    found = of_type(records, "metrics")[-1]["values"]
    found = next(
        r["values"] for r in of_type(records, "metrics") if "validation/loss" in r["values"]
    )
    assert found["validation/loss"] == pytest.approx(float(sum(sums)) / len(labels), rel=1e-6)


def test_sampled_rows_and_metrics_of_evaluations_are_float32(digits, tmp_path):
    """numpy has no bfloat16; and a sum over many rows needs the bits."""
    metric = {"type": "MulticlassHingeLoss", "args": {"num_classes": 10}, "inputs": ["fc", "label"]}
    data = {"validation": {"dataset": "ds_1", "split": "test"}}
    when = {"every_epochs": 1, "samples": 97}
    whole = spec(**LOW, data=data, evaluate=when, metrics=[metric], stop={"steps": 5})
    records = run(tmp_path, whole, digits)
    (kept,) = [load_file(tmp_path / r["file"]) for r in of_type(records, "artifact")]
    assert kept["fc"].dtype == torch.float32
    found = next(
        r["values"] for r in of_type(records, "metrics") if "validation/loss" in r["values"]
    )
    scores, rows = kept["fc"].softmax(1).double(), torch.arange(97)
    best = scores.clone()
    best[rows, kept["label"]] = -1
    hinge = (1 - scores[rows, kept["label"]] + best.max(1).values).clamp(min=0).mean()
    assert found["validation/MulticlassHingeLoss"] == pytest.approx(float(hinge), rel=1e-5)


def test_what_is_watched_has_the_type_that_it_was_computed_in(digits, tmp_path):
    kinds = ["output", "output_grad", "param", "param_grad"]
    probe = {"layers": ["fc", "conv1"], "kinds": kinds, "every": 1, "want": ["stats", "full"]}
    whole = spec(**LOW, stop={"steps": 2})
    records = run(tmp_path / "seen", {**whole, "probes": [probe]}, digits)
    assert losses(records) == losses(run(tmp_path / "plain", whole, digits))
    seen = captured(records, tmp_path / "seen")
    assert seen[0, "fc", "output"].dtype == seen[0, "fc", "output_grad"].dtype == torch.bfloat16
    assert seen[0, "fc.weight", "param"].dtype == torch.float32
    assert seen[0, "fc.weight", "param_grad"].dtype == torch.float32


@pytest.mark.parametrize("has_it", [True, False])
def test_auto_is_bfloat16_where_the_device_multiplies_it(has_it, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda _device: has_it)
    records = run(tmp_path, spec(precision="auto", stop={"steps": 3}), digits)
    plain = spec(precision="bfloat16" if has_it else "float32", stop={"steps": 3})
    assert losses(records) == losses(run(tmp_path / "plain", plain, digits))
    (told,) = of_type(records, "adjusted")
    del told["at"]
    to = plain["precision"]
    assert told == {
        "type": "adjusted",
        "what": "precision",
        "from": "auto",
        "to": to,
        "by": "device",
        "step": 0,
    }


def test_what_auto_is_is_reported_once_unless_it_is_something_else_now(
    digits, tmp_path, monkeypatch
):
    """A resumed job does not repeat its precision, except on a machine that chooses another one."""

    def adjustments_of(name: str, has_it: bool, **more: Any) -> list[tuple[Any, ...]]:
        monkeypatch.setattr(precision, "multiplies_bfloat16", lambda _device: has_it)
        records = run(tmp_path / name, job, digits, **more)
        return [(item["from"], item["to"], item["step"]) for item in of_type(records, "adjusted")]

    def after(name: str, step: int) -> dict[str, Any]:
        return {"dir": str(tmp_path / name / f"checkpoints/step-{step}"), "step": step}

    each = {"every_steps": 1, "keep_last": 9}
    job = spec(precision="auto", stop={"steps": 6}, checkpoint=each)
    assert adjustments_of("a", True) == [("auto", "bfloat16", 0)]
    assert adjustments_of("b", True, resume=after("a", 2)) == []
    assert adjustments_of("c", False, resume=after("b", 4)) == [("bfloat16", "float32", 4)]
    assert adjustments_of("d", False, resume=after("c", 5)) == []

    forked = {"checkpoint": {"dir": after("a", 2)["dir"]}}
    job |= {"init": {"checkpoint": "ckpt_1", "load": "all"}}
    assert adjustments_of("e", True, **forked) == [("auto", "bfloat16", 2)]


def test_layers_that_want_one_type_get_float32(digits, tmp_path):
    """Bilinear and weighted bags are none of autocast's; what they read is bfloat16."""
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "a", "type": "Linear", "args": {"out_features": 6}},
        {"name": "b", "type": "Linear", "args": {"out_features": 5}, "inputs": ["flat"]},
        {
            "name": "both",
            "type": "Bilinear",
            "args": {"out_features": 10},
            "inputs": ["a", "b"],
        },
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    told = losses(run(tmp_path, spec(**LOW, network={"layers": layers}), digits))
    assert told[-1] < told[0]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.long
def test_recurrent_layers_learn(kind, digits, tmp_path):
    layers = [
        {"name": "rows", "type": "reshape", "args": {"shape": [-1, 8, 8]}, "inputs": ["image"]},
        {"name": "wide", "type": "Linear", "args": {"out_features": 12}},
        {"name": "rnn", "type": kind, "args": {"hidden_size": 24, "batch_first": True}},
        {"name": "last", "type": "select", "args": {"dim": 1, "index": -1}, "inputs": ["rnn.0"]},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    adam = {"type": "Adam", "args": {"lr": 0.01}}
    low, high = (
        losses(
            run(
                tmp_path / item,
                spec(
                    network={"layers": layers},
                    precision=item,
                    stop={"epochs": 6},
                    optimizer=adam,
                ),
                digits,
            )
        )
        for item in ("bfloat16", "float32")
    )
    assert low != high
    assert low[-1] == pytest.approx(high[-1], rel=0.1)
    assert low[-1] < 0.8 * low[0]


def test_derived_figures_are_computed_in_float32(digits, tmp_path):
    metric = {"type": "mean_abs_diff", "inputs": ["fc", "twin"]}
    twin = {"name": "twin", "type": "Linear", "args": {"out_features": 10}, "inputs": ["drop"]}
    probe = {"layers": ["fc", "twin"], "kinds": ["output"], "every": 1, "want": ["full"]}
    whole = spec(
        **LOW,
        network={"layers": [*CNN, twin], "outputs": ["fc"]},
        metrics=[metric],
        probes=[probe],
        stop={"steps": 1},
    )
    records = run(tmp_path, whole, digits)
    seen = captured(records, tmp_path)
    expected = (seen[0, "fc", "output"].float() - seen[0, "twin", "output"].float()).abs().mean()
    values = next(r["values"] for r in of_type(records, "metrics") if "loss" in r["values"])
    assert values["mean_abs_diff(fc,twin)"] == pytest.approx(float(expected), rel=1e-6)


def test_auto_stays_auto_in_the_plan():
    assert planned(spec(precision="auto"))["spec"]["precision"] == "auto"
