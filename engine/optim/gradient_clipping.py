"""Clip the gradients of parameters between the backward pass and the update.

The formulas are torch's (``clip_grad_value_``, ``clip_grad_norm_``). Sparse gradients are supported
too; only the rows that they contain count.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.core.snapshot import State
from engine.optim.parameter_options import owned
from glasshouse.spec import GradClip, Graph

_EPSILON = 1e-6  # torch's


Parameters = list[nn.Parameter]


class Clip:
    """Clips the gradients of a network's parameters in place. Saved in checkpoints."""

    def __init__(self, spec: GradClip | None, own: Sequence[tuple[GradClip, Parameters]]) -> None:
        """``own``: the clipping of each group of parameters; first ``spec``'s, if it is set."""
        self.spec = spec
        """The job's ``grad_clip``. Its limits may change between two steps."""
        self._sets = [_Set(*item) for item in own]
        self._num_steps: Tensor | None = None

    def __call__(self) -> dict[str, Tensor]:
        """Clip. Return ``clipped_steps``, and ``grad_norm`` if the job clips by global norm."""
        figures: dict[str, Tensor] = {}
        bites: list[Tensor] = []
        for number, item in enumerate(self._sets):
            of_job = self.spec if number == 0 else None
            norm, bit = item.clip(of_job or item.spec)
            if of_job is not None and of_job.type == "global_norm" and norm is not None:
                figures["grad_norm"] = norm
            bites += [] if bit is None else [bit]
        if bites:
            any_bit = bites[0] if len(bites) == 1 else torch.stack(bites).any()
            before = 0.0 if self._num_steps is None else self._num_steps
            self._num_steps = any_bit.to(torch.float64) + before
            figures["clipped_steps"] = self._num_steps
        return figures

    def state(self) -> State:
        """Return the number of steps in which a gradient was clipped."""
        return {"steps": 0 if self._num_steps is None else int(self._num_steps)}

    def restore(self, state: State) -> None:
        """Continue counting from a saved state."""
        self._num_steps = torch.tensor(float(state["steps"]), dtype=torch.float64)


class _Set(NamedTuple):
    """Parameters that are clipped with the same spec."""

    spec: GradClip
    parameters: Parameters

    def clip(self, ends: GradClip) -> tuple[Tensor | None, Tensor | None]:
        """Clip to the given limits.

        Return the global norm if it was computed, and whether any gradient changed.

        A norm of NaN or Inf does not raise here: it is reported, which does not block.
        """
        found = [_values(item, item.grad) for item in self.parameters if item.grad is not None]
        gradients = [item for item in found if item.numel()]
        if not gradients:
            return None, None
        match self.spec.type:
            case "value":
                return None, _by_value(gradients, ends)
            case "norm":
                return None, _each_by_norm(gradients, ends.max)
            case "global_norm":
                return _all_by_norm(gradients, ends.max)


def _values(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return the values of a gradient, not a copy. The rows of a sparse one are coalesced."""
    if gradient.layout is torch.strided:
        return gradient
    if not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()  # pyright: ignore[reportPrivateUsage]


def _norms(gradients: list[Tensor], order: float) -> Tensor:
    return torch.stack(torch._foreach_norm(gradients, order))  # pyright: ignore


def _by_value(gradients: list[Tensor], ends: GradClip) -> Tensor:
    if ends.min is None:
        least, bit = -ends.max, _norms(gradients, torch.inf).max() > ends.max
    else:
        least = ends.min
        reach = torch.stack([torch.stack(torch.aminmax(item)) for item in gradients])
        bit = (reach[:, 0].min() < least) | (reach[:, 1].max() > ends.max)
    torch._foreach_clamp_min_(gradients, least)  # pyright: ignore
    torch._foreach_clamp_max_(gradients, ends.max)  # pyright: ignore
    return bit


def _each_by_norm(gradients: list[Tensor], most: float) -> Tensor:
    norms = _norms(gradients, 2)
    factors = torch.clamp(most / (norms + _EPSILON), max=1.0)
    torch._foreach_mul_(gradients, [*factors.unbind()])  # pyright: ignore
    return (norms > most).any()


def _all_by_norm(gradients: list[Tensor], most: float) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(_norms(gradients, 2))
    factor = torch.clamp(most / (norm + _EPSILON), max=1.0)
    torch._foreach_mul_(gradients, factor)  # pyright: ignore
    return norm, norm > most


def clipping(spec: GradClip | None, graph: Graph, network: nn.Module) -> Clip | None:
    """Create the clipping of a network's gradients; None if nothing is clipped."""
    rest: Parameters = []
    own: list[tuple[GradClip, Parameters]] = []
    for _, layer, module in owned(graph, network):
        parameters = [item for item in module.parameters() if item.requires_grad]
        if layer.grad_clip is None:
            rest += parameters
        elif layer.grad_clip is not False and parameters:
            own.append((layer.grad_clip, parameters))
    sets = own if spec is None else [(spec, rest), *own]
    return Clip(spec, sets) if sets else None
