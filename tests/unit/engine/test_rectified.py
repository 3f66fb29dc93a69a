"""A ReLU's output counted in the pass over what it reads: the very figures of reading it."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.native.compiling import ISAS
from engine.probes.statistics import native_kernel
from engine.probes.statistics.summarize import summarize
from engine.probes.watched.probe import ActiveProbe, ActiveProbes
from engine.probes.watched_relu import WatchedReLU, is_rectifier
from glasshouse.spec import Probe
from tests.conftest import absent
from tests.unit.engine.making import captured, of_type, run, spec
from tests.unit.engine.test_kernel import tensors
from tests.unit.engine.test_watching import by_numpy, probe


@pytest.fixture(autouse=True)
def native() -> None:
    if native_kernel.LOADED is None:
        absent("the kernel (python -m engine.native)")


def both(x: torch.Tensor, isa: int = -1) -> tuple[list[float], list[float]]:
    """The figures of a tensor and of its ReLU, whose bits are torch's."""
    assert native_kernel.LOADED is not None
    out, own, rectified = native_kernel.LOADED.rectify(x, isa=isa)
    same_bits(out, torch.relu(x))
    return own, rectified


def back(x: torch.Tensor, gradient: torch.Tensor, isa: int = -1) -> tuple[list[float], list[float]]:
    """The figures of a gradient and of what a ReLU of ``x`` lets through: bits are torch's."""
    assert native_kernel.LOADED is not None
    gate = torch.relu(x)
    out, own, gated = native_kernel.LOADED.rectify(gradient, gate, isa=isa)
    same_bits(out, torch.ops.aten.threshold_backward(gradient, gate, 0))
    return own, gated


def same_bits(x: torch.Tensor, y: torch.Tensor) -> None:
    """But for the payload of a NaN."""
    assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
    whole = {2: torch.int16, 4: torch.int32}[x.element_size()]
    assert torch.equal(x.isnan(), y.isnan())
    assert torch.equal(x.nan_to_num().view(whole), y.nan_to_num().view(whole))


def by_isa(x: torch.Tensor, isa: int) -> list[float]:
    assert native_kernel.LOADED is not None
    return native_kernel.LOADED([x], isa=isa)[0]


@given(tensors())
@settings(max_examples=400, deadline=None)
def test_one_pass_gives_the_bits_of_two(x: torch.Tensor):
    if not native_kernel.rectifies(x):
        return
    for isa in range(len(ISAS)):
        own, rectified = both(x, isa)
        np.testing.assert_array_equal(own, by_isa(x, isa))
        np.testing.assert_array_equal(rectified, by_isa(torch.relu(x), isa))
        gradient = x.flatten().flip(0).contiguous().view(x.shape)
        if not native_kernel.rectifies(x) or gradient.stride() != torch.relu(x).stride():
            continue
        own, gated = back(x, gradient, isa)
        np.testing.assert_array_equal(own, by_isa(gradient, isa))
        through = torch.ops.aten.threshold_backward(gradient, torch.relu(x), 0)
        np.testing.assert_array_equal(gated, by_isa(through, isa))


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
    assert not native_kernel.rectifies(torch.zeros(4, dtype=torch.float64))
    assert not native_kernel.rectifies(torch.zeros(4, dtype=torch.int64))
    assert not native_kernel.rectifies(torch.zeros(4, 4)[:, ::2])
    assert native_kernel.rectifies(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))


def watches() -> ActiveProbes:
    return ActiveProbes([ActiveProbe(0, Probe(layers=("*",), kinds=("output",), every=1))])


