"""Compares inference over a dataset with a hand-written torch loop, and measures its memory.

Both sides read the same uint8 images from a file, run the MNIST network on one thread, and write
the scores, classes and probabilities of all rows. They take turns in one process; the result is the
median of the ratios of wall time. ``--outside`` gives the CPU time of the main thread outside the
network, which other load disturbs less. ``--memory`` runs the engine alone, each time in a fresh
process, over more and more rows; its anonymous memory must not grow. Prints JSON lines.

``--device cuda`` runs both sides on the first CUDA device. There the hand-written loop copies each
batch to the device and its outputs back, and a larger ``--batch`` is usual.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bench.training.step import META, spec
from engine.core.spool import read_frames
from engine.network.network import Network
from engine.process import rank
from engine.process.planner import answer

BATCH = 256
CPU = {"type": "cpu", "threads": 1}


def make_table(directory: Path, num_rows: int) -> Path:
    """Write random images as a dataset."""
    (directory / "train").mkdir(parents=True)
    images = np.lib.format.open_memmap(
        directory / "train" / "0.npy", "w+", np.uint8, (num_rows, 28, 28)
    )
    generator = np.random.default_rng(0)
    for start in range(0, num_rows, 10_000):
        part = images[start : start + 10_000]
        part[:] = generator.integers(0, 256, part.shape, dtype=np.uint8)
    images.flush()
    np.save(directory / "train" / "1.npy", generator.integers(0, 10, num_rows).astype(np.uint8))
    (directory / "meta.json").write_text(json.dumps(META | {"splits": {"train": num_rows}}))
    return directory


def run_job(directory: Path, job: dict[str, Any], table: Path, **more: Any) -> float:
    """Run a job as a rank does; return the seconds from its start to its end."""
    directory.mkdir(parents=True)
    meta = json.loads((table / "meta.json").read_text())
    network = {"network": more["trained_by"]} if more.get("trained_by") else {}
    asked = {"id": 1, "do": "plan", "spec": job, "datasets": {"d": meta}, **network}
    resolved = answer(asked)["plan"]["spec"]
    whole = {"spec": resolved, "datasets": {"d": {"dir": str(table)}}, **more}
    whole = {"job": "job_x", "attempt": 1, "device": CPU} | whole
    (directory / "job.json").write_text(json.dumps(whole))
    began = time.perf_counter()
    rank.carry_out(directory, None)
    took = time.perf_counter() - began
    records, _ = read_frames(directory / "spool", 0, 10**6)
    if records[-1]["state"] != "succeeded":
        raise SystemExit(str(records[-1]))
    return took


def trained(directory: Path) -> tuple[dict[str, Any], Path]:
    """Train for two steps; return the resolved spec and the checkpoint."""
    table = make_table(directory / "few", 6000)
    run_job(directory / "training", spec(1), table)
    records, _ = read_frames(directory / "training" / "spool", 0, 10**6)
    saved = [record for record in records if record["type"] == "checkpoint"][-1]
    described = json.loads((directory / "training" / "job.json").read_text())["spec"]
    return described, directory / "training" / saved["dir"]


def by_hand(table: Path, checkpoint: Path, target: Path, device: str, batch: int) -> float:
    """Run the hand-written loop; return its seconds."""
    began = time.perf_counter()
    network = nn.Sequential(
        nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 20, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(980, 10),
    )  # fmt: skip
    weights = load_file(checkpoint / "model.safetensors")
    places = {"conv1": "0", "conv2": "3", "fc": "7"}
    named = {name.partition("."): x for name, x in weights.items()}
    network.load_state_dict({f"{places[a]}.{b}": x for (a, _, b), x in named.items()})
    network.to(device).eval()
    images = np.load(table / "train" / "0.npy", mmap_mode="r")
    values, ids, probabilities = [], [], []
    with torch.inference_mode():
        for start in range(0, len(images), batch):
            rows = torch.from_numpy(images[start : start + batch].copy()).to(device)
            scores = network(rows[:, None].float().div_(255))
            best = scores.softmax(1).max(1)
            values.append(scores.cpu())
            ids.append(best.indices.cpu())
            probabilities.append(best.values.cpu())
    joined = {"value": values, "id": ids, "prob": probabilities}
    save_file({f"fc/{name}": torch.cat(parts) for name, parts in joined.items()}, target)
    return time.perf_counter() - began


def infer_job(batch: int = BATCH) -> dict[str, Any]:
    data = {"dataset": "d", "split": "train", "batch_size": batch}
    return {"kind": "infer", "job": "job_x", "data": data, "outputs": ["fc"]}


def compare(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Let both sides take turns."""
    described, checkpoint = trained(directory)
    table = make_table(directory / "many", given.rows)
    more = {"trained_by": described, "checkpoint": {"dir": str(checkpoint)}}
    more |= {"device": {"type": given.device, "threads": 1}}
    took: list[tuple[float, float]] = []
    for turn in range(given.rounds + 1):
        target = directory / f"by-hand-{turn}.safetensors"
        plain = by_hand(table, checkpoint, target, given.device, given.batch)
        mine = run_job(directory / f"turn-{turn}", infer_job(given.batch), table, **more)
        found = load_file(directory / f"turn-{turn}" / "artifacts" / "outputs.safetensors")
        for name, tensor in load_file(target).items():
            torch.testing.assert_close(found[name], tensor)
        if turn:  # the first warms up
            took.append((plain, mine))
    ratios = [plain / mine for plain, mine in took]
    rates = [round(given.rows / statistics.median(side)) for side in zip(*took, strict=True)]
    return {
        "bench": "inference",
        "device": given.device,
        "rows": given.rows,
        "batch": given.batch,
        "throughput_ratio": round(statistics.median(ratios), 3),
        "low": round(min(ratios), 3),
        "high": round(max(ratios), 3),
        "rows_per_s": {"by_hand": rates[0], "engine": rates[1]},
        "rounds": given.rounds,
    }


