"""What went wrong, by name: exceptions of a rank as the run failures that end a job."""

import torch

from engine.network import LayerFailed
from engine.problems import SpecProblems
from glasshouse.errors import (
    DeviceFailed,
    EngineFailed,
    OutOfMemory,
    RunFailure,
    SpecFailed,
    StorageFailed,
)

_CPU_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_DEVICE = ("CUDA error", "cuDNN error", "CUBLAS", "NCCL", "device-side assert")


class StepFailed(Exception):
    """Training failed in a step."""

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(f"step {step}: {cause}")
        self.step = step
        self.cause = cause


def classify(error: BaseException) -> RunFailure:
    """The named failure of an exception, with the layer and the step where they are known."""
    step = layer = None
    if isinstance(error, StepFailed):
        step, error = error.step, error.cause
    if isinstance(error, LayerFailed):
        layer, error = error.layer, error.cause
    failure = _named(error, in_layer=layer is not None)
    failure.layer = failure.layer or layer
    failure.step = step if failure.step is None else failure.step
    failure.rank = 0
    return failure


def _named(error: BaseException, *, in_layer: bool) -> RunFailure:
    if isinstance(error, RunFailure):
        return error
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:500]
    if isinstance(error, SpecProblems):
        return SpecFailed(str(error))
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _mentions(text, _CPU_MEMORY):
        return OutOfMemory(f"Memory ran out: {text}")
    if isinstance(error, RuntimeError) and _mentions(text, _DEVICE):
        return DeviceFailed(f"The device failed: {text}")
    if in_layer and isinstance(error, (RuntimeError, ValueError, TypeError, IndexError)):
        return SpecFailed(text)
    failure = StorageFailed if isinstance(error, OSError) else EngineFailed
    return failure(f"{type(error).__name__}: {text}")


def _mentions(text: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in text for phrase in phrases)
