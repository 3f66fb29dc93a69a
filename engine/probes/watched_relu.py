"""A watched ReLU: computed in the same pass as the statistics of its input and output.

A pass over a tensor costs as much as reading it from memory. One pass computes the statistics of a
layer's output, its ReLU, and the statistics of the ReLU's output. In backward, one pass likewise
turns the gradient with respect to the ReLU's output into that with respect to its input. Values are
bitwise equal to torch's except for the payload of a NaN; statistics equal those of tensors that are
counted one by one. Which outputs a ReLU reads is found at the first step at which both are watched.
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
    """The newest watched output."""

    name: str
    tensor: weakref.ref[Tensor]
    version: int
    watches: ActiveProbes
    out: Tensor | None
    """The ReLU's output, if a ReLU is known to read this tensor."""
    figures: Figures | None
    """The statistics of ``out``."""

    def is_source(self, source: Tensor) -> bool:
        """Return whether ``source`` is that tensor, not written to since."""
        return self.tensor() is source and source._version == self.version


class _Back(NamedTuple):
    """The gradient of a ReLU's output, and the gradient of its input that was computed from it."""

    node: Any
    gradient: Tensor
    gate: Tensor
    out: Tensor
    version: int
    figures: Figures


class WatchedReLU:
    """Computes statistics of outputs and their gradients, and the ReLUs between them."""

    def __init__(self) -> None:
        self._last: _Last | None = None
        self._back: _Back | None = None
        self._read: set[str] = set()
        """The outputs that a ReLU has read, where the same probes want statistics of both."""
        self._graded: dict[str, ActiveProbes] = {}
        """The outputs whose gradients' statistics are wanted."""

    def forget(self) -> None:
        """Drop the tensors at the end of a step."""
        self._last = self._back = None

    # --- forward --------------------------------------------------------------------------------

    def summarize(
        self, name: str, tensor: Tensor, watches: ActiveProbes, source: Tensor | None
    ) -> Figures:
        """Return the statistics of an output; ``source`` is the input of its ReLU, if any."""
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
        """Replace the forward of a watched ReLU."""
        last = self._last
        if last is None or last.out is None or not last.is_source(x):
            return torch.relu(x)
        return _Relu.apply(x, last, self)  # pyright: ignore[reportReturnType]

    # --- backward -------------------------------------------------------------------------------

    def expect(self, name: str, watches: ActiveProbes) -> None:
        """Note the probes that will watch the gradient of an output, if it is computed."""
        if watches.takes_stats and not watches.counts:
            self._graded[name] = watches
        else:
            self._graded.pop(name, None)

    def summarize_gradient(self, gradient: Tensor, watches: ActiveProbes, node: Any) -> Figures:
        """Return the statistics of an output's gradient; ``node`` is the output's autograd node."""
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
        """Return the gradient with respect to the ReLU's input."""
        back = self._back
        if back is None or back.node is not node:
            (gate,) = node.saved_tensors
        elif back.gradient is gradient:
            return back.out
        else:  # a hook has changed it; saved tensors can be read only once
            gate = back.gate
        return torch.ops.aten.threshold_backward(gradient, gate, 0)


class _Relu(torch.autograd.Function):
    """Returns the precomputed output, and gets the gradient from ``WatchedReLU``."""

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
    """Return whether a module is torch's own ReLU and does not work in place."""
    return type(module) is nn.ReLU and not module.inplace
