"""The Triton kernel and numpy in float64 say the same: on a device, or in Triton's interpreter.

``TRITON_INTERPRET=1 python -m pytest tests/gpu/test_triton_kernel.py -m gpu`` runs it on the CPU,
as ``tests/unit/engine/test_on_cuda.py`` does.
"""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.probes.statistics import plain_torch, triton_check
from glasshouse.histogram_bins import bins_of
from tests.unit.engine.test_kernel import agree, tensors
from tests.unit.engine.test_watching import _tensors, by_numpy

triton_kernel = pytest.importorskip("engine.probes.statistics.triton_kernel", exc_type=ImportError)
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
TILE, MERGED = triton_kernel.TILE, triton_kernel.MERGED_AT_ONCE
SIZES = [0, 1, 2, 31, TILE - 1, TILE, TILE + 1, 3 * TILE + 5]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device"
    ),
    # the interpreter is numpy, which warns of what is masked out afterwards
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@pytest.fixture
def kernel():
    return triton_kernel.TritonKernel()


def counts_by_numpy(x: torch.Tensor) -> list[int]:
    numbers = bins_of(x.detach().to(torch.float64).numpy())
    return np.bincount(numbers, minlength=4096).tolist()


def check(x: torch.Tensor) -> None:
    """All three entries, of a tensor in CPU memory."""
    kernel = triton_kernel.TritonKernel()
    there, expected = x.to(DEVICE), by_numpy(x)
    agree(kernel.one(there).tolist(), expected)
    for found in kernel.many([there, there]):
        agree(found.tolist(), expected)
    figures, counts = kernel.count(there)
    agree(figures.tolist(), expected)
    assert counts.tolist() == counts_by_numpy(x)


@given(tensors())
@settings(max_examples=15 if IS_INTERPRETED else 300, deadline=None)
def test_any_tensor_has_numpys_figures(x):
    if triton_kernel.TritonKernel.takes(x):
        check(x)
    else:
        assert x.dtype is torch.float64


@pytest.mark.parametrize("name", [n for n, x in _tensors().items() if x.dtype != torch.float64])
def test_awkward_tensors_have_numpys_figures(name):
    x = _tensors()[name]
    assert triton_kernel.TritonKernel.takes(x)
    check(x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_sizes_around_a_tile(size, dtype):
    x = 3 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    check(x.to(dtype))


@pytest.mark.slow  # in the interpreter
def test_more_tiles_than_are_merged_at_once(kernel):
    x = torch.randn(MERGED * TILE + 77, generator=torch.Generator().manual_seed(0)) + 100
    x[::1000] = torch.inf
    agree(kernel.one(x.to(DEVICE)).tolist(), by_numpy(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_sixteen_bits_is_read_right(dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    check(x)
    check(x[x.to(torch.float32).abs() < 1e-4])


def test_a_deviation_that_the_mean_dwarfs_is_seen(kernel):
    x = 1e4 + 1e-2 * torch.randn(3 * TILE + 1, generator=torch.Generator().manual_seed(0))
    agree(kernel.one(x.to(DEVICE)).tolist(), by_numpy(x))


def test_a_tile_of_nothing_but_nan_leaves_the_others_figures():
    x = torch.randn(3 * TILE, generator=torch.Generator().manual_seed(0))
    x[TILE : 2 * TILE] = torch.nan
    check(x)


def test_memory_in_another_order_is_read_where_it_lies():
    x = torch.randn(4, 6, 30, 20, generator=torch.Generator().manual_seed(0))
    for view in (x.permute(3, 1, 0, 2), x.to(memory_format=torch.channels_last), x[:, 1::2, ::3]):
        check(view)
    check(x[0, 0, 0].expand(50, 20))


def test_many_at_once_equal_one_by_one(kernel):
    """Of several types and sizes, some empty; again from the kept table, and after they moved.

    On a device the sums of one and of many tensors are in another order: only the former's address
    is known to be aligned when the kernel is compiled.
    """
    generator = torch.Generator().manual_seed(0)
    types = [torch.float32, torch.bfloat16, torch.uint8]
    for _ in range(2):
        batch = [
            torch.randn(size, generator=generator).abs().to(types[number % 3]).to(DEVICE)
            for number, size in enumerate([*SIZES, 5, 6])
        ]
        expected = [kernel.one(x).tolist() for x in batch]
        for _ in range(2):
            found = [figures.tolist() for figures in kernel.many(batch)]
            for have, want in zip(found, expected, strict=True):
                assert have == pytest.approx(want, rel=1e-12, abs=1e-300, nan_ok=True)
            assert str(found) == str([figures.tolist() for figures in kernel.many(batch)])
    assert kernel.many([]) == []


@pytest.mark.slow  # in the interpreter
def test_figures_do_not_depend_on_the_schedule(kernel):
    x = torch.randn(50 * TILE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    first, counts = kernel.count(x)
    for _ in range(3 if IS_INTERPRETED else 100):
        again, recounted = kernel.count(x)
        assert torch.equal(again, first)
        assert torch.equal(recounted, counts)
        assert torch.equal(kernel.one(x), first)


def test_it_says_what_the_plain_path_says(kernel):
    for name, x in _tensors().items():
        if kernel.takes(x):
            found, counts = kernel.count(x.to(DEVICE))
            expected = plain_torch.figures_on_device(x.to(DEVICE))
            agree(found.tolist(), expected.tolist())
            assert torch.equal(counts, plain_torch.counts_on_device(x.to(DEVICE))), name


def test_it_is_tried_before_it_is_used(monkeypatch):
    assert isinstance(triton_check.tried(DEVICE), triton_kernel.TritonKernel)
    right = triton_kernel.TritonKernel.one
    monkeypatch.setattr(triton_kernel.TritonKernel, "one", lambda *given: right(*given) * 1.001)
    with pytest.raises(triton_check.NotUsable, match="other figures"):
        triton_check.tried(DEVICE)
    monkeypatch.setattr(triton_kernel, "TILE", 1000)  # no power of two: it does not compile
    with pytest.raises(triton_check.NotUsable, match=r"power of (2|two)"):
        triton_check.tried(DEVICE)
