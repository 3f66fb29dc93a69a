"""Name the calls of modules: which layer a module runs for, and which call of an inner module.

A module that several layers share runs once for each, in the graph's order. Modules inside it run
once more each time. The planner and the probes both use this, so their names agree.
"""

from collections import Counter
from collections.abc import Sequence


class Calls:
    """Counts the calls of one layer's module, and of modules inside it, in a forward pass."""

    def __init__(self, layers: Sequence[str], *, counted: bool = True) -> None:
        self._layers = layers
        self._first = -1 if counted else 0
        self._number = self._first
        self._seen: Counter[tuple[str, str]] = Counter()

    def restart(self) -> None:
        """Start another forward pass."""
        self._number = self._first
        self._seen.clear()

    def begin(self) -> None:
        """Count a call of the layer's module; optional if not ``counted``."""
        self._number += 1
        self._seen.clear()

    def name(self, path: str, what: str) -> str:
        """Return a call's name: ``block0``, ``block0.linear1``, second call ``block0.linear1:1``.

        Call this once per call and ``what``, which is the side that is watched.
        """
        layer = self._layers[self._number]
        if not path:
            return layer
        number = self._seen[path, what]
        self._seen[path, what] += 1
        return f"{layer}.{path}:{number}" if number else f"{layer}.{path}"
