"""Measures the cost of watching: the step time with a probe against the same job without.

A job with a probe and one without alternate their steps in one process that has the allocator and
garbage collector settings of a rank. The result is the median of the ratios of rounds. The native
kernel and the plain torch path are both measured. Data is random. Prints a JSON line for each
network, probe, path and number of threads.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from bench.training import step as mnist
from bench.training.step import Clock
from bench.training.turns import TURN, figures, ratios, take_turns
from engine.core.spool import SpoolWriter
from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.plan.plan import parse_spec, plan
from engine.probes.statistics import native_kernel
from engine.probes.tensors.ring import Ring, default_num_bytes
from engine.process.rank import calm_collector
from engine.training.loop import train
from engine.training.report import Outputs
from glasshouse.spec import Source
from worker.processes.fork_server import FIXED

NUM_ROWS, LENGTH, WIDTH, BATCH = 512, 64, 256, 8
PATHS = ("kernel", "plain")
ALL = ["output", "output_grad", "param", "param_grad"]
CASES: dict[str, tuple[dict[str, Any] | None, bool, float | None]] = {
    # name: the probe; whether to measure the plain path too; the target ratio
    "a: stats of everything, every step": ({"kinds": ALL, "every": 1}, True, 1.10),
    "a': stats of outputs and param_grads, every step": (
        {"kinds": ["output", "param_grad"], "every": 1}, True, 1.05,
    ),
    "b: stats of everything, every 25": ({"kinds": ALL, "every": 25}, True, 1.01),
    "c: full tensors of everything, every 25": (
        {"kinds": ALL, "every": 25, "want": ["full"]}, False, 1.02,
    ),
    "d: nothing due": ({"kinds": ALL, "every": 1, "start": 10**6}, False, 1.002),
    "e: 1,000 small layers, stats of everything, every step": (
        {"kinds": ALL, "every": 1}, True, None,
    ),
    "e': 1,000 small layers, stats of everything, every 25": (
        {"kinds": ALL, "every": 25}, True, None,
    ),
    "z: no probe, against itself": (None, False, None),  # the noise
}  # fmt: skip


def transformer() -> tuple[dict, dict, list[np.ndarray]]:
    """Return spec, metadata and data of four encoder layers on sequences of vectors."""
    args = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0}
    layers: list[dict] = [
        {
            "name": f"block{number}",
            "type": "TransformerEncoderLayer",
            "args": {**args, "batch_first": True},
        }
        for number in range(4)
    ]
    layers += [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    spec = {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": {
            "train": {"dataset": "d", "split": "train"},
            "fields": {
                "image": {"type": "dense", "shape": [LENGTH, WIDTH]},
                "label": {"type": "integer", "dim": 10},
            },
            "batch_size": BATCH,
        },
    }
    meta = {
        "columns": [
            {"name": "image", "dtype": "float32", "shape": [LENGTH, WIDTH], "file": "0.npy"},
            {"name": "label", "dtype": "uint8", "shape": [], "file": "1.npy"},
        ],
        "splits": {"train": NUM_ROWS},
    }
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((NUM_ROWS, LENGTH, WIDTH), dtype=np.float32)
    return spec, meta, [rows, generator.integers(0, 10, NUM_ROWS).astype(np.uint8)]


def cnn() -> tuple[dict, dict, list[np.ndarray]]:
    """Return those of the MNIST network of ``bench.training.step``, without its metric."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (6000, 28, 28), dtype=np.uint8)
    spec = {**mnist.spec(1), "metrics": []}
    return spec, mnist.META, [images, generator.integers(0, 10, 6000).astype(np.uint8)]


def many() -> tuple[dict, dict, list[np.ndarray]]:
    """Return those of 1,000 layers so small that a step is mostly the overhead of each layer."""
    layers: list[dict] = []
    for number in range(500):
        layers += [
            {"name": f"fc{number}", "type": "Linear", "args": {"out_features": 16}},
            {"name": f"relu{number}", "type": "ReLU"},
        ]
    layers.append({"name": "scores", "type": "Linear", "args": {"out_features": 10}})
    spec = {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["scores", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": {
            "train": {"dataset": "d", "split": "train"},
            "fields": {
                "x": {"type": "dense", "shape": [16]},
                "label": {"type": "integer", "dim": 10},
            },
            "batch_size": 32,
        },
    }
    meta = {
        "columns": [
            {"name": "x", "dtype": "float32", "shape": [16], "file": "0.npy"},
            {"name": "label", "dtype": "uint8", "shape": [], "file": "1.npy"},
        ],
        "splits": {"train": NUM_ROWS},
    }
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((NUM_ROWS, 16), dtype=np.float32)
    return spec, meta, [rows, generator.integers(0, 10, NUM_ROWS).astype(np.uint8)]


NETWORKS = {
    # name: its function; the steps of a block; the letters of its cases
    "mnist cnn, batch 100": (cnn, 50, "abcdz"),
    "transformer 4x256, 8x64 tokens": (transformer, 25, "abcdz"),
    "1,000 layers of 16, batch 32": (many, 25, "ez"),
}


