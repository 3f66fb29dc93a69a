"""A reader of event streams that can lose its connection at any byte. Knows nothing of retries."""

import http.client
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.acceptance.services import Endpoint

NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Received:
    """What came over one connection."""

    status: int
    body: bytes
    complete: bool
    """The server ended it; else it was cut here."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole messages; what came of the last one, if it was cut, is not one."""
        whole = self.body.decode(errors="replace").split("\n\n")[:-1]
        parsed = [dict(line.split(": ", 1) for line in text.splitlines()) for text in whole]
        return [message for message in parsed if "data" in message]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of the log: what has an id."""
        found = [message for message in self.messages if "id" in message]
        for message in found:
            data = json.loads(message["data"])
            assert (str(data["seq"]), data["type"]) == (message["id"], message["event"])
        return [json.loads(message["data"]) for message in found]


class Line:
    """One connection to the stream of a job, read at one's own pace."""

    def __init__(self, endpoint: Endpoint, job: str, after: int = 0, *, query: str = "") -> None:
        place = urlsplit(endpoint.url)
        self._connection = http.client.HTTPConnection(place.netloc, timeout=120)
        headers = {"Authorization": f"Bearer {endpoint.key}", "Accept": "text/event-stream"}
        if after:
            headers["Last-Event-ID"] = str(after)
        self._connection.request("GET", f"/api/v1/jobs/{job}/stream{query}", headers=headers)
        assert isinstance(self._connection.sock, socket.socket)
        self._socket = self._connection.sock
        self._answer = self._connection.getresponse()

    def read(self, limit: int | None = None) -> Received:
        """Read to the end, or cut the connection after so many bytes of the body."""
        parts: list[bytes] = []
        left = 1 << 62 if limit is None else limit
        complete = False
        try:
            while left > 0:
                data = self._answer.read1(min(left, 1 << 16))
                if not data:
                    complete = True
                    break
                parts.append(data)
                left -= len(data)
        except (OSError, http.client.IncompleteRead):
            complete = False  # the other side is gone
        self.close()
        return Received(self._answer.status, b"".join(parts), complete)

    def read_message(self) -> bytes:
        """One message, up to its empty line; empty when there is none any more."""
        lines: list[bytes] = []
        while line := self._answer.readline():
            lines.append(line)
            if line == b"\n":
                return b"".join(lines)
        return b""

    def close(self) -> None:
        """Cut the connection without a farewell."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self._answer.close()
        self._connection.close()


def polled(endpoint: Endpoint, job: str, **query: str) -> list[dict[str, Any]]:
    """The whole log of a job as polling gives it, a few at a time."""
    found: list[dict[str, Any]] = []
    with endpoint.http() as http:
        after: str | None = None
        while True:
            params = {"limit": "37"} | query | ({"after": after} if after else {})
            page = http.get(f"/jobs/{job}/events", params=params).raise_for_status().json()
            found += page["data"]
            if not page["has_more"]:
                return found
            after = str(page["next"])
