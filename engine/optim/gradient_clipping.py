"""Clip the gradients of parameters between the backward pass and the update.

The formulas are torch's (``clip_grad_value_``, ``clip_grad_norm_``). Sparse gradients are supported
too; only the rows that they contain count.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core.device_groups import by_device, on
from engine.core.shards import is_sharded, largest_of_all, norms, own_parts
from engine.core.snapshot import State
from engine.distributed.group import ALONE, Group
from engine.optim.parameter_options import owned
from glasshouse.spec import GradClip, Graph

_EPSILON = 1e-6  # torch's


Parameters = list[nn.Parameter]


class Clip:
    """Clips the gradients of a network's parameters in place. Saved in checkpoints."""

    def __init__(
        self,
        spec: GradClip | None,
        own: Sequence[tuple[GradClip, Parameters]],
        home: torch.device | None = None,
        group: Group = ALONE,
        device: torch.device | None = None,
    ) -> None:
        """``own``: the clipping of each group of parameters; first ``spec``'s, if it is set.

        ``home``: where norms are compared, if parameters are on several devices. ``group``: the
        processes, each of which may have some of the layers, on its ``device``.
        """
        self.spec = spec
        """The job's ``grad_clip``. Its limits may change between two steps."""
        self._group = group
        self._none = torch.zeros((), dtype=torch.bool, device=device)
        self._sets = [_Set(*item, home) for item in own]
        self._num_steps: Tensor | None = None

    def __call__(self) -> dict[str, Tensor]:
        """Clip. Return ``clipped_steps``, and ``grad_norm`` if the job clips by global norm."""
        figures: dict[str, Tensor] = {}
        bites: list[Tensor] = []
        for number, item in enumerate(self._sets):
            of_job = self.spec if number == 0 else None
            group = ALONE if of_job is None else self._group
            among = self._group.same_parameters()
            norm, bit = item.clip(of_job or item.spec, group, self._none, among)
            if of_job is not None and of_job.type == "global_norm" and norm is not None:
                figures["grad_norm"] = norm
            bites += [] if bit is None else [bit]
        if bites or self._group.is_staged:
            any_bit = bites[0] if len(bites) == 1 else torch.stack(bites or [self._none]).any()
            any_bit = self._group.over_stages(any_bit.double()) > 0
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
    home: torch.device | None
    """Where its norms are compared; None: its gradients are on one device."""

    def clip(
        self, ends: GradClip, group: Group, like: Tensor, among: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Clip to the given limits.

        ``group``: the processes with the other parameters of the set. ``like``: a tensor on the
        device of this one. ``among``: torch's group of the processes with parts of the parameters;
        None: all.

        Return the global norm if it was computed, and whether any gradient changed.

        A norm of NaN or Inf does not raise here: it is reported, which does not block.
        """
        found = [_values(item, item.grad) for item in self.parameters if item.grad is not None]
        gradients = [item for item in found if item.numel()]
        if not gradients and not group.is_staged:
            return None, None
        match self.spec.type:
            case "value":
                return None, _by_value(gradients, ends, self.home, among) if gradients else None
            case "norm":
                if not gradients:
                    return None, None
                return None, _each_by_norm(gradients, ends.max, self.home, among)
            case "global_norm":
                norms_T = (
                    norms(gradients, 2, self.home, among)
                    if gradients
                    else like.new_zeros(1, dtype=torch.float32)
                )
                norm = group.norm_over_stages(torch.linalg.vector_norm(norms_T))
                return _all_by_norm(gradients, norm, ends.max, self.home)


def _values(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return the values of a gradient, not a copy. The rows of a sparse one are coalesced."""
    if gradient.layout is torch.strided:
        return gradient
    if not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()  # pyright: ignore[reportPrivateUsage]


def _by_value(
    gradients: list[Tensor], ends: GradClip, home: torch.device | None, among: Any
) -> Tensor:
    least, parts = -ends.max, own_parts(gradients)
    if ends.min is None:
        bit = norms(gradients, torch.inf, home, among).max() > ends.max
    else:
        least = ends.min
        here = [item for item in parts if item.numel()] or [parts[0].new_zeros(1)]
        reaches = [torch.stack(torch.aminmax(item)) for item in here]
        reach = torch.stack(reaches if home is None else on(home, reaches))
        bit = (reach[:, 0].min() < least) | (reach[:, 1].max() > ends.max)
        if any(map(is_sharded, gradients)):
            bit = largest_of_all(bit.double(), among) > 0
    torch._foreach_clamp_min_(parts, least)  # pyright: ignore
    torch._foreach_clamp_max_(parts, ends.max)  # pyright: ignore
    return bit


def _each_by_norm(
    gradients: list[Tensor], most: float, home: torch.device | None, among: Any
) -> Tensor:
    found = norms(gradients, 2, home, among)
    factors = [*torch.clamp(most / (found + _EPSILON), max=1.0).unbind()]
    if home is not None:
        both = zip(gradients, factors, strict=True)
        factors = [factor.to(item.device, non_blocking=True) for item, factor in both]
    torch._foreach_mul_(own_parts(gradients), factors)  # pyright: ignore
    return (found > most).any()


def _all_by_norm(
    gradients: list[Tensor], norm: Tensor, most: float, home: torch.device | None
) -> tuple[Tensor, Tensor]:
    factor = torch.clamp(most / (norm + _EPSILON), max=1.0)
    if home is None and gradients:
        torch._foreach_mul_(own_parts(gradients), factor)  # pyright: ignore
    else:
        for device, some in by_device(gradients).items():
            torch._foreach_mul_(some, factor.to(device, non_blocking=True))  # pyright: ignore
    return norm, norm > most


def clipping(
    spec: GradClip | None,
    graph: Graph,
    network: nn.Module,
    home: torch.device | None = None,
    group: Group = ALONE,
    device: torch.device | None = None,
) -> Clip | None:
    """Create the clipping of a network's gradients; None if nothing is clipped.

    ``home``: where norms are compared, if parameters are on several devices. ``group``: the
    processes, each of which may have some of the layers, on its ``device``.
    """
    rest: Parameters = []
    own: list[tuple[GradClip, Parameters]] = []
    for _, layer, module in owned(graph, network):
        parameters = [item for item in module.parameters() if item.requires_grad]
        if layer.grad_clip is None:
            rest += parameters
        elif layer.grad_clip is not False and parameters:
            own.append((layer.grad_clip, parameters))
    sets = own if spec is None else [(spec, rest), *own]
    clips = bool(sets) or any(layer.grad_clip for layer in graph.layers)
    return Clip(spec, sets, home, group, device) if clips else None
