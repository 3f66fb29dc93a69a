"""Clients that follow jobs by their event streams across reconnects, some of them badly behaved.

``python -m tests.soak.stream_clients COUNT URL…``, with the key in ``GLASSHOUSE_API_KEY``, runs
until its standard input ends and uses the public API only. It prints one line of JSON: what it
received, and what was wrong. A client must see the events 1, 2, 3 … of each job up to its one end
event.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

ID = re.compile(rb"\nid: (\d+)\n")
END = b"\nevent: end\n"
HABITS = ("reads",) * 12 + ("cuts",) * 5 + ("dawdles",) * 2 + ("vanishes",)
"""Reads to the end; cuts its connection again and again; reads little at a time; never reads."""
NO_LINGER = struct.pack("ii", 1, 0)
LITTLE_BYTES = 4096
NUM_TOLD = 20


@dataclass
class Seen:
    """What all clients together have seen."""

    counts: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    most_open: int = 0
    wrong: list[str] = field(default_factory=list)

    def complain(self, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < NUM_TOLD:
            self.wrong.append(what)

    @contextlib.contextmanager
    def opened(self):
        self.counts["opened"] += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            yield
        finally:
            self.num_open -= 1


class SharedState:
    """What the clients share: the URLs of the service, its active jobs, whether the run is over."""

    def __init__(self, urls: list[str], key: str) -> None:
        self.urls = urls
        self.headers = {"Authorization": f"Bearer {key}"}
        self.jobs: list[str] = []
        self.closing = asyncio.Event()
        self.seen = Seen()

    async def look(self) -> None:
        """Ask again and again which jobs have not ended."""
        states = ["starting", "running", "pausing", "paused", "cancelling", "queued"]
        async with httpx2.AsyncClient(headers=self.headers, timeout=30) as http:
            while not self.closing.is_set():
                with contextlib.suppress(httpx2.TransportError):
                    url = f"{random.choice(self.urls)}/api/v1/jobs"  # noqa: S311
                    answer = await http.get(url, params={"state": states, "limit": 100})
                    if answer.is_success:
                        self.jobs = [row["id"] for row in answer.json()["data"]]
                await self.rest(1.0)

    async def rest(self, seconds: float) -> None:
        """Wait, but not beyond the end of the run."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.closing.wait(), seconds)


