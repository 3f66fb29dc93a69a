"""Measures what the comparison of served rows with training rows costs a replica.

``python -m bench.service.drift`` computes the same batches with and without ``drift`` (its
defaults) in one process, on one thread. The sides alternate in short turns; the cost is the median
of the ratios of their CPU times, minus one: other load of the machine disturbs these less.
Everything is included that the thread which answers requests does for drift. There is no socket and
no JSON, so that the real cost of a request is a smaller part of its time. Prints a JSON line for
each network and batch size.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.data.inference import run_job, trained
from engine.core.spool import read_frames
from engine.serving import requests
from engine.serving.asked import Asked
from engine.serving.drift.watch import DriftWatch
from engine.serving.served_models import ServedVersion, VersionName
from engine.training.report import Outputs
from glasshouse.spec import Drift, parse_trained

CPU = torch.device("cpu")
COLUMNS = 20
START_S = 60.0


def served(described: Mapping[str, Any], checkpoint: Path, table: Path) -> ServedVersion:
    """Load a version."""
    found = parse_trained(json.dumps(described))
    if found is None:
        raise SystemExit("the checkpoint is of no training job")
    name = VersionName("bench", 1, "ckpt_bench", checkpoint, {"d": table})
    version = ServedVersion(name, found, CPU, 64)
    version.warm_up()
    return version


def mnist(directory: Path) -> ServedVersion:
    """The MNIST network, trained for two steps."""
    return served(*trained(directory), directory / "few")


def tabular(directory: Path) -> ServedVersion:
    """Two linear layers over twenty columns."""
    table = directory / "table"
    (table / "train").mkdir(parents=True)
    x = np.random.default_rng(0).normal(size=(6000, COLUMNS)).astype(np.float32)
    np.save(table / "train" / "0.npy", x)
    np.save(table / "train" / "1.npy", (x.sum(1) > 0).astype(np.int64))
    columns = [
        {"name": "x", "dtype": "float32", "shape": [COLUMNS], "file": "0.npy"},
        {"name": "y", "dtype": "int64", "shape": [], "file": "1.npy"},
    ]
    meta = {"columns": columns, "splits": {"train": len(x)}}
    (table / "meta.json").write_text(json.dumps(meta))
    layers: list[dict[str, Any]] = [
        {"name": "fc1", "type": "Linear", "args": {"out_features": 128}, "inputs": ["x"]},
        {"name": "relu", "type": "ReLU"},
        {"name": "fc2", "type": "Linear", "args": {"out_features": 2}},
    ]
    job = {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc2", "y"]},
        "optimizer": {"type": "Adam"},
        "data": {
            "train": {"dataset": "d", "split": "train"},
            "fields": {"x": {"type": "dense"}, "y": {"type": "integer", "dim": 2}},
            "batch_size": 64,
        },
        "stop": {"steps": 2},
    }
    run_job(directory / "training", job, table)
    records, _ = read_frames(directory / "training" / "spool", 0, 10**6)
    saved = [record for record in records if record["type"] == "checkpoint"][-1]
    described = json.loads((directory / "training" / "job.json").read_text())["spec"]
    return served(described, directory / "training" / saved["dir"], table)


def batches_of(version: ServedVersion, num_rows: int) -> list[list[Asked]]:
    """Return different batches of requests with a row each."""
    shapes = {name: shape.shape for name, shape in version.inputs.shapes.items()}
    rng = np.random.default_rng(1)
    found: list[list[Asked]] = []
    for _ in range(20):
        batch: list[Asked] = []
        for _ in range(num_rows):
            inputs = {name: rng.normal(size=(1, *shape)).tolist() for name, shape in shapes.items()}
            body = json.dumps({"inputs": inputs}).encode()
            head = {"content_type": "application/json"}
            batch.append(requests.read(head, body, version.inputs))
        found.append(batch)
    return found


@torch.inference_mode()
def turn(version: ServedVersion, batches: list[list[Asked]], watch: DriftWatch | None) -> float:
    """Compute all batches as a replica does; return the CPU seconds of this thread."""
    began = time.thread_time()
    for batch in batches:
        started = time.monotonic()
        sample = None if watch is None else watch.begin(version, batch[0].outputs)
        version.compute(batch, sample)
        seconds = time.monotonic() - started
        if watch is not None:
            watch.end(version, batch, sample, seconds)
    return time.thread_time() - began


def measure(
    network: str, version: ServedVersion, num_rows: int, given: argparse.Namespace
) -> dict[str, Any]:
    """Let both sides take turns."""
    records: list[dict[str, Any]] = []
    watch = DriftWatch(Drift(), Outputs(Path(), records.append), CPU)
    watch.use([version])
    watch.start()
    until = time.monotonic() + START_S
    while not (listed := records and records[-1]["versions"]) or listed[0]["detail"] is not None:
        if time.monotonic() > until:
            raise SystemExit(f"there is no reference: {listed}")
        watch.settle()
        time.sleep(0.05)
    batches = batches_of(version, num_rows) * (max(1, given.batches // 20))
    ratios: list[float] = []
    for number in range(given.rounds + 2):
        sides = [None, watch] if number % 2 else [watch, None]
        took = {side is None: turn(version, batches, side) for side in sides}
        if number >= 2:  # the first two warm up
            ratios.append(took[False] / took[True])
    watch.close()
    ordered = sorted(ratios)
    reports = [record["versions"][0] for record in records if record["type"] == "drift"]
    return {
        "bench": "drift",
        "network": network,
        "batch": num_rows,
        "rounds": given.rounds,
        "cost": round(statistics.median(ratios) - 1, 4),
        "quartiles": [round(ordered[len(ordered) * part // 4] - 1, 4) for part in (1, 3)],
        "budget": round(
            (watch.budget.delay_s + watch.budget.counting_s) / watch.budget.computed_s, 4
        ),
        "windows": len({report["at"] for report in reports if report["at"]}),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.service.drift")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--batches", type=int, default=100, help="batches of a turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for network, make in (("mnist_cnn", mnist), ("tabular", tabular)):
        with tempfile.TemporaryDirectory() as directory:
            version = make(Path(directory))
            for num_rows in (1, 64):
                print(json.dumps(measure(network, version, num_rows, given)), flush=True)


if __name__ == "__main__":
    main()
