"""Compares the engine's step time with a hand-written torch loop, on the MNIST network.

Blocks of steps alternate in one process; the result is the median of the ratios. Data is random
and has the right shape. Prints one JSON line.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from engine.core.spool import SpoolWriter
from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.plan.plan import parse_spec, plan
from engine.training.loop import train
from engine.training.report import Outputs
from glasshouse.spec import Source

BATCH = 100
META = {
    "columns": [
        {"name": "image", "dtype": "uint8", "shape": [28, 28], "file": "0.npy"},
        {"name": "label", "dtype": "uint8", "shape": [], "file": "1.npy"},
    ],
    "splits": {"train": 6000},
}


def spec(num_steps: int) -> dict:
    conv = {"out_channels": 20, "kernel_size": 5, "padding": 2}
    layers = [
        {"name": "conv1", "type": "Conv2d", "args": conv},
        {"name": "relu1", "type": "ReLU"},
        {"name": "pool1", "type": "MaxPool2d", "args": {"kernel_size": 2}},
        {"name": "conv2", "type": "Conv2d", "args": conv},
        {"name": "relu2", "type": "ReLU"},
        {"name": "pool2", "type": "MaxPool2d", "args": {"kernel_size": 2}},
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    fields = {
        "image": {"type": "dense", "shape": [1, 28, 28]},
        "label": {"type": "integer", "dim": 10},
    }
    return {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": {
            "train": {"dataset": "d", "split": "train"},
            "fields": fields,
            "batch_size": BATCH,
        },
        "stop": {"steps": num_steps + 1},  # the control is not asked after the last step
        "metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}],
    }


def clocks() -> tuple[float, float]:
    """Return wall time, and the CPU time of this process, which other load disturbs less."""
    return time.perf_counter(), time.process_time()


class Clock:
    """A control that records the time at every step boundary."""

    wanted = None
    threads = None
    listen = None
    ends_as = "cancelled"
    orders = ()

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    @property
    def cancel_requested(self) -> bool:
        self.times.append(clocks())
        return False


class ByHand:
    """The training loop of a tutorial: data in memory as float32, loss read at every step."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.images, self.labels = images, labels
        self.network = nn.Sequential(
            nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(20, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(980, 10),
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01)
        self.loss_fn = nn.CrossEntropyLoss()

    def run(self, num_steps: int) -> tuple[float, float]:
        order = torch.randperm(len(self.images))
        wall, cpu = clocks()
        for step in range(num_steps):
            rows = order[step * BATCH % len(order) :][:BATCH]
            scores = self.network(self.images[rows])
            loss = self.loss_fn(scores, self.labels[rows])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            loss.item()
        ended = clocks()
        return ended[0] - wall, ended[1] - cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (6000, 28, 28), dtype=np.uint8)
    labels = generator.integers(0, 10, 6000).astype(np.uint8)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train").mkdir()
        np.save(directory / "train" / "0.npy", images)
        np.save(directory / "train" / "1.npy", labels)
        (directory / "meta.json").write_text(json.dumps(META))
        x = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 28, 28) / 255
        hand = ByHand(x, torch.from_numpy(labels).long())
        ratios = compare(given.rounds, given.steps, hand, directory)
    wall, cpu = zip(*ratios, strict=True)
    print(
        json.dumps(
            {
                "bench": "step",
                "ratio": round(statistics.median(wall), 4),
                "min": round(min(wall), 4),
                "max": round(max(wall), 4),
                "cpu_ratio": round(statistics.median(cpu), 4),
                "rounds": given.rounds,
                "steps": given.steps,
                "threads": given.threads,
                "target": 1.03,
            }
        )
    )


def compare(rounds: int, num_steps: int, hand: ByHand, directory: Path) -> list[tuple[float, ...]]:
    job = parse_spec(plan(parse_spec(spec(num_steps)), {"d": META})["spec"])
    table = Table(directory)
    source = Source(dataset="d", split="train")
    rows = load(source, job.data.fields, table, seed=0, device=torch.device("cpu"))
    spool = SpoolWriter(directory / "spool")
    ratios: list[tuple[float, ...]] = []
    for number in range(rounds + 1):
        clock = Clock()
        out = Outputs(directory, spool.append, spool.settle, spool.flush)
        train(job, rows, {}, control=clock, out=out)
        first, last = clock.times[0], clock.times[num_steps - 1]
        theirs = hand.run(num_steps)
        if number:  # the first round is a warm-up
            ratios.append(
                tuple(
                    (z - a) / (num_steps - 1) / (t / num_steps)
                    for a, z, t in zip(first, last, theirs, strict=True)
                )
            )
    spool.close()
    return ratios


if __name__ == "__main__":
    main()
