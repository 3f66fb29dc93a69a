"""Measures requests and events during a purge, and prints one JSON line.

``python -m bench.storage.purge [--rows N]`` fills a SQLite database with events of ended jobs. Then
it reads over HTTP and ships events, first alone and then while another process purges. The ratio of
the two matters. Ten million rows take some minutes to create and 3 GB of disk.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import insert, update

from models.tables import Event, Job, core, now
from tests.integration.store.factories import losses, make_job, make_worker, running, ship
from tests.running import Api, running_api

PER_JOB = 100_000
BATCH = 10_000


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.storage.purge")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--alone-s", type=float, default=10.0)
    given = parser.parse_args(arguments)
    with running_api() as api:
        fill(api, given.rows)
        stop = threading.Event()
        timer = threading.Timer(given.alone_s, stop.set)
        timer.start()
        alone = measure(api, stop)
        command = [sys.executable, "-m", "models.purge", "--json"]
        environment = os.environ | api.environment | {"GLASSHOUSE_KEEP_EVENTS_DAYS": "1"}
        began = time.perf_counter()
        purge = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        done = threading.Event()
        threading.Thread(target=lambda: (purge.wait(), done.set()), daemon=True).start()
        beside = measure(api, done)
        seconds = time.perf_counter() - began
        output, _ = purge.communicate()
    rows = json.loads(output)["rows"].get("events", 0)
    figures = {"bench": "purge", "rows": rows, "rows_per_s": round(rows / seconds)}
    print(json.dumps(figures | {"alone": alone, "beside_the_purge": beside}), flush=True)
    return 0


def fill(api: Api, rows: int) -> None:
    """Create ended jobs with ``rows`` events in total."""
    make_worker(api.database)
    payload = '{"step":1,"epoch":0,"values":{"loss":0.5}}'
    past = now() - timedelta(days=10)
    while rows > 0:
        job = make_job(api.database)
        count = min(rows, PER_JOB)
        rows -= count
        for first in range(2, count + 2, BATCH):
            events: list[dict[str, Any]] = [
                {
                    "job": job.id,
                    "seq": seq,
                    "attempt": 1,
                    "at": past,
                    "type": "metrics",
                    "payload": payload,
                }
                for seq in range(first, min(first + BATCH, count + 2))
            ]
            with api.database.write() as tx:
                tx.execute(insert(core(Event)), events)
        with api.database.write() as tx:
            ended = {"state": "succeeded", "ended_at": past, "last_seq": count + 1}
            tx.execute(update(Job).where(Job.id == job.id).values(ended))


def measure(api: Api, stop: threading.Event) -> dict[str, float]:
    """Read and ship until ``stop`` is set."""
    job = make_job(api.database, owner="admin")
    claim = running(api.database, job, lease_ms=10**9)
    read: list[float] = []
    shipped: list[float] = []

    def write() -> None:
        step = 0
        while not stop.is_set():
            batch = losses(*((step + n, 0.5) for n in range(100)))
            began = time.perf_counter()
            ship(api.database, claim, batch, (step, step + 100))
            shipped.append(time.perf_counter() - began)
            step += 100
            time.sleep(0.05)

    thread = threading.Thread(target=write)
    thread.start()
    with api.client() as client:
        while not stop.is_set():
            began = time.perf_counter()
            client.get(f"/api/v1/jobs/{job.id}/events", params={"limit": "100"}).raise_for_status()
            read.append(time.perf_counter() - began)
            time.sleep(0.005)
    thread.join()
    return {"get_p99_ms": p99_ms(read), "ship_p99_ms": p99_ms(shipped)}


def p99_ms(seconds: list[float]) -> float:
    return round(1000 * sorted(seconds)[int(len(seconds) * 0.99)], 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
