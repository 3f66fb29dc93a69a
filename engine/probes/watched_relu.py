"""A ReLU that is watched together with what it reads: computed in the pass that counts both.

A pass over a tensor costs what reading it from memory costs. A layer's output is counted, its ReLU
computed and the ReLU's output counted in one reading; in the same way back, the gradient by the
ReLU's output gives the one by its input. Values are torch's, bit for bit but for the payload of a
NaN, and figures are those of tensors that are counted one by one. Which outputs a ReLU reads is
learned as it happens, at the first step at which both are seen.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.probes.statistics import native_kernel
from engine.probes.statistics.summarize import Figures, summarize
from engine.probes.watched.probe import ActiveProbes


class _Last(NamedTuple):
    """The output that was seen last."""

    name: str
    tensor: weakref.ref[Tensor]
    version: int
    watches: ActiveProbes
    out: Tensor | None
    """What the ReLU makes of it, where one is known to read it,"""
    figures: Figures | None
    """and its figures."""

    def is_source(self, source: Tensor) -> bool:
        """Whether this very tensor was seen, and has not been written to since."""
        return self.tensor() is source and source._version == self.version


class _Back(NamedTuple):
    """A gradient that was seen on its way into a ReLU, and what has become of it."""

    node: Any
    gradient: Tensor
    gate: Tensor
    out: Tensor
    version: int
    figures: Figures


class WatchedReLU:
    """Counts outputs and their gradients, and computes the ReLUs between them."""

    def __init__(self) -> None:
        self._last: _Last | None = None
        self._back: _Back | None = None
        self._read: set[str] = set()
        """The outputs that a ReLU has read; the same probes want statistics of both."""
        self._graded: dict[str, ActiveProbes] = {}
        """The outputs of which statistics of the gradients are wanted."""

    def forget(self) -> None:
        """At the end of a step: keep no tensor."""
        self._last = self._back = None

    # --- forward --------------------------------------------------------------------------------

    def summarize(
        self, name: str, tensor: Tensor, watches: ActiveProbes, source: Tensor | None
    ) -> Figures:
        """The figures of an output; ``source`` is what it was made of, if a ReLU made it."""
        last, self._last = self._last, None
        if last and source is not None and last.is_source(source):
            if last.out is tensor and last.figures is not None:
                return last.figures
            if last.watches == watches:
                self._read.add(last.name)
        elif last and last.out is not None:
            self._read.discard(last.name)
        return self._begin(name, tensor, watches)

    def _begin(self, name: str, tensor: Tensor, watches: ActiveProbes) -> Figures:
        loaded = native_kernel.LOADED
        if loaded is None or tensor.is_inference() or not native_kernel.rectifies(tensor):
            return summarize(tensor)
        out = found = None
        if name in self._read:
            out, figures, found = loaded.rectify(tensor)
        else:
            figures = loaded.one(tensor)
        self._last = _Last(name, weakref.ref(tensor), tensor._version, watches, out, found)
        return figures

    def relu(self, x: Tensor) -> Tensor:
        """What stands in for the forward of a ReLU that is watched."""
        last = self._last
        if last is None or last.out is None or not last.is_source(x):
            return torch.relu(x)
        return _Relu.apply(x, last, self)  # pyright: ignore[reportReturnType]

    # --- backward -------------------------------------------------------------------------------

    def expect(self, name: str, watches: ActiveProbes) -> None:
        """The gradient of an output will be seen by these, if it is asked for."""
        if watches.takes_stats and not watches.counts:
            self._graded[name] = watches
        else:
            self._graded.pop(name, None)

    def summarize_gradient(self, gradient: Tensor, watches: ActiveProbes, node: Any) -> Figures:
        """The figures of an output's gradient; ``node`` made the output, in torch's graph."""
        back = self._back
        if back is not None and back.out is gradient and gradient._version == back.version:
            self._back = None
            return back.figures
        loaded, reads = native_kernel.LOADED, getattr(node, "rectifies", None)
        if loaded is None or reads is None or self._graded.get(reads) != watches:
            return summarize(gradient)
        (gate,) = node.saved_tensors
        if not (native_kernel.rectifies(gradient) and _lie_alike(gradient, gate)):
            return summarize(gradient)
        out, figures, found = loaded.rectify(gradient, gate)
        self._back = _Back(node, gradient, gate, out, out._version, found)
        return figures

    def gradient_through(self, node: Any, gradient: Tensor) -> Tensor:
        """The gradient by what a ReLU has read."""
        back = self._back
        if back is None or back.node is not node:
            (gate,) = node.saved_tensors
        elif back.gradient is gradient:
            return back.out
        else:  # a hook has changed it; what is saved may be had only once
            gate = back.gate
        return torch.ops.aten.threshold_backward(gradient, gate, 0)


class _Relu(torch.autograd.Function):
    """Hands out what has been computed, and asks for the gradient in the same way."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, last: _Last, rectified: WatchedReLU) -> Tensor:
        assert last.out is not None  # noqa: S101 - `WatchedReLU.relu` has looked
        ctx.save_for_backward(last.out)
        ctx.rectified, ctx.rectifies = rectified, last.name
        return last.out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides names
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        return ctx.rectified.gradient_through(ctx, grads[0]), None, None


def _lie_alike(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()


def is_rectifier(module: nn.Module) -> bool:
    """Whether a module is torch's own ReLU, and leaves what it reads as it is."""
    return type(module) is nn.ReLU and not module.inplace
