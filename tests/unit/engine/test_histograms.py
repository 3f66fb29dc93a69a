"""The native kernel, the plain path, the path of devices and numpy count the same."""

import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.native.compiling import FLAGS, ISAS, LIBRARY, SOURCE, find_compiler, source_mark
from engine.probes import hooks
from engine.probes.statistics import native_kernel, plain_torch
from engine.probes.statistics.native_kernel import TYPES, Kernel
from engine.probes.statistics.summarize import summarize
from engine.probes.step_records import TensorHistogram, histogram_keys, landed, numbers_of
from glasshouse.histogram_bins import bins_of, quantiles
from tests.conftest import absent
from tests.unit.engine import test_kernel
from tests.unit.engine.runs import of_type, run, spec
from tests.unit.engine.test_kernel import tensors
from tests.unit.engine.test_watching import _tensors

native = test_kernel.native
LARGE = 300_007


def by_numpy(x: torch.Tensor) -> tuple[list[int], list[int]]:
    bins, counts = np.unique(bins_of(x.to(torch.float64).numpy()), return_counts=True)
    return bins.tolist(), counts.tolist()


def all_ways(native: Kernel, x: torch.Tensor) -> list:
    ways = [native.count(x, isa=isa)[1] for isa in range(len(ISAS))]
    return [*ways, plain_torch.counts(x), plain_torch.sparse(plain_torch.counts_on_device(x))]


@given(tensors())
@settings(max_examples=300, deadline=None)
def test_every_way_counts_what_numpy_counts(native, x):
    assert all_ways(native, x) == [by_numpy(x)] * 5
    assert str([native.count(x)[0]]) == str(native.many([x]))


@pytest.mark.parametrize("name", _tensors())
def test_awkward_tensors_are_counted_alike(native, name):
    x = _tensors()[name]
    before = x.clone()
    assert all_ways(native, x) == [by_numpy(x)] * 5
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_counted_through_float32(native, dtype):
    x = (torch.arange(-3000, 3001, dtype=torch.float64) / 7).to(dtype)
    assert all_ways(native, x) == [by_numpy(x)] * 5
    assert sum(native.count(x)[1][1]) == len(x)


