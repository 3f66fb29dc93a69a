"""Write tensors from the ring to files: one safetensors file for the tensors of a step.

Without torch, directly from the mapped memory. Writes bypass the page cache if the file system
allows it: copying into the cache costs more than the write itself, at the expense of training.
"""

import errno
import json
import mmap
import os
import queue
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.spool import Emit
from engine.core.tensor_dtypes import DTYPE_NAMES
from engine.probes.tensors.ring import Ring

_PIECE = 2**20
_BLOCK = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)


def can_keep(dtype: str) -> bool:
    """Return whether safetensors has a name for a type."""
    return dtype in DTYPE_NAMES


def file_names(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a unique name for each tensor in its file, such as ``conv1/output``."""
    names: dict[str, None] = {}
    for tensor in tensors:
        name = wanted = f"{tensor['layer']}/{tensor['kind']}"
        number = 1
        while name in names:
            number += 1
            name = f"{wanted}#{number}"
        names[name] = None
    return list(names)


def write_file(path: Path, record: Mapping[str, Any], ring: Ring) -> None:
    """Write the tensors of a ``captures`` record.

    Raises:
        OSError: writing failed.
        ValueError, KeyError, TypeError: the record is invalid, or names what is not in the ring.
    """
    tensors: list[Mapping[str, Any]] = record["tensors"]
    about = {"step": str(record["step"]), "phase": record["phase"]}
    views = [ring.read(tensor["position"], tensor["size_bytes"]) for tensor in tensors]
    head = header(tensors, range(len(tensors)), about)
    whole = _in_one_piece(record, head, ring)
    with _Writer(path) as file:
        if whole is not None:
            file.write_all(*whole)
            return
        # wide elements first, so that every tensor is aligned in the file
        order = sorted(range(len(tensors)), key=lambda number: -_width(tensors[number]))
        head = header(tensors, order, about)
        file.write([memoryview(head), *(views[number] for number in order)])


def _in_one_piece(
    record: Mapping[str, Any], head: bytes, ring: Ring
) -> tuple[memoryview, int] | None:
    """Return the file as it lies in the ring, with the header written before it, and its size.

    This works if the tensors are adjacent: none needed alignment, and the ring did not end among
    them.
    """
    if record.get("head") is None or not _DIRECT:
        return None
    position, room = record["head"]
    end = position + room
    for tensor in record["tensors"]:
        if tensor["position"] != end:
            return None
        end += tensor["size_bytes"]
    if len(head) > room or position % _BLOCK or room % _BLOCK:
        return None
    size = end - position
    in_blocks = -(-size // _BLOCK) * _BLOCK
    if not ring.has(position, in_blocks):  # the header has the last pages of a lap
        return None
    text = head[8:] + b" " * (room - len(head))
    ring.read(position, room)[:] = struct.pack("<Q", len(text)) + text
    return ring.read(position, in_blocks), size


def header(
    tensors: Sequence[Mapping[str, Any]], order: Iterable[int], about: Mapping[str, str]
) -> bytes:
    """Return the start of a safetensors file whose tensors are stored in the given order."""
    names = file_names(tensors)
    entries: dict[str, Any] = {"__metadata__": about}
    end = 0
    for number in order:
        tensor = tensors[number]
        begin, end = end, end + tensor["size_bytes"]
        entries[names[number]] = {
            "dtype": DTYPE_NAMES[tensor["dtype"]],
            "shape": tensor["shape"],
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _width(tensor: Mapping[str, Any]) -> int:
    num = 1
    for length in tensor["shape"]:
        num *= length
    return int(tensor["size_bytes"]) // num if num else 0


class _Writer:
    """A new file that is written once, sequentially, bypassing the page cache if possible.

    Such a write needs whole blocks from aligned memory: the data is gathered piece by piece in a
    page-aligned buffer that is small enough to stay in the CPU cache.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags | _DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not _DIRECT:
                raise
            self._file = os.open(path, flags, 0o600)
        self._filled = self._size = 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._file)

    def write(self, parts: Iterable[memoryview]) -> None:
        """Write everything; the file then has exactly these bytes."""
        buffer = mmap.mmap(-1, _PIECE)
        for part in parts:
            at = 0
            while at < len(part):
                num = min(_PIECE - self._filled, len(part) - at)
                buffer[self._filled : self._filled + num] = part[at : at + num]
                self._filled += num
                at += num
                if self._filled == _PIECE:
                    self._flush(buffer, _PIECE)
        if self._filled:
            self._flush(buffer, -(-self._filled // _BLOCK) * _BLOCK)
            os.ftruncate(self._file, self._size)
        buffer.close()

    def write_all(self, whole: memoryview, size: int) -> None:
        """Write the whole file at once from aligned memory, then truncate it to ``size`` bytes."""
        written = 0
        while written < len(whole):
            written += self._put(whole[written:])
        os.ftruncate(self._file, size)

    def _flush(self, buffer: mmap.mmap, num_bytes: int) -> None:
        self._size += self._filled
        self._filled = 0
        with memoryview(buffer) as whole, whole[:num_bytes] as waiting:
            written = 0
            while written < num_bytes:
                written += self._put(waiting[written:])

    def _put(self, waiting: memoryview) -> int:
        try:
            return os.write(self._file, waiting)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # some file systems open a file like this and then refuse to write it
        import fcntl  # noqa: PLC0415 - there is none where there is no O_DIRECT

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        if not flags & _DIRECT:
            raise OSError(errno.EINVAL, "the file does not take a write")
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)
        return os.write(self._file, waiting)


class LocalDrain:
    """Writes a ring to files in the process that fills it: ``captures/<step>.safetensors``.

    Used when the engine runs alone, without a supervisor. It emits a record after each file.
    """

    def __init__(self, ring: Ring, out_dir: Path, emit: Emit) -> None:
        self._ring = ring
        self._emit = emit
        self._directory = out_dir / "captures"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="captures", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread that empties the ring is running."""
        return self._thread.is_alive()

    def put(self, record: dict[str, Any]) -> None:
        """Queue a record whose tensors are complete in the ring."""
        self._queue.put(record)

    def close(self) -> None:
        """Wait until everything is written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._emit(self._store(record))
            except Exception as error:  # a full disk must not end training: the drop is counted
                self._emit(dropped(record, error))
            self._ring.release(record["end"])

    def _store(self, record: dict[str, Any]) -> dict[str, Any]:
        stem = str(record["step"]) if record["phase"] == "train" else f"{record['step']}-evaluate"
        name, number = f"{stem}.safetensors", 1
        while (self._directory / name).exists():  # a step whose tensors came in several batches
            number += 1
            name = f"{stem}-{number}.safetensors"
        beside = self._directory / f".{name}.incoming"
        try:
            write_file(beside, record, self._ring)
            beside.replace(self._directory / name)
        finally:
            beside.unlink(missing_ok=True)
        return stored(record, f"captures/{name}")


def stored(record: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the record of tensors that are in a file of the job's directory."""
    tensors: list[Mapping[str, Any]] = record["tensors"]
    kept = [
        {key: value for key, value in tensor.items() if key != "position"} | {"tensor": name}
        for tensor, name in zip(tensors, file_names(tensors), strict=True)
    ]
    rest = {key: value for key, value in record.items() if key not in ("head", "end")}
    return rest | {"tensors": kept, "file": file}


def dropped(record: Mapping[str, Any], error: BaseException) -> dict[str, Any]:
    """Return the record of tensors that could not be stored."""
    what = f"captures: {type(error).__name__}: {error}"[:500]
    return {
        "type": "dropped",
        "at": record["at"],
        "what": what,
        "count": len(record["tensors"]),
    }
