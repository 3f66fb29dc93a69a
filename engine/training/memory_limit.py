"""Limit the memory of a training run, and find layers whose batches cannot be split.

Knows torch and the operating system; the worker decides what happens when memory runs out.
"""

import os
import resource
from pathlib import Path

import torch

from engine.core.problems import Findings
from engine.training import out_of_memory
from glasshouse.errors import SpecFailed
from glasshouse.spec import Allocator, MemoryGuard, TrainJob

_STATUS = Path("/proc/self/status")


def guard_memory(guard: MemoryGuard, device: torch.device) -> None:
    """Apply a spec's limits to this process. torch reads its settings when CUDA is first used."""
    if guard.allocator is not None:
        os.environ["PYTORCH_ALLOC_CONF"] = settings_of(guard.allocator)
    if guard.cap_fraction is None:
        return
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(guard.cap_fraction, device)
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
    limit = out_of_memory.on_host("").get("limit_bytes")
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
    if any(layer.type.startswith("BatchNorm") for layer in layers):
        detail = "batch normalisation takes its statistics of each part of a batch by itself"
        findings.warn("/guards/memory/on_oom", detail, "batch_norm")
