"""HTTP as it goes over the wire, for what a good client would never send."""

import http.client
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

ANSWERS: Counter[str] = Counter()
"""What came of what was asked here, for the figures; a bare connection counts as ``raw``."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Raw:
    """One connection that sends paths and headers as they are."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._place = (parts.hostname or "", parts.port or 80)
        self._key = key
        self._connection: http.client.HTTPConnection | None = None

    def ask(
        self, method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """One request. ``target`` is percent-encoded already, or is not, as it likes."""
        for fresh in (False, True):  # one that was kept open may have been closed by now
            try:
                return self._ask(method, target, headers or {}, body, fresh=fresh)
            except (http.client.RemoteDisconnected, ConnectionError, http.client.CannotSendRequest):
                self.close()
                if fresh:
                    raise
        raise AssertionError

    def _ask(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, *, fresh: bool
    ) -> Answer:
        if self._connection is None or fresh:
            self._connection = http.client.HTTPConnection(*self._place, timeout=120)
        connection = self._connection
        connection.putrequest(method, target, skip_accept_encoding=True)
        connection.putheader("Authorization", f"Bearer {self._key}")
        for name, value in headers.items():
            connection.putheader(name, value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        answer = connection.getresponse()
        found = answer.read()
        ANSWERS[f"{answer.status // 100}xx"] += 1
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, found)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def connect(url: str) -> socket.socket:
    """A bare connection to a service."""
    parts = urlsplit(url)
    ANSWERS["raw"] += 1
    return socket.create_connection((parts.hostname or "", parts.port or 80), timeout=120)


def one_status(connection: socket.socket) -> int:
    """The status of the next answer, which is read to its end, in however many pieces it comes."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    parts: list[bytes] = []
    try:
        while data := connection.recv(65536):
            parts.append(data)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def closed_after(connection: socket.socket) -> float:
    """Seconds until the other side closes."""
    began = time.monotonic()
    read_all(connection)
    return time.monotonic() - began
