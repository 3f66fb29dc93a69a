"""Copy the state of a training run at a step boundary into host memory.

Everything that a resumed run needs is a part with `Stateful`'s two methods. One place lists all
parts (`engine/training/loop.py`). Handles tensors, not files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.core.shards import Place, computing_type, counts_here, own_part, place_of

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
    """A part of which each process has something else: the state of its own layers."""

    @property
    def first(self) -> int:
        """The rank of the first process with state of the same layers."""
        ...

    def join(self, documents: Sequence[State]) -> State:
        """Return what all processes have together, of the JSON values of each; no tensors."""
        ...


Parts = dict[str, Stateful]
"""All parts by name: ``model`` becomes ``model.safetensors``. They are restored in this order."""


@dataclass
class Snapshot:
    """All parts of a training run at one step; later training does not change it.

    If the processes of a job have different parts of the state, each has a snapshot of its own.
    """

    about: dict[str, Any]
    """Metadata that anyone may read: step, epoch, spec, metrics …"""
    tensors: dict[str, dict[str, Tensor]]
    rest: dict[str, dict[str, Any]]
    places: dict[str, dict[str, Place]] = field(default_factory=dict[str, dict[str, Place]])
    """Where the tensors are of which this process has not the whole."""
    device: str = "cpu"
    """Type of the device that training runs on: ``cpu``, ``cuda`` …"""
    arrived: Sequence[torch.Event] = ()
    """Each is complete when the copies from one device are."""

    def wait(self) -> None:
        """Block until copies from devices are complete."""
        for event in self.arrived:
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

    Of several processes that have the same values, the first one copies them.

    Copies from a device are queued behind the operations that compute the values, and before those
    that change them, so nothing waits here.
    """
    staging = Staging() if staging is None else staging
    found = Snapshot(dict(about), {}, {})
    devices: set[torch.device] = set()
    kinds: set[str] = set()
    for name, part in parts.items():
        state = part.state()
        tensors = {key: item for key, item in state.items() if isinstance(item, Tensor)}
        found.rest[name] = {key: item for key, item in state.items() if key not in tensors}
        mine = {key: item for key, item in tensors.items() if _counts(part, item)}
        devices |= {item.device for item in mine.values() if item.device.type != "cpu"}
        kinds |= {computing_type(item) for item in mine.values()}
        places = {key: place_of(item) for key, item in mine.items()}
        found.places[name] = {key: place for key, place in places.items() if place is not None}
        found.tensors[name] = {
            key: staging.copied(name, key, own_part(item)) for key, item in mine.items()
        }
    found.device = next(iter(kinds - {"cpu"}), "cpu")
    if devices:
        found.arrived = [torch.accelerator.current_stream(one).record_event() for one in devices]
    return found


def _counts(part: Stateful, tensor: Tensor) -> bool:
    """Whether this process is the first of those that have the same values of a tensor."""
    return counts_here(tensor, part.first if isinstance(part, StatefulInParts) else 0)
