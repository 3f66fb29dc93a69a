"""Weights averaged over training steps, with torch's own functions where it has them.

Evaluations and checkpoints use the averages: they are swapped with the network's own weights
meanwhile. Floating-point buffers are averaged too, as torch's ``AveragedModel`` does with
``use_buffers``; integer buffers keep their newest values.
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
"""The default of PaddlePaddle's ModelAverage."""


class Averages:
    """The averaged weights of a network. Knows nothing of evaluations or files."""

    def __init__(self, spec: Average, network: Network) -> None:
        self._spec = spec
        self._network = network
        averaged = _averaged(network)
        self._newest = [*averaged.values()]
        self._means = [item.detach().clone() for item in self._newest]
        self._count = 0
        """The number of steps in the averages."""
        self._rule = _rule(spec, self._means, [*averaged])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after a step to the averages, if the step is one to average."""
        after = step - self._spec.start_step
        if after < 0 or after % self._spec.every_steps:
            return
        self._rule.add(self._newest, self._count)
        self._count += 1

    @contextmanager
    def applied(self) -> Generator[None]:
        """Swap the averages into the network in this context; before the first, do nothing."""
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
        """Set the averages to the network's weights."""
        for mine, mean in zip(self._newest, self._means, strict=True):
            mean.copy_(mine)

    def state(self) -> State:
        """Return the number of averaged steps and what the averages are computed from."""
        return {"type": self._spec.type, "count": self._count, **self._rule.state()}

    def restore(self, state: State) -> None:
        """Restore the state; `AveragedWeights` has restored the values of the averages."""
        if state["type"] != self._spec.type:
            raise ValueError(f"it is {state['type']} there, and {self._spec.type} in the job")
        self._count = int(state["count"])
        self._rule.restore(state)


class AveragedWeights(Weights):
    """The weights that a checkpoint is saved for: the averages."""

    def __init__(self, network: Network, averages: Averages) -> None:
        super().__init__(network)
        self._averages = averages

    def state(self) -> State:
        """Return all tensors of the network, averaged."""
        with self._averages.applied():
            return super().state()

    def restore(self, state: State) -> None:
        """Load the network, and set the averages to the same values.

        Raises:
            CheckpointMismatch: names, shapes or types differ.
        """
        super().restore(state)
        self._averages.begin_with_network()


def averages(spec: Average | None, network: Network) -> Averages | None:
    """Create the averages of a network's weights; None if the spec has none."""
    return None if spec is None else Averages(spec, network)


def num_copies(spec: Average | None) -> int:
    """Return how many copies of the weights are kept besides the newest."""
    if spec is None:
        return 0
    return 3 if spec.type == "window" else 1


def _averaged(network: Network) -> dict[str, Tensor]:
    """Return the parameters, and the buffers that can be averaged, by name; each once."""
    buffers = {name: item for name, item in network.named_buffers() if item.is_floating_point()}
    return {**dict(network.named_parameters()), **buffers}


# --- how an average is made ------------------------------------------------------------------


class _Running:
    """An average that is updated from the previous one: exponential, or equal."""

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
        """Do nothing: the means are always current."""

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        """Do nothing: there is no state besides the means."""


class _Window:
    """PaddlePaddle's ModelAverage: two sums, of which the older is dropped when the newer is full.

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
        """Compute the means from the sums."""
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
    """Group the pairs into lists of one type and device each, as torch's functions require."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for mean, item in zip(means, newest, strict=True):
        some, others = groups.setdefault((mean.device, mean.dtype), ([], []))
        some.append(mean)
        others.append(item)
    return list(groups.values())