def test_what_is_beyond_float32_is_in_the_last_bin_and_both_zeros_in_the_first(native):
    x = torch.tensor([1e300, -1e39, 3.5e38, math.inf, math.nan, -0.0, -1e-60, 1e-60], dtype=float)
    assert all_ways(native, x) == [([0, 0x7F7, 0xFF7], [3, 2, 1])] * 5
    longs = torch.tensor([2**63 - 1, -(2**63), 0, 3])
    assert all_ways(native, longs) == [by_numpy(longs)] * 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_sixteen_bits_is_in_its_bin(native, dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert all_ways(native, x) == [by_numpy(x)] * 5


def test_tensors_of_one_call_do_not_mix(native):
    batch = [x for x in _tensors().values() if native_kernel.takes(x)] * 3 + [torch.randn(LARGE)]
    found = [native.count(x) for x in batch]
    assert [histogram for _, histogram in found] == [by_numpy(x) for x in batch]
    assert str([figures for figures, _ in found]) == str(native.many(batch))
    assert native.many([]) == []


def test_one_value_many_times_is_counted_whole(native):
    assert native.count(torch.zeros(LARGE))[1] == ([0], [LARGE])
    assert native.count(torch.full((LARGE,), -1.5))[1] == ([2048 + 127 * 8 + 4], [LARGE])


@pytest.mark.long
def test_more_values_than_a_table_may_hold_are_counted(tmp_path):
    if find_compiler() is None:
        absent("a C++ compiler")
    library = tmp_path / LIBRARY
    defined = [f"-DKERNEL_SOURCE={source_mark()}ULL", "-DKERNEL_MOST_PENDING=5000"]
    command = [find_compiler(), *FLAGS, *defined, SOURCE, "-o", library]
    subprocess.run(command, check=True)
    batch = [torch.randn(40_000), torch.randn(100), torch.zeros(0), torch.randn(LARGE)] * 2
    made = Kernel(library)
    for threads in (1, 2):
        for x in batch:
            assert made.count(x, threads=threads)[1] == by_numpy(x)


def test_what_the_kernel_cannot_read_is_counted_too():
    whole = torch.tensor([[0.0, 2.0], [0.0, -0.0]])
    assert summarize(whole.to_sparse(), histogram=True)[1] == by_numpy(whole)
    figures, counts = summarize(torch.complex(whole, whole), histogram=True)
    assert figures[5] == 2.0
    assert counts == ([0, 128 * 8], [6, 2])


def test_without_the_kernel_the_histogram_is_the_same(monkeypatch):
    x = torch.randn(5000)
    found = summarize(x, histogram=True)
    monkeypatch.setattr(native_kernel, "LOADED", None)
    assert summarize(x, histogram=True)[1] == found[1] == by_numpy(x)


# --- in the record of a step -----------------------------------------------------------------


def test_what_is_read_back_from_a_device_reports_the_same_as_what_was_here():
    both = frozenset({"histogram", "quantiles"})
    inputs = [torch.randn(300), torch.tensor([math.nan, math.inf]), torch.zeros(0)]
    here = [TensorHistogram("a", "output", *summarize(x, histogram=True), both) for x in inputs]
    there = [
        item._replace(
            figures=torch.tensor(item.figures, dtype=torch.float64),
            counts=plain_torch.counts_on_device(x),
        )
        for item, x in zip(here, inputs, strict=True)
    ]
    numbers = torch.cat(numbers_of(there))
    assert str(histogram_keys([*landed(there, numbers)])) == str(histogram_keys(here))
    assert numbers_of(here) == []
    assert [*landed(here, torch.empty(0))] == here


def test_a_step_on_a_device_reports_what_a_step_here_reports(digits, tmp_path, monkeypatch):
    everything = {"layers": ["*"], "kinds": ["output", "param", "param_grad"], "every": 2}
    job = spec(probes=[{**everything, "want": ["stats", "histogram", "quantiles"]}])
    here = of_type(run(tmp_path / "here", job, digits), "stats")

    def as_there(tensor: torch.Tensor, *, histogram: bool = False):
        figures = plain_torch.figures_on_device(tensor)
        return (figures, plain_torch.counts_on_device(tensor)) if histogram else figures

    monkeypatch.setattr(hooks, "summarize", as_there)
    there = of_type(run(tmp_path / "there", job, digits), "stats")
    assert [record["histograms"] for record in there] == [record["histograms"] for record in here]
    for mine, other in zip(there, here, strict=True):
        for key in ("rows", "quantiles"):
            assert len(mine[key]) == len(other[key]) > 0
            for row, expected in zip(mine[key], other[key], strict=True):
                assert row[:2] == expected[:2]
                assert row[2:] == pytest.approx(expected[2:], rel=1e-6, abs=1e-9)


def test_only_what_is_wanted_is_reported():
    figures, counts = summarize(torch.arange(1.0, 9.0), histogram=True)
    counted = [
        TensorHistogram("a", "output", figures, counts, frozenset({"histogram"})),
        TensorHistogram("b", "output", figures, counts, frozenset({"quantiles"})),
    ]
    keys = histogram_keys(counted)
    assert keys["histograms"] == [["a", "output", *counts]]
    assert keys["quantiles"] == [["b", "output", *quantiles(*counts, low=1.0, high=8.0)]]
    assert histogram_keys([]) == {}


# --- threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_figures_do_not_depend_on_the_number_of_threads(native, dtype):
    if not native.shares_threads:
        pytest.skip("torch computes without an OpenMP runtime")
    batch = [(torch.randn(num) * 100).to(dtype) for num in (5, LARGE, 16384 * 4, 0, 16385 * 9)]
    alone = [native.count(x, threads=1) for x in batch]
    for threads in (2, 3, 5, 1000):
        assert str([native.count(x, threads=threads) for x in batch]) == str(alone)
        figures = native.many(batch, threads=threads)
        assert str(figures) == str([found for found, _ in alone])


def test_python_threads_may_share_the_threads(native):
    inputs = [torch.randn(LARGE) + number for number in range(3)]
    expected = [native.count(x, threads=1) for x in inputs]
    wrong: list = []

    def work(number: int) -> None:
        for _ in range(30):
            found = native.count(inputs[number], threads=2)
            if found != expected[number]:
                wrong.append(found)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.long
def test_a_process_that_only_loads_the_kernel_starts_no_thread_and_its_forks_may(native):
    code = """
import os, torch
torch.set_num_threads(1)
from engine.probes.statistics import native_kernel
x = torch.ones(400_000)
expected = native_kernel.LOADED.count(x)
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
if (child := os.fork()) == 0:
    torch.set_num_threads(2)
    for _ in range(3):
        assert native_kernel.LOADED.count(x) == expected
    os._exit(0 if len(os.listdir("/proc/self/task")) > 1 else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    if (
        native_kernel.LOADED is None
        or not native.shares_threads
        or not os.path.isdir("/proc/self/task")
    ):
        pytest.skip("there is no kernel in force, or it has no threads")
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, **one})
