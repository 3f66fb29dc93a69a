"""Measures the latency of events from the database to one and to many streaming clients.

``python -m bench.service.stream`` starts a broker and an API of its own and prints JSON lines. The
events are those of a job with statistics at every step. The code of `models` writes them in
batches, as a worker does. The clients are one other process, which fails if a client misses an
event. Some cases also have clients that never read; they must not affect the others.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from redis import Redis

from bench.service.readers import Readers
from glasshouse.events import STATS_COLUMNS
from models.database import Database
from models.jobs.shipments import Batch
from models.migrate import migrate
from models.observations.events import NewEvent
from models.tables import now
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Broker, Writer
from tests.integration.inspection.test_endings import raw_stream
from worker.attempt.store import SHIP_EVERY_S


@dataclass(frozen=True)
class Case:
    """A number of clients and a rate of events per second."""

    watchers: int
    rate: int
    silent: int = 0
    """Additional clients that never read."""
    rows: int = 12
    """Rows of statistics in an event; 0: an event is a loss."""


CASES = {
    "one": Case(1, 20, rows=0),
    "losses": Case(100, 400, rows=0),
    "crowd": Case(500, 100),
    "crowd and silent": Case(500, 100, silent=50),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.service.stream")
    parser.add_argument("--case", choices=[*CASES], nargs="*", default=[*CASES])
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    broker = Broker(home)
    broker.start()
    database = Database(f"sqlite:///{home / 'glasshouse.db'}")
    migrate(database, lock_file=home / "migrate.lock")
    redis = Redis.from_url(broker.url)
    _, secret = services.make_key(database, "ada")
    try:
        for name in given.case:
            api = Api(home, database.url, broker.url)
            writer = Writer(database, redis).begin()
            found = measure(api, secret, writer, CASES[name], given.seconds)
            print(json.dumps({"bench": "stream", "case": name, **found}), flush=True)
            api.stop()
    finally:
        redis.close()
        database.close()
        broker.kill()
        shutil.rmtree(home)
    return 0


def measure(api: Api, secret: str, writer: Writer, case: Case, seconds: float) -> dict[str, Any]:
    """Measure one case; latencies are those of every event for every client that reads."""
    server = psutil.Process(api.process.pid)
    path = f"/jobs/{writer.job.id}/stream"
    with ExitStack() as stack:
        readers = Readers(api.url, path, secret, case.watchers, api.log.with_suffix(".npy"))
        stack.callback(readers.close)
        for _ in range(case.silent):
            stack.enter_context(raw_stream(api.url, path, secret))
        feed(writer, case, 2.0)
        memory = Memory(server)
        cpu_before, began = server.cpu_times(), time.perf_counter()
        shipped, stored_ms = feed(writer, case, seconds)
        wall_s = time.perf_counter() - began
        cpu = server.cpu_times()
        grown_mb = memory.grown_mb()
        writer.finish()
        late_ms = delays_ms(readers.finish(), shipped, case.watchers)
    cpu_s = cpu.user + cpu.system - cpu_before.user - cpu_before.system
    return {
        "watchers": case.watchers,
        "silent": case.silent,
        "events_per_s": round(len(shipped) / wall_s),
        "delivered_per_s": round(len(shipped) * case.watchers / wall_s),
        "latency_median_ms": round(statistics.median(late_ms), 1),
        "latency_p99_ms": round(float(np.percentile(late_ms, 99)), 1),
        "latency_max_ms": round(float(late_ms.max()), 1),
        "stored_p99_ms": round(float(np.percentile(stored_ms, 99)), 1),
        "server_cpu": round(cpu_s / wall_s, 3),
        "server_rss_mb": round(server.memory_info().rss / 1e6),
        "server_grown_mb": round(grown_mb, 1),
    }


class Memory:
    """Measures how much the memory of a process grows from now on, ten times per second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._before = self._most = process.memory_info().rss
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def grown_mb(self) -> float:
        self._ended.set()
        self._thread.join()
        return (self._most - self._before) / 1e6

    def _sample(self) -> None:
        while not self._ended.wait(0.1):
            self._most = max(self._most, self._process.memory_info().rss)


def feed(writer: Writer, case: Case, seconds: float) -> tuple[dict[int, float], list[float]]:
    """Ship events at a constant rate, several at once as a worker does.

    Return when each event was shipped, just before it was stored, and the duration of each
    transaction, ms.
    """
    size = max(1, round(case.rate * SHIP_EVERY_S))
    shipped: dict[int, float] = {}
    stored_ms: list[float] = []
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        began = time.time()
        last = ship(writer, size, case.rows)
        stored_ms.append((time.time() - began) * 1000)
        shipped |= dict.fromkeys(range(last - size + 1, last + 1), began)
        due += size / case.rate
    return shipped, stored_ms


def ship(writer: Writer, size: int, rows: int) -> int:
    """Store the events of some steps; return the number of the last event."""
    if not rows:
        writer.losses([0.5] * size)
        return last_seq(writer)
    batch = Batch()
    for step in range(writer.step, writer.step + size):
        figures = [[f"layer{n}", "output", *np.random.random(9).tolist()] for n in range(rows)]
        record = {"step": step, "phase": "train", "rows": figures}
        batch.events.append(NewEvent("stats", now(), record | {"columns": list(STATS_COLUMNS)}))
        batch.stats.append(record)
    writer.step += size
    writer.ship(batch)
    return last_seq(writer)


def last_seq(writer: Writer) -> int:
    with writer.database.read() as tx:
        return services.jobs.get(tx, writer.job.id, None).last_seq


def delays_ms(came: np.ndarray, shipped: dict[int, float], watchers: int) -> np.ndarray:
    """Return the latency of each event for each client, ms."""
    late: list[float] = []
    for _, arrived, first, last in came.tolist():
        late += [
            (arrived - shipped[seq]) * 1000
            for seq in range(int(first), int(last) + 1)
            if seq in shipped
        ]
    assert len(late) == len(shipped) * watchers, "an event did not reach every client"
    return np.array(late)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
