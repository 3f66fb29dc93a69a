"""Native kernel of the statistics: nine statistics of each of many CPU tensors in one call.

On request it counts a histogram in the same pass. Large tensors are split over torch's own OpenMP
threads: those are awake, and a second pool would compete for the same cores. The results do not
depend on the number of threads.

``python -m engine.native`` builds it in place, for a checkout. It is optional: without it,
``plain_torch`` computes the same statistics more slowly.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.native.compiling import LIBRARY, SOURCE, NotCompiled, best_isa, open_library
from engine.native.threads import lend_threads

NUM_FIGURES = 9
NUM_FINITE_BINS = 2 * 0x7F8
_Figures = ctypes.c_double * NUM_FIGURES
TYPES = {
    torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4,
    torch.int16: 5, torch.int32: 6, torch.int64: 7, torch.uint8: 8, torch.bool: 9,
}  # fmt: skip
"""The type codes of the C++ source."""
_BEST = -1
_FAILURES = {1: "the kernel does not know a type", 2: "the kernel has no memory left"}


Histogram = tuple[list[int], list[int]]
"""The nonempty bins in ascending order, and their counts."""


class Kernel:
    """A loaded library. Calls hold no lock and no state, so threads may share it."""

    def __init__(self, path: Path) -> None:
        library = open_library(path)
        self.best_isa = best_isa(library)
        self.shares_threads = lend_threads(library)
        self._summarize = library.glasshouse_summarize
        pointers = [ctypes.c_void_p] * 7
        self._summarize.argtypes = [ctypes.c_int64, *pointers, ctypes.c_int32, ctypes.c_int32]
        self._summarize.restype = ctypes.c_int32
        self._one = library.glasshouse_summarize_one
        one = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32]
        self._one.argtypes = one
        self._one.restype = ctypes.c_int32

    def one(self, x: Tensor) -> list[float]:
        """Return the statistics of a tensor that ``takes`` accepts: the fast path for hooks."""
        laid = x if x.is_contiguous() or is_dense(x) else x.contiguous()
        found = _Figures()
        kind, threads = TYPES[x.dtype], torch.get_num_threads()
        failed = self._one(laid.data_ptr(), laid.numel(), kind, found, threads)
        if failed:
            raise RuntimeError(_FAILURES[failed])
        return found[:]

    def many(
        self, tensors: Sequence[Tensor], *, isa: int = _BEST, threads: int | None = None
    ) -> list[list[float]]:
        """Return the statistics of tensors that ``takes`` accepts, in one call."""
        return self._run(tensors, (None, None, None), isa, threads)

    def count(
        self, x: Tensor, *, isa: int = _BEST, threads: int | None = None
    ) -> tuple[list[float], Histogram]:
        """Return the statistics and the histogram of a tensor that ``takes`` accepts."""
        room = min(x.numel(), NUM_FINITE_BINS)
        bins, counts = torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=torch.int64)
        num = (ctypes.c_int64 * 1)()
        (figures,) = self._run([x], (bins.data_ptr(), counts.data_ptr(), num), isa, threads)
        return figures, (bins[: num[0]].tolist(), counts[: num[0]].tolist())

    def _run(
        self, tensors: Sequence[Tensor], counted: tuple[Any, ...], isa: int, threads: int | None
    ) -> list[list[float]]:
        num = len(tensors)
        laid = [x if x.is_contiguous() or is_dense(x) else x.contiguous() for x in tensors]
        found = (ctypes.c_double * (NUM_FIGURES * num))()
        failed = self._summarize(
            num,
            (ctypes.c_void_p * num)(*[x.data_ptr() for x in laid]),
            (ctypes.c_int64 * num)(*[x.numel() for x in laid]),
            (ctypes.c_int32 * num)(*[TYPES[x.dtype] for x in laid]),
            found,
            *counted,
            isa,
            threads or torch.get_num_threads(),
        )
        if failed:
            raise RuntimeError(_FAILURES[failed])
        figures = found[:]
        return [figures[at : at + NUM_FIGURES] for at in range(0, len(figures), NUM_FIGURES)]


def takes(x: Tensor) -> bool:
    """Return whether the kernel can read a tensor in place."""
    return x.is_cpu and x.dtype in TYPES and x.layout is torch.strided and not x.is_neg()


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor fills its memory range, each element once, in any order."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def load(path: Path | None = None) -> Kernel | None:
    """Load the kernel; None if it is missing or has another version."""
    try:
        return Kernel(path or SOURCE.with_name(LIBRARY))
    except NotCompiled:
        return None


LOADED = load()
