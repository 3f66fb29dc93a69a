"""Limit the memory of a training run, and report its use if it runs out.

Knows torch and the operating system; the worker decides what happens when memory runs out.
"""

import contextlib
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from engine.core.device import cap_memory, is_accelerator, peak_bytes
from engine.core.problems import Findings
from glasshouse.errors import SpecFailed
from glasshouse.spec import Allocator, MemoryGuard, TrainJob

_STATUS = Path("/proc/self/status")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_ON_DEVICE = {
    "requested_bytes": re.compile(rf"Tried to allocate {_SIZE}"),
    "limit_bytes": re.compile(rf"total capacity of {_SIZE}"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free"),
}
_ALLOWED = re.compile(rf"{_SIZE} allowed; ")
"""What `cap_memory` lets the process take, which torch's message has only then."""
_TAKEN = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_ON_HOST = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)
_CGROUP = Path("/sys/fs/cgroup")
_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Paths of a control group as seen by a process inside it, of version 2 and version 1."""


def guard_memory(guard: MemoryGuard, *devices: torch.device) -> None:
    """Apply a spec's limits to this process. torch reads its settings at first use.

    ``devices``: all that the job computes on.
    """
    if guard.allocator is not None:
        os.environ["PYTORCH_ALLOC_CONF"] = settings_of(guard.allocator)
    if guard.cap_fraction is None:
        return
    for device in devices:
        if is_accelerator(device):
            cap_memory(device, guard.cap_fraction)
        else:
            cap_process(guard.cap_fraction)


def settings_of(allocator: Allocator) -> str:
    """Return the settings in torch's format: ``expandable_segments:True,max_split_size_mb:128``."""
    given = allocator.model_dump(exclude_none=True)
    return ",".join(f"{name}:{value}" for name, value in given.items())


def cap_process(fraction: float) -> None:
    """Let this process use ``fraction`` of the host's memory in addition to its current use.

    The limit counts writable private memory (``RLIMIT_DATA``).

    Raises:
        SpecFailed: only Linux counts that.
    """
    limit = on_host("").get("limit_bytes")
    if limit is None or not _STATUS.exists():
        detail = "guards.memory.cap_fraction: this system does not count what a process takes of"
        raise SpecFailed(f"{detail} the host's memory, so that it cannot be capped: leave it out.")
    most = _data_bytes() + int(fraction * limit)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _data_bytes() -> int:
    """Return the bytes that the kernel counts for this process now."""
    lines = _STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))


def check_memory(spec: TrainJob, findings: Findings) -> None:
    """Add findings for layers whose batches cannot be split, or give other results then."""
    if spec.guards.memory.on_oom != "halve_batch":
        return
    layers = spec.network.layers
    if any(layer.stateful for layer in layers):
        detail = "the micro-batches of a batch would share states: set on_oom to fail if a layer is"
        findings.problem("/guards/memory/on_oom", f"{detail} stateful", "stateful")
    if any("BatchNorm" in layer.type for layer in layers):
        detail = "batch normalization takes its statistics of each part of a batch by itself"
        findings.warn("/guards/memory/on_oom", detail, "batch_norm")


def on_device(text: str) -> dict[str, Any]:
    """Return what the message of a ``torch.OutOfMemoryError`` and the device itself report."""
    found: dict[str, Any] = {"where": "device"}
    for name, pattern in _ON_DEVICE.items():
        if (read := _bytes_in(text, pattern)) is not None:
            found[name] = read
    if (allowed := _bytes_in(text, _ALLOWED)) is not None:  # the process is capped
        found["limit_bytes"] = allowed
        left = max(0, allowed - (_bytes_in(text, _TAKEN) or 0))
        found["free_bytes"] = min(left, found.get("free_bytes", left))
    with contextlib.suppress(Exception):  # a failing device is not queried again
        if (peak := peak_bytes()) is not None:
            found["peak_bytes"] = peak
    return found


def _bytes_in(text: str, pattern: re.Pattern[str]) -> int | None:
    """Return the size that a message of torch names; None: it names none."""
    match = pattern.search(text)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


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


def in_words(memory: dict[str, Any]) -> str:
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
