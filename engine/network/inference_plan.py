"""The layers of a network for inference: the same computations with less of Python around them.

A small layer computes for some microseconds. The call of a module, with its hooks and the lookup of
its attributes, takes as long when other code has run in between.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from engine.core.precision import in_float32
from engine.core.tensor_names import root
from engine.network.layers import OF_ONE_TYPE, STATE_PAIRS, Step, is_hooked
from engine.network.lengths import Lengths, TakesLengths

_NOTHING_TO_DO = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Layers that return their input in evaluation."""


class Values(dict[str, Tensor]):
    """The values of a pass by name, and the lengths of rows that layers share."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        super().__init__(batch)
        self._lengths: dict[str, Lengths] = {}

    def lengths(self, name: str, host_name: str | None) -> Lengths:
        """Return lengths, whose extremes are computed once for all layers."""
        found = self._lengths.get(name)
        if found is None:
            known = None if host_name is None else self.get(host_name)
            found = self._lengths[name] = Lengths(self[name], known)
        return found


class InferenceStep(NamedTuple):
    """A layer in evaluation. Hooks that are added later do not run."""

    name: str
    forward: Callable[..., Any]
    inputs: tuple[str, ...]
    finished: tuple[str, ...]
    """The layers whose output no later step reads."""
    lengths: str | None
    """The name of the lengths that it takes."""
    host_lengths: str | None
    is_of_one_type: bool
    takes_state_pair: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of all values that it needs."""
        lengths = (name for name in (self.lengths, self.host_lengths) if name is not None)
        return (*self.inputs, *lengths)

    @staticmethod
    def of(step: Step) -> "InferenceStep":
        """Return the step that computes what ``step`` computes without gradients."""
        module = step.module
        takes_lengths = step.lengths is not None and isinstance(module, TakesLengths)
        return InferenceStep(
            step.name,
            module if is_hooked(module) else module.forward,
            step.inputs,
            step.finished,
            step.lengths if takes_lengths else None,
            step.host_lengths if takes_lengths else None,
            isinstance(module, OF_ONE_TYPE),
            len(step.inputs) == 3 and isinstance(module, STATE_PAIRS),
        )

    def run(self, values: dict[str, Tensor]) -> Any:
        """Call the layer on its inputs; ``values``: a `Values`."""
        given: Sequence[Any] = [values[source] for source in self.inputs]
        if self.is_of_one_type:
            given = [in_float32(item) for item in given]
        if self.takes_state_pair:
            given = given[0], (given[1], given[2])
        if self.lengths is None:
            return self.forward(*given)
        found = cast("Values", values).lengths(self.lengths, self.host_lengths)
        return self.forward(*given, lengths=found)


def without_dropout(steps: Sequence[Step], wanted: Sequence[str]) -> list[Step]:
    """Return the steps without those that only return their input, unless their output is wanted.

    Layers that read such an output read its input instead.
    """
    kept, same = {root(name) for name in wanted}, dict[str, str]()
    found: list[Step] = []
    for given in steps:
        step = given._replace(inputs=tuple(same.get(name, name) for name in given.inputs))
        if isinstance(step.module, _NOTHING_TO_DO) and step.name not in kept:
            same[step.name] = step.inputs[0]
        else:
            found.append(step)
    return found
