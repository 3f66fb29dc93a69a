"""Run the layers of a network on several devices of one process.

A value is copied to another device once, before the first of the consecutive layers there that read
it. autograd copies the gradient back. What losses and metrics read ends on the home device, that of
the last layer that a loss reads.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core import device as backend
from engine.core.tensor_names import root
from engine.network.layers import LayerFailed, Step
from glasshouse.errors import DeviceFailed
from glasshouse.spec import TrainJob
from glasshouse.spec.placement import home_of, placed


@dataclass(frozen=True)
class Placement:
    """The devices of a job, and the one of each layer."""

    devices: tuple[torch.device, ...]
    """All devices of the job. The data fields of a batch are on the first one."""
    layers: dict[str, torch.device]
    home: torch.device
    """Where losses and metrics are computed and numbers are read back."""

    @staticmethod
    def of(job: TrainJob, first: torch.device) -> "Placement | None":
        """Return the placement of a job; None: all of it is on ``first``.

        Raises:
            DeviceFailed: this process does not see all devices of the job.
        """
        if job.parallel.strategy != "placed" or not backend.is_accelerator(first):
            return None
        indices, num_devices = placed(job.network.layers), job.devices.num_devices or 1
        seen = len(backend.visible())
        if seen < num_devices:
            detail = f"The job places layers on {num_devices} devices, and its process sees {seen}."
            raise DeviceFailed(detail)
        if not any(indices.values()):
            return None
        devices = tuple(torch.device(first.type, number) for number in range(num_devices))
        layers = {name: devices[index] for name, index in indices.items()}
        return Placement(devices, layers, devices[home_of(indices, job.loss_reads)])

    def of_value(self, name: str) -> torch.device:
        """Return where a layer's output, a leaf of it, or a data field is computed."""
        return self.layers.get(root(name), self.devices[0])

    def seed(self, seed: int) -> None:
        """Seed the generators of the devices: each draws numbers of its own."""
        for number, one in enumerate(self.devices):
            backend.seed(one, seed + number)


class Move(NamedTuple):
    """Copies a value to the device of the layers that read it. Runs as a layer does."""

    name: str
    source: str
    device: torch.device
    finished: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The name of the value."""
        return (self.source,)

    def run(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the copy.

        Raises:
            LayerFailed: there is no memory for it; it names the layer that is copied.
        """
        try:
            return values[self.source].to(self.device, non_blocking=True)
        except Exception as cause:
            raise LayerFailed(root(self.source), cause) from cause


def with_moves(steps: Sequence[Step], placement: Placement) -> list[Step | Move]:
    """Return the steps, reading copies of what is on other devices, and the moves before them."""
    found: list[Step | Move] = []
    copied: set[str] = set()
    for device, run in groupby(steps, lambda step: placement.layers[step.name]):
        moves: list[Move] = []
        there: list[Step] = []
        for step in run:
            wanted = [*step.inputs, *([step.lengths] if step.lengths else [])]
            away = [name for name in wanted if placement.of_value(name) != device]
            names = {name: _name_of_copy(name, device) for name in away}
            for source, name in names.items():
                if name not in copied:
                    copied.add(name)
                    moves.append(Move(name, source, device))
            inputs = tuple(names.get(name, name) for name in step.inputs)
            lengths = None if step.lengths is None else names.get(step.lengths, step.lengths)
            there.append(step._replace(inputs=inputs, lengths=lengths))
        found += [*moves, *there]
    return found


def _name_of_copy(name: str, device: torch.device) -> str:
    """Return the name of a copy, which no layer has and which is no leaf of another."""
    return f"{name.replace('.', '/')}@{device.index}"


def moves_home(wanted: Sequence[str], placement: Placement) -> list[Move]:
    """Return the moves, after the last layer, of what losses and metrics read."""
    away = [name for name in wanted if placement.of_value(name) != placement.home]
    return [Move(name, name, placement.home) for name in dict.fromkeys(away)]


def backward_in_order(
    placement: Placement | None,
) -> contextlib.AbstractContextManager[object]:
    """Run backward passes in this context in one thread if there are several devices.

    torch has a thread for each device, which would run hooks at once and add gradients in any
    order. The devices still compute at the same time.
    """
    if placement is None:
        return contextlib.nullcontext()
    return torch.autograd.set_multithreading_enabled(False)
