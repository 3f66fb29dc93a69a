"""The jobs that the acceptance tests submit."""

import json
from typing import Any

from tests.acceptance.services import ROOT

FIELDS = {
    "image": {"type": "dense", "shape": [1, 8, 8]},
    "label": {"type": "integer", "dim": 10},
}


def digits_example(dataset: str, **changes: Any) -> dict[str, Any]:
    """The job of ``examples/digits.json`` on a dataset."""
    spec: dict[str, Any] = json.loads((ROOT / "examples" / "digits.json").read_text())
    for source in ("train", "validation"):
        spec["data"][source]["dataset"] = dataset
    return spec | changes


def small(dataset: str, **changes: Any) -> dict[str, Any]:
    """A job of one layer and a few steps."""
    spec: dict[str, Any] = {
        "kind": "train",
        "seed": 1,
        "network": {
            "layers": [
                {"name": "flat", "type": "Flatten"},
                {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
            ]
        },
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "data": {
            "train": {"dataset": dataset, "split": "train"},
            "fields": FIELDS,
            "batch_size": 100,
        },
        "stop": {"steps": 5},
        "devices": {"type": "cpu", "threads": 1},
    }
    return spec | changes


def lasting(dataset: str, steps: int, **changes: Any) -> dict[str, Any]:
    """A job whose steps take some milliseconds each."""
    layers: list[dict[str, Any]] = [
        {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 32, "kernel_size": 3}},
        {"name": "relu1", "type": "ReLU"},
        {"name": "conv2", "type": "Conv2d", "args": {"out_channels": 32, "kernel_size": 3}},
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    return small(dataset, network={"layers": layers}, stop={"steps": steps}) | changes
