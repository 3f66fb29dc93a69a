"""Turns what ranks print to their log files into ``log`` events: clean lines of limited length."""

import os
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from models.observations.events import NewEvent
from models.observations.log_levels import LevelReader
from models.tables import now

MAX_LINE_CHARACTERS = 4096
MAX_STREAM_BYTES = 5 * 1024**2
"""Per stream of each rank. The file is cut to this, so a rank cannot fill the disk."""
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

    def __init__(self, path: Path, stream: str, rank: int = 0) -> None:
        self.rank = rank
        self.stream = stream
        self._path = path
        self._levels = LevelReader()
        self._offset = 0
        self._rest = b""
        self._dropped_bytes = 0
        self._dropped_at = 0.0
        self._last: deque[str] = deque(maxlen=_TAIL_LINES)
        self._last_lost: list[str] = []

    def read(self, *, final: bool = False) -> list[NewEvent]:
        """Return new lines as events; with ``final``, all of them and an unfinished last line.

        An event has the lines of at most 64 KiB.
        """
        found: list[NewEvent] = []
        while data := self._read_some():
            *whole, rest = (self._rest + data).split(b"\n")
            self._rest = rest[: 4 * MAX_LINE_CHARACTERS]  # more of a line cannot be shown
            found += self._printed(whole)
            if not final:
                break
        if final and self._rest:
            found += self._printed([self._rest])
            self._rest = b""
        self.cut()
        if self._dropped_bytes and (
            final or time.monotonic() - self._dropped_at >= _DROPPED_EVERY_S
        ):
            what = f"bytes of {self.stream} of rank {self.rank}"
            payload = {"what": what, "count": self._dropped_bytes}
            found.append(NewEvent("dropped", now(), payload))
            self._dropped_bytes, self._dropped_at = 0, time.monotonic()
        return found

    def _printed(self, raw: Sequence[bytes]) -> list[NewEvent]:
        """Return the event of some lines; none without lines."""
        if not raw:
            return []
        lines = [clean(line) for line in raw]
        self._last.extend(lines)
        printed = {"lines": lines, "levels": self._levels.levels(lines)}
        payload = {"rank": self.rank, "stream": self.stream, **printed}
        return [NewEvent("log", now(), payload)]

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


class Logs:
    """The logs of all ranks of an attempt, of each rank one per stream."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self._logs = logs

    def read(self, *, final: bool = False) -> list[NewEvent]:
        """Return new lines of all logs as events; see `Log.read`."""
        return [event for log in self._logs for event in log.read(final=final)]

    def cut(self) -> None:
        """Cut all files back to the limit."""
        for log in self._logs:
            log.cut()

    def tail(self, rank: int | None = None) -> str | None:
        """Return the last lines of a rank's standard error, for the error of a failed job.

        Without ``rank``: those of the first rank that has printed there.
        """
        for log in self._logs:
            if log.stream == "stderr" and rank in (None, log.rank) and (found := log.tail()):
                return found
        return None


def clean(line: bytes) -> str:
    """Return a printed line as text that cannot move a terminal's cursor or forge another line."""
    text = _ESCAPES.sub("", line.decode("utf-8", "replace"))
    text = text.rstrip("\r").rsplit("\r", 1)[-1]  # a progress bar rewrites its line
    text = _CONTROLS.sub("", text)
    return text if len(text) <= MAX_LINE_CHARACTERS else text[: MAX_LINE_CHARACTERS - 1] + "…"
