"""From the ledger to a streaming client: latency of an event, and many watchers of one job.

``python -m bench.stream`` starts a broker and an API of its own and prints JSON lines.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from redis import Redis

from models.database import Database
from models.migrate import migrate
from tests.integration.window import scene
from tests.integration.window.scene import Api, Broker, Writer

EVENTS_PER_SHIPMENT = 20


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stream")
    parser.add_argument("--watchers", type=int, default=100)
    parser.add_argument("--rate", type=int, default=400, help="events per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    broker = Broker(home)
    broker.start()
    database = Database(f"sqlite:///{home / 'glasshouse.db'}")
    migrate(database, lock_file=home / "migrate.lock")
    api = Api(home, database.url, broker.url)
    redis = Redis.from_url(broker.url)
    _, secret = scene.make_key(database, "ada")
    try:
        for watchers, rate in ((1, 20), (given.watchers, given.rate)):
            writer = Writer(database, redis).begin()
            found = asyncio.run(measure(api, secret, writer, watchers, rate, given.seconds))
            print(json.dumps(found), flush=True)
    finally:
        api.stop()
        redis.close()
        database.close()
        broker.kill()
        shutil.rmtree(home)
    return 0


async def measure(
    api: Api, secret: str, writer: Writer, watchers: int, rate: int, seconds: float
) -> dict[str, object]:
    server = psutil.Process(api.process.pid)
    opened = asyncio.Semaphore(0)
    late_ms: list[list[float]] = [[] for _ in range(watchers)]
    tasks = [
        asyncio.create_task(watch(api, secret, writer.job.id, late, opened)) for late in late_ms
    ]
    for _ in range(watchers):
        await opened.acquire()
    cpu_before, began = server.cpu_times(), time.perf_counter()
    count = await asyncio.to_thread(write, writer, rate, seconds)
    wall_s = time.perf_counter() - began
    cpu = server.cpu_times()
    writer.finish()
    await asyncio.gather(*tasks)
    times = sorted(value for late in late_ms for value in late)
    cpu_s = cpu.user + cpu.system - cpu_before.user - cpu_before.system
    assert all(len(late) == count for late in late_ms), "a watcher missed an event"
    return {
        "bench": "stream",
        "watchers": watchers,
        "events_per_s": round(count / wall_s),
        "delivered_per_s": round(count * watchers / wall_s),
        "latency_median_ms": round(statistics.median(times), 1),
        "latency_p99_ms": round(times[int(len(times) * 0.99)], 1),
        "server_cpu": round(cpu_s / wall_s, 3),
        "server_rss_mb": round(server.memory_info().rss / 1e6),
    }


def write(writer: Writer, rate: int, seconds: float) -> int:
    """Ship events at an even rate, as a worker does; each carries when it was shipped."""
    size = EVENTS_PER_SHIPMENT if rate > 10 * EVENTS_PER_SHIPMENT else 1
    count = 0
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        writer.losses([time.time()] * size)
        count += size
        due += size / rate
    return count


async def watch(
    api: Api, secret: str, job: str, late_ms: list[float], opened: asyncio.Semaphore
) -> None:
    """Read a stream; note how late each event came. Cheap: the client must not be the limit."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, sender = await asyncio.open_connection(host, int(port), limit=2**22)
    head = f"GET /api/v1/jobs/{job}/stream?types=metrics HTTP/1.1\r\nHost: {host}:{port}\r\n"
    sender.write(f"{head}Authorization: Bearer {secret}\r\n\r\n".encode())
    mark = b'"values":{"loss":'
    rest = b""
    hello = False
    while data := await reader.read(65536):
        arrived = time.time()
        if not hello and b"event: hello" in data:
            hello = True
            opened.release()
        *whole, rest = (rest + data).split(b"\n\n")
        for message in whole:
            if mark in message:
                shipped = message.partition(mark)[2].partition(b",")[0]
                late_ms.append((arrived - float(shipped)) * 1000)
            elif b"event: end" in message:
                sender.close()
                return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
