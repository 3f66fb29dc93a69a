"""Compares two jobs that share the cores with one job that has all of them, in the real service.

``python -m bench.training.sharing`` starts the embedded service in a directory of its own. One job
that names no ``threads`` trains all the time. In each round it is alone, then a second one joins
it, then it is alone again. It prints one JSON line, with medians over the rounds:

- ``two_to_one``: images per second of both jobs together, divided by those of one job alone, before
  and after.
- ``back_s``: seconds from the end of the second job to the first step of the other one with all
  cores. ``given_s``: from the first step of the second job to the first one's step with fewer.
- ``service_cores``: how many cores the processes of the service take meanwhile, beside those that
  train, each alone and with two jobs.

Compare the ratios only; other processes disturb the rates.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.training.step import BATCH, spec
from glasshouse import Client

CLI = [sys.executable, "-m", "glasshouse.cli"]
NUM_ROWS, ENDLESS, LIMIT_S = 6000, 10**9 - 1, 120.0
FORK_SERVER = "engine.process.fork_server"


def rows() -> dict[str, np.ndarray]:
    """Return random images and labels."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (NUM_ROWS, 28, 28), np.uint8)
    return {"image": images, "label": generator.integers(0, 10, NUM_ROWS)}


@dataclass
class Watched:
    """A job, and the times of its steps and of its changes of threads."""

    job: Any
    steps: list[datetime] = field(default_factory=list[datetime])
    adjusted: list[tuple[datetime, int]] = field(default_factory=list[tuple[datetime, int]])
    ended: datetime | None = None

    def follow(self) -> None:
        """Read its events until it ends."""
        for event in self.job.stream(types=["metrics", "adjusted", "state", "end"]):
            if event.type == "metrics" and "loss" in event.values:
                self.steps.append(event.at)
            elif event.type == "adjusted" and event.what == "threads":
                self.adjusted.append((event.at, event.to))
            elif event.type == "end":
                self.ended = event.at

    def rate(self, since: datetime, until: datetime) -> float:
        """Return the images per second between two times."""
        count = sum(since <= at < until for at in self.steps)
        return BATCH * count / (until - since).total_seconds()


class Bench:
    """The service, and the jobs of one measurement."""

    def __init__(self, client: Client, stack: int, seconds: float, settle_s: float) -> None:
        self.client, self.seconds, self.settle_s = client, seconds, settle_s
        self.stack = psutil.Process(stack)
        self.dataset = client.datasets.upload(rows(), name="random").id

    def begin(self, seed: int) -> Watched:
        """Start a job that names no threads, and wait until it trains."""
        job = spec(ENDLESS) | {"seed": seed, "devices": {"type": "cpu"}}
        job["data"]["train"]["dataset"] = self.dataset
        made = Watched(self.client.jobs.create(job))
        threading.Thread(target=made.follow, daemon=True).start()
        wait(lambda: len(made.steps) >= 10)
        return made

    def window(self) -> tuple[datetime, datetime, dict[str, float]]:
        """Let the jobs train for a while. Return when, and the cores that the service took."""
        time.sleep(self.settle_s)
        before, since = self.service_s(), datetime.now(UTC)
        time.sleep(self.seconds)
        after, until = self.service_s(), datetime.now(UTC)
        return since, until, {name: (after[name] - before[name]) / self.seconds for name in after}

    def service_s(self) -> Counter[str]:
        """Return the CPU seconds of each process of the service that does not train."""
        found = Counter[str]()
        for process in self.stack.children(recursive=True):
            name, parent = module_of(process), module_of(process.parent())
            if not (name == FORK_SERVER == parent):  # a fork of it trains
                spent = process.cpu_times()
                found[name] += spent.user + spent.system
        return found


def module_of(process: psutil.Process | None) -> str:
    """Return the module that a process runs, or the name of its program."""
    words = [] if process is None else process.cmdline()
    at = words.index("-m") + 1 if "-m" in words else 0
    return Path(words[at]).name if words else ""


def wait(condition: Any) -> None:
    """Wait until something is so."""
    ends = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError("the service does not do what is waited for")
        time.sleep(0.01)


def round_of(bench: Bench, first: Watched, seed: int) -> dict[str, Any]:
    """Measure one job alone, both, and one alone again."""
    all_cores = len(bench.client.jobs.get(first.job.id).devices)
    before = bench.window()
    second = bench.begin(seed)
    wait(lambda: first.adjusted and first.adjusted[-1][1] < all_cores)
    given_s = (first.adjusted[-1][0] - second.steps[0]).total_seconds()
    both = bench.window()
    second.job.cancel()
    wait(lambda: second.ended and first.adjusted[-1][1] == all_cores)
    assert second.ended is not None
    back_s = (first.adjusted[-1][0] - second.ended).total_seconds()
    after = bench.window()
    time.sleep(1.0)  # the last steps arrive
    alone = statistics.mean([first.rate(*before[:2]), first.rate(*after[:2])])
    together = first.rate(*both[:2]) + second.rate(*both[:2])
    return {
        "two_to_one": together / alone,
        "given_s": given_s,
        "back_s": back_s,
        "alone": before[2],
        "both": both[2],
    }


def cores_of(found: list[dict[str, Any]], when: str) -> dict[str, float]:
    """Return the medians of the cores of each process."""
    names = sorted({name for one in found for name in one[when]})
    values = {name: [one[when].get(name, 0.0) for one in found] for name in names}
    return {name: round(statistics.median(several), 3) for name, several in values.items()}


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Measure all rounds, and return the line to print."""
    first = bench.begin(0)
    found = [round_of(bench, first, seed) for seed in range(1, rounds + 1)]
    first.job.cancel()
    wait(lambda: first.ended)
    medians = {
        name: round(statistics.median(one[name] for one in found), 3)
        for name in ("two_to_one", "given_s", "back_s")
    }
    return {
        "bench": "sharing",
        **medians,
        "ratios": [round(one["two_to_one"], 3) for one in found],
        "longest_back_s": round(max(one["back_s"] for one in found), 3),
        "service_cores": {"one_job": cores_of(found, "alone"), "two_jobs": cores_of(found, "both")},
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part of a round")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before each part")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    where = ["--home", str(home)]
    try:
        subprocess.run(
            [*CLI, "up", "--detach", "--port", "0", *where], check=True, stdout=subprocess.DEVNULL
        )
        runtime = json.loads((home / "runtime.json").read_text())
        with Client(runtime["url"], runtime["api_key"]) as client:
            bench = Bench(client, runtime["pid"], given.seconds, given.settle)
            print(json.dumps(measure(bench, given.rounds)))
    finally:
        subprocess.run([*CLI, "down", *where], check=False, stdout=subprocess.DEVNULL)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
