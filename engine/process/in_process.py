"""Run an attempt in this process, for a debugger, and restore the process's settings after it."""

import os
import resource
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from engine.core import device
from engine.process import rank

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def carry_out(job_dir: Path) -> None:
    """Run ``job.json`` of a directory in this thread, to its end."""
    # An accelerator has generators once it is initialized. That is left to the job: its allocator
    # reads its settings then.
    used = device.in_use()
    kind = used[0].type if used else "cpu"
    forked = torch.random.fork_rng([one.index for one in used], device_type=kind)
    with _as_it_was(), forked, warnings.catch_warnings():
        rank.carry_out(job_dir)


@contextmanager
def _as_it_was() -> Generator[None]:
    """Restore the environment, the limits of the process and torch's global state."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    limits = {kind: resource.getrlimit(kind) for kind in _LIMITS}
    with ExitStack() as stack:  # each of these runs at its end, even if another fails
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.use_deterministic_algorithms, is_deterministic, warn_only=warns_only)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        with suppress(RuntimeError):  # set by the caller with torch.backends: it cannot be read
            precision = torch.get_float32_matmul_precision()
            stack.callback(torch.set_float32_matmul_precision, precision)
        stack.callback(_restore_accelerator, device.memory_caps() if device.in_use() else None)
        stack.callback(_restore_environment, dict(os.environ))
        stack.callback(_restore_limits, limits)
        yield


def _restore_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _restore_limits(limits: dict[int, tuple[int, int]]) -> None:
    for kind, (soft, hard) in limits.items():
        now = resource.getrlimit(kind)
        if now != (soft, hard):
            resource.setrlimit(kind, (soft, now[1]))  # a hard limit cannot be raised again


def _restore_accelerator(caps: dict[torch.device, float] | None) -> None:
    """Restore the memory caps; None: the accelerator was not in use before."""
    for one in device.memory_caps():
        device.cap_memory(one, (caps or {}).get(one, 1.0))
    if caps is None:  # as torch seeds new generators when it initializes the accelerator
        device.seed_all(torch.initial_seed())
