"""Measures the cost of the NaN and Inf guard: step time with it against the same job without it.

Blocks of all kinds alternate in one process; each value is the median over the rounds. ``share``
is the fraction of the training thread's CPU time that the guard's two calls took. ``ratio`` is
that of step times and includes everything else, and the noise of the machine. Data is random and
all values are finite. Prints a JSON line for each network and guard.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.probes.watching import NETWORKS, Bench
from engine.guards.guard import Guard
from engine.process.rank import calm_collector

GUARDS: dict[str, dict[str, Any]] = {
    "default": {},
    "skip_step": {"action": "skip_step"},
    "outputs too": {"check": ["loss", "outputs", "gradients"]},
    "everything": {"check": ["loss", "outputs", "gradients", "parameters"], "action": "fail"},
}
OFF: dict[str, Any] = {"check": []}
NUM_STEPS = 200
"""Steps of a block; in the first ones the guard has not measured its own cost yet."""
_spent = {"guard": 0.0}


def timed(call: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method so that its CPU time is added up."""

    def wrapped(*args: Any) -> None:
        started = time.thread_time()
        call(*args)
        _spent["guard"] += time.thread_time() - started

    return wrapped


def block(bench: Bench, job: Any) -> tuple[float, float, float]:
    """Return wall and CPU time of a block, and the guard's share of this thread's CPU time."""
    _spent["guard"] = 0.0
    started = time.thread_time()
    wall, cpu = bench.block(job)
    return wall, cpu, _spent["guard"] / (time.thread_time() - started)


def measure(bench: Bench, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    """Return one line for each guard, with medians over the rounds."""

    def job(guard: dict[str, Any]) -> Any:
        bench.spec["guards"] = {"nonfinite": guard}
        return bench.job(None)

    without = job(OFF)
    jobs = {name: job(GUARDS[name]) for name in names}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first round is a warm-up
        for name, guarded in jobs.items():
            order = [guarded, without] if number % 2 else [without, guarded]
            times = {id(one): block(bench, one) for one in order}
            if number >= 0:
                mine, alone = times[id(guarded)], times[id(without)]
                found[name].append((mine[0] / alone[0], mine[2]))
    return [
        {
            "guard": name,
            "share": round(statistics.median(share for _, share in both), 4),
            "ratio": round(statistics.median(wall for wall, _ in both), 4),
            "min": round(min(wall for wall, _ in both), 4),
            "max": round(max(wall for wall, _ in both), 4),
        }
        for name, both in found.items()
    ]


def main() -> None:
    """Print a line for each network and guard."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--network", choices=[*NETWORKS], nargs="*", default=[*NETWORKS])
    parser.add_argument("--guard", choices=[*GUARDS], nargs="*", default=[*GUARDS])
    given = parser.parse_args()
    calm_collector()
    Guard.begin, Guard.check = timed(Guard.begin), timed(Guard.check)  # type: ignore[method-assign]
    torch.set_num_threads(given.threads)
    for network in given.network:
        make, _, _ = NETWORKS[network]
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(Path(directory) / "data", make, given.steps)
            for line in measure(bench, given.rounds, given.guard):
                about = {"bench": "guarding", "network": network, "threads": given.threads}
                print(json.dumps({**about, **line, "rounds": given.rounds}), flush=True)
            bench.close()


if __name__ == "__main__":
    main()
