"""Measures the cost of padding: an LSTM on rows of many lengths, with and without bucketing.

All jobs read the same rows in one process and alternate, a whole epoch each. ``bucket_by_length``
is compared with random batches by the median of the ratios of epoch times. Prints one JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.datasets.ingest import ingest
from engine.plan.plan import parse_spec, plan
from engine.training.loop import train
from engine.training.report import Outputs
from glasshouse.spec import Source, TrainJob

WORDS = 1000
KINDS: dict[str, dict[str, Any] | None] = {
    "by_chance": None,
    "buckets": {},
    "tokens": {"max_tokens": 2400},
}


class Control:
    """A control without requests."""

    wanted = None
    threads = None
    listen = None
    ends_as = "cancelled"
    orders = ()
    cancel_requested = False


def write(directory: Path, num_rows: int) -> Path:
    """Write rows of 1 to 200 steps, distributed like sentence lengths: most are short."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(3.3, 0.7, num_rows).astype(int), 1, 200)
    with (directory / "rows.jsonl").open("w") as file:
        for length in lengths:
            ids = generator.integers(0, WORDS, length).tolist()
            file.write(json.dumps({"ids": ids, "label": int(length) % 2}) + "\n")
    ingest(directory / "rows.jsonl", "jsonl", directory / "dataset")
    return directory / "dataset"


def spec(bucket: dict[str, Any] | None) -> dict[str, Any]:
    layers = [
        {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 32}, "inputs": ["ids"]},
        {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 64, "batch_first": True}},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
    ]
    fields = {
        "ids": {"type": "integer_sequence", "dim": WORDS},
        "label": {"type": "integer", "dim": 2},
    }
    data = {"train": {"dataset": "d"}, "fields": fields, "batch_size": 50}
    return {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "data": data if bucket is None else data | {"bucket_by_length": bucket},
        "stop": {"epochs": 1},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(Path(name), given.rows, given.rounds)))


def measure(directory: Path, num_rows: int, rounds: int) -> dict[str, Any]:
    table = Table(write(directory, num_rows))
    found: dict[str, Any] = {"bench": "padding", "rows": num_rows, "rounds": rounds}
    jobs: dict[str, TrainJob] = {}
    for kind, bucket in KINDS.items():
        planned = plan(parse_spec(spec(bucket)), {"d": table.meta})
        jobs[kind] = parse_spec(planned["spec"])
        found[f"padding_{kind}"] = planned["sequences"]["ids"]["padding"]
        found[f"steps_{kind}"] = planned["num_steps"]
    fields = jobs["buckets"].data.fields
    rows = load(Source(dataset="d"), fields, table, seed=0, device=torch.device("cpu"))
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, job in jobs.items():
            started = time.perf_counter()
            train(job, rows, {}, control=Control(), out=Outputs(directory, lambda _record: None))
            if number:  # the first round is a warm-up
                spent[kind].append(time.perf_counter() - started)
    for kind in ("buckets", "tokens"):
        ratios = [a / b for a, b in zip(spent[kind], spent["by_chance"], strict=True)]
        found[f"time_{kind}"] = round(statistics.median(ratios), 3)
    return found


if __name__ == "__main__":
    main()
