"""Triton kernel of the statistics on CUDA, compiled at first use.

A tensor is cut into tiles. One program sums up each tile in registers, with the squared deviations
from the tile's mean; one more program merges the tiles by Chan's formula, in fixed order. All sums
are in float64 and none uses floating-point atomics, so results do not depend on scheduling. A
histogram is counted in the same pass, by integer atomics, whose sums do not depend on order either.
Many tensors of one type take two launches.

Needs Triton, which torch's CUDA builds for Linux include; ``triton_check`` decides whether it is
used. ``tests/gpu`` tests it on a device, or in Triton's interpreter on the CPU.
"""

# Triton compiles the bodies of these functions: their arguments have its types, not Python's.
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.probes.statistics.native_kernel import NUM_FIGURES, is_dense
from glasshouse.histogram_bins import NUM_BINS

TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64,
    torch.uint8: tl.uint8, torch.bool: tl.uint8,
}  # fmt: skip
"""Not float64, whose squares may overflow; it takes the plain path."""
TILE = 2048
NUM_WARPS = 8
"""Warps of a program that sums up a tile: eight values per thread fit its registers."""
MERGED_AT_ONCE = 512
NUM_SUMS = 8
NUM_COPIES = 32
"""Histograms that are counted in parallel, so that programs seldom contend."""
_MOST_VALUES = 2**31
_KEPT_TABLES = 8


@triton.jit
def _widened(x):
    """Convert to float64 exactly; bfloat16 by its bits: the interpreter loses small values."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x
    return wide.to(tl.float64)


@triton.jit
def _sum_up(x, there, sums, num_tiles):
    """Write the partial sums of one tile: a column of the float64 matrix ``sums``."""
    wide = _widened(x)
    is_nan = there & (wide != wide)  # noqa: PLR0124 - NaN alone differs from itself
    finite = there & (tl.abs(wide) < float("inf"))
    kept = tl.where(finite, wide, 0.0)
    num = tl.sum(finite.to(tl.float64), 0)
    total = tl.sum(kept, 0)
    apart = tl.where(finite, wide - total / tl.maximum(num, 1.0), 0.0)
    tl.store(sums, num)
    tl.store(sums + num_tiles, total)
    tl.store(sums + 2 * num_tiles, tl.sum(apart * apart, 0))
    tl.store(sums + 3 * num_tiles, tl.sum(kept * kept, 0))
    tl.store(sums + 4 * num_tiles, tl.min(tl.where(finite, wide, float("inf")), 0))
    tl.store(sums + 5 * num_tiles, tl.max(tl.where(finite, wide, float("-inf")), 0))
    tl.store(sums + 6 * num_tiles, tl.sum((there & (wide == 0.0)).to(tl.float64), 0))
    tl.store(sums + 7 * num_tiles, tl.sum(is_nan.to(tl.float64), 0))


@triton.jit
def _count(x, there, counts):
    """Count a tile into a histogram; its zeros, which are often many, in one operation."""
    bits = _widened(x).to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_counted = there & (size != 0) & (size < 0x7F800000)
    tl.atomic_add(counts + ((bits >> 20) & 0xFFF), 1, mask=is_counted, sem="relaxed")
    tl.atomic_add(counts, tl.sum((there & (size == 0)).to(tl.int32), 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_tiles"])
def _sum_up_one(
    x, size, sums, num_tiles, counts, TILE: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr
):
    """``BINS``: the number of bins to count; 0: ``counts`` is not used."""
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < size
    values = tl.load(x + at, there, other=0)
    _sum_up(values, there, sums + tile, num_tiles)
    if BINS > 0:
        _count(values, there, counts + (tile % COPIES) * BINS)


@triton.jit(do_not_specialize=["num", "num_tiles"])
def _sum_up_many(table, num, sums, num_tiles, TYPE: tl.constexpr, TILE: tl.constexpr):
    """``table``: addresses, sizes and first tiles of ``num`` tensors, then each tile's tensor."""
    tile = tl.program_id(0)
    which = tl.load(table + 3 * num + 1 + tile)
    x = tl.load(table + which).to(tl.pointer_type(TYPE))
    size = tl.load(table + num + which)
    at = (tile - tl.load(table + 2 * num + which)) * TILE + tl.arange(0, TILE)
    there = at < size
    _sum_up(tl.load(x + at, there, other=0), there, sums + tile, num_tiles)