class Steps:
    """A layer's output and a ReLU that reads it, seen step by step."""

    def __init__(self) -> None:
        self.rectified = WatchedReLU()
        self.own = self.of_relu = watches()

    def see(self, x: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        """What the ReLU makes of it; the figures of both are right."""
        source = x if source is None else source
        assert self.rectified.summarize("conv", x, self.own, None) == summarize(x)
        after = self.rectified.relu(source)
        same_bits(after, torch.relu(source))
        found = self.rectified.summarize("relu", after, self.of_relu, source)
        assert found == summarize(torch.relu(source))
        return after


def is_computed_ahead(after: torch.Tensor) -> bool:
    return hasattr(after.grad_fn, "rectifies")


def values(num: int = 50) -> torch.Tensor:
    return torch.randn(num, requires_grad=True) * 1


def test_from_the_second_step_on_the_relu_is_computed_where_it_is_counted():
    steps = Steps()
    assert not is_computed_ahead(steps.see(values()))
    assert is_computed_ahead(steps.see(values()))
    assert is_computed_ahead(steps.see(values()))


def test_an_output_that_was_written_to_in_between_is_counted_again():
    steps = Steps()
    steps.see(values())
    x = values()
    steps.rectified.summarize("conv", x, steps.own, None)
    with torch.no_grad():
        x.mul_(-1)
    after = steps.rectified.relu(x)
    same_bits(after, torch.relu(x))
    assert not is_computed_ahead(after)
    assert steps.rectified.summarize("relu", after, steps.of_relu, x) == summarize(after)


def test_another_tensor_than_the_one_seen_last_is_counted_for_itself():
    steps = Steps()
    steps.see(values())
    assert not is_computed_ahead(steps.see(values(), source=values()))
    assert not is_computed_ahead(steps.see(values()))  # what was learned is forgotten


def test_nothing_is_computed_ahead_for_other_probes_than_the_layers():
    steps = Steps()
    steps.of_relu = watches()
    assert steps.own != steps.of_relu
    steps.see(values())
    assert not is_computed_ahead(steps.see(values()))


def gradients(x: torch.Tensor, weight: torch.Tensor, clip: bool, steps: Steps | None) -> list:
    """The gradient of the ReLU's output, as it came, and of what it reads; their figures."""
    rectified = WatchedReLU() if steps is None else steps.rectified
    after = torch.relu(x) if steps is None else steps.see(x)
    found: list[tuple[torch.Tensor, list[float]]] = []

    def seen(node: object) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            figures = rectified.summarize_gradient(gradient, watched, node)
            found.append((gradient.clone(), list(figures)))

        return hook

    watched = watches() if steps is None else steps.own
    for name in ("conv", "relu"):
        rectified.expect(name, watched)
    x.register_hook(seen(None))
    after.register_hook(seen(after.grad_fn))
    if clip:
        after.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    (after * weight).sum().backward()
    rectified.forget()
    return found


@pytest.mark.parametrize("clip", [False, True])
def test_the_way_back_gives_the_gradients_and_figures_of_torchs_relu(clip: bool):
    steps, weight = Steps(), torch.randn(20_011)
    weight[3], weight[4] = math.nan, math.inf
    for _ in range(3):
        x = values(20_011)
        again = x.detach().clone().requires_grad_()
        expected = gradients(again, weight, clip, None)
        found = gradients(x, weight, clip, steps)
        assert len(found) == len(expected) == 2
        for (own, own_figures), (by_torch, figures) in zip(found, expected, strict=True):
            same_bits(own, by_torch)
            assert own_figures == figures == summarize(own)


def test_what_is_saved_is_asked_for_once(monkeypatch: pytest.MonkeyPatch):
    """As torch.utils.checkpoint has it, which computes it again."""
    asked: list[int] = []
    steps, weight = Steps(), torch.randn(50)
    steps.see(values())
    for clip in (False, True):
        asked.clear()
        x = values()

        def unpacked(item: torch.Tensor) -> torch.Tensor:
            if item.numel() == 50 and item.grad_fn is None:
                asked.append(1)
            return item

        with torch.autograd.graph.saved_tensors_hooks(lambda item: item, unpacked):
            found = gradients(x, weight, clip, steps)
        assert len(found) == 2
        assert len(asked) <= 2  # of the product, and of the ReLU


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
