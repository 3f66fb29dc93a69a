"""Checks for NaN or Inf values, and limits of memory."""

from typing import Literal, Self

from pydantic import Field as Constraint
from pydantic import model_validator

from glasshouse.spec.probes import Glob
from glasshouse.spec.strict import Spec, WrongAt

NonfiniteCheck = Literal["loss", "outputs", "gradients", "parameters"]
MAX_SKIPPED = 100
"""The default of ``max_skipped``."""


class NonfiniteGuard(Spec):
    """What to do if a value in training is NaN or Inf."""

    check: tuple[NonfiniteCheck, ...] = Constraint(default=("loss", "gradients"), max_length=4)
    """What to check. ``loss``: the loss of each step. ``gradients``: the L2 norm of all parameter
    gradients, before clipping. ``outputs``: the output of every layer. ``parameters``: every
    parameter, after each update. An empty list disables all checks."""
    action: Literal["fail", "skip_step", "warn"] = "warn"
    """``warn``: send the event ``finding`` and continue. ``skip_step``: in addition, the step
    changes no parameter and no optimizer state. ``fail``: end the job, before the update of the bad
    step; with ``check`` ``parameters``, after it."""
    skip: tuple[Glob, ...] = Constraint(default=(), max_length=1000)
    """Globs of fields, layers and parameters that are not checked, for example a layer that masks
    with ``-inf``. Example: ``["mask*"]``."""
    max_skipped: int | None = Constraint(default=None, ge=1, le=1_000_000)
    """With ``skip_step``: maximum number of consecutive skipped steps; with one more the job fails.
    Default: 100."""

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
    """Settings of torch's CUDA memory allocator, by the names of ``PYTORCH_ALLOC_CONF``.

    A setting that is unset has torch's default.
    """

    expandable_segments: bool | None = None
    """Whether memory segments can grow. This reduces fragmentation if batch sizes vary."""
    max_split_size_mb: int | None = Constraint(default=None, gt=20)
    """Blocks larger than this, in MiB, are not split. Example: ``128``."""
    garbage_collection_threshold: float | None = Constraint(default=None, gt=0, lt=1)
    """Fraction of the device memory above which unused blocks are released, oldest first. Example:
    ``0.8``."""

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not self.model_fields_set:
            names = ", ".join(type(self).model_fields)
            raise WrongAt(detail=f"allocator is {{}}: give at least one of {names}, or remove it")
        return self


class MemoryGuard(Spec):
    """What to do if memory runs out, and how much memory the training can use."""

    on_oom: Literal["fail", "halve_batch"] = "fail"
    """``fail``: the job fails and reports the requested, free and planned memory. ``halve_batch``:
    a new process resumes from the last checkpoint with twice as many micro-batches per batch, down
    to one row each. Their gradients make one update together, as with ``accumulate``."""
    cap_fraction: float | None = Constraint(default=None, gt=0, le=1)
    """Maximum memory of the training, as a fraction of the CUDA device's memory. On a CPU it is a
    fraction of the host's memory or of the control group's limit, in addition to what the process
    uses at its start. Using more is an out-of-memory error. Default: no limit. Example: ``0.5``."""
    allocator: Allocator | None = None
    """torch's memory allocator. Requires ``devices.type`` ``cuda``. Example:
    ``{"expandable_segments": true}``."""


class Guards(Spec):
    """What to do about NaN or Inf values, and about memory."""

    memory: MemoryGuard = MemoryGuard()
    """Out-of-memory errors and memory limits."""
    nonfinite: NonfiniteGuard = NonfiniteGuard()
    """NaN or Inf values."""
