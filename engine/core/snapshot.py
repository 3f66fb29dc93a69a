"""What a training run is made of, at one step boundary, in memory of its own.

Everything that must be as it was when training goes on later is a part with `Stateful`'s two
methods, and one place lists them all (`engine/training/loop.py`). Knows tensors; knows no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

State = dict[str, Any]
"""Tensors and JSON values by name. Tensors become a file of their own, the rest goes into
``state.json``; both come back under the same names."""


class Stateful(Protocol):
    """A part of a training run that a checkpoint holds."""

    def state(self) -> State:
        """What it is now. The tensors may be its own: they are copied at once, the rest is not."""
        ...

    def restore(self, state: State) -> None:
        """Become what it was.

        Raises:
            CheckpointMismatch: the state is of something else.
        """
        ...


Parts = dict[str, Stateful]
"""All parts by name: ``model`` becomes ``model.safetensors``. Restored in their order."""


@dataclass
class Snapshot:
    """All parts of a training run as they were; nothing that training does changes it."""

    about: dict[str, Any]
    """What everybody may read: step, epoch, spec, metrics …"""
    tensors: dict[str, dict[str, Tensor]]
    rest: dict[str, dict[str, Any]]
    device: str = "cpu"
    """Where training computes: ``cpu``, ``cuda`` …"""
    _arrived: torch.Event | None = None

    def wait(self) -> None:
        """Until copies from a device are complete."""
        if self._arrived is not None:
            self._arrived.synchronize()


class Staging:
    """Host memory for the copies of a snapshot, used again for the next one.

    Where an accelerator computes it is pinned, which takes the longer the more it is.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copied(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """A contiguous copy; from an accelerator it is complete once the stream has come by."""
        source = tensor.detach()
        try:
            buffer = self._buffer((part, name), source)
        except RuntimeError:  # no more memory can be pinned: then the copy is waited for
            return source.cpu().contiguous()
        return buffer.copy_(source, non_blocking=source.device.type != "cpu")

    def _buffer(self, key: tuple[str, str], source: Tensor) -> Tensor:
        found = self._buffers.get(key)
        if found is None or (found.shape, found.dtype) != (source.shape, source.dtype):
            pinned = source.device.type != "cpu"
            found = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            self._buffers[key] = found
        return found


def take(
    parts: Mapping[str, Stateful], about: Mapping[str, Any], staging: Staging | None = None
) -> Snapshot:
    """Copy every part into host memory; into that of ``staging``, whose last snapshot is over.

    Copies from a device are queued behind the work that makes the values, and before what changes
    them: nobody waits for them here.
    """
    staging = Staging() if staging is None else staging
    tensors: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    device: torch.device | None = None
    for name, part in parts.items():
        whole = part.state()
        found = {key: item for key, item in whole.items() if isinstance(item, Tensor)}
        device = next((x.device for x in found.values() if x.device.type != "cpu"), device)
        rest[name] = {key: item for key, item in whole.items() if key not in found}
        tensors[name] = {key: staging.copied(name, key, item) for key, item in found.items()}
    if device is None:
        return Snapshot(dict(about), tensors, rest)
    arrived = torch.accelerator.current_stream(device).record_event()
    return Snapshot(dict(about), tensors, rest, device.type, arrived)
