"""Save the parts of which each process of a pipeline has that of its own layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

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

    def whole_state(self) -> State:
        """Return the state of all layers, in process 0. Collective.

        Processes with other rows have the same state as those that send theirs.
        """
        state = self._part.state() if self._group.share == 0 else {}
        tensors = {name: item for name, item in state.items() if isinstance(item, Tensor)}
        rest = {name: item for name, item in state.items() if name not in tensors}
        away = {} if self._group.is_first else tensors
        found = self._group.gather_parts(away)
        others = self._group.gather(rest)[1:]
        if not self._group.is_first:
            return {}
        joined: State = rest
        for other in others:
            joined = self._joined(joined, other)
        received = {name: parts[0] for name, parts in found.items()}
        return {**joined, **tensors, **received}

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
                    both = [*one[key], *other[key]]
                    joined[key] = sorted(both, key=lambda name: self._order[name])
                else:
                    joined[key] = self._joined(one[key], other[key])
            return joined
        if isinstance(one, list) and isinstance(other, list):
            pairs = zip(list[Any](one), list[Any](other), strict=True)
            return [self._joined(*pair) for pair in pairs]
        return one
