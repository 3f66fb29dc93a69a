"""Write tensors from the ring to files: one safetensors file for the tensors of a step.

Without torch, directly from the mapped memory. A file that lies in the ring as it is wanted
bypasses the page cache if the file system allows it: copying into the cache costs more than the
write itself, at the expense of training. Others are written as usual.
"""

import errno
import math
import os
import queue
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.safetensors_header import header
from engine.core.spool import Emit
from engine.probes.tensors.ring import Ring

_BLOCK = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)


def file_names(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a unique name for each tensor in its file, such as ``conv1/output``.

    The tensor of process 1 alone is ``conv1/output@1``.
    """
    names: dict[str, None] = {}
    for tensor in tensors:
        rank = f"@{tensor['rank']}" if "rank" in tensor else ""
        name = wanted = f"{tensor['layer']}/{tensor['kind']}{rank}"
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
    entries = [
        (name, item["dtype"], item["shape"], item["size_bytes"])
        for name, item in zip(file_names(tensors), tensors, strict=True)
    ]
    whole = _in_one_piece(record, header(entries, about), ring)
    if whole is not None and _write_directly(path, *whole):
        return
    # wide elements first, so that every tensor is aligned in the file
    order = sorted(range(len(tensors)), key=lambda number: -_width(tensors[number]))
    with open(path, "wb", opener=_open_private) as file:
        file.write(header([entries[number] for number in order], about))
        file.writelines(views[number] for number in order)


def _write_directly(path: Path, whole: memoryview, size: int) -> bool:
    """Write a file past the page cache from aligned memory; return False if this is impossible."""
    try:
        handle = _open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | _DIRECT)
        try:
            written = 0
            while written < len(whole):
                written += os.write(handle, whole[written:])
            os.ftruncate(handle, size)
        finally:
            os.close(handle)
    except OSError as error:  # some file systems refuse to open such a file, others to write it
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _open_private(path: str | Path, flags: int) -> int:
    return os.open(path, flags, 0o600)


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


def _width(tensor: Mapping[str, Any]) -> int:
    num = math.prod(tensor["shape"])
    return int(tensor["size_bytes"]) // num if num else 0


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
