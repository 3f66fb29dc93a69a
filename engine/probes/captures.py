"""Whole tensors on their way to files: a bounded queue and one writer thread.

Training never waits for it: what does not fit the queue is dropped and counted.
"""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.network import dtype_name
from engine.spool import now

Emit = Callable[[dict[str, Any]], None]
MAX_ITEMS = 4096
MAX_BYTES = 512 * 2**20


class CaptureWriter:
    """Writes ``captures/<n>.safetensors`` and then the record that names it."""

    def __init__(
        self, out_dir: Path, emit: Emit, *, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._out_dir = out_dir
        self._emit = emit
        self._max_bytes = max_bytes
        self._queue: queue.Queue[tuple[dict[str, Any], Tensor, Any] | None] = queue.Queue(max_items)
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_dropped = 0
        self._num_written = 0
        self._thread: threading.Thread | None = None

    def offer(  # noqa: PLR0913 (each is a word of the record)
        self,
        step: int,
        layer: str,
        kind: str,
        tensor: Tensor,
        *,
        form: str = "full",
        slice: str | None = None,  # noqa: A002 (the public name)
        captured_from: tuple[int, ...] | None = None,
    ) -> bool:
        """Copy a tensor as it is now, to be written later; False when there is no room.

        ``tensor`` may be a part of what ``captured_from`` is the shape of, as ``form`` says.
        """
        size = tensor.numel() * tensor.element_size()
        with self._lock:
            if self._num_bytes + size > self._max_bytes or self._queue.full():
                self._num_dropped += 1
                return False
            self._num_bytes += size
        record = {
            "type": "capture",
            "at": now(),
            "step": step,
            "layer": layer,
            "kind": kind,
            "phase": "train",
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "size_bytes": size,
            "form": form,
            "slice": slice,
            "captured_from": list(tensor.shape if captured_from is None else captured_from),
        }
        self._start()
        self._queue.put((record, *_snapshot(tensor)))
        return True

    def take_dropped(self) -> int:
        """How many tensors were dropped since this was last asked."""
        with self._lock:
            dropped, self._num_dropped = self._num_dropped, 0
            return dropped

    def close(self) -> None:
        """Wait until everything is written."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        if self._thread is None:
            (self._out_dir / "captures").mkdir(parents=True, exist_ok=True)
            self._thread = threading.Thread(target=self._write_all, name="captures", daemon=True)
            self._thread.start()

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            record, tensor, ready = item
            try:
                self._write(record, tensor, ready)
            except Exception:  # a full disk must not end training: the drop is counted
                with self._lock:
                    self._num_dropped += 1
            with self._lock:
                self._num_bytes -= record["size_bytes"]

    def _write(self, record: dict[str, Any], tensor: Tensor, ready: Any) -> None:
        if ready is not None:
            ready.synchronize()
        name = f"captures/{self._num_written}.safetensors"
        self._num_written += 1
        save_file({"tensor": tensor}, self._out_dir / name)
        self._emit({**record, "file": name})


def _snapshot(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy in CPU memory, and the event after which it may be read."""
    source = tensor.detach()
    if source.layout is not torch.strided:
        source = source.to_dense()
    if source.device.type == "cpu":
        return torch.clone(source, memory_format=torch.contiguous_format), None
    landed = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    landed.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return landed, event
