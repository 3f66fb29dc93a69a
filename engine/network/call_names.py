"""The names of calls: which layer a module runs for, and which call of an inner module it is.

A module that several layers share runs once for each, in the graph's order; what is built into it
runs once more each time. Used by the planner and by the look, so that both say the same names.
"""

from collections import Counter
from collections.abc import Sequence


class Calls:
    """The calls of one layer's module, and of the modules inside it, within a forward pass."""

    def __init__(self, layers: Sequence[str], *, counted: bool = True) -> None:
        self._layers = layers
        self._first = -1 if counted else 0
        self._number = self._first
        self._seen: Counter[tuple[str, str]] = Counter()

    def restart(self) -> None:
        """Another forward pass begins."""
        self._number = self._first
        self._seen.clear()

    def begin(self) -> None:
        """The layer's module is called; may be left out where it is called once and is all."""
        self._number += 1
        self._seen.clear()

    def name(self, path: str, what: str) -> str:
        """The name of a call: ``block0``, ``block0.linear1``, its second time ``block0.linear1:1``.

        Asked once per call and ``what``, which is the side that is looked at.
        """
        layer = self._layers[self._number]
        if not path:
            return layer
        number = self._seen[path, what]
        self._seen[path, what] += 1
        return f"{layer}.{path}:{number}" if number else f"{layer}.{path}"