@triton.jit
def _squares_about(mean, sums, num_tiles, first, end, BLOCK: tl.constexpr):
    """Return the sum of the squared deviations from ``mean`` of the values of some tiles."""
    lane = tl.arange(0, BLOCK)
    deviations = tl.zeros((BLOCK,), tl.float64)
    start = first
    while start < end:  # not a range: the interpreter does not accept tensors as its bounds
        at = start + lane
        there = at < end
        part = tl.load(sums + at, there, other=0.0)
        apart = tl.load(sums + num_tiles + at, there, other=0.0) / tl.maximum(part, 1.0) - mean
        deviations += tl.load(sums + 2 * num_tiles + at, there, other=0.0) + part * apart * apart
        start += BLOCK
    return tl.sum(deviations, 0)


@triton.jit
def _merge(sums, num_tiles, first, end, size, figures, BLOCK: tl.constexpr):
    """Write the nine statistics of the tensor whose tiles are ``first`` to ``end``."""
    lane = tl.arange(0, BLOCK)
    nums = tl.zeros((BLOCK,), tl.float64)
    totals = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    lows = tl.full((BLOCK,), float("inf"), tl.float64)
    highs = tl.full((BLOCK,), float("-inf"), tl.float64)
    zeros = tl.zeros((BLOCK,), tl.float64)
    nans = tl.zeros((BLOCK,), tl.float64)
    start = first
    while start < end:
        at = start + lane
        there = at < end
        nums += tl.load(sums + at, there, other=0.0)
        totals += tl.load(sums + num_tiles + at, there, other=0.0)
        squares += tl.load(sums + 3 * num_tiles + at, there, other=0.0)
        lows = tl.minimum(lows, tl.load(sums + 4 * num_tiles + at, there, other=float("inf")))
        highs = tl.maximum(highs, tl.load(sums + 5 * num_tiles + at, there, other=float("-inf")))
        zeros += tl.load(sums + 6 * num_tiles + at, there, other=0.0)
        nans += tl.load(sums + 7 * num_tiles + at, there, other=0.0)
        start += BLOCK
    num = tl.sum(nums, 0)
    some = num > 0
    divisor = tl.maximum(num, 1.0)
    mean = tl.sum(totals, 0) / divisor
    about_mean = _squares_about(mean, sums, num_tiles, first, end, BLOCK)
    low = tl.min(lows, 0)
    high = tl.max(highs, 0)
    nan = tl.sum(nans, 0)
    values = size.to(tl.float64)
    nothing = float("nan")
    tl.store(figures, tl.where(some, mean, nothing))
    tl.store(figures + 1, tl.where(some, tl.sqrt(about_mean / divisor), nothing))
    tl.store(figures + 2, tl.where(some, low, nothing))
    tl.store(figures + 3, tl.where(some, high, nothing))
    tl.store(figures + 4, tl.where(some, tl.sqrt(tl.sum(squares, 0)), nothing))
    tl.store(figures + 5, tl.where(some, tl.maximum(tl.abs(low), tl.abs(high)), nothing))
    tl.store(
        figures + 6,
        tl.where(values > 0, tl.sum(zeros, 0) / tl.maximum(values, 1.0), nothing),
    )
    tl.store(figures + 7, nan)
    tl.store(figures + 8, values - num - nan)


@triton.jit(do_not_specialize=["size", "num_tiles"])
def _merge_one(sums, num_tiles, size, figures, BLOCK: tl.constexpr):
    _merge(sums, num_tiles, 0 * num_tiles, num_tiles, size, figures, BLOCK)


