"""Who a look works for: where what it sees goes, and what is trained."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.core.timing import Clock
from engine.data.batches.rows import Rows
from engine.losses.losses import Losses
from engine.network.network import Network
from engine.optim.gradient_scaling import GradScaling
from engine.probes.statistics.histograms import TensorHistogram
from engine.probes.tensors.captures import Captures
from engine.probes.watched.probe import ActiveProbe

Mark = Callable[[str], None]
Update = Callable[[], object]
"""Makes the optimizer's step, or decides not to."""


@dataclass(frozen=True)
class WatchedTraining:
    """What a network is trained with, as far as it is watched."""

    loss_fn: Losses | None = None
    rows: Rows | None = None
    clips: bool = False
    """Whether gradients are clipped before the update."""
    scaling: GradScaling | None = None
    """What gradients by outputs are scaled by, if they are."""
    optimizer: torch.optim.Optimizer | None = None


class Unwatched(AbstractContextManager["Unwatched"]):
    """A step that nothing looks at."""

    def __enter__(self) -> "Unwatched":
        return self

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        pass

    def step(self, update: Update, _mark: Mark) -> None:
        """Make the optimizer's step."""
        update()


class Sink(Protocol):
    """Where a look takes what it has seen."""

    network: Network
    training: WatchedTraining
    loss: Tensor | None
    phase: str
    captures: Captures
    """Where whole tensors go."""

    @property
    def clock(self) -> Clock:
        """Where the time is told that looks take out of a pass."""
        ...

    def finish_step(
        self, step: int, rows: list[tuple[str, str, Any]], counted: Sequence[TensorHistogram]
    ) -> None:
        """Send the statistics of a step on their way."""
        ...

    def failed(self, watches: Sequence[ActiveProbe], error: Exception) -> None:
        """Count a failure to observe."""
        ...
