"""Append a rank's records to the spool, a file that another process reads as it grows.

A frame is the payload length and the CRC-32 of the payload (two little-endian uint32), then the
payload, a record as UTF-8 JSON. The statistics in ``stats`` records are Base64 of little-endian
doubles, because writing each as text took as long as computing them. A last frame that a crash cut
short is ignored. Pure Python.
"""

import errno
import os
import struct
import threading
import time
import traceback
import zlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from glasshouse import jsonio
from glasshouse.failpoints import failpoint

HEADER = struct.Struct("<II")
MAX_PAYLOAD_BYTES = 64 * 2**20
MAX_WAITING_BYTES = 64 * 2**20
"""The most kept in memory while the disk is full. Beyond it the job fails."""
_FULL_S = 0.5
_FLUSH_BYTES = 256 * 1024
_FLUSH_S = 0.005

Emit = Callable[[dict[str, Any]], None]
"""Takes a record to report."""


class SpoolDamaged(Exception):
    """A frame before the last one fails its checksum: the file was altered."""


def now() -> str:
    """Return the current time as in records: RFC 3339, UTC, milliseconds."""
    second, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"{_second(second)}.{nanoseconds // 10**6:03d}Z"


def report_dropped(emit: Emit, what: str, error: Exception, more: str = "") -> None:
    """Report something that a job lost by an error that does not end it."""
    text = f"{what}: {type(error).__name__}: {error}{more}"
    emit({"type": "dropped", "at": now(), "what": text[:500], "count": 1})
    traceback.print_exception(error)


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class SpoolWriter:
    """Appends records. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._flushed_at = time.monotonic()
        self._full_until = 0.0

    def append(self, record: dict[str, Any]) -> None:
        """Add a record. It is written now or together with later ones."""
        payload = jsonio.dumps(_packed(record)).encode()
        failpoint("spool.append")
        with self._lock:
            self._waiting += HEADER.pack(len(payload), zlib.crc32(payload))
            self._waiting += payload
            if len(self._waiting) >= _FLUSH_BYTES:
                self._write()

    def settle(self) -> None:
        """Write buffered records if some milliseconds have passed; called at step boundaries."""
        if time.monotonic() - self._flushed_at >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write all buffered records."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write all buffered records, sync the file to disk and close it.

        While the disk is full this waits, so that trained results are not lost.
        """
        with self._lock:
            self._write()
            while self._waiting:
                time.sleep(_FULL_S)
                self._write()
            failpoint("spool.sync")
            os.fsync(self._file)
            os.close(self._file)

    def _write(self) -> None:
        if time.monotonic() < self._full_until:
            return
        failpoint("spool.write")
        try:
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
        except OSError as error:  # training continues, and its records stay in memory
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or len(self._waiting) > MAX_WAITING_BYTES:
                raise
            self._full_until = time.monotonic() + _FULL_S
        failpoint("spool.written")
        self._flushed_at = time.monotonic()


def read_frames(
    path: Path, offset: int, max_records: int = 1000
) -> tuple[list[dict[str, Any]], int]:
    """Read records from an offset; return them and the offset to continue from.

    Stops before a last frame that is incomplete or damaged, because it is still being written.

    Raises:
        SpoolDamaged: a frame fails its checksum although more data follows.
    """
    records: list[dict[str, Any]] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return [], offset
    with file:
        end = os.fstat(file.fileno()).st_size
        file.seek(offset)
        while len(records) < max_records:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                break
            length, checksum = HEADER.unpack(header)
            after = offset + HEADER.size + length
            if length > MAX_PAYLOAD_BYTES:
                raise SpoolDamaged(f"{path.name}: a frame of {length} bytes at {offset}")
            payload = file.read(length)
            if len(payload) < length:
                break
            if zlib.crc32(payload) != checksum:
                if after < end:
                    raise SpoolDamaged(f"{path.name}: the frame at {offset} fails its checksum")
                break
            records.append(_unpacked(jsonio.loads(payload)))
            offset = after
    return records, offset


def _packed(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with its table of statistics, if it has one, as Base64."""
    rows: Sequence[Sequence[Any]] | int | None = record.get("rows")
    if not rows or isinstance(rows, int):  # a finding has a number of rows
        return record
    flat = [figure for row in rows for figure in row[2:]]
    figures = b2a_base64(struct.pack(f"<{len(flat)}d", *flat), newline=False).decode()
    names = [name for row in rows for name in row[:2]]
    return {**record, "rows": {"names": names, "figures": figures}}


def _unpacked(record: dict[str, Any]) -> dict[str, Any]:
    packed = record.get("rows")
    if not isinstance(packed, dict):
        return record
    names: list[str] = packed["names"]
    data = a2b_base64(packed["figures"])
    flat = struct.unpack(f"<{len(data) // 8}d", data)
    num = 2 * len(flat) // len(names)
    rows = [
        [*names[2 * row : 2 * row + 2], *flat[row * num : (row + 1) * num]]
        for row in range(len(names) // 2)
    ]
    return {**record, "rows": rows}
