"""Copy whole tensors once into a ring, from which another thread or process writes files.

Training never waits for that: a tensor without room is dropped and counted. Only for a ``lossless``
probe does training wait, and the time is reported.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.core.precision import dtype_name
from engine.core.safetensors_header import DTYPE_NAMES
from engine.core.spool import Emit, now
from engine.probes.tensors.drain import LocalDrain
from engine.probes.tensors.ring import PAGE_BYTES, Producer, Ring, default_num_bytes

_SHORT_S, _LONG_S = 0.0005, 0.01
_HEAD_BYTES = 4 * PAGE_BYTES
_HEAD_SHARE = 16
"""A ring smaller than this many header sizes gets no header."""


class CapturePiece(NamedTuple):
    """The fields of the record of a whole tensor or a part of one."""

    step: int
    layer: str
    kind: str
    form: str = "full"
    slice: str | None = None
    captured_from: tuple[int, ...] | None = None
    """The shape of the tensor that this is a part of; None: its own shape."""
    lossless: bool = False
    """Whether training waits for room."""
    phase: str = "train"
    rank: int | None = None
    """The process whose tensor it is; None: that of all processes."""


@dataclass(slots=True)
class _Batch:
    """The tensors of one step that have room in the ring."""

    step: int
    phase: str
    tensors: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    landing: list[tuple[Tensor, int]] = field(default_factory=list[tuple[Tensor, int]])
    """Tensors of a device that are being copied to pinned memory, and their positions."""
    head: tuple[int, int] | None = None
    """Room before the tensors, where the consumer writes the header of their file."""
    end: int = 0
    sources: set[torch.device] = field(default_factory=set[torch.device])
    """The devices that they come from."""
    landed: tuple[torch.Event, ...] = ()
    """The events, one of each device, after which all of them have arrived."""


class Captures:
    """Copies tensors into the ring and emits one ``captures`` record a step."""

    def __init__(
        self,
        out_dir: Path,
        emit: Emit,
        *,
        ring: str | None = None,
        num_bytes: int | None = None,
        flush: Callable[[], None] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the captures; with ``ring`` None a thread writes a private ring to ``out_dir``.

        ``flush`` makes emitted records visible to the consumer; ``is_over`` ends waiting for room.
        """
        self._out_dir = out_dir
        self._emit = emit
        self._name = ring
        self._num_bytes = num_bytes
        self._flush = flush
        self._is_over = is_over
        self._drain: LocalDrain | None = None
        self._open: _Batch | None = None
        self._closed: deque[_Batch] = deque()
        self._head_bytes = _HEAD_BYTES
        self._num_dropped = 0
        self._waited_s = 0.0

    def offer(self, piece: CapturePiece, tensor: Tensor) -> bool:
        """Copy a tensor's current value; return False if there is no room."""
        source = tensor.detach()
        if source.layout is not torch.strided:
            source = source.to_dense()
        dtype = dtype_name(source.dtype)
        if dtype not in DTYPE_NAMES:
            raise TypeError(f"a file of tensors has no name for {dtype}")
        self._begin(piece.step, piece.phase)
        size = source.numel() * source.element_size()
        position = self._room(size, source.element_size(), lossless=piece.lossless)
        if position is None:
            self._num_dropped += 1
            return False
        whole = source.shape if piece.captured_from is None else piece.captured_from
        entry: dict[str, Any] = {
            "layer": piece.layer,
            "kind": piece.kind,
            "shape": list(source.shape),
            "dtype": dtype,
            "size_bytes": size,
            "form": piece.form,
            "slice": piece.slice,
            "captured_from": list(whole),
            "position": position,
        }
        if piece.rank is not None:
            entry["rank"] = piece.rank
        # waiting for room may have sent the batch
        batch = self._open = self._open or _Batch(piece.step, piece.phase)
        try:
            if source.is_cpu:
                self._copy(source, position)
            else:
                landing = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                batch.landing.append((landing.copy_(source, non_blocking=True), position))
                batch.sources.add(source.device)
        except BaseException:
            self._producer.take_back(position)
            raise
        batch.tensors.append(entry)
        return True

    @property
    def pending(self) -> bool:
        """Whether ``poll`` may have work."""
        return bool(self._closed)

    def poll(self) -> None:
        """Send the tensors of a device that have arrived by now."""
        while self._closed and all(event.query() for event in self._closed[0].landed):
            self._send(self._closed.popleft())

    def finish_step(self) -> None:
        """Send the tensors of the step, and report how many of them were dropped."""
        batch, self._open = self._open, None
        if batch is not None:
            self._close(batch)
        dropped, self._num_dropped = self._num_dropped, 0
        if dropped:
            self._emit({"type": "dropped", "at": now(), "what": "captures", "count": dropped})

    def _close(self, batch: _Batch) -> None:
        if not batch.tensors:
            if batch.head is not None:
                self._producer.take_back(batch.head[0])
            return
        self._head_bytes = _head_bytes(batch.tensors)
        batch.end = self._producer.head
        if not batch.landing and not self._closed:
            self._send(batch)
            return
        streams = (torch.accelerator.current_stream(one) for one in batch.sources)
        batch.landed = tuple(stream.record_event() for stream in streams)
        self._closed.append(batch)

    def settle(self) -> None:
        """Send everything, tensors of a device when they have arrived."""
        self.finish_step()
        while self._closed:
            batch = self._closed.popleft()
            for event in batch.landed:
                event.synchronize()
            self._send(batch)

    def take_waited_s(self) -> float:
        """Return how long training has waited for room since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """Send everything, and wait until this process has stored what it stores itself."""
        self.settle()
        if self._drain is not None:
            self._drain.close()
            self._drain = None

    def _begin(self, step: int, phase: str) -> None:
        """Start a step on a new page, with room for a header, so that the file is one write."""
        if self._open is not None:
            if (self._open.step, self._open.phase) == (step, phase):
                return
            self.finish_step()
        if self._name is None and self._drain is None:
            self._drain = LocalDrain(self._producer.ring, self._out_dir, self._emit)
        batch = self._open = _Batch(step, phase)
        if self._head_bytes * _HEAD_SHARE <= self._producer.ring.num_bytes:
            position = self._producer.reserve(self._head_bytes, PAGE_BYTES)
            batch.head = None if position is None else (position, self._head_bytes)

    @cached_property
    def _producer(self) -> Producer:
        if self._name is not None:
            return Producer(Ring.open(self._name))
        return Producer(Ring.private(self._num_bytes or default_num_bytes()))

    def _room(self, size: int, align: int, *, lossless: bool) -> int | None:
        producer = self._producer
        position = producer.reserve(size, align)
        if position is not None or not lossless:
            return position
        if size > producer.ring.num_bytes:
            return None  # it never will
        began = time.monotonic()
        self.settle()  # otherwise no room can become free
        self._flush()
        pause = _SHORT_S
        while (position := producer.reserve(size, align)) is None and not self._is_over():
            if self._drain is not None and not self._drain.is_alive:
                break
            time.sleep(pause)
            pause = min(_LONG_S, 2 * pause)
        self._waited_s += time.monotonic() - began
        return position

    def _copy(self, source: Tensor, position: int) -> None:
        """Copy the tensor with torch, which takes strided sources."""
        count, ring = source.numel(), self._producer.ring
        if count:
            offset = ring.place(position)
            flat = torch.frombuffer(ring.memory, dtype=source.dtype, count=count, offset=offset)
            flat.view(source.shape).copy_(source)

    def _send(self, batch: _Batch) -> None:
        for landed, position in batch.landing:
            self._copy(landed, position)
        record = {
            "type": "captures",
            "at": now(),
            "step": batch.step,
            "phase": batch.phase,
            "tensors": batch.tensors,
            "head": batch.head,
            "end": batch.end,
        }
        if self._drain is not None:
            self._drain.put(record)
        else:
            self._emit(record)


def _head_bytes(entries: list[dict[str, Any]]) -> int:
    """Return a size in whole pages that is enough for the header of a file of these tensors."""
    size = sum(160 + len(entry["layer"]) + 12 * len(entry["shape"]) for entry in entries) + 200
    return -(-size // PAGE_BYTES) * PAGE_BYTES
