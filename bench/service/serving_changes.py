"""Measures the first answer of a model that no process serves yet, and a swap under load.

``python -m bench.service.serving_changes`` starts an embedded service and prints two JSON lines:

- ``cold``: a serve job with ``replicas.min`` 0 is paused after ``idle_s``. The next request starts
  a process for it; the time is that of this request.
- ``swap``: an alias moves from one version to another and back while clients ask. No request may
  fail, and each answer must be that of one of the two versions.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from bench.service.load import Load
from bench.service.serving import ROOT, START_S, Service, ask, wait_for_answer, write_requests
from glasshouse.client import Job

NAME = "mnist_cnn"
ALIAS = "production"


def publish(service: Service, files: Path, version: int) -> Path:
    """Publish a version; return the file with its weights."""
    weights = files / f"weights-{version}"
    save_file(service.train(NAME, seed=version), weights)
    return weights


def wait_for_state(job: Job, state: str) -> None:
    """Wait until a job is in a state."""
    until = time.monotonic() + START_S
    while job.refresh().state != state:
        if time.monotonic() > until:
            raise SystemExit(f"the serve job is {job.state}, not {state}")
        time.sleep(0.1)


def cold(service: Service, files: Path, rounds: int) -> dict[str, Any]:
    """Measure first answers."""
    write_requests(NAME, publish(service, files, 1), files)
    side = service.serve(NAME, replicas={"min": 0, "max": 1}, idle_s=1.0)
    wait_for_answer(side, files)
    took: list[float] = []
    for _ in range(rounds):
        wait_for_state(side.job, "paused")
        began = time.perf_counter()
        ask(side, files)
        took.append(time.perf_counter() - began)
    side.job.cancel()
    wait_for_state(side.job, "cancelled")
    figures = {"median": round(statistics.median(took), 3), "max": round(max(took), 3)}
    return {"bench": "serving, cold", "first_answer_s": figures, "rounds": rounds}


def swap(service: Service, files: Path, clients: int, seconds: float, swaps: int) -> dict[str, Any]:
    """Move the alias while clients ask; fail if a request fails or an answer is of no version."""
    expected: list[Path] = []
    for version in (2, 3):
        write_requests(NAME, publish(service, files, version), files)
        expected.append((files / "expected.npz").rename(files / f"expected-{version}.npz"))
    service.client.models.set_alias(NAME, ALIAS, 2)
    side = service.serve(f"{NAME}@{ALIAS}")
    wait_for_answer(side, files)
    both = ":".join(map(str, expected))
    load = Load(side.url, side.path, str(files / "requests"), both, clients, seconds)
    running = subprocess.Popen(
        [sys.executable, "-m", "bench.service.load", json.dumps(asdict(load))],
        env=os.environ | {"GLASSHOUSE_API_KEY": side.key},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    for number in range(swaps):
        time.sleep(seconds / (swaps + 1))
        service.client.models.set_alias(NAME, ALIAS, 3 - number % 2)
    found = json.loads(running.communicate()[0])
    if found["errors"] or found["wrong"] or min(found["by_version"]) == 0:
        raise SystemExit(f"the swap lost something: {found}")
    kept = ("requests", "errors", "wrong", "by_version")
    times = {name: round(found[name], 1) for name in ("p50_ms", "p99_ms", "max_ms")}
    line = {"bench": "serving, swap", "clients": clients, "swaps": swaps}
    return line | {name: found[name] for name in kept} | times


def main(arguments: Sequence[str]) -> int:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m bench.service.serving_changes")
    parser.add_argument("--rounds", type=int, default=5, help="first answers")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=12.0, help="of the load during swaps")
    parser.add_argument("--swaps", type=int, default=4)
    given = parser.parse_args(arguments)
    service = Service(threads=1)
    try:
        with tempfile.TemporaryDirectory() as name:
            files = Path(name)
            print(json.dumps(cold(service, files, given.rounds)), flush=True)
            found = swap(service, files, given.clients, given.seconds, given.swaps)
            print(json.dumps(found), flush=True)
    finally:
        service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
