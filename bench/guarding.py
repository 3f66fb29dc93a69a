"""What the guard over the numbers costs: a job's step with it against the same job's without.

Blocks of all kinds take turns in one process; each figure is the median of its ratios. Data is
random, and all numbers are finite. Prints a JSON line for each network and guard.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.watching import NETWORKS, Bench
from engine.rank import calm_collector

GUARDS: dict[str, dict[str, Any]] = {
    "default": {},
    "skip_step": {"action": "skip_step"},
    "outputs too": {"check": ["loss", "outputs", "gradients"]},
    "everything": {"check": ["loss", "outputs", "gradients", "parameters"], "action": "fail"},
}
OFF: dict[str, Any] = {"check": []}


def measure(bench: Bench, rounds: int, names: list[str]) -> list[dict[str, Any]]:
    """The ratios of each guard, one for every round."""

    def job(guard: dict[str, Any]) -> Any:
        bench.spec["guards"] = {"nonfinite": guard}
        return bench.job(None)

    without = job(OFF)
    jobs = {name: job(GUARDS[name]) for name in names}
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first round loads things
        for name, guarded in jobs.items():
            order = [guarded, without] if number % 2 else [without, guarded]
            times = {id(one): bench.block(one) for one in order}
            if number >= 0:
                mine, alone = times[id(guarded)], times[id(without)]
                ratios[name].append((mine[0] / alone[0], mine[1] / alone[1]))
    return [
        {
            "guard": name,
            "ratio": round(statistics.median(wall for wall, _ in found), 4),
            "min": round(min(wall for wall, _ in found), 4),
            "max": round(max(wall for wall, _ in found), 4),
            "cpu_ratio": round(statistics.median(cpu for _, cpu in found), 4),
        }
        for name, found in ratios.items()
    ]


def main() -> None:
    """Print the lines of all that was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--network", choices=[*NETWORKS], nargs="*", default=[*NETWORKS])
    parser.add_argument("--guard", choices=[*GUARDS], nargs="*", default=[*GUARDS])
    given = parser.parse_args()
    calm_collector()
    torch.set_num_threads(given.threads)
    for network in given.network:
        make, num_steps, _ = NETWORKS[network]
        with tempfile.TemporaryDirectory() as directory:
            bench = Bench(Path(directory) / "data", make, num_steps)
            for line in measure(bench, given.rounds, given.guard):
                about = {"bench": "guarding", "network": network, "threads": given.threads}
                print(json.dumps({**about, **line, "rounds": given.rounds}), flush=True)
            bench.close()


if __name__ == "__main__":
    main()
