"""Gradients made smaller between the backward pass and the update, by torch's own functions."""

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from engine.problems import Findings
from glasshouse.spec import GradClip


class Clip:
    """Clips the gradients of some parameters in place; ``max`` may change between two steps."""

    def __init__(self, spec: GradClip, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.max = spec.max
        self._clip = {
            "value": self._by_value,
            "norm": self._each_by_norm,
            "global_norm": self._all_by_norm,
        }[spec.type]

    def __call__(self) -> Tensor | None:
        """Clip; gives the global norm before, where that decided."""
        return self._clip()

    def _by_value(self) -> None:
        clip_grad_value_(self._parameters, self.max)

    def _each_by_norm(self) -> None:
        for parameter in self._parameters:
            clip_grad_norm_(parameter, self.max)

    def _all_by_norm(self) -> Tensor:
        # Not told to raise at a norm that is not finite: it is reported, and that needs no wait.
        return clip_grad_norm_(self._parameters, self.max)


def clipping(spec: GradClip | None, parameters: Iterable[nn.Parameter]) -> Clip | None:
    """What clips the gradients of some parameters; None where nothing does."""
    return None if spec is None else Clip(spec, parameters)


def check_clipping(spec: GradClip | None, sparse: Collection[str], findings: Findings) -> None:
    """Refuse to clip what torch cannot clip: ``sparse`` are the parameters with such gradients."""
    if spec is not None and sparse:
        detail = f"the gradients of {', '.join(sorted(sparse)[:10])} are sparse, and torch clips"
        findings.problem("/grad_clip", f"{detail} dense ones only: set sparse to false", "sparse")
