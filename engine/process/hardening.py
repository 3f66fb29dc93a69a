"""Hardening of processes with torch: no torch with known vulnerabilities, and limits of a rank."""

import ctypes
import resource
import sys
from contextlib import suppress

import torch

OLDEST_TORCH = (2, 10)
"""Earlier versions could run code while loading "weights only" (CVE-2025-32434, CVE-2026-24747)."""
MAX_OPEN_FILES = 4096
_PR_SET_NO_NEW_PRIVS = 38


def check_torch(version: str = torch.__version__) -> None:
    """Exit if this torch has known vulnerabilities.

    Raises:
        SystemExit: it has.
    """
    found = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    if found < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        known = f"torch {version} has known vulnerabilities"
        raise SystemExit(f"{known}; Glasshouse needs {needed} or newer")


def limit_rank() -> None:
    """Limit what a rank may do to the machine: no core files, few open files, no setuid.

    Memory is not limited here: with CUDA the address space does not measure it. Start the worker
    in a control group to limit it.
    """
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _lower(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value))