@triton.jit(do_not_specialize=["num", "num_tiles"])
def _merge_many(table, num, sums, num_tiles, figures, FIGURES: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(0)
    firsts = table + 2 * num + which
    first = tl.load(firsts)
    end = tl.load(firsts + 1)
    size = tl.load(table + num + which)
    _merge(sums, num_tiles, first, end, size, figures + which * FIGURES, BLOCK)


class TritonKernel:
    """Computes statistics as float64 vectors on the tensors' device; nothing waits for them."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], Tensor] = {}

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Return whether the kernel can read a tensor."""
        return x.layout is torch.strided and x.dtype in TYPES and x.numel() < _MOST_VALUES

    @torch.no_grad()
    def one(self, tensor: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return the nine statistics of a tensor; add its histogram to ``counts`` in that pass."""
        x = _laid(tensor)
        with torch.cuda.device_of(x):
            num_tiles = _num_tiles(x)
            sums, figures = _empty(x, NUM_SUMS, num_tiles), _empty(x, NUM_FIGURES)
            if num_tiles:
                _sum_up_one[(num_tiles,)](
                    x, x.numel(), sums, num_tiles, sums if counts is None else counts,
                    TILE=TILE, BINS=0 if counts is None else NUM_BINS, COPIES=NUM_COPIES,
                    num_warps=NUM_WARPS,
                )  # fmt: skip
            _merge_one[(1,)](sums, num_tiles, x.numel(), figures, BLOCK=MERGED_AT_ONCE)
            return figures

    def count(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nine statistics and the counts of all bins as float64, from one pass."""
        shape = NUM_COPIES, NUM_BINS
        counts = torch.zeros(shape, dtype=torch.int32, device=tensor.device)
        return self.one(tensor, counts), counts.sum(0, dtype=torch.float64)

    @torch.no_grad()
    def many(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the nine statistics of tensors of one device; two launches per type."""
        laid = [_laid(x) for x in tensors]
        places: dict[torch.dtype, list[int]] = {}
        for place, x in enumerate(laid):
            places.setdefault(x.dtype, []).append(place)
        found: dict[int, Tensor] = {}
        for some in places.values():
            figures = self._of_one_type([laid[place] for place in some])
            found |= dict(zip(some, figures.unbind(), strict=True))
        return [found[place] for place in range(len(laid))]

    def _of_one_type(self, tensors: Sequence[Tensor]) -> Tensor:
        first, num = tensors[0], len(tensors)
        with torch.cuda.device_of(first):
            table = self._table(tensors)
            num_tiles = len(table) - 3 * num - 1
            sums, figures = _empty(first, NUM_SUMS, num_tiles), _empty(first, num, NUM_FIGURES)
            if num_tiles:
                _sum_up_many[(num_tiles,)](
                    table, num, sums, num_tiles,
                    TYPE=TYPES[first.dtype], TILE=TILE, num_warps=NUM_WARPS,
                )  # fmt: skip
            _merge_many[(num,)](
                table, num, sums, num_tiles, figures, FIGURES=NUM_FIGURES, BLOCK=MERGED_AT_ONCE
            )
            return figures

    def _table(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors' addresses on their device; cached: parameters stay in place."""
        addresses, sizes = [x.data_ptr() for x in tensors], [x.numel() for x in tensors]
        device = tensors[0].device
        key = (device.index or 0, *addresses, *sizes)
        known = self._tables.get(key)
        if known is not None:
            return known
        nums = torch.tensor([_num_tiles(x) for x in tensors])
        firsts = torch.cat([torch.zeros(1, dtype=torch.int64), nums.cumsum(0)])
        owners = torch.arange(len(tensors)).repeat_interleave(nums)
        table = torch.cat([torch.tensor([*addresses, *sizes]), firsts, owners])
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        while len(self._tables) >= _KEPT_TABLES:
            del self._tables[next(iter(self._tables))]
        self._tables[key] = table
        return table


def _laid(tensor: Tensor) -> Tensor:
    """Return the values of a tensor contiguously, in any order."""
    x = tensor.detach().resolve_neg()
    x = x if x.is_contiguous() or is_dense(x) else x.contiguous()
    return x.view(torch.uint8) if x.dtype is torch.bool else x


def _num_tiles(x: Tensor) -> int:
    return -(-x.numel() // TILE)


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device=like.device)
