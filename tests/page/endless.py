"""A job that runs until it is canceled."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

import glasshouse as gh


@contextmanager
def running(*jobs: gh.Job) -> Generator[None]:
    """Cancel the jobs at the end of the block and wait until their devices are free."""
    try:
        yield
    finally:
        for job in reversed(jobs):
            job.cancel()
        for job in jobs:
            with pytest.raises(gh.JobCancelled):
                job.wait(timeout=240)


def endless(digits: str, name: str, **more: Any) -> dict[str, Any]:
    """The spec of a job that runs for ten minutes."""
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
