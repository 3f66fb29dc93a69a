"""What watches over the numbers of a training, and what it does about them."""

from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.probes import Glob
from glasshouse.spec.strict import Spec, WrongAt

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
            detail = (
                f"max_skipped ({self.max_skipped}) applies to action skip_step only, and action"
            )
            detail += f" is {self.action!r}: remove max_skipped, or set action to skip_step"
            raise WrongAt("max_skipped", detail=detail)
        if self.action == "skip_step" and "parameters" in self.check:
            detail = (
                "action skip_step cannot undo the update after which parameters are checked: set"
            )
            detail += " action to fail or warn, or check gradients instead of parameters"
            raise WrongAt("check", self.check.index("parameters"), detail=detail)
        if self.action == "skip_step" and not self.check:
            detail = "action skip_step needs at least one check, and check is []: add gradients"
            raise WrongAt("check", detail=detail)
        return self


class Allocator(Spec):
    """How torch keeps the memory of a CUDA device, by the names of ``PYTORCH_ALLOC_CONF``.

    What is left out is torch's own default.
    """

    expandable_segments: bool | None = None
    """Whether segments grow, which leaves fewer holes where batches have different sizes."""
    max_split_size_mb: int | None = Constraint(default=None, gt=20)
    """Blocks above this many MiB are never split."""
    garbage_collection_threshold: float | None = Constraint(default=None, gt=0, lt=1)
    """Above this part of its memory the device gives unused blocks back, the oldest first."""

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not self.model_fields_set:
            names = ", ".join(type(self).model_fields)
            raise WrongAt(detail=f"allocator is {{}}: give at least one of {names}, or remove it")
        return self


class MemoryGuard(Spec):
    """What happens when memory runs out, and how much of it a training may take."""

    on_oom: Literal["fail", "halve_batch"] = "fail"
    """``fail``: the job has failed, and says what was asked for, free and planned.
    ``halve_batch``: a new process goes on from the last checkpoint and runs each batch in twice as
    many parts, whose gradients make one update together, as with ``accumulate``; down to one row at
    a time."""
    cap_fraction: float | None = Constraint(default=None, gt=0, le=1)
    """The most that the training may take: this part of a CUDA device's memory; on a CPU this part
    of the host's, or of the control group's limit, beside what its process has at the start. More
    is out of memory. Left out: no cap."""
    allocator: Allocator | None = None
    """Of CUDA devices."""


class Guards(Spec):
    """What watches over a training."""

    memory: MemoryGuard = MemoryGuard()
    """Memory that runs out."""
    nonfinite: NonfiniteGuard = NonfiniteGuard()
    """Numbers that are NaN or infinite."""
