"""Sends requests over some connections, each the next one as soon as its answer came.

``python -m bench.service.load '{"url": …}'`` prints one JSON line. One thread, raw sockets and
prebuilt bytes: it must take much less CPU time than a server. The answers are kept while it
measures. Then each is compared with the outputs that are expected for its row.
"""

import gc
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

READ_BYTES = 1 << 16
TOLERANCE = 1e-4
"""Rows that are computed together differ in the last digits from a row that is computed alone."""
STUCK_S = 30.0
HEAD_END, LENGTH = b"\r\n\r\n", b"content-length:"


@dataclass(frozen=True)
class Load:
    """What is sent where."""

    url: str
    path: str
    requests: str
    """A file: one JSON body on each line."""
    expected: str
    """An npz file with ``value`` [rows, classes] and ``prob`` [rows], or several with ``:``."""
    clients: int
    seconds: float
    servers: tuple[int, ...] = ()
    """Process ids whose CPU time is measured, too."""
    warm_up_s: float = 0.5


@dataclass
class Answer:
    """An answer of a server."""

    row: int
    sent: float
    came: float
    status: int
    body: bytes


class Client:
    """One connection with one request on its way."""

    def __init__(self, number: int, load: Load, requests: Sequence[bytes]) -> None:
        self._load, self._requests = load, requests
        self._row = number % len(requests)
        self._sent = 0.0
        self._received = b""
        self._whole = 0
        self.socket = connected(load.url)

    def send(self) -> None:
        """Send the next request."""
        self._row = (self._row + 1) % len(self._requests)
        self._received, self._whole = b"", 0
        self._sent = time.perf_counter()
        self.socket.sendall(self._requests[self._row])

    def read(self) -> Answer | None:
        """Read what is there; return the answer if it is complete."""
        part = self.socket.recv(READ_BYTES)
        if not part:
            return Answer(self._row, self._sent, time.perf_counter(), 0, b"disconnected")
        self._received = received = self._received + part if self._received else part
        if not self._whole:
            end = received.find(HEAD_END)
            if end < 0:
                return None
            head = received[:end].lower()
            at = head.find(LENGTH)
            if at < 0:
                raise SystemExit(f"an answer has no Content-Length: {received[:300]!r}")
            start = at + len(LENGTH)
            stop = head.find(b"\r\n", start)
            self._whole = end + 4 + int(head[start:] if stop < 0 else head[start:stop])
        if len(received) < self._whole:
            return None
        came = time.perf_counter()
        body = received[received.find(HEAD_END) + 4 :]
        return Answer(self._row, self._sent, came, int(received[9:12]), body)


def connected(url: str) -> socket.socket:
    """Return a connection to the server."""
    parts = urlsplit(url)
    opened = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=STUCK_S)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def request_bytes(load: Load) -> list[bytes]:
    """Return whole requests; the key of Glasshouse is in the environment."""
    key = os.environ.get("GLASSHOUSE_API_KEY")
    lines = [f"POST {load.path} HTTP/1.1", f"Host: {urlsplit(load.url).netloc}"]
    lines += ["Content-Type: application/json"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    found: list[bytes] = []
    for body in Path(load.requests).read_bytes().splitlines():
        head = [*lines, f"Content-Length: {len(body)}", "", ""]
        found.append("\r\n".join(head).encode() + body)
    return found


@dataclass
class Span:
    """The time in which answers count, and the CPU time in it."""

    began: float
    ended: float
    load_cpu_s: float = 0.0
    server_cpu_s: float = 0.0

    def begin(self, servers: Sequence[int]) -> None:
        self.load_cpu_s, self.server_cpu_s = -time.process_time(), -cpu_s_of(servers)
        self.began = time.perf_counter()

    def end(self, servers: Sequence[int]) -> None:
        self.load_cpu_s += time.process_time()
        self.server_cpu_s += cpu_s_of(servers)
        self.ended = time.perf_counter()


def cpu_s_of(servers: Sequence[int]) -> float:
    """Return the CPU time of processes, seconds."""
    times = [psutil.Process(number).cpu_times() for number in servers]
    return sum(spent.user + spent.system for spent in times)


def run(load: Load) -> tuple[list[Answer], Span]:
    """Return all answers, and when they were measured."""
    requests = request_bytes(load)
    first = len(requests) // load.clients
    clients = [Client(number * first, load, requests) for number in range(load.clients)]
    answers: list[Answer] = []
    selector = selectors.DefaultSelector()
    for client in clients:
        selector.register(client.socket, selectors.EVENT_READ, client)
        client.send()
    span = Span(time.perf_counter() + load.warm_up_s, float("inf"))
    is_warm, left = False, len(clients)
    while left:
        ready = selector.select(STUCK_S)
        if not ready:
            raise SystemExit(f"{left} requests were not answered within {STUCK_S:g} s")
        now = time.perf_counter()
        if not is_warm and now > span.began:
            is_warm = True
            span.begin(load.servers)
        if is_warm and span.ended == float("inf") and now > span.began + load.seconds:
            span.end(load.servers)
        for entry, _ in ready:
            client: Client = entry.data
            answer = client.read()
            if answer is None:
                continue
            answers.append(answer)
            if span.ended == float("inf") and answer.status:
                client.send()
                continue
            selector.unregister(client.socket)
            client.socket.close()
            left -= 1
    return answers, span


def checked(answers: Sequence[Answer], expected: Sequence[Any]) -> tuple[list[int], float]:
    """Return how many answers each version of the model gave, and the largest difference of one.

    The others are wrong.
    """
    by_version, largest = [0] * len(expected), 0.0
    for answer in answers:
        outputs = json.loads(answer.body)["outputs"]
        found = np.array([*outputs["fc/value"][0], outputs["fc/prob"][0]])
        differences = [
            float(
                np.abs(found - np.append(one["value"][answer.row], one["prob"][answer.row])).max()
            )
            for one in expected
        ]
        best = int(np.argmin(differences))
        scores = expected[best]["value"][answer.row]
        is_largest = scores[outputs["fc/id"][0]] > scores.max() - TOLERANCE
        if differences[best] < TOLERANCE and is_largest:
            largest = max(largest, differences[best])
            by_version[best] += 1
    return by_version, largest


def measure(load: Load) -> dict[str, Any]:
    """Return what one turn measured."""
    answers, span = run(load)
    good = [answer for answer in answers if answer.status == 200]
    timed = [answer for answer in good if span.began < answer.came <= span.ended]
    took_ms = [1000 * (answer.came - answer.sent) for answer in timed] or [float("nan")]
    by_version, largest = checked(good, [dict(np.load(one)) for one in load.expected.split(":")])
    bad = next((answer for answer in answers if answer.status != 200), None)
    seconds = span.ended - span.began
    return {
        "requests": len(answers),
        "requests_per_s": len(timed) / seconds,
        "p50_ms": float(np.percentile(took_ms, 50)),
        "p99_ms": float(np.percentile(took_ms, 99)),
        "max_ms": max(took_ms),
        "errors": len(answers) - len(good),
        "first_error": None if bad is None else bad.body[:300].decode(errors="replace"),
        "wrong": len(good) - sum(by_version),
        "by_version": by_version,
        "largest_difference": largest,
        "server_cpu_us": 1e6 * span.server_cpu_s / max(1, len(timed)),
        "load_cpu": span.load_cpu_s / seconds,
    }


def main(text: str) -> None:
    """Measure and print one JSON line."""
    gc.disable()
    print(json.dumps(measure(Load(**json.loads(text)))))


if __name__ == "__main__":
    main(sys.argv[1])
