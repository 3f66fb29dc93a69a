"""Gradients made smaller between the backward pass and the update, by torch's own functions."""

from collections.abc import Callable, Collection, Iterable

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from engine.problems import Findings
from glasshouse.spec import GradClip

Clip = Callable[[], Tensor | None]
"""Clips in place; gives the global norm before, where that decided."""


def clipping(spec: GradClip | None, parameters: Iterable[nn.Parameter]) -> Clip | None:
    """What clips the gradients of some parameters; None where nothing does."""
    if spec is None:
        return None
    learned = list(parameters)
    limit = spec.max

    def by_value() -> None:
        clip_grad_value_(learned, limit)

    def each_by_norm() -> None:
        for parameter in learned:
            clip_grad_norm_(parameter, limit)

    def all_by_norm() -> Tensor:
        # Not told to raise at a norm that is not finite: it is reported, and that needs no wait.
        return clip_grad_norm_(learned, limit)

    return {"value": by_value, "norm": each_by_norm, "global_norm": all_by_norm}[spec.type]


def check_clipping(spec: GradClip | None, sparse: Collection[str], findings: Findings) -> None:
    """Refuse to clip what torch cannot clip: ``sparse`` are the parameters with such gradients."""
    if spec is not None and sparse:
        detail = f"the gradients of {', '.join(sorted(sparse)[:10])} are sparse, and torch clips"
        findings.problem("/grad_clip", f"{detail} dense ones only: set sparse to false", "sparse")
