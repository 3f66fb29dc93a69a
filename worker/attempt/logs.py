"""Turns what a rank prints to its log files into ``log`` events: clean lines of limited length."""

import os
import re
import time
from collections import deque
from pathlib import Path

from models.observations.events import NewEvent
from models.tables import now

MAX_LINE_CHARACTERS = 4096
MAX_STREAM_BYTES = 5 * 1024**2
"""Per stream, so 10 MiB per rank. The file is cut to this, so a rank cannot fill the disk."""
_READ_BYTES = 64 * 1024
_TAIL_LINES = 50
_TAIL_CHARACTERS = 8 * 1024
_DROPPED_EVERY_S = 10.0
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Log:
    """Reads one stream of one rank.

    The rank appends to the file. Each read cuts the file back to the limit: later output is
    counted and not kept, and printing never blocks the rank.
    """

    def __init__(self, path: Path, stream: str) -> None:
        self._path = path
        self._stream = stream
        self._offset = 0
        self._rest = b""
        self._dropped_bytes = 0
        self._dropped_at = 0.0
        self._last: deque[str] = deque(maxlen=_TAIL_LINES)
        self._last_lost: list[str] = []

    def read(self, *, final: bool = False) -> list[NewEvent]:
        """Return new lines as events; with ``final``, also an unfinished last line."""
        lines: list[str] = []
        while data := self._read_some():
            *whole, rest = (self._rest + data).split(b"\n")
            lines += [clean(line) for line in whole]
            self._rest = rest[: 4 * MAX_LINE_CHARACTERS]  # more of a line cannot be shown
            if not final:
                break
        if final and self._rest:
            lines.append(clean(self._rest))
            self._rest = b""
        self.cut()
        self._last.extend(lines)
        found: list[NewEvent] = []
        if lines:
            payload = {"rank": 0, "stream": self._stream, "lines": lines}
            found.append(NewEvent("log", now(), payload))
        if self._dropped_bytes and (
            final or time.monotonic() - self._dropped_at >= _DROPPED_EVERY_S
        ):
            payload = {"what": f"bytes of {self._stream}", "count": self._dropped_bytes}
            found.append(NewEvent("dropped", now(), payload))
            self._dropped_bytes, self._dropped_at = 0, time.monotonic()
        return found

    def tail(self) -> str | None:
        """Return the last lines, for the error of a failed job."""
        lines = [*self._last, *self._last_lost][-_TAIL_LINES:]
        return "\n".join(lines)[-_TAIL_CHARACTERS:] or None

    def _read_some(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(min(_READ_BYTES, MAX_STREAM_BYTES - self._offset))
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def cut(self) -> None:
        """Cut the file back to the limit. ``read`` does so too."""
        try:
            size = self._path.stat().st_size
            if size <= MAX_STREAM_BYTES:
                return
            with self._path.open("rb") as file:
                file.seek(max(MAX_STREAM_BYTES, size - _TAIL_CHARACTERS))
                lost = file.read(_TAIL_CHARACTERS)
            os.truncate(self._path, MAX_STREAM_BYTES)
        except FileNotFoundError:
            return
        self._dropped_bytes += size - MAX_STREAM_BYTES
        self._last_lost = [clean(line) for line in lost.rstrip(b"\n").split(b"\n")[1:]]


def clean(line: bytes) -> str:
    """Return a printed line as text that cannot move a terminal's cursor or forge another line."""
    text = _ESCAPES.sub("", line.decode("utf-8", "replace"))
    text = text.rstrip("\r").rsplit("\r", 1)[-1]  # a progress bar rewrites its line
    text = _CONTROLS.sub("", text)
    return text if len(text) <= MAX_LINE_CHARACTERS else text[: MAX_LINE_CHARACTERS - 1] + "…"
