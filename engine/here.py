"""An attempt in this very process, for a debugger. What it sets of torch is put back after it."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine import rank


def carry_out(job_dir: Path) -> None:
    """Run ``job.json`` of a directory in this thread, to its end."""
    with _torch_as_it_was(), torch.random.fork_rng():
        rank.carry_out(job_dir)


@contextmanager
def _torch_as_it_was() -> Generator[None]:
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.mha.set_fastpath_enabled(fastpath)
