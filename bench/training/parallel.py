"""Compares two processes under each strategy with one, and with hand-written DDP (torchrun).

The sides take turns; each runs in processes of its own with one thread each, on random rows. Prints
one JSON line for each network: seconds per step, and the medians of the ratios of the rounds. The
global batch is the same on all sides. On one side, the two processes are pinned to a core each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from engine.core.spool import read_frames
from engine.plan.plan import parse_spec, plan
from worker.processes.fork_server import ForkServerClient, rank_directory

BATCH, WARM_UP, NUM_ROWS = 256, 20, 6000
STRATEGIES = ("none", "data", "fsdp", "tensor", "pipeline")
META = {
    "columns": [
        {"name": "image", "dtype": "uint8", "shape": [784], "file": "0.npy"},
        {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"},
    ],
    "splits": {"train": NUM_ROWS},
}
WIDTHS = {"small": (128,), "wide": (1024, 1024)}


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Return random images and labels, the same each time."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (NUM_ROWS, 784), np.uint8)
    return images, generator.integers(0, 10, NUM_ROWS)


def network_by_hand(name: str) -> nn.Module:
    """Return the network of a name as a torch module."""
    layers: list[nn.Module] = []
    wide = 784
    for width in WIDTHS[name]:
        layers += [nn.Linear(wide, width), nn.GELU()]
        wide = width
    return nn.Sequential(*layers, nn.Linear(wide, 10))


def spec(name: str, strategy: str, steps: int, *, is_watched: bool) -> dict[str, Any]:
    """Return the job of a network."""
    layers: list[dict[str, Any]] = []
    for number, width in enumerate(WIDTHS[name]):
        args = {"out_features": width}
        layers += [
            {"name": f"fc{number}", "type": "Linear", "args": args},
            {"name": f"act{number}", "type": "GELU"},
        ]
    layers.append({"name": "out", "type": "Linear", "args": {"out_features": 10}})
    kinds = ["output", "output_grad", "param", "param_grad"]
    probes = [{"layers": ["*"], "kinds": kinds, "every": 1, "max_overhead": None}]
    return {
        "kind": "train",
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["out", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.01}},
        "data": {
            "train": {"dataset": "d", "split": "train"},
            "fields": {"image": {"type": "dense"}, "label": {"type": "integer", "dim": 10}},
            "global_batch_size": BATCH,
        },
        "parallel": {"strategy": strategy, "processes": processes_of(strategy)},
        "probes": probes if is_watched else [],
        "stop": {"steps": steps},
    }


def processes_of(strategy: str) -> int:
    """Return the number of processes of a side."""
    return 1 if strategy == "none" else 2


def seconds_of_a_job(
    server: ForkServerClient, table: Path, resolved: dict[str, Any], *, is_pinned: bool = False
) -> float:
    """Run a job; return the seconds of a step after the first ones.

    ``is_pinned``: each process may run on one core only, a core of its own.
    """
    cpus = sorted(os.sched_getaffinity(0))
    processes = processes_of(resolved["parallel"]["strategy"])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "logs").mkdir()
        ranks = []
        for rank in range(processes):
            own = rank_directory(directory, rank)
            own.mkdir(exist_ok=True)
            job = {
                "spec": resolved,
                "datasets": {"d": {"dir": str(table)}},
                "device": {"type": "cpu", "threads": 1},
                "group": {"rank": rank, "size": processes, "store": str(directory / "store")},
            }
            (own / "job.json").write_text(json.dumps(job))
            ranks.append(server.fork(directory, {}, rank))
            if is_pinned:
                os.sched_setaffinity(ranks[-1].identity.pid, {cpus[rank]})
        for rank in ranks:
            assert rank.wait(600) is not None
            rank.close()
        records, _ = read_frames(directory / "spool", 0, 10**7)
        assert records[-1]["state"] == "succeeded", records[-1]
    at = {
        item["step"]: datetime.fromisoformat(item["at"]).timestamp()
        for item in records
        if item["type"] == "metrics" and "loss" in item["values"]
    }
    return (at[max(at)] - at[WARM_UP]) / (max(at) - WARM_UP)


def seconds_by_hand(name: str, steps: int) -> float:
    """Run the hand-written loop under torchrun; return the seconds of a step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "bench.training.ddp_by_hand", "--network", name, "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])["step_s"]


def main() -> None:
    """Let the sides take turns, and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=220)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        table = Path(name)
        (table / "train").mkdir()
        for number, values in enumerate(rows()):
            np.save(table / "train" / f"{number}.npy", values)
        (table / "meta.json").write_text(json.dumps(META))
        server = ForkServerClient(log_path=table / "log")
        server.start()
        assert server.wait_ready(60)
        for network in WIDTHS:
            compare(server, table, network, given.rounds, given.steps)
        server.close()


def compare(server: ForkServerClient, table: Path, network: str, rounds: int, steps: int) -> None:
    """Run all sides ``rounds`` times, and print a line."""
    jobs = {
        strategy + "_watched" * is_watched: plan(
            parse_spec(spec(network, strategy, steps, is_watched=is_watched)), {"d": META}
        )["spec"]
        for strategy in STRATEGIES
        for is_watched in (False, True)
    }
    taken: list[dict[str, float]] = []
    for _ in range(rounds):
        found = {side: seconds_of_a_job(server, table, resolved) for side, resolved in jobs.items()}
        found["pinned"] = seconds_of_a_job(server, table, jobs["data"], is_pinned=True)
        taken.append(found | {"by_hand": seconds_by_hand(network, steps)})

    def ratio(above: str, below: str) -> float:
        return round(statistics.median(one[above] / one[below] for one in taken), 3)

    line = {
        "network": network,
        "step_ms": {
            side: round(1e3 * statistics.median(one[side] for one in taken), 3) for side in taken[0]
        },
        "one_to": {side: ratio("none", side) for side in STRATEGIES[1:]},
        "hand_to_data": ratio("by_hand", "data"),
        "pinned_to_data": ratio("pinned", "data"),
        "watching": {side: ratio(f"{side}_watched", side) for side in STRATEGIES},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