def outside(num_rows: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Return medians of the main thread's CPU seconds outside the network, and inside it."""
    described, checkpoint = trained(directory)
    table = make_table(directory / "many", num_rows)
    more = {"trained_by": described, "checkpoint": {"dir": str(checkpoint)}}
    inside: list[float] = []
    for module in (nn.Sequential, Network):
        module.forward = timed(module.forward, inside)
    took: list[float] = []
    rank.carry_out = timed(rank.carry_out, took)
    hand = timed(by_hand, took)
    found: dict[str, list[float]] = {"loop_s": [], "job_s": [], "network_s": []}
    for turn in range(rounds + 1):
        for side in ("loop_s", "job_s"):
            inside.clear()
            if side == "loop_s":
                hand(table, checkpoint, directory / f"by-hand-{turn}.safetensors")
            else:
                run_job(directory / f"turn-{turn}", infer_job(), table, **more)
            found[side].append(took[-1] - sum(inside))
            found["network_s"].append(sum(inside))
    medians = {
        side: statistics.median(values[len(values) // (rounds + 1) :])
        for side, values in found.items()
    }
    both = [medians[side] + medians["network_s"] for side in ("loop_s", "job_s")]
    about = {"bench": "inference, CPU outside the network", "rows": num_rows, "rounds": rounds}
    rounded = {side: round(value, 4) for side, value in medians.items()}
    return about | rounded | {"ratio": round(both[0] / both[1], 3)}


def timed(work: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that also appends the CPU seconds of each call in its thread."""

    @functools.wraps(work)
    def run(*args: Any, **more: Any) -> Any:
        began = time.thread_time()
        found = work(*args, **more)
        seconds.append(time.thread_time() - began)
        return found

    return run


class AnonymousMemory(threading.Thread):
    """Records the peak of this process's memory that is not that of files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.peak = self._now()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.005):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        """Return KiB."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def memory(num_rows: int, directory: Path) -> dict[str, Any]:
    """Return by how much the memory of a process grows that runs one inference."""
    described, checkpoint = trained(directory)
    table = make_table(directory / "many", num_rows)
    more = {"trained_by": described, "checkpoint": {"dir": str(checkpoint)}}
    watched = AnonymousMemory()
    watched.start()
    run_job(directory / "turn", infer_job(), table, **more)
    watched.ended.set()
    grown = round((watched.peak - watched.first) / 1024, 1)
    return {"bench": "inference memory", "rows": num_rows, "grown_mib": grown}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="in this process, without turns")
    parser.add_argument("--outside", action="store_true", help="CPU time outside the network")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=BATCH, help="rows of a batch")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        if given.outside:
            print(json.dumps(outside(given.rows, given.rounds, Path(name))))
            return
        if given.memory:
            print(json.dumps(memory(given.rows, Path(name))))
            return
        print(json.dumps(compare(given, Path(name))), flush=True)
    if given.device != "cpu":
        return
    for num_rows in (given.rows, 4 * given.rows):
        command = [sys.executable, "-m", "bench.data.inference", "--memory"]
        subprocess.run([*command, "--rows", str(num_rows)], check=True)


if __name__ == "__main__":
    main()
