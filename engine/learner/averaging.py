"""Weights averaged over the steps of a training, by torch's own functions where it has them.

The averages are what evaluations and checkpoints take: they change places with the network's own
weights for as long as that lasts. Buffers in floating point are averaged too, as torch's
``AveragedModel`` does with ``use_buffers``; those in integers stay the newest.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from engine.checkpoint.training_state import Weights
from engine.core.snapshot import State
from engine.network.network import Network
from glasshouse.spec import Average

DECAY = 0.999
WINDOW_RATE = 0.15
WINDOW = 10_000
"""As PaddlePaddle's ModelAverage has them."""


class Averages:
    """The averaged weights of a network. Knows nothing of evaluations or files."""

    def __init__(self, spec: Average, network: Network) -> None:
        self._spec = spec
        self._network = network
        averaged = _averaged(network)
        self._newest = [*averaged.values()]
        self._means = [item.detach().clone() for item in self._newest]
        self._count = 0
        """How many steps are in the averages."""
        self._rule = _rule(spec, self._means, [*averaged])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights that a step has made into the averages, if it is one of those."""
        after = step - self._spec.start_step
        if after < 0 or after % self._spec.every_steps:
            return
        self._rule.add(self._newest, self._count)
        self._count += 1

    @contextmanager
    def applied(self) -> Generator[None]:
        """The network has the averages for weights in here; before the first it keeps its own."""
        if not self._count:
            yield
            return
        self._rule.settle()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for mine, mean in zip(self._newest, self._means, strict=True):
            mine.data, mean.data = mean.data, mine.data

    @torch.no_grad()
    def begin_with_network(self) -> None:
        """Forget what was averaged: the averages are the network's weights."""
        for mine, mean in zip(self._newest, self._means, strict=True):
            mean.copy_(mine)

    def state(self) -> State:
        """How many steps the averages are of, and what they are made from."""
        return {"type": self._spec.type, "count": self._count, **self._rule.state()}

    def restore(self, state: State) -> None:
        """Go on with the averages, whose values `AveragedWeights` has restored."""
        if state["type"] != self._spec.type:
            raise ValueError(f"it is {state['type']} there, and {self._spec.type} in the job")
        self._count = int(state["count"])
        self._rule.restore(state)


class AveragedWeights(Weights):
    """The weights that a checkpoint is for: the averages."""

    def __init__(self, network: Network, averages: Averages) -> None:
        super().__init__(network)
        self._averages = averages

    def state(self) -> State:
        """All tensors of the network, as averaged."""
        with self._averages.applied():
            return super().state()

    def restore(self, state: State) -> None:
        """Fill the network, and the averages with the same.

        Raises:
            CheckpointMismatch: names, shapes or types differ.
        """
        super().restore(state)
        self._averages.begin_with_network()


def averages(spec: Average | None, network: Network) -> Averages | None:
    """The averages of a network's weights; None where nobody wants any."""
    return None if spec is None else Averages(spec, network)


def num_copies(spec: Average | None) -> int:
    """How many times the weights are kept beside the newest."""
    if spec is None:
        return 0
    return 3 if spec.type == "window" else 1


def _averaged(network: Network) -> dict[str, Tensor]:
    """Parameters, and the buffers that an average can be made of, by name; each once."""
    buffers = {name: item for name, item in network.named_buffers() if item.is_floating_point()}
    return {**dict(network.named_parameters()), **buffers}


# --- how an average is made ------------------------------------------------------------------


class _Running:
    """An average that follows from the one before: exponential, or equal."""

    def __init__(self, means: list[Tensor], rule: Callable[..., None]) -> None:
        self._means = means
        self._rule = rule

    def add(self, newest: Sequence[Tensor], count: int) -> None:
        if not count:
            for mean, item in zip(self._means, newest, strict=True):
                mean.copy_(item)
            return
        for some, others in _by_kind(self._means, newest):
            self._rule(some, others, count)

    def settle(self) -> None:
        """The means are always what they should be."""

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        """There is nothing but the means."""


class _Window:
    """PaddlePaddle's ModelAverage: two sums, of which the older one goes when the newer is full.

    Source: PaddlePaddle's operator ``average_accumulates`` (its third sum only keeps precision).
    """

    def __init__(self, spec: Average, means: list[Tensor], names: Sequence[str]) -> None:
        self._means = means
        self._names = names
        self._rate = spec.average_window_rate or WINDOW_RATE
        self._least = spec.min_average_window or WINDOW
        self._most = spec.max_average_window or WINDOW
        self._sums: dict[Literal["new", "old"], list[Tensor]] = {
            "new": [torch.zeros_like(item) for item in means],
            "old": [torch.zeros_like(item) for item in means],
        }
        self._counts = {"new": 0, "old": 0}

    def add(self, newest: Sequence[Tensor], count: int) -> None:
        for total, item in zip(self._sums["new"], newest, strict=True):
            total.add_(item)
        self._counts["new"] += 1
        full = min(float(self._most), (count + 1) * self._rate)
        if self._counts["new"] >= self._least and self._counts["new"] >= full:
            self._sums["old"], self._sums["new"] = self._sums["new"], self._sums["old"]
            for total in self._sums["new"]:
                total.zero_()
            self._counts = {"new": 0, "old": self._counts["new"]}

    @torch.no_grad()
    def settle(self) -> None:
        """Make the means of the sums."""
        total = self._counts["new"] + self._counts["old"]
        sums = zip(self._means, self._sums["new"], self._sums["old"], strict=True)
        for mean, new, old in sums:
            mean.copy_((new + old) / total)

    def state(self) -> State:
        found: State = {"counts": dict(self._counts)}
        for age, tensors in self._sums.items():
            named = zip(self._names, tensors, strict=True)
            found |= {f"{age}.{name}": item for name, item in named}
        return found

    @torch.no_grad()
    def restore(self, state: State) -> None:
        self._counts = {age: int(state["counts"][age]) for age in self._counts}
        for age, tensors in self._sums.items():
            for number, (name, item) in enumerate(zip(self._names, tensors, strict=True)):
                key = f"{age}.{name}"
                # A checkpoint of format 2 numbers them.
                item.copy_(state[key] if key in state else state[f"{age}.{number}"])


def _rule(spec: Average, means: list[Tensor], names: Sequence[str]) -> Any:
    if spec.type == "window":
        return _Window(spec, means, names)
    decay = DECAY if spec.decay is None else spec.decay
    return _Running(
        means, get_ema_multi_avg_fn(decay) if spec.type == "ema" else get_swa_multi_avg_fn()
    )


def _by_kind(
    means: Sequence[Tensor], newest: Sequence[Tensor]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Pairs in lists of one type and device each, as torch's functions take them."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for mean, item in zip(means, newest, strict=True):
        some, others = groups.setdefault((mean.device, mean.dtype), ([], []))
        some.append(mean)
        others.append(item)
    return list(groups.values())
