"""What the engine needs of a device besides tensors, events and streams.

``torch.accelerator`` answers for the backend that torch was built with: CUDA (which includes ROCm),
XPU, MPS, or one registered as PrivateUse1. What it does not have is looked up in the backend's own
module, ``torch.cuda`` or ``torch.xpu``; a backend without it does without. The CPU is no
accelerator: its operations have ended when they return.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glasshouse.errors import SpecFailed

_NOT_ACCELERATORS = ("cpu", "meta")


def is_accelerator(device: torch.device) -> bool:
    """Whether operations are queued on a device that has memory of its own."""
    return device.type not in _NOT_ACCELERATORS


def named(kind: str) -> torch.device:
    """Return the device of an assignment: the CPU, or the first visible one of an accelerator."""
    return torch.device(kind) if kind in _NOT_ACCELERATORS else torch.device(kind, 0)


def visible() -> list[torch.device]:
    """Return every device of the accelerator that this process can use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    numbers = range(torch.accelerator.device_count())
    return [torch.device(accelerator.type, number) for number in numbers]


def in_use() -> list[torch.device]:
    """Return every visible device if this process has initialized the accelerator, else none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return visible() if is_initialized is None or is_initialized() else []  # MPS does not report it


def synchronize(device: torch.device) -> None:
    """Wait for everything that is queued on a device."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has bfloat16 matrix instructions; without them bfloat16 is slower."""
    if is_accelerator(device):
        supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
        with torch.accelerator.device_index(device.index):
            return supported is not None and supported(including_emulation=False)
    has_amx: bool = torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    return has_amx or torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]


# --- memory ------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of an accelerator; None: its backend does not report it."""
    read = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if read is None else read(device)[0]


def peak_bytes() -> int | None:
    """Return the most memory that tensors took on one device; None if it is not known."""
    return max(map(torch.accelerator.max_memory_allocated, in_use()), default=None)


def cap_memory(device: torch.device, fraction: float) -> None:
    """Limit this process to a fraction of an accelerator's memory.

    Raises:
        SpecFailed: the backend cannot.
    """
    cap: Any = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if cap is None:
        detail = f"guards.memory.cap_fraction: torch cannot cap the memory of {device.type}"
        raise SpecFailed(f"{detail}: leave it out.")
    if device.type == "mps":  # the only one with a single device
        cap(fraction)
    else:
        cap(fraction, device)


def memory_caps() -> dict[torch.device, float]:
    """Return the fraction of each device in use that this process may take, where it is known."""
    found: dict[torch.device, float] = {}
    for device in in_use():
        read = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
        if read is not None:
            found[device] = read(device)
    return found


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the free and total memory of an accelerator; None: its backend does not report it."""
    read = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if read is None else read(device)


# --- versions ----------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries that torch uses on accelerators; None: it has none.

    Nothing here initializes a device, so a process that forks may ask.
    """
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _dotted(_quietly(torch.backends.cudnn.version)),
        "nccl": _dotted(_quietly(lambda: importlib.import_module("torch.cuda.nccl").version())),
    }


def _quietly(read: Callable[[], Any]) -> Any:
    """Return a version; None if the library is missing or does not report it."""
    with contextlib.suppress(AttributeError, ImportError, OSError, RuntimeError):
        return read()
    return None


def _dotted(version: int | tuple[int | str, ...] | None) -> str | None:
    """Return ``9.10.2`` for cuDNN's 91002 (``8.9.7`` for 8907), and for a tuple."""
    if version is None:
        return None
    if not isinstance(version, int):
        return ".".join(str(part) for part in version)
    of_major = 10_000 if version >= 90_000 else 1000  # as cudnn_version.h defines it
    return f"{version // of_major}.{version % of_major // 100}.{version % 100}"


# --- random generators -------------------------------------------------------------------------


def random_state(device: torch.device) -> Tensor:
    """Return the state of an accelerator's default random generator, as bytes."""
    return torch.get_device_module(device).get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of an accelerator's default random generator."""
    torch.get_device_module(device).set_rng_state(state, device)


def seed_all(seed: int) -> None:
    """Seed the default generator of every device in use, as torch does for a new one."""
    for module in {torch.get_device_module(device) for device in in_use()}:
        getattr(module, "manual_seed_all", module.manual_seed)(seed)  # MPS has a single device


def seed(device: torch.device, number: int) -> None:
    """Seed the default generator of one accelerator."""
    with torch.accelerator.device_index(device.index):
        torch.get_device_module(device).manual_seed(number)
