"""A job that runs until it is cancelled."""

from typing import Any


def endless(digits: str, name: str, **more: Any) -> dict[str, Any]:
    """Its spec."""
    return {
        "kind": "train",
        "name": name,
        "network": {"type": "preset", "preset": "mlp", "args": {"hidden": [8]}},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["out", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.001}},
        "data": {
            "train": {"dataset": digits, "split": "train"},
            "fields": {
                "image": {"type": "dense", "shape": [1, 8, 8]},
                "label": {"type": "integer", "dim": 10},
            },
            "batch_size": 100,
        },
        "stop": {"seconds": 600},
    } | more
