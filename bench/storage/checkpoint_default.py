"""Measures the cost of the default checkpoints for a job with short epochs and a large state.

The job has a sparse table of 384 MB and epochs of about 0.15 s. Runs with the default
``checkpoint`` and runs that save only at the end alternate. ``ratio`` is that of their mean step
times from the first step to the last; it is the median of the rounds. ``validated``: each epoch is
evaluated and the best state is kept. Prints a JSON line with and without validation.
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

from engine.plan.plan import parse_spec, plan
from engine.process.rank import Assignment, calm_collector, run
from engine.training.report import Outputs

NUM_WORDS, WIDTH, BATCH, STEPS = 1_500_000, 64, 8, 200
NEVER = {"every_epochs": 1_000_000, "every_s": None}
META = {
    "columns": [
        {"name": "word", "dtype": "int64", "shape": [], "file": "0.npy"},
        {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"},
    ],
    "splits": {"train": BATCH * STEPS, "test": BATCH},
}


class Clock:
    """A job's control that records when steps ended and at which steps checkpoints were saved."""

    cancel_requested, ends_as, orders = False, "cancelled", ()
    wanted = threads = listen = None

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.saved: list[int] = []

    def emit(self, record: dict[str, Any]) -> None:
        if record["type"] == "checkpoint":
            self.saved.append(record["step"])
        elif record["type"] == "metrics" and "loss" in record["values"]:
            self.ends.append(time.perf_counter())

    @property
    def step_ms(self) -> float:
        """The mean step time, ms, including the time between steps."""
        return 1000 * (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def write_table(directory: Path) -> Path:
    generator = np.random.default_rng(0)
    for split, num_rows in META["splits"].items():  # type: ignore[attr-defined]
        (directory / split).mkdir(parents=True)
        np.save(directory / split / "0.npy", generator.integers(0, NUM_WORDS, num_rows))
        np.save(directory / split / "1.npy", generator.integers(0, 10, num_rows))
    (directory / "meta.json").write_text(json.dumps(META))
    return directory


def spec(epochs: int, *, validated: bool, never: bool) -> dict[str, Any]:
    sizes = {"num_embeddings": NUM_WORDS, "embedding_dim": WIDTH, "sparse": True}
    layers = [
        {"name": "words", "type": "Embedding", "args": sizes},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    data: dict[str, Any] = {
        "train": {"dataset": "d", "split": "train"},
        "fields": {
            "word": {"type": "integer", "dim": NUM_WORDS},
            "label": {"type": "integer", "dim": 10},
        },
        "batch_size": BATCH,
    }
    if validated:
        data["validation"] = {"dataset": "d", "split": "test"}
    return {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": data,
        "stop": {"epochs": epochs},
        **({"checkpoint": NEVER} if never else {}),
    }


def measure(table: Path, directory: Path, body: dict[str, Any]) -> Clock:
    directory.mkdir()
    job = {
        "spec": plan(parse_spec(body), {"d": META})["spec"],
        "datasets": {"d": {"dir": str(table)}},
        "device": {"type": "cpu", "threads": 1},
    }
    (directory / "job.json").write_text(json.dumps(job))
    clock = Clock()
    out = Outputs(directory, clock.emit)
    ended = run(Assignment.read(directory / "job.json"), control=clock, out=out)  # type: ignore[arg-type]
    assert ended.state == "succeeded"
    return clock


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    calm_collector()
    torch.set_num_threads(1)
    for validated in (False, True):
        ratios: list[float] = []
        saved: list[int] = []
        with tempfile.TemporaryDirectory() as name:
            table = write_table(Path(name) / "table")
            measure(table, Path(name) / "warm", spec(2, validated=validated, never=True))
            for number in range(given.rounds):
                found: dict[bool, Clock] = {}
                for never in (False, True) if number % 2 else (True, False):
                    with tempfile.TemporaryDirectory(dir=name) as place:
                        body = spec(given.epochs, validated=validated, never=never)
                        found[never] = measure(table, Path(place) / "job", body)
                ratios.append(found[False].step_ms / found[True].step_ms)
                saved = found[False].saved
        line: dict[str, Any] = {
            "bench": "checkpoint_default",
            "validated": validated,
            "megabytes": NUM_WORDS * WIDTH * 4 // 10**6,
            "epochs": given.epochs,
            "ratio": round(statistics.median(ratios), 3),
            "min": round(min(ratios), 3),
            "max": round(max(ratios), 3),
            "checkpoints": len(saved),
            "step_ms_without": round(found[True].step_ms, 3),
            "rounds": given.rounds,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
