"""Gradients made smaller, of parameters and of layers' outputs."""

from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.strict import Spec, WrongAt

FLOAT32_MAX = 3.4028234663852886e38
"""The largest float32. torch cannot clamp a float32 tensor to more."""


class GradClip(Spec):
    """Gradients are made smaller between the backward pass and the update."""

    type: Literal["value", "norm", "global_norm"]
    """``value``: each element to [-max, max], or [min, max]. ``norm``: each parameter's gradient to
    an l2 norm of at most max. ``global_norm``: all gradients together; the norm before is the
    metric ``grad_norm``, where the job says so and not a layer."""
    max: float = Constraint(gt=0, le=FLOAT32_MAX)
    """The upper end of each element, or the largest norm."""
    min: float | None = Constraint(default=None, ge=-FLOAT32_MAX, le=0)
    """Of ``value``: the lower end; left out, -max."""

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.min is not None and self.type != "value":
            detail = f"min ({self.min}) applies to type value only: a norm has no lower end"
            raise WrongAt("min", detail=f"{detail}; remove min, or set type to value")
        return self


class OutputGradClip(Spec):
    """Each element of the gradient by a layer's output is made to lie in [min, max]."""

    min: float = Constraint(ge=-FLOAT32_MAX, le=0)
    """What is less becomes this."""
    max: float = Constraint(ge=0, le=FLOAT32_MAX)
    """What is more becomes this."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min == self.max:
            detail = "min and max are both 0: to cut the gradient, set stop_gradient of the layer"
            raise WrongAt("max", detail=detail)
        return self
