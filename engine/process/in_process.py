"""Run an attempt in this process, for a debugger, and restore the process's settings after it."""

import os
import resource
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from engine.process import rank

_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def carry_out(job_dir: Path) -> None:
    """Run ``job.json`` of a directory in this thread, to its end."""
    # Generators of CUDA are there once it is initialized. That is left to the job: its allocator
    # reads its settings then.
    devices = None if torch.cuda.is_initialized() else ()
    with _as_it_was(), torch.random.fork_rng(devices), warnings.catch_warnings():
        rank.carry_out(job_dir)


@contextmanager
def _as_it_was() -> Generator[None]:
    """Restore the environment, the limits of the process and torch's global state."""
    with ExitStack() as stack:
        for undo in (*_of_torch(), *_of_process()):
            stack.callback(undo)  # each one runs, even if another fails
        yield


def _of_process() -> list[Callable[[], object]]:
    environment = dict(os.environ)
    limits = {kind: resource.getrlimit(kind) for kind in _LIMITS}

    def restore_environment() -> None:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def restore_limits() -> None:
        for kind, (soft, hard) in limits.items():
            now = resource.getrlimit(kind)
            if now != (soft, hard):
                resource.setrlimit(kind, (soft, now[1]))  # a hard limit cannot be raised again

    return [restore_environment, restore_limits]


def _of_torch() -> list[Callable[[], object]]:
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    dtype = torch.get_default_dtype()
    undone: list[Callable[[], object]] = [
        lambda: torch.set_num_threads(threads),
        lambda: torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only),
        lambda: torch.backends.mha.set_fastpath_enabled(fastpath),
        lambda: torch.set_default_dtype(dtype),
    ]
    with suppress(RuntimeError):  # set by the caller with torch.backends, which this cannot read
        precision = torch.get_float32_matmul_precision()
        undone.append(lambda: torch.set_float32_matmul_precision(precision))
    return [*undone, _of_cuda()]


def _of_cuda() -> Callable[[], object]:
    """Return a function that restores each device's memory fraction, and seeds new generators."""
    was_initialized = torch.cuda.is_initialized()
    numbers = range(torch.cuda.device_count() if was_initialized else 0)
    shares = {number: torch.cuda.get_per_process_memory_fraction(number) for number in numbers}

    def restore() -> None:
        if not torch.cuda.is_initialized():
            return
        for number in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(shares.get(number, 1.0), number)
        if not was_initialized:  # as torch seeds them when it initializes CUDA
            torch.cuda.manual_seed_all(torch.initial_seed())

    return restore
