"""Clipping of gradients, of parameters and of layer outputs."""

from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.strict import Spec, WrongAt

FLOAT32_MAX = 3.4028234663852886e38
"""The largest float32. torch cannot clamp a float32 tensor to a larger number."""


class GradClip(Spec):
    """Gradient clipping, between the backward pass and the update."""

    type: Literal["value", "norm", "global_norm"]
    """``value``: clip each element to [-max, max], or to [min, max]. ``norm``: scale each
    parameter's gradient to an L2 norm of at most ``max``. ``global_norm``: scale all gradients
    together to a total L2 norm of at most ``max``; the job's ``grad_clip`` then reports the norm
    before clipping as the metric ``grad_norm``."""
    max: float = Constraint(gt=0, le=FLOAT32_MAX)
    """Upper limit of each element, or maximum norm. Example: ``1.0``."""
    min: float | None = Constraint(default=None, ge=-FLOAT32_MAX, le=0)
    """With ``value``: lower limit of each element. Default: ``-max``. Example: ``-0.1``."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.min is not None and self.type != "value":
            detail = f"min ({self.min}) applies to type value only: a norm has no lower end"
            raise WrongAt("min", detail=f"{detail}; remove min, or set type to value")
        return self


class OutputGradClip(Spec):
    """Limits for clipping the gradient with respect to a layer's output, element by element."""

    min: float = Constraint(ge=-FLOAT32_MAX, le=0)
    """Lower limit. Example: ``-0.1``."""
    max: float = Constraint(ge=0, le=FLOAT32_MAX)
    """Upper limit. Example: ``0.1``."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min == self.max:
            detail = "min and max are both 0: to stop the gradient, set stop_gradient of the layer"
            raise WrongAt("max", detail=detail)
        return self
