"""Copy the state of a training run at a step boundary into host memory.

Everything that a resumed run needs is a part with `Stateful`'s two methods. One place lists all
parts (`engine/training/loop.py`). Handles tensors, not files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.core.shards import whole

State = dict[str, Any]
"""Tensors and JSON values by name. Tensors are written to a file of their own, the rest to
``state.json``; both are restored under the same names."""


class Stateful(Protocol):
    """A part of a training run that checkpoints contain."""

    def state(self) -> State:
        """Return the current state. The caller copies tensors at once, other values not at all."""
        ...

    def restore(self, state: State) -> None:
        """Restore a state.

        Raises:
            CheckpointMismatch: the state belongs to something else.
        """
        ...


@runtime_checkable
class StatefulInParts(Stateful, Protocol):
    """A part of which each process has something else."""

    def whole_state(self) -> State:
        """Return what all processes have together, in process 0. Collective."""
        ...


Parts = dict[str, Stateful]
"""All parts by name: ``model`` becomes ``model.safetensors``. They are restored in this order."""


@dataclass
class Snapshot:
    """All parts of a training run at one step; later training does not change it."""

    about: dict[str, Any]
    """Metadata that anyone may read: step, epoch, spec, metrics …"""
    tensors: dict[str, dict[str, Tensor]]
    rest: dict[str, dict[str, Any]]
    device: str = "cpu"
    """Type of the device that training runs on: ``cpu``, ``cuda`` …"""
    _arrived: Sequence[torch.Event] = ()

    def wait(self) -> None:
        """Block until copies from devices are complete."""
        for event in self._arrived:
            event.synchronize()


class Staging:
    """Host memory for the copies of a snapshot, reused for the next one.

    For tensors on an accelerator it is pinned. Pinning takes longer the more memory there is.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copied(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """Return a contiguous copy; from an accelerator, complete once the stream reaches it."""
        source, pinned = tensor.detach(), tensor.device.type != "cpu"
        buffer = self._buffers.get((part, name))
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            try:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            except RuntimeError:  # no more memory can be pinned: copy synchronously
                return source.cpu().contiguous()
            self._buffers[part, name] = buffer
        return buffer.copy_(source, non_blocking=pinned)


def take(
    parts: Mapping[str, Stateful], about: Mapping[str, Any], staging: Staging | None = None
) -> Snapshot:
    """Copy every part into host memory: into that of ``staging``, whose last snapshot is done.

    Copies from a device are queued behind the operations that compute the values, and before those
    that change them, so nothing waits here.
    """
    staging = Staging() if staging is None else staging
    tensors: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    devices: set[torch.device] = set()
    for name, part in parts.items():
        state = _whole_state(part)
        found = {key: item for key, item in state.items() if isinstance(item, Tensor)}
        devices |= {x.device for x in found.values() if x.device.type != "cpu"}
        rest[name] = {key: item for key, item in state.items() if key not in found}
        tensors[name] = {key: staging.copied(name, key, whole(item)) for key, item in found.items()}
    if not devices:
        return Snapshot(dict(about), tensors, rest)
    arrived = [torch.accelerator.current_stream(one).record_event() for one in devices]
    return Snapshot(dict(about), tensors, rest, next(iter(devices)).type, arrived)


def _whole_state(part: Stateful) -> State:
    return part.whole_state() if isinstance(part, StatefulInParts) else part.state()


def take_part(parts: Mapping[str, Stateful]) -> None:
    """Send this process's part of each sharded tensor to the process that calls ``take``."""
    for part in parts.values():
        for item in _whole_state(part).values():
            if isinstance(item, Tensor):
                whole(item)
