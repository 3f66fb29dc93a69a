"""Weights averaged over training steps, with torch's own functions where it has them.

Evaluations and checkpoints use the averages: they are swapped with the network's own weights
meanwhile. Floating-point buffers are averaged too, as torch's ``AveragedModel`` does with
``use_buffers``; integer buffers keep their newest values.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from engine.checkpoint.training_state import Weights
from engine.core.shards import is_sharded, own_part, settle_copies, sharded_like
from engine.core.snapshot import State
from engine.network.network import Network
from glasshouse.spec import Average

DECAY = 0.999
WINDOW_RATE = 0.15
WINDOW = 10_000
"""The default of PaddlePaddle's ModelAverage."""


class Averages:
    """The averaged weights of a network: exponential, or equal. Knows no evaluations or files."""

    def __init__(self, spec: Average, network: Network) -> None:
        self._spec = spec
        self._network = network
        averaged = {
            **dict(network.named_parameters()),
            **{name: x for name, x in network.named_buffers() if x.is_floating_point()},
        }
        self._names = [*averaged]
        self._newest = [*averaged.values()]
        self._means = [item.detach().clone() for item in self._newest]
        self._count = 0
        """The number of steps in the averages."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step to the averages, if the step is one to average."""
        after = step - self._spec.start_step
        if after < 0 or after % self._spec.every_steps:
            return
        self._add()
        self._count += 1

    def _add(self) -> None:
        if not self._count:
            self.begin_with_network()
            return
        decay = DECAY if self._spec.decay is None else self._spec.decay
        is_exponential = self._spec.type == "ema"
        rule = get_ema_multi_avg_fn(decay) if is_exponential else get_swa_multi_avg_fn()
        # In lists of one type and device each, as torch's functions require.
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for mean, item in zip(self._means, self._newest, strict=True):
            some, others = groups.setdefault((mean.device, mean.dtype), ([], []))
            some.append(own_part(mean))
            others.append(own_part(item))
        for some, others in groups.values():
            rule(some, others, self._count)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def applied(self) -> Generator[None]:
        """Swap the averages into the network in this context; before the first, do nothing."""
        if not self._count:
            yield
            return
        self._settle()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def means(self) -> dict[str, Tensor]:
        """Return the averages by the names that the network saves; empty before the first."""
        if not self._count:
            return {}
        self._settle()
        saved = self._network.state_dict().keys()
        named = zip(self._names, self._means, strict=True)
        return {name: mean.detach() for name, mean in named if name in saved}

    def _settle(self) -> None:
        """Make the means current, which they always are."""

    @torch.no_grad()
    def _swap(self) -> None:
        settle_copies(self._newest)
        for mine, mean in zip(self._newest, self._means, strict=True):
            if is_sharded(mine):  # torch keeps its memory
                own, other = own_part(mine), own_part(mean)
                before = own.clone()
                own.copy_(other)
                other.copy_(before)
            else:
                mine.data, mean.data = mean.data, mine.data

    @torch.no_grad()
    def begin_with_network(self) -> None:
        """Set the averages to the network's weights."""
        for mine, mean in zip(self._newest, self._means, strict=True):
            own_part(mean).copy_(own_part(mine))

    def state(self) -> State:
        """Return the number of averaged steps and what the averages are computed from."""
        return {"type": self._spec.type, "count": self._count}

    def restore(self, state: State) -> None:
        """Restore the state; `AveragedWeights` has restored the values of the averages."""
        if state["type"] != self._spec.type:
            raise ValueError(f"it is {state['type']} there, and {self._spec.type} in the job")
        self._count = int(state["count"])


class _WindowAverages(Averages):
    """PaddlePaddle's ModelAverage: two sums, of which the older is dropped when the newer is full.

    Source: PaddlePaddle's operator ``average_accumulates`` (its third sum only keeps precision).
    """

    def __init__(self, spec: Average, network: Network) -> None:
        super().__init__(spec, network)
        self._rate = spec.average_window_rate or WINDOW_RATE
        self._least = spec.min_average_window or WINDOW
        self._most = spec.max_average_window or WINDOW
        self._sums: dict[Literal["new", "old"], list[Tensor]] = {
            "new": [torch.zeros_like(item) for item in self._means],
            "old": [torch.zeros_like(item) for item in self._means],
        }
        self._counts = {"new": 0, "old": 0}

    def _add(self) -> None:
        for total, item in zip(self._sums["new"], self._newest, strict=True):
            own_part(total).add_(own_part(item))
        self._counts["new"] += 1
        full = min(float(self._most), (self._count + 1) * self._rate)
        if self._counts["new"] >= self._least and self._counts["new"] >= full:
            self._sums["old"], self._sums["new"] = self._sums["new"], self._sums["old"]
            for total in self._sums["new"]:
                own_part(total).zero_()
            self._counts = {"new": 0, "old": self._counts["new"]}

    @torch.no_grad()
    def _settle(self) -> None:
        """Compute the means from the sums."""
        total = self._counts["new"] + self._counts["old"]
        sums = zip(self._means, self._sums["new"], self._sums["old"], strict=True)
        for mean, new, old in sums:
            own_part(mean).copy_((own_part(new) + own_part(old)) / total)

    def state(self) -> State:
        """Return the number of averaged steps, and the sums by age."""
        found: State = {**super().state(), "counts": dict(self._counts)}
        for age, tensors in self._sums.items():
            named = zip(self._names, tensors, strict=True)
            found |= {f"{age}.{name}": item for name, item in named}
        return found

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Restore the state."""
        super().restore(state)
        self._counts = {age: int(state["counts"][age]) for age in self._counts}
        for age, tensors in self._sums.items():
            for number, (name, item) in enumerate(zip(self._names, tensors, strict=True)):
                key = f"{age}.{name}"
                # A checkpoint of format 2 numbers them.
                saved = state[key] if key in state else state[f"{age}.{number}"]
                own_part(item).copy_(own_part(sharded_like(saved, item)))


class AveragedWeights(Weights):
    """The weights that a checkpoint is saved for: the averages."""

    def __init__(self, network: Network, averages: Averages) -> None:
        super().__init__(network)
        self._averages = averages

    def state(self) -> State:
        """Return all tensors of the network, averaged."""
        return super().state() | self._averages.means()

    def restore(self, state: State) -> None:
        """Load the network, and set the averages to the same values.

        Raises:
            CheckpointMismatch: names, shapes or types differ.
        """
        super().restore(state)
        self._averages.begin_with_network()


def averages(spec: Average | None, network: Network) -> Averages | None:
    """Create the averages of a network's weights; None if the spec has none."""
    if spec is None:
        return None
    return (_WindowAverages if spec.type == "window" else Averages)(spec, network)


def num_copies(spec: Average | None) -> int:
    """Return how many copies of the weights are kept besides the newest."""
    if spec is None:
        return 0
    return 3 if spec.type == "window" else 1
