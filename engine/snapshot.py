"""What a training run is made of, at one step boundary, in memory of its own.

Everything that must be as it was when training goes on later is a part with `Stateful`'s two
methods, and one place lists them all (`engine/train.py`). Knows tensors; knows no files.
"""

import contextlib
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
    _arrived: torch.cuda.Event | None = None

    @property
    def device(self) -> str:
        """Where training computes: ``cpu`` or ``cuda``."""
        return "cpu" if self._arrived is None else "cuda"

    def wait(self) -> None:
        """Until copies from a device are complete."""
        if self._arrived is not None:
            self._arrived.synchronize()


def take(parts: Mapping[str, Stateful], about: Mapping[str, Any]) -> Snapshot:
    """Copy every part into host memory.

    Copies from a device are queued behind the work that makes the values, and before what changes
    them: nobody waits for them here.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    on_device = False
    for name, part in parts.items():
        whole = part.state()
        found = {key: item for key, item in whole.items() if isinstance(item, Tensor)}
        on_device = on_device or any(item.is_cuda for item in found.values())
        rest[name] = {key: item for key, item in whole.items() if key not in found}
        tensors[name] = {key: copied(item) for key, item in found.items()}
    arrived = None
    if on_device:
        arrived = torch.cuda.Event()
        arrived.record()
    return Snapshot(dict(about), tensors, rest, arrived)


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory; from CUDA it is complete once the stream has come by."""
    source = tensor.detach()
    if not source.is_cuda:
        return source.cpu().clone(memory_format=torch.contiguous_format)
    with contextlib.suppress(RuntimeError):  # no more memory can be pinned: then it is waited for
        landed = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return landed.copy_(source, non_blocking=True)
    return source.cpu().contiguous()
