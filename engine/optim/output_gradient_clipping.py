"""Gradients by layers' outputs, clipped on their way back: PaddlePaddle's error clipping."""

import contextlib
from collections.abc import Generator

from torch import Tensor

from engine.optim.gradient_scaling import GradScaling
from glasshouse.spec import Graph, OutputGradClip


class OutputClips:
    """Clips the gradients by the outputs of some layers, and counts how often that bites."""

    def __init__(self, graph: Graph) -> None:
        self._ranges = {
            layer.name: _range(layer.output_grad_clip)
            for layer in graph.layers
            if layer.output_grad_clip is not None
        }
        self._seen: dict[str, tuple[int, Tensor]] = {}
        self._counts = True
        self.scaling: GradScaling | None = None
        """What the gradients are scaled by, if they are: so are their limits."""

    def __contains__(self, layer: str) -> bool:
        """Whether a layer's is clipped."""
        return layer in self._ranges

    def watch(self, layer: str, output: Tensor) -> None:
        """Have the gradient by an output, which has just been made, clipped once it comes.

        Whoever asked for it before this is called sees it as it comes.
        """
        if output.requires_grad:
            output.register_hook(lambda gradient: self._clip(layer, gradient))

    def take(self) -> dict[str, Tensor]:
        """For each layer the part of its elements, 0 to 1, that was clipped since the last call."""
        seen, self._seen = self._seen, {}
        return {f"output_grad_clip/{layer}": bit / count for layer, (count, bit) in seen.items()}

    @contextlib.contextmanager
    def uncounted(self) -> Generator[None]:
        """A pass in here is made once more, and counts for nothing."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def _clip(self, layer: str, gradient: Tensor) -> Tensor:
        least, most = self._ranges[layer]
        if self.scaling is None:
            clipped = gradient.clamp(least, most)
        else:
            scale = self.scaling.scale
            clipped = gradient.clamp(least * scale, most * scale)
        if self._counts:
            count, bit = self._seen.get(layer, (0, None))
            more = (clipped != gradient).sum()
            self._seen[layer] = count + gradient.numel(), more if bit is None else bit + more
        return clipped


def _range(spec: float | OutputGradClip) -> tuple[float, float]:
    return (spec.min, spec.max) if isinstance(spec, OutputGradClip) else (-spec, spec)
