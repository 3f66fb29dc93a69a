"""Specs, datasets and runs for the engine's tests. Each call creates its own."""

import copy
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.core.spool import read_frames
from engine.process import rank
from engine.process.planner import answer

DEVICE = os.environ.get("ENGINE_DEVICE", "cpu")
"""The type of the device on which the engine's tests train: ``make test-accelerator`` sets it."""
DIGITS_META = {
    "columns": [
        {"name": "image", "dtype": "uint8", "shape": [1, 8, 8], "file": "0.npy"},
        {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"},
    ],
    "splits": {"train": 300, "test": 97},
}

CNN = [
    {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 6, "kernel_size": 3}},
    {"name": "relu1", "type": "ReLU", "args": {"inplace": True}},
    {"name": "pool1", "type": "MaxPool2d", "args": {"kernel_size": 2}},
    {"name": "flat", "type": "Flatten"},
    {"name": "drop", "type": "Dropout", "args": {"p": 0.25}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]


def write_table(directory: Path, columns: dict[str, np.ndarray], splits: dict[str, slice]) -> Path:
    """Write a dataset directory by hand, in the documented layout."""
    meta: dict[str, Any] = {"columns": [], "splits": {}}
    for number, (name, values) in enumerate(columns.items()):
        meta["columns"].append(
            {
                "name": name,
                "dtype": values.dtype.name,
                "shape": list(values.shape[1:]),
                "file": f"{number}.npy",
            }
        )
        for split, rows in splits.items():
            (directory / split).mkdir(parents=True, exist_ok=True)
            np.save(directory / split / f"{number}.npy", values[rows])
            meta["splits"][split] = len(values[rows])
    (directory / "meta.json").write_text(json.dumps(meta))
    return directory


def is_real(x: Tensor) -> bool:
    """Whether a layer was called with values: plans call them too, once for all jobs of a shape."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)


def spec(**changes: Any) -> dict[str, Any]:
    """A small training job on digits, two epochs; keyword arguments replace its parts."""
    whole: dict[str, Any] = {
        "kind": "train",
        "seed": 3,
        "network": {"layers": copy.deepcopy(CNN)},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9}},
        "data": {
            "train": {"dataset": "ds_1", "split": "train"},
            "fields": {"image": {"type": "dense"}, "label": {"type": "integer", "dim": 10}},
            "batch_size": 64,
        },
        "stop": {"epochs": 2},
    }
    for name, value in changes.items():
        if name == "data":
            whole["data"] = {**whole["data"], **value}
        else:
            whole[name] = value
    return whole


def planned(job: dict[str, Any], meta: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The planner's plan of a job, which must be good."""
    reply = answer(
        {"id": 1, "do": "plan", "spec": job, "datasets": {"ds_1": meta or DIGITS_META}, **more}
    )
    assert reply["ok"], reply["errors"]
    return reply["plan"]


def errors(job: dict[str, Any], meta: dict[str, Any] | None = None, **more: Any) -> dict[str, str]:
    """The planner's problems of a job, by pointer."""
    reply = answer(
        {"id": 1, "do": "plan", "spec": job, "datasets": {"ds_1": meta or DIGITS_META}, **more}
    )
    assert not reply["ok"], "the planner accepted it"
    return {item["pointer"]: item["detail"] for item in reply["errors"]}


def write_job(directory: Path, resolved: dict[str, Any], table: Path, **more: Any) -> Path:
    """Write a job directory as the worker does."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {
        "job": "job_x",
        "attempt": 1,
        "spec": resolved,
        "datasets": {"ds_1": {"dir": str(table)}},
        "device": {"type": DEVICE, "threads": 1},
        "checkpoint": None,
        "trained_by": None,
        **more,
    }
    (directory / "job.json").write_text(json.dumps(whole))
    return directory


def captured(
    records: Iterable[dict[str, Any]], directory: Path
) -> dict[tuple[int, str, str], torch.Tensor]:
    """What was kept whole, by step, layer and kind, from the files that the engine alone makes."""
    return {
        (record["step"], entry["layer"], entry["kind"]): file[entry["tensor"]]
        for record in of_type(records, "captures")
        for file in [load_file(directory / record["file"])]
        for entry in record["tensors"]
    }


def run(directory: Path, job: dict[str, Any], table: Path, **more: Any) -> list[dict[str, Any]]:
    """Plan a job and run it in this process; returns its records."""
    meta = json.loads((table / "meta.json").read_text())
    network = {"network": more["trained_by"]} if more.get("trained_by") else {}
    resolved = planned(job, meta, **network)["spec"]
    assert rank.main(write_job(directory, resolved, table, **more)) == 0
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["type"] == "end"
    assert records[-1]["state"] == "succeeded", records[-1]
    return records


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The records of one type."""
    return [record for record in records if record["type"] == kind]


def losses(records: list[dict[str, Any]]) -> list[float]:
    """The training losses in order of steps."""
    return [r["values"]["loss"] for r in of_type(records, "metrics") if "loss" in r["values"]]


def cnn() -> nn.Sequential:
    """The network of the spec, by hand."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(54, 10),
    )


def by_hand(
    table: Path, make_optimizer: Any, *, seed: int = 3, epochs: int = 2, steps: int | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The reference: thirty lines of plain torch; losses and final weights."""
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "1.npy"))
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = cnn()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = make_optimizer(network.parameters())
    found: list[float] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(images), generator=generator)
        for start in range(0, len(images), 64):
            if steps is not None and len(found) == steps:
                break
            rows = order[start : start + 64]
            x = images[rows].to(torch.float32) / 255
            loss = loss_fn(network(x), labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.item())
    names = {"0": "conv1", "5": "fc"}
    state = {f"{names[k[0]]}{k[1:]}": v for k, v in network.state_dict().items()}
    return found, state
