"""Checks that training is not slowed down by a slow disk, a stopped reader, or dead viewers.

A slow disk, nobody who reads: a job whose layers' tensors are stored whole, and the process that
stores them. In alternating blocks its disk is normal, or else it is slow (2 MB/s) or the process is
stopped, so that the ring is full and tensors are dropped. The ratio is that of the step times in
two neighboring blocks. Every due tensor must be stored or counted as dropped, or the benchmark
fails.

Dead viewers: a job of a whole service with statistics at every step, and one client that reads its
stream. In every second window fifty more connections request the stream and never read.

Prints a JSON line for each. Data is random.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.probes.watching import ALL, Bench, cnn
from bench.service.service import CLI
from bench.service.service import spec as digits
from bench.training.step import Clock, clocks
from engine.training.loop import train
from engine.training.report import Outputs
from glasshouse import Client
from tests.integration.inspection.test_endings import raw_stream
from worker.processes.fork_server import FIXED

EVERY = 25
RING_BYTES = 64 * 2**20
FILLING, TIMED = 5 * EVERY, 4 * EVERY
"""Steps before a measurement, in which the ring may fill up; and steps that are measured."""
PATIENCE_S = 120.0
NUM_VIEWERS = 50
SETTLING_S = 1.0
TARGET = 1.01


# --- a slow disk, and a stopped reader ---------------------------------------------------------


class Blocks(Clock):
    """A control that slows down or frees the consumer at each block, and times the block."""

    def __init__(self, bench: Bench, kept: "TensorCounter", hinder: int, free: int) -> None:
        super().__init__()
        self._bench = bench
        self._kept = kept
        self._signals = hinder, free
        self._step = 0
        self._began = clocks()
        self.seconds: list[tuple[float, float]] = []
        """Wall and CPU time of each block; in every second one the consumer is slow."""

    @property
    def cancel_requested(self) -> bool:
        self._step += 1
        number, place = divmod(self._step, FILLING + TIMED)
        if place == FILLING:
            self._began = clocks()
        if place == 0:
            now = clocks()
            self.seconds.append((now[0] - self._began[0], now[1] - self._began[1]))
            self._turn(hindered=number % 2 == 1)
        return False

    def _turn(self, *, hindered: bool) -> None:
        os.kill(self._bench.consumer.pid, self._signals[0 if hindered else 1])
        until = time.monotonic() + PATIENCE_S
        while not hindered and self._bench.ring.released < self._kept.end:
            assert self._bench.consumer.poll() is None, "the consumer exited"
            assert time.monotonic() < until, "the consumer does not catch up"
            time.sleep(0.01)


class TensorCounter:
    """Counts the stored and dropped tensors in a rank's records, and passes the records on."""

    def __init__(self, emit: Any) -> None:
        self._emit = emit
        self.num_kept = self.num_dropped = self.end = 0
        self.num_of_a_step = 0

    def __call__(self, record: dict[str, Any]) -> None:
        if record["type"] == "captures":
            self.num_kept += len(record["tensors"])
            self.num_of_a_step = max(self.num_of_a_step, len(record["tensors"]))
            self.end = record["end"]
        elif record["type"] == "dropped":
            assert record["what"] == "captures", record
            self.num_dropped += record["count"]
        self._emit(record)