class Viewer:
    """One client; it follows one job after another."""

    def __init__(self, shared: SharedState, number: int) -> None:
        self._shared = shared
        self._number = number
        self._random = random.Random(number)  # noqa: S311
        self._habit = HABITS[number % len(HABITS)]
        self._sees_all = number % 5 != 0
        """Also what gave way to a later attempt: then no number may be missing."""
        self._job = ""
        self._last = 0
        self._ended = False

    async def live(self) -> None:
        """Follow jobs until all of it ends."""
        shared = self._shared
        while not shared.closing.is_set():
            if not shared.jobs:
                await shared.rest(0.5)
                continue
            self._job, self._last, self._ended = self._random.choice(shared.jobs), 0, False
            await self._follow()

    async def _follow(self) -> None:
        while not self._ended and not self._shared.closing.is_set():
            try:
                if not await self._connect():
                    return
            except (OSError, asyncio.IncompleteReadError) as error:
                closed = isinstance(error, ConnectionRefusedError)
                self._shared.seen.counts["found_closed" if closed else "lost"] += 1
                await self._shared.rest(self._random.uniform(0.1, 1.0))

    async def _connect(self) -> bool:
        """One connection. False: there is nothing more to be had of this job."""
        reader, writer = await self._open()
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status == 200:
                with self._shared.seen.opened():
                    await self._read(reader)
                return True
            return await self._refused(status)
        finally:
            writer.transport.abort()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = (
            self._random.choice(self._shared.urls).removeprefix("http://").partition(":")
        )
        opened = socket.socket()
        opened.setblocking(False)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        if self._habit in ("dawdles", "vanishes"):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(opened, (host, int(port)))
        except BaseException:
            opened.close()
            raise
        reader, writer = await asyncio.open_connection(sock=opened, limit=1 << 16)
        which = "?attempt=all" if self._sees_all else ""
        lines = [f"GET /api/v1/jobs/{self._job}/stream{which} HTTP/1.1", f"Host: {host}:{port}"]
        lines += [f"{name}: {value}" for name, value in self._shared.headers.items()]
        if self._last:
            lines.append(f"Last-Event-ID: {self._last}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        return reader, writer

    async def _refused(self, status: int) -> bool:
        counts = self._shared.seen.counts
        counts[f"status_{status}"] += 1
        if status == 204 and not self._ended:
            self._shared.seen.complain(f"{self._job}: over at {self._last}, and no end was seen")
        if status == 503:
            await self._shared.rest(1.0)
            return True
        if status not in (204, 404):
            self._shared.seen.complain(f"{self._job}: answered {status}")
        return False

    async def _read(self, reader: asyncio.StreamReader) -> None:
        if self._habit == "vanishes":
            self._shared.seen.counts["vanished"] += 1
            await self._shared.rest(self._random.uniform(5, 90))
            self._ended = True  # for this one: the next job
            return
        wait_s = self._random.uniform(0.2, 8.0) if self._habit == "cuts" else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._read_on(reader)
                return
        self._shared.seen.counts["cut"] += 1

    async def _read_on(self, reader: asyncio.StreamReader) -> None:
        rest = b"\n"
        while not self._ended and not self._shared.closing.is_set():
            dawdles = self._habit == "dawdles"
            part = await reader.read(LITTLE_BYTES if dawdles else 1 << 18)
            if not part:
                raise ConnectionError
            data = rest + part
            end = data.rfind(b"\n\n") + 1  # the second of the two stays, so that an id is after one
            whole, rest = (data[: end + 1], data[end:]) if end else (b"", data)
            self._take(whole)
            if dawdles:
                await self._shared.rest(self._random.uniform(0.1, 1.0))

    def _take(self, whole: bytes) -> None:
        seen = self._shared.seen
        for number in map(int, ID.findall(whole)):
            missing = self._sees_all and number != self._last + 1
            if number <= self._last or missing or self._ended:
                seen.complain(f"{self._job}: {number} after {self._last} ({self._habit})")
            self._last = number
            seen.counts["events"] += 1
        if END in whole:
            self._ended = True
            seen.counts["ends"] += 1


async def main(count: int, urls: list[str]) -> dict[str, Any]:
    """All clients, until standard input ends; what they saw."""
    shared = SharedState(urls, os.environ["GLASSHOUSE_API_KEY"])
    loop = asyncio.get_running_loop()

    def await_the_end() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(shared.closing.set)

    threading.Thread(target=await_the_end, daemon=True).start()
    tasks = [asyncio.create_task(Viewer(shared, number).live()) for number in range(count)]
    tasks.append(asyncio.create_task(shared.look()))
    await shared.closing.wait()
    await asyncio.wait(tasks, timeout=1.0)  # who waits for bytes is cut off
    for task in tasks:
        task.cancel()
    for done in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(done, Exception):
            shared.seen.complain(f"a client has failed: {done!r}")
    seen = shared.seen
    return {"clients": count, "most_open": seen.most_open, **seen.counts, "told": seen.wrong}


class StreamClients:
    """That process, seen from the one that starts it."""

    def __init__(self, count: int, urls: list[str], key: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.stream_clients", str(count), *urls],
            env=os.environ | {"GLASSHOUSE_API_KEY": key},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def leave(self) -> dict[str, Any]:
        """All clients go; what they saw."""
        try:
            said, _ = self.process.communicate(timeout=60)
            return json.loads(said)
        finally:
            self.process.kill()
            self.process.wait()


if __name__ == "__main__":
    found = asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
    sys.stdout.write(json.dumps(found) + "\n")
