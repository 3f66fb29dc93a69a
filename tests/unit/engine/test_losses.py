"""Several losses with weights: the update of their sum, and each told by itself."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.unit.engine.runs import captured, errors, losses, of_type, planned, run, spec

LAYERS = [
    {"name": "flat", "type": "Flatten"},
    {"name": "hidden", "type": "Linear", "args": {"out_features": 16}},
    {"name": "act", "type": "Tanh"},
    {"name": "scores", "type": "Linear", "args": {"out_features": 10}},
    {"name": "back", "type": "Linear", "args": {"out_features": 64}, "inputs": ["act"]},
]
CLASSES = {"type": "CrossEntropyLoss", "inputs": ["scores", "label"], "name": "classes"}
REBUILD = {"type": "MSELoss", "inputs": ["back", "flat"], "weight": 0.25}
SUMMED = {**REBUILD, "args": {"reduction": "sum"}, "weight": 0.01}


def job(*several: dict[str, Any], **more: Any) -> dict[str, Any]:
    whole = {
        "network": {"layers": LAYERS, "outputs": ["scores", "back"]},
        "loss": [*several] or [CLASSES, REBUILD],
        "data": {"validation": {"dataset": "ds_1", "split": "test"}},
        "evaluate": {"every_epochs": 1},
        "stop": {"epochs": 1},
    }
    return spec(**{**whole, **more})


def network() -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Linear(64, 16), nn.Linear(16, 10), nn.Linear(16, 64)


def terms(parts: Any, x: torch.Tensor, label: torch.Tensor, reduction: str) -> list[torch.Tensor]:
    flat = x.flatten(1)
    hidden = torch.tanh(parts[0](flat))
    classes = nn.functional.cross_entropy(parts[1](hidden), label)
    return [classes, nn.functional.mse_loss(parts[2](hidden), flat, reduction=reduction)]


def by_hand(table: Any, reduction: str, weight: float, size: int = 64) -> dict[str, Any]:
    columns = [
        [torch.from_numpy(np.load(table / split / f"{n}.npy")) for n in range(2)]
        for split in ("train", "test")
    ]
    parts = network()
    learned = [item for part in parts for item in part.parameters()]
    optimizer = torch.optim.SGD(learned, 0.1, 0.9)
    told: dict[str, Any] = {"loss": [], "loss/classes": [], "loss/MSELoss": []}
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003))
    for rows in order.split(size):
        each = terms(parts, columns[0][0][rows].float() / 255, columns[0][1][rows], reduction)
        total = each[0] + weight * each[1]
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in zip(told, [total, *each], strict=True):
            told[name].append(value.item())
    with torch.no_grad():
        each = terms(parts, columns[1][0].float() / 255, columns[1][1], reduction)
    told["validation"] = [float(each[0] + weight * each[1]), *map(float, each)]
    told["weights"] = parts[0].weight.detach()
    return told


@pytest.mark.parametrize("second", [REBUILD, SUMMED], ids=["means", "mean and sum"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_their_weighted_sum_is_trained_on(second, accumulate, digits, tmp_path):
    """Also where a step has four batches: a mean counts by its rows, a sum by itself."""
    size = {"batch_size": 64 // accumulate}
    whole = job(CLASSES, second, accumulate=accumulate)
    whole["data"] |= size
    records = run(tmp_path, whole, digits)
    reduction = second.get("args", {}).get("reduction", "mean")
    expected = by_hand(digits, reduction, second["weight"])
    figures = [r["values"] for r in of_type(records, "metrics") if "loss" in r["values"]]
    for name in ("loss", "loss/classes", "loss/MSELoss"):
        assert [item[name] for item in figures] == pytest.approx(expected[name], rel=2e-5), name
    judged = next(
        r["values"] for r in of_type(records, "metrics") if "validation/loss" in r["values"]
    )
    names = ("validation/loss", "validation/loss/classes", "validation/loss/MSELoss")
    assert [judged[name] for name in names] == pytest.approx(expected["validation"], rel=1e-4)
    kept = load_file(tmp_path / "checkpoints" / "step-5" / "model.safetensors")
    torch.testing.assert_close(kept["hidden.weight"], expected["weights"], rtol=1e-4, atol=1e-6)


def test_one_loss_in_a_list_is_that_loss_and_a_weight_is_a_factor(digits, tmp_path):
    alone = {**CLASSES}
    del alone["name"]
    plain = losses(run(tmp_path / "plain", job(loss=alone), digits))
    assert losses(run(tmp_path / "listed", job(alone), digits)) == plain
    slow = {"type": "SGD", "args": {"lr": 0.05}}
    half = losses(
        run(
            tmp_path / "half",
            job(
                loss={**alone, "weight": 0.5},
                optimizer={**slow, "args": {"lr": 0.1, "momentum": 0}},
            ),
            digits,
        )
    )
    whole = losses(run(tmp_path / "whole", job(loss=alone, optimizer=slow), digits))
    assert half == pytest.approx([0.5 * item for item in whole], rel=1e-5)


def test_each_sample_has_the_weighted_sum_of_its_losses(digits, tmp_path):
    names = {"layers": ["loss", "loss.samples"], "kinds": ["output"], "every": 1, "want": ["full"]}
    probes = [names, {**names, "layers": ["scores", "back", "flat"]}]
    records = run(tmp_path, job(probes=probes, stop={"steps": 1}), digits)
    seen = {name: tensor for (_, name, _), tensor in captured(records, tmp_path).items()}
    rebuilt = (seen["back"] - seen["flat"]).square().mean(dim=1)
    labels = torch.from_numpy(np.load(digits / "train" / "1.npy"))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(3 * 1_000_003))[:64]
    expected = nn.functional.cross_entropy(seen["scores"], labels[order], reduction="none")
    expected = expected + 0.25 * rebuilt
    torch.testing.assert_close(seen["loss.samples"], expected)
    torch.testing.assert_close(seen["loss"], seen["loss.samples"].mean())


def test_one_of_several_losses_can_select_the_best_checkpoint():
    best = {"metric": "validation/loss/classes", "mode": "min"}
    stop = {"epochs": 3, "early": {**best, "patience": 2}}
    planned(job(checkpoint={"keep_best": best}, stop=stop))
    found = errors(job(checkpoint={"keep_best": {**best, "metric": "validation/loss/other"}}))
    assert "validation/loss/MSELoss" in found["/checkpoint/keep_best/metric"]


@pytest.mark.parametrize(
    ("several", "pointer", "detail"),
    [
        ([CLASSES, {**REBUILD, "inputs": ["back", "nothing"]}], "/loss/1/inputs/1", "nothing"),
        ([CLASSES, {**REBUILD, "type": "MSE"}], "/loss/1/type", "MSELoss"),
        ([CLASSES, {**REBUILD, "args": {"reduction": "none"}}], "/loss/1/args/reduction", "mean"),
        ([CLASSES, {**REBUILD, "args": {"x": 1}}], "/loss/1/args/x", "no argument"),
        ([CLASSES, {**REBUILD, "inputs": ["back", "scores"]}], "/loss/1/inputs", "shape"),
        ([CLASSES, {**REBUILD, "inputs": ["flat", "flat"]}], "/loss/1/inputs", "no parameter"),
        ([CLASSES, {**REBUILD, "weight": 0}], "/loss/1/weight", "greater than 0"),
        ([CLASSES, {**REBUILD, "wait": 1}], "/loss/1/wait", "no such field"),
        ([CLASSES, {"type": "MSELoss"}], "/loss/1/inputs", "this field is required"),
        ([REBUILD, SUMMED], "/loss/1/name", "two losses are named 'MSELoss'"),
    ],
)
def test_what_is_wrong_with_one_of_several_is_named_by_its_place(several, pointer, detail):
    found = errors(job(*several))
    assert list(found) == [pointer]
    assert detail in found[pointer]


def test_an_empty_loss_list_is_refused():
    assert list(errors(job(loss=[]))) == ["/loss"]
