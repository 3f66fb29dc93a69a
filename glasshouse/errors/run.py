"""Failures that end a job. They are stored on it as its ``error``."""

from collections.abc import Mapping
from typing import Any, ClassVar

from glasshouse.errors.base import GlasshouseError, code_of


class RunFailure(GlasshouseError):
    """The job failed."""

    category: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    hint: ClassVar[str | None] = None

    def __init__(
        self,
        detail: str | None = None,
        /,
        *,
        layer: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.layer = layer
        self.step = step
        self.rank = rank
        self.advice = hint or type(self).hint

    @property
    def code(self) -> str:
        """The stable public code: the class name in snake case."""
        return code_of(type(self).__name__)

    def as_dict(self) -> dict[str, Any]:
        """The job's ``error``, without its ``log_tail``."""
        return {
            "code": self.code,
            "message": self.detail,
            "category": self.category,
            "retryable": self.retryable,
            "rank": self.rank,
            "layer": self.layer,
            "step": self.step,
            "hint": self.advice,
        }


class SpecFailed(RunFailure):
    """The network or one of its parts cannot run as specified."""

    category = "spec"


class CheckpointMismatch(SpecFailed):
    """The checkpoint does not fit the job's network, optimizer or data."""


class DataFailed(RunFailure):
    """The data does not match its declaration."""

    category = "data"


class NonFinite(RunFailure):
    """The job failed because of NaN or Inf."""

    category = "nonfinite"
    OF_RATE: ClassVar[str] = (
        "Lower the learning rate or set grad_clip. A probe with on: nonfinite shows the last steps "
        "before the first bad one."
    )
    hint = OF_RATE
    OF_DATA: ClassVar[str] = (
        "The data contains NaN or Inf: correct those rows (bad_samples of the finding), set fill "
        'of the field, or set data.on_bad_row to "drop".'
    )
    OF_GROWTH: ClassVar[str] = (
        "The gradients grew over the last steps: lower the learning rate or set grad_clip."
    )
    OF_FUNCTION: ClassVar[str] = (
        "Lower the learning rate or set grad_clip, unless the layer takes a logarithm, a root or a "
        "quotient at zero: then add a small constant to its argument."
    )
    OF_SCALE: ClassVar[str] = (
        "Gradients overflow float16 even with the smallest loss scale: set precision to bfloat16, "
        "or scale the loss down."
    )
    LARGE: ClassVar[float] = 1e4
    """A field that reaches this may be what makes numbers overflow."""

    @staticmethod
    def of_field(name: str, absmax: float) -> str:
        """The hint if a field of the data has values that are too large."""
        return f"The field {name!r} reaches {absmax:.3g}: scale or normalize it."

    def __init__(
        self,
        detail: str | None = None,
        /,
        *,
        layer: str | None = None,
        step: int | None = None,
        found: Mapping[str, Any] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(detail, layer=layer, step=step, hint=hint)
        self.found = None if found is None else dict(found)
        """The first NaN or Inf: ``step``, ``metric``, ``layer``, ``kind``, ``phase``, and the rows
        of the batch. None if no search was run."""

    def as_dict(self) -> dict[str, Any]:
        """The job's ``error``, with the place of the first NaN or Inf if it is known."""
        error = super().as_dict()
        return error if self.found is None else {**error, "nonfinite": self.found}


class TooManySkipped(NonFinite):
    """Too many consecutive steps had NaN or Inf and were skipped."""

    hint = (
        "The parameters have not changed since the last good step, so the next steps would be "
        "skipped too. Lower the learning rate or check the data; the finding names the layer."
    )


class OutOfMemory(RunFailure):
    """The job ran out of memory."""

    category = "out_of_memory"
    hint = "Lower data.batch_size, or choose a device with more memory."

    def __init__(
        self,
        detail: str | None = None,
        /,
        *,
        memory: Mapping[str, Any] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(detail, rank=rank)
        self.memory = dict(memory or {})
        """``where`` (device or host), ``requested_bytes``, ``free_bytes``, ``peak_bytes``,
        ``limit_bytes``, as far as known."""

    def as_dict(self) -> dict[str, Any]:
        """The job's ``error``, with the known figures of the memory."""
        return {**super().as_dict(), "memory": self.memory}


class DeviceFailed(RunFailure):
    """The device failed."""

    category = "device"
    retryable = True


class PeerLost(RunFailure):
    """Another process of the job ended or did not answer."""

    category = "internal"
    retryable = True
    hint = "The cause is in the log of the process that ended first."


class Unkillable(RunFailure):
    """The process did not end after SIGKILL."""

    category = "device"
    hint = (
        "It is blocked in the kernel, usually by a device or a disk. Its devices are withheld "
        "until it is gone. If it stays, reboot the machine."
    )


class WorkerLost(RunFailure):
    """The job lost its worker too many times."""

    category = "worker_lost"
    retryable = True
    hint = "Check the worker's log and the memory of its host."


class RankDied(RunFailure):
    """A training process ended without reporting an error."""

    category = "internal"
    retryable = True


class CrashLoop(RunFailure):
    """The training process crashed repeatedly without progress."""

    category = "internal"
    hint = (
        "Native code crashed; the last lines of the log may name it. Remove unusual parts of the "
        "spec, or use another kind of device."
    )


class Stalled(RunFailure):
    """The job made no progress for longer than stall_timeout_s."""

    category = "timeout"
    retryable = True
    hint = "The event stalled names the step. If a step may take longer, raise stall_timeout_s."


class Timeout(RunFailure):
    """The job took longer than its timeout_s."""

    category = "timeout"
    hint = "Raise timeout_s. The job's checkpoints are kept."


class StorageFailed(RunFailure):
    """A file could not be written or read."""

    category = "storage"
    retryable = True


class DiskFull(StorageFailed):
    """The disk of the worker is full."""

    hint = "Free disk space: delete ended jobs and unused datasets."


class CheckpointDamaged(StorageFailed):
    """The checkpoint is damaged: files are missing, changed or unexpected."""


class EngineFailed(RunFailure):
    """An unexpected error occurred in the engine."""

    category = "internal"
