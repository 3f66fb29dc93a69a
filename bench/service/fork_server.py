"""Measures the time from the request to fork a rank to its first optimizer step: one JSON line."""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bench.training.step import META, spec
from engine.core.spool import read_frames
from engine.plan.plan import parse_spec, plan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        seconds = measure(Path(name), given.rounds)
    print(
        json.dumps(
            {
                "bench": "fork_server",
                "fork_to_first_step_s": round(statistics.median(seconds), 4),
                "min_s": round(min(seconds), 4),
                "max_s": round(max(seconds), 4),
                "rounds": given.rounds,
            }
        )
    )


def measure(directory: Path, rounds: int) -> list[float]:
    table = directory / "data"
    (table / "train").mkdir(parents=True)
    np.save(table / "train" / "0.npy", np.zeros((6000, 28, 28), dtype=np.uint8))
    np.save(table / "train" / "1.npy", np.zeros(6000, dtype=np.uint8))
    (table / "meta.json").write_text(json.dumps(META))
    job = plan(parse_spec(spec(2)), {"d": META})["spec"]
    ours, theirs = socket.socketpair()
    environment = {
        "PATH": os.environ["PATH"],
        "GLASSHOUSE_FORK_SERVER_FD": str(theirs.fileno()),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "engine.process.fork_server"]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    with ours, ours.makefile("rb") as lines:
        lines.readline()
        seconds = [
            first_step(directory / f"job-{n}", job, table, ours, lines) for n in range(rounds)
        ]
    process.wait()
    return seconds


def first_step(
    directory: Path, job: dict, table: Path, fork_server: socket.socket, lines: BinaryIO
) -> float:
    directory.mkdir()
    assignment = {
        "job": "job_x",
        "attempt": 1,
        "spec": job,
        "datasets": {"d": {"dir": str(table)}},
        "device": {"type": "cpu", "threads": 1},
        "checkpoint": None,
        "trained_by": None,
    }
    (directory / "job.json").write_text(json.dumps(assignment))
    request = {"id": 1, "do": "fork", "job_dir": str(directory), "env": {}}
    request |= {"stdout": str(directory / "stdout"), "stderr": str(directory / "stderr")}
    reading, writing = os.pipe()
    started = time.perf_counter()
    socket.send_fds(fork_server, [json.dumps(request).encode() + b"\n"], [reading])
    os.close(reading)
    while not any(r["type"] == "metrics" for r in read_frames(directory / "spool", 0)[0]):
        time.sleep(0.0005)
    seconds = time.perf_counter() - started
    while b"exited" not in lines.readline():
        continue
    os.close(writing)
    return seconds


if __name__ == "__main__":
    main()
