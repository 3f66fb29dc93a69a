"""Clip gradients with respect to layers' outputs (PaddlePaddle's error clipping)."""

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

from engine.core.device_groups import on
from engine.distributed.group import Group
from engine.optim.gradient_scaling import GradScaling
from glasshouse.spec import Graph, OutputGradClip


class OutputClips:
    """Clips the gradients with respect to some layers' outputs and counts clipped elements."""

    def __init__(self, graph: Graph) -> None:
        self._ranges = {
            layer.name: _range(layer.output_grad_clip)
            for layer in graph.layers
            if layer.output_grad_clip is not None
        }
        self._seen: dict[str, tuple[int, Tensor]] = {}
        self._counts = True
        self.scaling: GradScaling | None = None
        """The scaling of the gradients, if they are scaled. The limits are scaled with it."""
        self.device: torch.device | None = None
        """The device of this process."""
        self.home: torch.device | None = None
        """Where fractions are computed, if layers are on several devices."""

    def __contains__(self, layer: str) -> bool:
        """Whether a layer's output gradient is clipped."""
        return layer in self._ranges

    def watch(self, layer: str, output: Tensor) -> None:
        """Clip the gradient with respect to an output when the backward pass computes it.

        Hooks registered on the output before this call see the gradient unclipped.
        """
        if output.requires_grad:
            output.register_hook(lambda gradient: self._clip(layer, gradient))

    def take(self, group: Group) -> dict[str, Tensor]:
        """Return the fraction of clipped elements of each layer, 0 to 1, since the last call.

        It is that over the processes of the job.
        """
        seen, self._seen = self._seen, {}
        if group.is_staged:  # each process has seen other layers
            none = 0, torch.zeros((), dtype=torch.int64, device=self.device)
            seen = {name: seen.get(name, none) for name in self._ranges}
        if not seen:
            return {}
        counts = [torch.stack([bit, torch.full_like(bit, count)]) for count, bit in seen.values()]
        if self.home is not None:
            counts = on(self.home, counts)
        bits, totals = group.sum(torch.stack(counts)).unbind(dim=1)
        found = zip(seen, (bits / totals).unbind(), strict=True)
        return {f"output_grad_clip/{layer}": part for layer, part in found}

    @contextlib.contextmanager
    def uncounted(self) -> Generator[None]:
        """Do not count the backward pass of this context: it repeats an earlier one."""
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
            scale = self.scaling.scale_on(gradient.device)
            clipped = gradient.clamp(least * scale, most * scale)
        if self._counts:
            count, bit = self._seen.get(layer, (0, None))
            more = (clipped != gradient).sum()
            self._seen[layer] = count + gradient.numel(), more if bit is None else bit + more
        return clipped


def _range(spec: float | OutputGradClip) -> tuple[float, float]:
    return (spec.min, spec.max) if isinstance(spec, OutputGradClip) else (-spec, spec)
