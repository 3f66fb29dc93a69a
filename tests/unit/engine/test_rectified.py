"""A ReLU's output counted in the pass over what it reads: the very figures of reading it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.native.compiling import ISAS
from engine.probes.figures import kernel
from engine.probes.figures.summarize import summarize
from engine.probes.rectified import Rectified, is_rectifier
from engine.probes.watched.watch import Watch, Watches
from glasshouse.spec import Probe
from tests.conftest import absent
from tests.unit.engine.making import captured, of_type, run, spec
from tests.unit.engine.test_kernel import tensors
from tests.unit.engine.test_watching import by_numpy, probe


@pytest.fixture(autouse=True)
def native() -> None:
    if kernel.LOADED is None:
        absent("the kernel (python -m engine.native)")


def both(x: torch.Tensor, isa: int = -1) -> tuple[list[float], list[float]]:
    assert kernel.LOADED is not None
    return kernel.LOADED.rectified(x, isa=isa)


def by_isa(x: torch.Tensor, isa: int) -> list[float]:
    assert kernel.LOADED is not None
    return kernel.LOADED([x], isa=isa)[0]


@given(tensors())
@settings(max_examples=400, deadline=None)
def test_one_pass_gives_the_bits_of_two(x: torch.Tensor):
    if not kernel.rectifies(x):
        return
    for isa in range(len(ISAS)):
        own, rectified = both(x, isa)
        np.testing.assert_array_equal(own, by_isa(x, isa))
        np.testing.assert_array_equal(rectified, by_isa(torch.relu(x), isa))


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_tensors_are_shared_by_threads_and_agree_with_numpy(
    dtype: torch.dtype, offset: float
):
    x = (torch.randn(3, 70_001, generator=torch.Generator().manual_seed(1)) + offset).to(dtype)
    own, rectified = both(x)
    assert own == pytest.approx(by_numpy(x), rel=1e-6)
    assert rectified == pytest.approx(by_numpy(torch.relu(x)), rel=1e-6, abs=1e-300)
    np.testing.assert_array_equal(rectified, summarize(torch.relu(x)))


def test_of_what_is_nowhere_positive_all_is_zero():
    own, rectified = both(-torch.rand(64, generator=torch.Generator().manual_seed(1)) - 0.01)
    assert own[3] < 0
    assert rectified == [0, 0, 0, 0, 0, 0, 1, 0, 0]


def test_what_may_take_two_passes_or_lies_apart_is_not_taken():
    assert not kernel.rectifies(torch.zeros(4, dtype=torch.float64))
    assert not kernel.rectifies(torch.zeros(4, dtype=torch.int64))
    assert not kernel.rectifies(torch.zeros(4, 4)[:, ::2])
    assert kernel.rectifies(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))


def watches() -> Watches:
    return Watches([Watch(0, Probe(layers=("*",), kinds=("output",), every=1))])


class Steps:
    """A layer's output and a ReLU that reads it, seen step by step."""

    def __init__(self) -> None:
        self.rectified = Rectified()
        self.own = self.of_relu = watches()

    def see(self, x: torch.Tensor, after: torch.Tensor, source: torch.Tensor | None = None) -> list:
        """The figures of both; ``after`` is what is shown as the ReLU's output."""
        first = self.rectified.summarize("conv", x, self.own, None)
        source = x if source is None else source
        return [first, self.rectified.summarize("relu", after, self.of_relu, source)]


def test_from_the_second_step_on_the_relus_output_is_not_read():
    x, other, steps = torch.randn(50), torch.full((50,), 7.0), Steps()
    expected = [summarize(x), summarize(torch.relu(x))]
    assert steps.see(x, torch.relu(x)) == expected
    assert steps.see(x, other) == expected  # the other one is not looked at: it is known
    y = torch.randn(50)
    assert steps.see(y, other) == [summarize(y), summarize(torch.relu(y))]


def test_an_output_that_was_written_to_in_between_is_counted_again():
    x, steps = torch.randn(50), Steps()
    steps.see(x, torch.relu(x))
    first = steps.rectified.summarize("conv", x, steps.own, None)
    assert first == summarize(x)
    x.mul_(-1)
    after = torch.relu(x)
    assert steps.rectified.summarize("relu", after, steps.of_relu, x) == summarize(after)


def test_another_tensor_than_the_one_seen_last_is_counted_for_itself():
    x, y, steps = torch.randn(50), torch.randn(50), Steps()
    steps.see(x, torch.relu(x))
    assert steps.see(x, torch.relu(y), source=y) == [summarize(x), summarize(torch.relu(y))]
    other = torch.full((50,), 7.0)
    assert steps.see(x, other)[1] == summarize(other)  # and what was learned is forgotten


def test_nothing_is_counted_ahead_for_other_probes_than_the_layers():
    x, other, steps = torch.randn(50), torch.full((50,), 7.0), Steps()
    steps.of_relu = watches()
    assert steps.own != steps.of_relu
    steps.see(x, torch.relu(x))
    assert steps.see(x, other)[1] == summarize(other)


def test_a_relu_that_overwrites_what_it_reads_is_none_and_neither_is_another_kind():
    assert is_rectifier(torch.nn.ReLU())
    assert not is_rectifier(torch.nn.ReLU(inplace=True))
    assert not is_rectifier(torch.nn.LeakyReLU())
    assert not is_rectifier(torch.nn.ReLU6())


def network(inplace: bool) -> dict:
    conv = {"out_channels": 3, "kernel_size": 3, "padding": 1}
    relu = {"type": "ReLU", "args": {"inplace": inplace}}
    return {
        "layers": [
            {"name": "conv1", "type": "Conv2d", "args": conv},
            {"name": "relu1", **relu},
            {"name": "conv2", "type": "Conv2d", "args": conv},
            {"name": "relu2", **relu},
            {"name": "again", "type": "ReLU"},
            {"name": "flat", "type": "Flatten"},
            {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
        ]
    }  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True])
def test_a_jobs_statistics_are_those_of_what_it_captures(digits, tmp_path, inplace: bool):
    job = spec(network=network(inplace), probes=[probe(kinds=["output", "output_grad"])])
    records = run(tmp_path, job, digits)
    captures = captured(records, tmp_path)
    for record in of_type(records, "stats"):
        for layer, kind, *figures in record["rows"]:
            tensor = captures.pop((record["step"], layer, kind))
            expected = summarize(tensor)
            np.testing.assert_array_equal(figures, expected, err_msg=f"{layer} {kind}")
            assert not math.isnan(figures[0])
    assert not captures
