"""The versions of torch and of the libraries that it was built with."""

import contextlib
import platform
import re
from pathlib import Path

import torch

from engine.core import device

_DRIVER = Path("/proc/driver/nvidia/version")
_BUILT_WITH = {
    "mkl": r"Math Kernel Library Version (\S+?)-",
    "onednn": r"MKL-DNN v([\d.]+)",
    "openmp": r"OpenMP \d+ \(a\.k\.a\. OpenMP ([\d.]+)\)",
}
"""Patterns of ``torch.__config__.show()``. oneDNN still has its former name there."""


def versions() -> dict[str, str | None]:
    """Return versions by name; None: this build of torch, or this host, does not have it."""
    built = torch.__config__.show()
    found = {name: re.search(pattern, built) for name, pattern in _BUILT_WITH.items()}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **device.versions(),
        "driver": driver_version(),
        **{name: match and match[1] for name, match in found.items()},
    }


def driver_version(path: Path = _DRIVER) -> str | None:
    """Return the version of NVIDIA's kernel driver, as the kernel reports it."""
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", path.read_text())
        return found and found[1]
    return None
