"""Runs many clients of one event stream in one process: raw sockets, without parsing JSON.

``python -m bench.service.readers URL PATH COUNT FILE``, with the key in ``GLASSHOUSE_API_KEY``.
Prints a line when every stream has sent hello and one when every stream has ended. FILE gets an
array with the rows: client, arrival (seconds), first and last event number. Fails if a number is
missing, duplicated or out of order.
"""

import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

ID = re.compile(rb"\nid: (\d+)\n")
READ_BYTES = 1 << 18


@dataclass
class Client:
    """One connection and its position in the stream."""

    number: int
    socket: socket.socket
    last: int = 0
    greeted: bool = False
    ended: bool = False
    rest: bytes = b""
    came: list[tuple[int, float, int, int]] = field(default_factory=list)

    def read(self) -> None:
        """Read the available data; count only whole messages."""
        part = self.socket.recv(READ_BYTES)
        arrived = time.time()
        if not part:
            raise ConnectionError(f"client {self.number} was disconnected after event {self.last}")
        data = self.rest + part
        end = data.rfind(b"\n\n") + 1  # keep the second newline: an id comes after one
        whole, self.rest = (data[: end + 1], data[end:]) if end else (b"", data)
        if not self.greeted:
            if b" 200 OK" not in data.partition(b"\r\n")[0]:
                raise ConnectionError(data[:500].decode(errors="replace"))
            self.greeted = b"event: hello" in whole
        numbers = [int(found) for found in ID.findall(whole)]
        if not numbers:
            return
        wanted = [*range(self.last + 1, self.last + 1 + len(numbers))]
        if numbers != wanted:
            raise AssertionError(f"client {self.number}: got {numbers} instead of {wanted}")
        self.last = numbers[-1]
        self.came.append((self.number, arrived, numbers[0], numbers[-1]))
        self.ended = b"\nevent: end\n" in whole


def connect(number: int, url: str, path: str, key: str) -> Client:
    """Connect and request the stream."""
    host, port = url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), timeout=60)
    lines = [f"GET /api/v1{path} HTTP/1.1", f"Host: {host}:{port}", f"Authorization: Bearer {key}"]
    opened.sendall("\r\n".join([*lines, "", ""]).encode())
    return Client(number, opened)


def main(url: str, path: str, count: str, file: str) -> None:
    """Read until every stream has ended."""
    key = os.environ["GLASSHOUSE_API_KEY"]
    clients = [connect(number, url, path, key) for number in range(int(count))]
    selector = selectors.DefaultSelector()
    for client in clients:
        selector.register(client.socket, selectors.EVENT_READ, client)
    waiting, left = len(clients), len(clients)
    while left:
        for entry, _ in selector.select():
            client: Client = entry.data
            was_greeted = client.greeted
            client.read()
            waiting -= client.greeted and not was_greeted
            if client.greeted and not was_greeted and not waiting:
                print(json.dumps({"open": len(clients)}), flush=True)
            if client.ended:
                selector.unregister(client.socket)
                client.socket.close()
                left -= 1
    np.save(file, np.array([row for client in clients for row in client.came]))
    print(json.dumps({"ended": len(clients)}), flush=True)


class Readers:
    """The handle of that process."""

    def __init__(self, url: str, path: str, key: str, count: int, file: Path) -> None:
        self._file = file
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.service.readers", url, path, str(count), str(file)],
            env=os.environ | {"GLASSHOUSE_API_KEY": key},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._output: IO[str] = self._process.stdout
        self._hear("open")

    def finish(self) -> np.ndarray:
        """Wait until all streams have ended; return the array."""
        self._hear("ended")
        self.close()
        return np.load(self._file)

    def close(self) -> None:
        """End the process in any case."""
        self._process.kill()
        self._process.wait()
        self._output.close()

    def _hear(self, word: str) -> None:
        line = self._output.readline()
        assert word in (json.loads(line) if line else {}), "the readers failed; see above"


if __name__ == "__main__":
    main(*sys.argv[1:])
