"""Map the exceptions of a rank to the named run failures that end a job."""

import errno

import torch

from engine.core.problems import SpecProblems
from engine.network.layers import LayerFailed
from engine.training.memory import in_words, on_device, on_host
from glasshouse.errors import (
    DataFailed,
    DeviceFailed,
    DiskFull,
    EngineFailed,
    OutOfMemory,
    PeerLost,
    RunFailure,
    SpecFailed,
    StorageFailed,
)

_HOST_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
_DEVICE_MEMORY = (
    *("CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory"),
    *("HIP out of memory", "HIP error: out of memory", "MPS backend out of memory"),
)
_DEVICE = (
    *("CUDA error", "cuDNN error", "CUBLAS", "NCCL", "CUDA driver"),
    *("HIP error", "level_zero backend failed"),
)
_PEER = ("gloo/transport", "Connection closed by peer", "ncclRemoteError", "ncclSystemError")
_BAD_INDEX = ("device-side assert",)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_INDEX_HINT = (
    "A number in the data is not below what the layer or the loss takes: compare the field's dim, "
    "num_embeddings and the number of classes with the values in the dataset."
)
_ASSERT_HINT = f"{_INDEX_HINT} On a CPU the same job names the layer."


class StepFailed(Exception):
    """Training failed in a step."""

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(f"step {step}: {cause}")
        self.step = step
        self.cause = cause


def cause_of(error: BaseException) -> BaseException:
    """Return the original exception, without the wrappers that add the step and the layer."""
    while isinstance(error, (StepFailed, LayerFailed)):
        error = error.cause
    return error


def classify(error: BaseException) -> RunFailure:
    """Return the run failure of an exception, with its layer and step if known."""
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
    found = _of_peer(error) or _shortfall(error, text) or _of_device(error, text)
    found = found or _of_disk(error, text)
    if found is not None:
        return found
    if in_layer and isinstance(error, IndexError):
        return DataFailed(text, hint=_INDEX_HINT)
    if in_layer and isinstance(error, (RuntimeError, ValueError, TypeError)):
        return SpecFailed(text)
    return EngineFailed(f"{type(error).__name__}: {text}")


def _of_peer(error: BaseException) -> PeerLost | None:
    """Return the failure of a collective that failed because of another process; or None."""
    if not isinstance(error, RuntimeError) or not _mentions(str(error), _PEER):
        return None
    return PeerLost("Another process of the job ended or did not answer.")


def _shortfall(error: BaseException, text: str) -> OutOfMemory | None:
    """Return the out-of-memory failure of an exception, of the device or the host; or None."""
    if isinstance(error, torch.OutOfMemoryError) or _mentions(text, _DEVICE_MEMORY):
        memory, where = on_device(str(error)), "the device"
    elif isinstance(error, MemoryError) or _mentions(text, _HOST_MEMORY):
        memory, where = on_host(str(error)), "the host"
    else:
        return None
    said = in_words(memory) or text
    return OutOfMemory(f"Memory ran out on {where}: {said}.", memory=memory)


def _of_device(error: BaseException, text: str) -> RunFailure | None:
    if not isinstance(error, RuntimeError):
        return None
    if _mentions(text, _BAD_INDEX):
        return DataFailed(f"An index is out of range: {text}", hint=_ASSERT_HINT)
    return DeviceFailed(f"The device failed: {text}") if _mentions(text, _DEVICE) else None


def _of_disk(error: BaseException, text: str) -> StorageFailed | None:
    if not isinstance(error, OSError):
        return None
    failure = DiskFull if error.errno in _NO_SPACE else StorageFailed
    return failure(f"{type(error).__name__}: {text}")


def _mentions(text: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in text for phrase in phrases)
