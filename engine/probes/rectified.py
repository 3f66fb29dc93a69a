"""A layer's output and what the ReLU after it makes of it, counted in one pass.

A pass over a tensor costs what reading it from memory costs. The output of a ReLU follows from its
input value by value, so the figures of both come from one reading. Which outputs a ReLU reads is
learned as it happens: the first step at which both are seen counts them one by one.
"""

import weakref
from typing import NamedTuple

from torch import Tensor, nn

from engine.probes.figures import kernel
from engine.probes.figures.summarize import Figures, summarize
from engine.probes.watched.watch import Watches


class _Last(NamedTuple):
    """The output that was seen last."""

    name: str
    tensor: weakref.ref[Tensor]
    version: int
    watches: Watches
    rectified: list[float] | None
    """The figures of what a ReLU would make of it, where they are known."""

    def is_source(self, source: Tensor) -> bool:
        """Whether this very tensor was seen, and has not been written to since."""
        return self.tensor() is source and source._version == self.version


class Rectified:
    """Counts outputs, each together with that of the ReLU that is known to read it."""

    def __init__(self) -> None:
        self._last: _Last | None = None
        self._read: set[str] = set()
        """The outputs that a ReLU has read; the same probes want statistics of both."""

    def summarize(
        self, name: str, tensor: Tensor, watches: Watches, source: Tensor | None
    ) -> Figures:
        """The figures of an output; ``source`` is what it was made of, if a ReLU made it."""
        last, self._last = self._last, None
        if last and source is not None and last.is_source(source):
            if last.rectified is not None:
                return last.rectified
            if last.watches == watches:
                self._read.add(last.name)
        elif last and last.rectified is not None:
            self._read.discard(last.name)
        return self._begin(name, tensor, watches)

    def _begin(self, name: str, tensor: Tensor, watches: Watches) -> Figures:
        loaded = kernel.LOADED
        if loaded is None or tensor.is_inference() or not kernel.rectifies(tensor):
            return summarize(tensor)
        figures, rectified = (
            loaded.rectified(tensor) if name in self._read else (loaded.one(tensor), None)
        )
        reference = weakref.ref(tensor)
        self._last = _Last(name, reference, tensor._version, watches, rectified)
        return figures


def is_rectifier(module: nn.Module) -> bool:
    """Whether a module is torch's own ReLU, and leaves what it reads as it is."""
    return type(module) is nn.ReLU and not module.inplace
