"""Jobs of several processes, each beside the same job of one, and what the two must share."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.unit.engine.runs import losses, of_type, spec, write_table

Records = list[dict[str, Any]]
SMOOTH = [
    {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 6, "kernel_size": 3}},
    {"name": "gelu1", "type": "GELU"},
    {"name": "pool1", "type": "AvgPool2d", "args": {"kernel_size": 2}},
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
VALIDATION = {"validation": {"dataset": "ds_1", "split": "test"}}


def rarely(*values: object) -> Any:
    """A case that only ``make test-slow`` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def series(records: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The values of each step that do not depend on the clock."""
    values = [item["values"] for item in of_type(records, "metrics")]
    by_clock = ("time/", "system/", "throughput/", "data/pool_")
    kept = [{name: x[name] for name in x if not name.startswith(by_clock)} for x in values]
    return [x for x in kept if x]


def network(*layers: dict[str, Any]) -> dict[str, Any]:
    """A network of the given layers, or the smooth one."""
    return {"layers": copy.deepcopy([*layers] or SMOOTH)}


def pair(
    num: int, rows: int = 64, strategy: str | dict[str, int] = "data", **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job of ``num`` processes and the same job of one, both with batches of ``rows`` rows.

    ``strategy``: its name, or the sizes.
    """
    data = more.pop("data", {})
    base = {"network": network(), "stop": {"steps": 40}, **more}
    named = {"strategy": strategy} if isinstance(strategy, str) else strategy
    parallel = {**named, "processes": num}
    peers = num if strategy == "tensor" else named.get("tensor", 1)
    shared = {**data, "batch_size": rows * int(peers) // num}
    several = spec(**base, parallel=parallel, data=shared)
    return several, spec(**base, data={**data, "batch_size": rows})


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """The saved weights."""
    return load_file(directory / f"checkpoints/step-{step}/model.safetensors")


def assert_same_losses(
    mine: list[dict[str, Any]], theirs: list[dict[str, Any]], rel: float = 1e-5
) -> None:
    """Compare the losses of all steps and evaluations."""
    assert len(losses(theirs)) > 1
    np.testing.assert_allclose(losses(mine), losses(theirs), rtol=rel)
    for name in ("validation/loss", "validation/accuracy"):
        found = [
            [item["values"][name] for item in of_type(records, "metrics") if name in item["values"]]
            for records in (mine, theirs)
        ]
        assert found[0] == pytest.approx(found[1], rel=rel)


ADAM = {"type": "Adam", "args": {"lr": 0.005}}
VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {"stop": {"steps": 100}},
    "adam": {"optimizer": ADAM, "stop": {"steps": 100}},
    "clipping": {"grad_clip": {"type": "global_norm", "max": 0.5}},
    "accumulation": {"accumulate": 3, "stop": {"steps": 40}},
    "ema": {"average": {"type": "ema", "decay": 0.9}},
    "schedule": {"scheduler": {"type": "StepLR", "args": {"step_size": 20, "gamma": 0.5}}},
    "class weights": {
        "loss": {
            "type": "CrossEntropyLoss",
            "inputs": ["fc", "label"],
            "args": {"weight": [0.5, 2, 1, 1, 3, 1, 1, 1, 0.25, 1]},
        }
    },
    "ignored targets": {
        "loss": {
            "type": "CrossEntropyLoss",
            "inputs": ["fc", "label"],
            "args": {"ignore_index": 3},
        }
    },
    "streamed rows": {"data": {"shuffle": {"buffer_size": 128}}, "stop": {"steps": 20}},
    "activation checkpointing": {
        "activation_checkpointing": ["conv1", "pool1", "flat"],
        "stop": {"steps": 20},
    },
    "augmentation": {
        "data": {
            "fields": {
                "image": {
                    "type": "dense",
                    "augment": [{"type": "RandomCrop", "args": {"padding": 1}}],
                },
                "label": {"type": "integer", "dim": 10},
            }
        },
        "stop": {"steps": 20},
    },
    "sum": {
        "loss": {
            "type": "CrossEntropyLoss",
            "inputs": ["fc", "label"],
            "args": {"reduction": "sum"},
        },
        "optimizer": {"type": "SGD", "args": {"lr": 0.001}},
    },
    "two losses": {
        "loss": [
            {"type": "CrossEntropyLoss", "inputs": ["fc", "label"], "name": "a"},
            {"type": "MultiMarginLoss", "inputs": ["fc", "label"], "weight": 0.5, "name": "b"},
        ]
    },
}


OF_PARAMETERS: dict[str, dict[str, Any]] = {
    "clip by value": {"grad_clip": {"type": "value", "max": 0.002}},
    "clip between": {"grad_clip": {"type": "value", "min": -0.001, "max": 0.002}},
    "clip by norm": {"grad_clip": {"type": "norm", "max": 0.05}},
    "l1": {"optimizer": {"type": "SGD", "args": {"lr": 0.05}, "l1": 0.001}},
    "window": {"average": {"type": "window", "min_average_window": 2, "max_average_window": 6}},
    "guards": {"guards": {"nonfinite": {"check": ["loss", "gradients", "outputs", "parameters"]}}},
}
"""What reads or writes parameters and gradients besides the optimizer."""
EMBEDDING = {"type": "Embedding", "args": {"embedding_dim": 8, "num_embeddings": 50}}
NETWORKS: dict[str, dict[str, Any]] = {
    "sparse gradients": {
        "layers": [
            {"name": "emb", **EMBEDDING, "inputs": ["tok"]},
            {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
            {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
        ]
    },
    "transformer": {
        "type": "preset",
        "preset": "transformer_classifier",
        "args": {"text": "tok", "dropout": 0.0, "num_classes": 10, "max_length": 12},
    },
}
NETWORKS["sparse gradients"]["layers"][0]["args"] = {**EMBEDDING["args"], "sparse": True}


def token_table(directory: Path) -> Path:
    """A table of token lists and labels."""
    generator = np.random.default_rng(0)
    columns = {
        "tok": generator.integers(0, 50, (300, 12)),
        "label": generator.integers(0, 10, 300),
    }
    return write_table(directory, columns, {"train": slice(0, 300)})


def of_tokens(name: str) -> dict[str, Any]:
    """The parts of a job on that table."""
    fields = {"tok": {"type": "integer_sequence", "dim": 50}}
    fields["label"] = {"type": "integer", "dim": 10}
    optimizer = {"type": "SGD", "args": {"lr": 0.1}}
    return {"network": NETWORKS[name], "optimizer": optimizer, "data": {"fields": fields}}


ALL_KINDS = ["param", "input", "output", "output_grad", "param_grad", "update", "optim_state"]


def table_of(records: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[float]]:
    """The statistics by step, phase, layer and kind."""
    return {
        (item["step"], item["phase"], *row[:2]): [float(value) for value in row[2:]]
        for item in of_type(records, "stats")
        for row in item["rows"]
    }


def assert_resumes(at: Callable[..., Records], directory: Path, *, is_alike: bool) -> None:
    """Resume a run from step 7 in another way, to step 20.

    ``at(directory, is_second, **more)`` runs the job, the first time or as it resumes.
    ``is_alike``: with as many processes under the same strategy. Then the bits are the same, else
    the losses up to rounding.
    """
    whole = at(directory / "whole", False)
    resume = {"dir": str(directory / "whole/checkpoints/step-7"), "step": 7}
    rest = at(directory / "rest", True, resume=resume)
    mine, theirs = weights(directory / "rest", 20), weights(directory / "whole", 20)
    if is_alike:
        assert losses(rest) == losses(whole)[7:]
        assert all(torch.equal(mine[name], item) for name, item in theirs.items())
    else:
        assert losses(rest) == pytest.approx(losses(whole)[7:], rel=1e-5)
