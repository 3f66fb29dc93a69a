"""Several batches to a step: the update that one batch of all their rows would make."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.core.spool import read_frames
from engine.process import rank
from tests.unit.engine.runs import (
    CNN,
    captured,
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_job,
    write_table,
)

PLAIN = [layer for layer in CNN if layer["type"] != "Dropout"]
SEED = 3


def job(**more: Any) -> dict[str, Any]:
    whole = {"network": {"layers": PLAIN}, "data": {"batch_size": 16}, "accumulate": 4, **more}
    return spec(**whole)


def in_whole_batches(table: Any, sizes: list[int], reduction: str) -> list[float]:
    """Plain torch with one pass for each step; the steps of an epoch have these many rows."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.manual_seed(SEED)
    network = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 10)
    )
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1 if reduction == "mean" else 0.001)
    found: list[float] = []
    for epoch in range(2):
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
        for rows in torch.randperm(len(images), generator=generator).split(sizes):
            loss = loss_fn(network(images[rows].float() / 255), labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_is_that_of_one_large_batch(reduction, digits, tmp_path):
    """300 rows in batches of 16: 18 whole ones and one of 12; the last step has three batches."""
    lr = 0.1 if reduction == "mean" else 0.001
    loss = spec()["loss"] | {"args": {"reduction": reduction}}
    records = run(tmp_path, job(loss=loss, optimizer={"type": "SGD", "args": {"lr": lr}}), digits)
    expected = in_whole_batches(digits, [64, 64, 64, 64, 44], reduction)
    assert losses(records) == pytest.approx(expected, rel=2e-5)
    assert of_type(records, "progress")[-1]["samples"] == 600
    assert of_type(records, "progress")[-1]["step"] == 10


def test_a_last_batch_dropped_leaves_its_step_shorter(digits, tmp_path):
    small = {"batch_size": 16, "drop_last": True}
    sgd = {"type": "SGD", "args": {"lr": 0.1}}
    records = run(tmp_path, job(data=small, optimizer=sgd), digits)
    expected = in_whole_batches(digits, [64, 64, 64, 64, 32, 12], "mean")
    assert losses(records)[:5] == pytest.approx(expected[:5], rel=2e-5)
    assert len(losses(records)) == 10


def test_accuracy_counts_every_row_of_the_step(digits, tmp_path):
    accuracy = [{"type": "accuracy", "inputs": ["fc", "label"]}]
    frozen = {"type": "SGD", "args": {"lr": 0.0}}
    many = run(tmp_path / "a", job(metrics=accuracy, optimizer=frozen), digits)
    one = run(
        tmp_path / "b",
        job(metrics=accuracy, optimizer=frozen, data={"batch_size": 64}, accumulate=1),
        digits,
    )
    figures = [
        [r["values"]["accuracy"] for r in of_type(records, "metrics") if "loss" in r["values"]]
        for records in (many, one)
    ]
    assert figures[0] == figures[1]
    assert len(set(figures[0])) > 1


def test_probes_see_the_gradients_of_the_whole_step_and_the_outputs_of_its_last_batch(
    digits, tmp_path
):
    probe = {"layers": ["fc"], "kinds": ["output", "param_grad"], "every": 1}
    probes = [probe | {"want": ["stats", "full"], "max_overhead": None}]
    one = {"batch_size": 64}
    many = run(tmp_path / "a", job(probes=probes, stop={"steps": 2}), digits)
    whole = run(
        tmp_path / "b", job(probes=probes, stop={"steps": 2}, data=one, accumulate=1), digits
    )
    parts, wholes = captured(many, tmp_path / "a"), captured(whole, tmp_path / "b")
    for step in (0, 1):
        name = (step, "fc.weight", "param_grad")
        torch.testing.assert_close(parts[name], wholes[name], rtol=1e-4, atol=1e-6)
        seen, rows = parts[step, "fc", "output"], wholes[step, "fc", "output"]
        assert len(seen) == 16
        torch.testing.assert_close(seen, rows[48:], rtol=1e-4, atol=1e-5)
    assert losses(many) == losses(run(tmp_path / "c", job(stop={"steps": 2}), digits))


@pytest.mark.parametrize("action", ["fail", "skip_step"])
def test_a_guard_finds_the_bad_row_in_whichever_batch_of_the_step_it_is(action, tmp_path):
    """Row 21 of 64 is NaN: of the second of four batches, whose loss is not the last one's."""
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    x[21, 3] = np.nan
    columns = {"x": x, "label": (x[:, 0] > 0).astype(np.int64)}
    table = write_table(tmp_path / "table", columns, {"train": slice(0, 64)})
    fields = {"x": {"type": "dense", "fill": "NaN"}, "label": {"type": "integer", "dim": 10}}
    job = spec(
        network={"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 10}}]},
        data={"fields": fields, "batch_size": 16, "shuffle": {"enabled": False}},
        accumulate=4,
        guards={"nonfinite": {"action": action}},
        stop={"steps": 1},
    )
    resolved = planned(job, json.loads((table / "meta.json").read_text()))["spec"]
    assert rank.main(write_job(tmp_path, resolved, table)) == 0
    records, _ = read_frames(tmp_path / "spool", 0, 10**6)
    [finding] = of_type(records, "finding")
    assert (finding["layer"], finding["kind"], finding["bad_samples"]) == ("x", "input", [21])
    assert finding["samples"] == [*range(16, 32)]
    assert records[-1]["state"] == ("failed" if action == "fail" else "succeeded")
    if action == "skip_step":
        weights = load_file(tmp_path / "checkpoints/step-1/model.safetensors")
        assert all(bool(item.isfinite().all()) for item in weights.values())


def test_the_plan_counts_steps_and_not_batches():
    assert planned(job())["num_steps"] == 10
    assert planned(job(stop={"epochs": 1}, accumulate=100))["num_steps"] == 1
    more = job(scheduler={"type": "CosineAnnealingLR", "unit": "samples"})
    assert planned(more)["spec"]["scheduler"]["args"] == {"T_max": 600}


def test_no_batches_are_none():
    with pytest.raises(AssertionError, match="accepted"):
        errors(job(accumulate=1))
    assert "at least 1" in errors(job(accumulate=0))["/accumulate"]
