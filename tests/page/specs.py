"""A small job for the tests of the dashboard."""

from typing import Any

FIELDS = {
    "image": {"type": "dense", "shape": [1, 8, 8]},
    "label": {"type": "integer", "dim": 10},
}


def small(digits: str, name: str, **more: Any) -> dict[str, Any]:
    """A small network on the digits."""
    layers = [
        {"name": "flat", "type": "Flatten", "inputs": ["image"]},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    split = {"dataset": digits, "split": "train"}
    return {
        "kind": "train",
        "name": name,
        "seed": 1,
        "network": {"type": "graph", "layers": layers, "outputs": ["fc"]},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "data": {"train": split, "fields": FIELDS, "batch_size": 100},
        "stop": {"epochs": 1},
    } | more