def disk(name: str, rounds: int) -> dict[str, Any]:
    """Run one long job, with a slow consumer in every second block."""
    hinder, free = {
        "a slow disk": (signal.SIGUSR1, signal.SIGUSR2),
        "nobody who reads": (signal.SIGSTOP, signal.SIGCONT),
    }[name]
    num_steps = (2 * rounds + 1) * (FILLING + TIMED)
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory) / "data", cnn, num_steps, RING_BYTES)
        bench.spec = {**bench.spec, "checkpoint": {"every_steps": 10**9}}
        kept = TensorCounter(bench.spool.append)
        out = Outputs(bench.directory, kept, bench.spool.settle, bench.spool.flush)
        out.ring = bench.ring.name
        control = Blocks(bench, kept, hinder, free)
        job = bench.job({"kinds": ALL, "every": EVERY, "want": ["full"]}, num_steps)
        try:
            train(job, bench.rows, {}, control=control, out=out)
        finally:
            os.kill(bench.consumer.pid, signal.SIGCONT)
            bench.close()
    due = -(-num_steps // EVERY) * kept.num_of_a_step
    assert kept.num_kept + kept.num_dropped == due, (kept.num_kept, kept.num_dropped, due)
    assert kept.num_dropped, "no tensor was dropped: the consumer was not slow enough"
    blocks = control.seconds
    pairs = [(blocks[n], blocks[n + 1]) for n in range(0, len(blocks) - 1, 2)][:rounds]
    counts = {"due": due, "kept": kept.num_kept, "dropped": kept.num_dropped}
    return ratios([(b[0] / a[0], b[1] / a[1]) for a, b in pairs]) | counts


# --- dead viewers ------------------------------------------------------------------------


class StepTimes:
    """Collects the step times of a job as a client reads them."""

    def __init__(self, job: Any) -> None:
        self._found: list[tuple[datetime, float]] = []
        self._job = job
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the first value."""
        until = time.monotonic() + PATIENCE_S
        while not self._found:
            assert time.monotonic() < until, "the job reports nothing"
            time.sleep(0.1)

    def close(self) -> None:
        """After the job was cancelled, read its stream to the end."""
        self._thread.join(PATIENCE_S)

    def _read(self) -> None:
        for event in self._job.stream(types=["metrics"]):
            seconds = event.values.get("time/step")
            if seconds is not None:
                self._found.append((event.at, seconds))

    def between(self, begin: datetime, end: datetime) -> float:
        """Return the median of the mean step times in a window."""
        return statistics.median(seconds for at, seconds in [*self._found] if begin <= at <= end)


def viewers(rounds: int, window_s: float) -> dict[str, Any]:
    """Run a job of a service, with and without viewers that do not read."""
    home = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    where = ["--home", str(home)]
    try:
        command = [*CLI, "up", "--detach", "--port", "0", *where]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        runtime = json.loads((home / "runtime.json").read_text())
        with Client(runtime["url"], runtime["api_key"]) as client:
            dataset = client.datasets.create(builtin="digits").id
            probe = {"layers": ["*"], "kinds": ALL, "every": 1, "max_overhead": None}
            spec = digits(dataset, 0, 1) | {"stop": {"seconds": 3600}, "probes": [probe]}
            job = client.jobs.create(spec)
            step_times = StepTimes(job)
            step_times.wait()
            path = f"/jobs/{job.id}/stream"
            found = []
            for number in range(rounds):
                sides: dict[int, float] = {}
                for silent in (0, NUM_VIEWERS) if number % 2 else (NUM_VIEWERS, 0):
                    with ExitStack() as stack:
                        for _ in range(silent):
                            stream = raw_stream(runtime["url"], path, runtime["api_key"])
                            stack.enter_context(stream)
                        time.sleep(SETTLING_S)
                        begin = datetime.now(UTC)
                        time.sleep(window_s)
                        sides[silent] = step_times.between(begin, datetime.now(UTC))
                found.append((sides[NUM_VIEWERS] / sides[0],))
            job.cancel()
            step_times.close()
    finally:
        subprocess.run([*CLI, "down", *where], check=False, stdout=subprocess.DEVNULL)
        shutil.rmtree(home, ignore_errors=True)
    return ratios(found) | {"viewers": NUM_VIEWERS}


def ratios(found: list[Any]) -> dict[str, Any]:
    """Return median, min and max of the ratios of neighboring blocks."""
    wall = [pair[0] for pair in found]
    line = {"ratio": statistics.median(wall), "min": min(wall), "max": max(wall)}
    if len(found[0]) > 1:
        line["cpu_ratio"] = statistics.median(pair[1] for pair in found)
    return {name: round(value, 4) for name, value in line.items()} | {"target": TARGET}


def main() -> None:
    settings = {name: value for name, value in FIXED.items() if name.startswith("MALLOC_")}
    if any(os.environ.get(name) != value for name, value in settings.items()):
        command = [sys.executable, "-m", "bench.probes.hindered", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings})  # noqa: S606
    parser = argparse.ArgumentParser(prog="python -m bench.probes.hindered")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--window", type=float, default=8.0, help="seconds of a window with or without viewers"
    )
    cases = ("a slow disk", "nobody who reads", "dead viewers")
    parser.add_argument("--case", choices=cases, nargs="*", default=cases)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.case:
        is_service = name == "dead viewers"
        found = viewers(given.rounds, given.window) if is_service else disk(name, given.rounds)
        about = {"bench": "hindered", "case": name, "rounds": given.rounds}
        print(json.dumps(about | found), flush=True)


if __name__ == "__main__":
    main()
