"""Jobs of pipelines, for tests of their plans."""

import json
from typing import Any

from glasshouse.spec import TrainJob, parse_job
from tests.unit.engine.runs import spec

MLP: list[dict[str, Any]] = [
    {"name": "flat", "type": "Flatten"},
    {"name": "a", "type": "Linear", "args": {"out_features": 24}},
    {"name": "tanh", "type": "Tanh"},
    {"name": "b", "type": "Linear", "args": {"out_features": 16}},
    {"name": "gelu", "type": "GELU"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
"""Of 64 values: 1560, 400 and 170 parameters."""


def job(
    layers: list[dict[str, Any]] | None = None,
    parallel: dict[str, Any] | None = None,
    *,
    batch_size: int = 64,
    **changes: Any,
) -> dict[str, Any]:
    """A job of two processes in a pipeline; ``parallel``: what is different."""
    both = {"strategy": "pipeline", "processes": 2, **(parallel or {})}
    network = {"layers": [dict(layer) for layer in layers or MLP]}
    changes["data"] = {"batch_size": batch_size, **changes.get("data", {})}
    return spec(network=network, parallel=both, **changes)


def parsed(*given: Any, **changes: Any) -> TrainJob:
    """The job as it is read."""
    found = parse_job(json.dumps(job(*given, **changes)))
    assert isinstance(found, TrainJob)
    return found


def at_stages(*stages: int | None, layers: list[dict[str, Any]] = MLP) -> list[dict[str, Any]]:
    """The layers with their stages."""
    return [
        layer if stage is None else {**layer, "stage": stage}
        for layer, stage in zip(layers, stages, strict=True)
    ]
