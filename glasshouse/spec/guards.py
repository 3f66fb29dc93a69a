"""What watches over the numbers of a training, and what it does about them."""

from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.probes import Glob
from glasshouse.spec.strict import Spec

NonfiniteCheck = Literal["loss", "outputs", "gradients", "parameters"]
MAX_SKIPPED = 100
"""Steps skipped in a row that a job stands, where its spec does not say."""


class NonfiniteGuard(Spec):
    """What happens when a number of training is NaN or infinite."""

    check: tuple[NonfiniteCheck, ...] = Constraint(default=("loss", "gradients"), max_length=4)
    """``loss``: of each step. ``gradients``: the l2 norm of all parameters' gradients, before they
    are clipped. ``outputs``: every layer's output. ``parameters``: after each update. An empty list
    looks at nothing."""
    action: Literal["fail", "skip_step", "warn"] = "warn"
    """``warn``: the event ``finding``, and training goes on. ``skip_step``: also, the step changes
    no parameter and nothing that the optimizer keeps. ``fail``: the job ends, with the parameters
    of before the step."""
    skip: tuple[Glob, ...] = Constraint(default=(), max_length=1000)
    """Globs over the names of fields, layers and parameters that are not looked at: a layer that
    masks with infinities, for one."""
    max_skipped: int | None = Constraint(default=None, ge=1, le=1_000_000)
    """Of ``skip_step``: a job that skips so many steps in a row and then another one has failed.
    Left out: 100."""

    @model_validator(mode="after")
    def _check_action(self) -> Self:
        if self.action != "skip_step" and self.max_skipped is not None:
            raise ValueError("max_skipped is of action skip_step: no other skips a step")
        if self.action == "skip_step" and "parameters" in self.check:
            raise ValueError(
                "parameters are looked at after the update, which skip_step cannot take back: "
                "choose fail or warn, or check gradients"
            )
        if self.action == "skip_step" and not self.check:
            raise ValueError("skip_step needs something in check to decide by")
        return self


class Guards(Spec):
    """What watches over a training."""

    nonfinite: NonfiniteGuard = NonfiniteGuard()
    """Numbers that are NaN or infinite."""
