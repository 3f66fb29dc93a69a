"""Save the parts of which each process of a pipeline has that of its own layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.snapshot import State, Stateful
from engine.distributed.group import Group


class OfStages:
    """A part of a checkpoint that is put together from those of all processes of a pipeline.

    Each process restores its own from the whole.
    """

    def __init__(self, part: Stateful, group: Group, order: Sequence[str]) -> None:
        """``order``: the parameters of the network, in order."""
        self._part = part
        self._group = group
        self._order = {name: number for number, name in enumerate(order)}

    def state(self) -> State:
        """Return the state of this process's layers."""
        return self._part.state()

    @property
    def first(self) -> int:
        """The rank of the first process with its layers."""
        return self._group.first_alike

    def join(self, documents: Sequence[State]) -> State:
        """Return the values of all layers, of those that each process has."""
        first, *others = documents
        joined: State = first
        for other in others:
            joined = self._joined(joined, other)
        return joined

    def restore(self, state: State) -> None:
        """Restore the state of this process's layers."""
        self._part.restore(state)

    def _joined(self, one: Any, other: Any) -> Any:
        """Join two documents: mappings by their keys, ``params`` in the network's order.

        Anything else is the same in both.
        """
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            joined: dict[str, Any] = {**other, **one}
            for key in one.keys() & other.keys():
                if key == "params":  # the parameters of a group of the optimizer
                    both = {*one[key], *other[key]}  # processes of several pipelines have the same
                    joined[key] = sorted(both, key=lambda name: self._order[name])
                else:
                    joined[key] = self._joined(one[key], other[key])
            return joined
        if isinstance(one, list) and isinstance(other, list):
            pairs = zip(list[Any](one), list[Any](other), strict=True)
            return [self._joined(*pair) for pair in pairs]
        return one
