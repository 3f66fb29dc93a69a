"""Measures the time that ``activation_checkpointing: true`` costs and the memory that it saves.

The network has 12 blocks of Linear, BatchNorm1d, ReLU and Dropout of width 256; the batch has 300
rows. Blocks of forward and backward passes alternate in one process; memory is the plan's
estimate. Prints one JSON line.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from engine.losses.losses import Losses, loss_of
from engine.network.network import Network
from engine.plan.plan import parse_spec, plan

ROWS = 300
FIELDS = {"x": {"type": "dense", "shape": [64]}, "label": {"type": "integer", "dim": 10}}
META = {
    "columns": [
        {"name": "x", "dtype": "float32", "shape": [64], "file": "0.npy"},
        {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"},
    ],
    "splits": {"train": 6000},
}


def spec(**more: Any) -> dict[str, Any]:
    layers: list[dict[str, Any]] = []
    for number in range(12):
        args = {"out_features": 256}
        layers.append({"name": f"fc{number}", "type": "Linear", "args": args})
        kinds = ("BatchNorm1d", "ReLU", "Dropout")
        layers += [{"name": f"{kind}{number}", "type": kind} for kind in kinds]
    layers.append({"name": "fc", "type": "Linear", "args": {"out_features": 10}})
    return {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": {
            "train": {"dataset": "d", "split": "train"},
            "fields": FIELDS,
            "batch_size": ROWS,
        },
        "stop": {"steps": 1},
        **more,
    }


def block_s(job: Any, network: Network, batch: dict[str, Tensor], num_steps: int) -> float:
    loss_fn = Losses.of(job)
    began = time.perf_counter()
    for _ in range(num_steps):
        loss_of(loss_fn, network(batch)).total.backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    plans = [
        plan(parse_spec(spec(**more)), {"d": META})
        for more in ({}, {"activation_checkpointing": True})
    ]
    job: Any = parse_spec(plans[1]["spec"])
    usual, less = (
        Network(job.network, ("fc",), kept_at=kept) for kept in ((), job.activation_boundaries)
    )
    batch = {"x": torch.rand(ROWS, 64), "label": torch.randint(10, (ROWS,))}
    for network in (usual, less):
        block_s(job, network, batch, args.steps)
    ratios: list[float] = []
    for _ in range(args.rounds):
        before = block_s(job, usual, batch, args.steps)
        ratios.append(block_s(job, less, batch, args.steps) / before)
    line = {
        "bench": "recomputing",
        "ratio": round(statistics.median(ratios), 3),
        "min": round(min(ratios), 3),
        "max": round(max(ratios), 3),
        "activations_mb": [round(p["memory"]["activations_bytes"] / 1e6, 1) for p in plans],
        "kept_at": job.activation_boundaries,
        "threads": args.threads,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