class Bench:
    """Trains one network with any probe, in blocks."""

    def __init__(
        self, directory: Path, make: Any, num_steps: int, ring_bytes: int | None = None
    ) -> None:
        self.num_steps = num_steps
        self.spec, self.meta, columns = make()
        self.directory = directory
        (directory / "train").mkdir(parents=True)
        for number, values in enumerate(columns):
            np.save(directory / "train" / f"{number}.npy", values)
        (directory / "meta.json").write_text(json.dumps(self.meta))
        job = self.job(None)
        source = Source(dataset="d", split="train")
        table, cpu = Table(directory), torch.device("cpu")
        self.rows = load(source, job.data.fields, table, seed=0, device=cpu)
        self.spool = SpoolWriter(directory / "spool")
        self.ring = Ring.shared(ring_bytes or default_num_bytes())
        command = [sys.executable, "-m", "bench.probes.consumer", str(self.ring.name)]
        command += [str(directory / "spool"), str(directory / "artifacts")]
        self.consumer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.consumer.stdout is not None
        self.consumer.stdout.readline()
        self._consumed = 0.0

    def close(self) -> None:
        self.consumer.kill()
        self.consumer.wait()
        self.spool.close()
        self.ring.close()

    def drained(self) -> float:
        """Wait until the consumer is idle; return its CPU time so far, seconds."""
        time.sleep(0.3)
        spent = psutil.Process(self.consumer.pid).cpu_times()
        return spent.user + spent.system

    def job(self, probe: dict | None, num_steps: int | None = None) -> Any:
        """Plan a job. By default it has a block, one step before it, and a last step not timed."""
        always = {"layers": ["*"], "max_overhead": None}  # the cost is measured here
        probes = [] if probe is None else [{**always, **probe}]
        stop = {"steps": num_steps or self.num_steps + 2}
        spec = {**self.spec, "stop": stop, "probes": probes}
        return parse_spec(plan(parse_spec(spec), {"d": self.meta})["spec"])

    def block(self, job: Any) -> tuple[float, ...]:
        """Return wall and CPU time of a block without its first step, which is a warm-up."""
        clock = Clock()
        before = self.drained()
        self.run(job, clock)
        first, last = clock.times[0], clock.times[self.num_steps]
        wall, cpu = (z - a for a, z in zip(first, last, strict=True))
        return wall, cpu + self.drained() - before

    def run(self, job: Any, control: Any) -> None:
        out = Outputs(self.directory, self.spool.append, self.spool.settle, self.spool.flush)
        out.ring = self.ring.name
        train(job, self.rows, {}, control=control, out=out)

    def settled(self) -> float:
        """Wait until the consumer is idle; return its CPU time since the last call, seconds."""
        before, self._consumed = self._consumed, self.drained()
        return self._consumed - before


def measure(bench: Bench, given: argparse.Namespace, names: list[str]) -> Generator[dict[str, Any]]:
    """Yield a line for each case and path, as soon as it is measured."""
    for name in names:
        probe, has_plain, target = CASES[name]
        native = [("kernel", native_kernel.LOADED)] if native_kernel.LOADED is not None else []
        plain = [("plain", None)] if has_plain or not native else []
        for path, loaded in [one for one in (*native, *plain) if one[0] in given.path]:
            with_kernel, native_kernel.LOADED = native_kernel.LOADED, loaded
            found = compared(bench, given.rounds, given.turn, probe)
            native_kernel.LOADED = with_kernel
            yield {"case": name, "path": path, **figures(found), "target": target}


def compared(bench: Bench, rounds: int, turn: int, probe: dict | None) -> list[tuple[float, ...]]:
    """Return per round the ratios of wall and CPU time of steps with the probe to those without.

    The jobs alternate after every ``turn`` steps. With short turns the machine is equally fast for
    both. With more than one step, most steps find the caches filled by their own network. Where
    whole tensors are written, a turn ends when the writer is done, so that no side writes in the
    other's turn; the writer's CPU time counts.
    """
    size = bench.num_steps
    is_writing = probe is not None and "full" in probe.get("want", ())
    settled = bench.settled if is_writing else None
    num_steps = (rounds + 1) * size + 2  # a warm-up round, a first step, a last one not timed
    watched, alone = take_turns(
        bench.run, (bench.job(probe, num_steps), bench.job(None, num_steps)), turn, settled
    )
    return ratios(watched, alone, size // turn)


def main() -> None:
    settings = {name: value for name, value in FIXED.items() if name.startswith("MALLOC_")}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        command = [sys.executable, "-m", "bench.probes.watching", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings})  # noqa: S606
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", choices=[*NETWORKS], nargs="*", default=[*NETWORKS])
    parser.add_argument("--turn", type=int, default=TURN, help="steps of a turn")
    parser.add_argument("--case", nargs="*", help="cases by their letters; default: all")
    parser.add_argument("--path", choices=PATHS, nargs="*", default=[*PATHS])
    given = parser.parse_args()
    calm_collector()
    names = [name for name in CASES if not given.case or name.partition(":")[0] in given.case]
    for threads in given.threads:
        torch.set_num_threads(threads)
        for network in given.network:
            make, num_steps, letters = NETWORKS[network]
            with tempfile.TemporaryDirectory() as directory:
                bench = Bench(Path(directory) / "data", make, num_steps)
                mine = [name for name in names if name[0] in letters]
                for line in measure(bench, given, mine):
                    about = {"bench": "watching", "network": network, "threads": threads}
                    print(json.dumps({**about, **line, "rounds": given.rounds}), flush=True)
                bench.close()


if __name__ == "__main__":
    main()
