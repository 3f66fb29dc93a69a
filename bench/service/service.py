"""Measures the whole service: latency of a job, latency of an event, and idle memory.

``python -m bench.service.service`` starts the embedded service in a directory of its own, submits
small jobs over HTTP one after another while it is warm, and streams them. It prints one JSON line.
``post_to_step`` is the time from the POST to the end of the rank's first step. ``step_to_client``
is the time from the end of a step in the rank to its event in the client.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from glasshouse import Client

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "glasshouse.cli"]


def spec(dataset: str, seed: int, steps: int) -> dict[str, Any]:
    """Return a short digits example, with statistics of every layer at every 10th step."""
    job = json.loads((ROOT / "examples" / "digits.json").read_text())
    for source in ("train", "validation"):
        job["data"][source]["dataset"] = dataset
    return job | {"seed": seed, "stop": {"steps": steps}}


def one_job(client: Client, dataset: str, seed: int, steps: int) -> tuple[float, list[float]]:
    """Return the seconds from the POST to the first step, and from each step to its event here."""
    accepted = datetime.now(UTC)
    job = client.jobs.create(spec(dataset, seed, steps))
    first: datetime | None = None
    delays: list[float] = []
    for event in job.stream(types=["metrics"]):
        first = first or event.at
        delays.append((datetime.now(UTC) - event.at).total_seconds())
    assert first is not None
    return (first - accepted).total_seconds(), delays


def memory_mib(home: Path) -> dict[str, float]:
    """Return the resident memory of each process of the service, MiB."""
    found: dict[str, float] = {}
    stack = json.loads((home / "runtime.json").read_text())["pid"]
    for process in psutil.Process(stack).children(recursive=True):
        words = process.cmdline()
        name = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"), words[0])
        found[Path(name).name] = round(process.memory_info().rss / 2**20, 1)
    return found


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    where = ["--home", str(home)]
    try:
        subprocess.run(
            [*CLI, "up", "--detach", "--port", "0", *where], check=True, stdout=subprocess.DEVNULL
        )
        runtime = json.loads((home / "runtime.json").read_text())
        idle = memory_mib(home)
        with Client(runtime["url"], runtime["api_key"]) as client:
            dataset = client.datasets.create(builtin="digits").id
            one_job(client, dataset, 0, given.steps)
            runs = [one_job(client, dataset, seed, given.steps) for seed in range(1, given.jobs)]
        starts = sorted(start for start, _ in runs)
        delays = sorted(delay for _, job in runs for delay in job)
        print(
            json.dumps(
                {
                    "bench": "service",
                    "post_to_step_s": {
                        "median": round(statistics.median(starts), 3),
                        "max": round(starts[-1], 3),
                    },
                    "step_to_client_ms": {
                        "median": round(1000 * statistics.median(delays), 1),
                        "p99": round(1000 * delays[int(len(delays) * 0.99)], 1),
                    },
                    "idle_mib": idle,
                }
            )
        )
    finally:
        subprocess.run([*CLI, "down", *where], check=False, stdout=subprocess.DEVNULL)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
