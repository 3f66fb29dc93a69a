"""Measures what predictions with the current weights cost a job, and how long they take.

The MNIST job of `bench.training.step` runs in turns: alone; after somebody has asked, without
requests (idle); and with clients that send the next request as soon as they have the answer. Prints
one JSON line with medians over the rounds. The clients are a process of their own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.training.step import BATCH, META, Clock, spec
from engine.core.spool import SpoolWriter
from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.plan.plan import parse_spec, plan
from engine.serving.live_predictions import LivePredictions
from engine.training.loop import train
from engine.training.report import Outputs
from glasshouse.spec import Source

WARM_UP = 50
"""Steps that are not measured."""


class Asked(Clock):
    """A control of a job that listens from the first step on, if ``at`` is given."""

    def __init__(self, at: Path | None) -> None:
        super().__init__()
        self.listen = None if at is None else {"job": "job", "at": {"path": str(at)}}


def run(job: Any, table: Path, directory: Path, clients: int | None) -> dict[str, float]:
    """Train, with so many clients; None: nobody has asked. Return seconds of steps and answers."""
    directory.mkdir()
    spool = SpoolWriter(directory / "spool")
    asking: list[subprocess.Popen[str]] = []

    shares: list[float] = []

    def emit(record: dict[str, Any]) -> None:
        spool.append(record)
        values = record.get("values", {})
        if "time/predict" in values:
            shares.append(values["time/predict"] / values["time/step"])
        if record["type"] == "answering" and clients:
            given = [record["address"], record["token"], str(clients)]
            command = [sys.executable, "-m", "bench.training.asking", *given]
            asking.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    cpu = torch.device("cpu")
    source = Source(dataset="d", split="train")
    rows = load(source, job.data.fields, Table(table), seed=0, device=cpu)
    out = Outputs(directory, emit, spool.settle, spool.flush)
    control = Asked(None if clients is None else directory / "s")
    predictions = LivePredictions(job, cpu, out)
    train(job, rows, {}, control=control, out=out, predictions=predictions)
    predictions.close()
    times = control.times[WARM_UP:]
    step_s, cpu_s = ((z - a) / (len(times) - 1) for a, z in zip(times[0], times[-1], strict=True))
    found = {"step_s": step_s, "cpu_s": cpu_s}
    if len(shares) > 1:  # the first one has the creation of the second network
        found["share"] = statistics.median(shares[1:])
    for one in asking:
        found |= json.loads(one.communicate()[0])
    return found


def main() -> None:
    """Measure and print a line."""
    parser = argparse.ArgumentParser(prog="python -m bench.training.predicting")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        table = home / "table"
        (table / "train").mkdir(parents=True)
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (6000, 28, 28), np.uint8)
        np.save(table / "train" / "0.npy", images)
        np.save(table / "train" / "1.npy", random.integers(0, 10, 6000).astype(np.uint8))
        (table / "meta.json").write_text(json.dumps(META))
        made = plan(parse_spec(spec(given.steps + WARM_UP)), {"d": META})
        job = parse_spec(made["spec"])
        for number in range(given.rounds):
            ways: dict[str, int | None] = {"alone": None, "idle": 0, "asked": given.clients}
            for way, clients in ways.items():
                one = run(job, table, home / f"{way}-{number}", clients)
                found.setdefault(way, []).append(one)
    alone = [one["step_s"] for one in found["alone"]]
    cpu = [one["cpu_s"] for one in found["alone"]]
    line: dict[str, Any] = {"bench": "predictions while training", "clients": given.clients}
    line |= {"rows": BATCH, "step_ms": round(statistics.median(alone) * 1e3, 3)}
    for way in ("idle", "asked"):
        ratios = [one["step_s"] / base for one, base in zip(found[way], alone, strict=True)]
        line[f"{way}, relative step time"] = round(statistics.median(ratios), 4)
        ratios = [one["cpu_s"] / base for one, base in zip(found[way], cpu, strict=True)]
        line[f"{way}, relative CPU time"] = round(statistics.median(ratios), 4)
    shares = [one["share"] for one in found["asked"] if "share" in one]
    line["share of answers"] = round(statistics.median(shares), 4) if shares else None
    latencies = [one["latency_s"] for one in found["asked"]]
    line["latency_ms"] = round(statistics.median(latencies) * 1e3, 2)
    line["answers"] = int(sum(one["answers"] for one in found["asked"]))
    print(json.dumps(line | {"cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
