"""Out-of-memory report: bytes requested, free, at the peak, and the limit."""

import contextlib
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_ON_DEVICE = {
    "requested_bytes": re.compile(rf"Tried to allocate {_SIZE}"),
    "limit_bytes": re.compile(rf"total capacity of {_SIZE}"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free"),
}
_ON_HOST = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)
_CGROUP = Path("/sys/fs/cgroup")
_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Paths of a control group as seen by a process inside it, of version 2 and version 1."""


def on_device(text: str) -> dict[str, Any]:
    """Return what the message of a ``torch.OutOfMemoryError`` and the device itself report."""
    found: dict[str, Any] = {"where": "device"}
    for name, pattern in _ON_DEVICE.items():
        if (match := pattern.search(text)) is not None:
            found[name] = round(float(match[1]) * _UNITS[match[2]])
    with contextlib.suppress(Exception):  # a failing device is not queried again
        if torch.cuda.is_initialized():
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def on_host(text: str) -> dict[str, Any]:
    """Return what the message of the CPU's allocator and the host report."""
    found: dict[str, Any] = {"where": "host"}
    if (match := _ON_HOST.search(text)) is not None:
        found["requested_bytes"] = int(match[1])
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        figures = {words[0]: int(words[1]) * 1024 for words in lines}
        found["free_bytes"] = figures["MemAvailable:"]
        found["limit_bytes"] = figures["MemTotal:"]
    for limit_file, used_file in _GROUP_FILES:
        with contextlib.suppress(OSError, ValueError):
            limit = int((_CGROUP / limit_file).read_text())
            used = int((_CGROUP / used_file).read_text())
            found["limit_bytes"] = min(limit, found.get("limit_bytes", limit))
            found["free_bytes"] = min(max(0, limit - used), found.get("free_bytes", limit))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["peak_bytes"] = peak if sys.platform == "darwin" else peak * 1024
    return found


def told(memory: dict[str, Any]) -> str:
    """Return the values as text for a message."""
    words = {
        "requested_bytes": "{} more was asked for",
        "free_bytes": "{} was free",
        "peak_bytes": "{} was in use at the peak",
        "limit_bytes": "there is {} in all",
    }
    return ", ".join(text.format(size(memory[key])) for key, text in words.items() if key in memory)


def size(num_bytes: float) -> str:
    """Return a size in readable form: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
