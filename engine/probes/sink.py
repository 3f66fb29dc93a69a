"""Interfaces between a watcher and its owner: where records go, and what is trained."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.core.timing import Clock
from engine.losses.losses import Losses
from engine.network.network import Network
from engine.optim.gradient_scaling import GradScaling
from engine.probes.statistics.histograms import TensorHistogram
from engine.probes.tensors.captures import Captures
from engine.probes.watched.probe import ActiveProbe

Mark = Callable[[str], None]
Update = Callable[[], object]
"""Runs the optimizer's step, or skips it."""


@dataclass(frozen=True)
class WatchedTraining:
    """The watched parts of a training: loss, optimizer, clipping, gradient scaling."""

    loss_fn: Losses | None = None
    clips: bool = False
    """Whether gradients are clipped before the update."""
    scaling: GradScaling | None = None
    """What scales the gradients with respect to outputs, if they are scaled."""
    optimizer: torch.optim.Optimizer | None = None


class Unwatched(AbstractContextManager["Unwatched"]):
    """A step that no probe watches."""

    def __enter__(self) -> "Unwatched":
        return self

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        pass

    def step(self, update: Update, _mark: Mark) -> None:
        """Run the optimizer's step."""
        update()


class Sink(Protocol):
    """Receives what a watcher has seen."""

    network: Network
    training: WatchedTraining
    loss: Tensor | None
    phase: str
    captures: Captures
    """Receives whole tensors."""

    @property
    def clock(self) -> Clock:
        """The clock that excludes the time of watching from a pass."""
        ...

    def finish_step(
        self, step: int, rows: list[tuple[str, str, Any]], counted: Sequence[TensorHistogram]
    ) -> None:
        """Send the statistics of a step."""
        ...

    def failed(self, watches: Sequence[ActiveProbe], error: Exception) -> None:
        """Count a failure to watch."""
        ...
