"""The native pooling with its ReLU is torch's two operations, bit for bit."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.native import pooling
from engine.native.compiling import ISAS
from tests.conftest import absent

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38, 1.0]


@pytest.fixture(autouse=True)
def _native() -> None:
    if pooling.LOADED is None:
        absent("the native pooling (python -m engine.native)")


def by_torch(pool: nn.MaxPool2d, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """As a user writes it: the ReLU first, channels together or not."""
    x = x.detach().requires_grad_()
    out = pool(torch.relu(x))
    out.backward(grad)
    assert x.grad is not None
    return [out.detach(), x.grad]


def natively(
    pool: nn.MaxPool2d, x: torch.Tensor, grad: torch.Tensor, isa: int
) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    assert pooling.takes(pool, x)
    out = pooling.relu_of_max_pool2d(pool, x, isa=isa)
    assert out.is_contiguous(memory_format=torch.channels_last)
    out.backward(grad)
    assert x.grad is not None
    return [out.detach(), x.grad]


def bits(x: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, with one NaN for all: its payload is nobody's number."""
    x = torch.where(x.isnan(), math.nan, x)
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.MaxPool2d, torch.Tensor, torch.Tensor]:
    window = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    stride = tuple(size + draw(st.integers(0, 2)) for size in window)
    pool = nn.MaxPool2d(window, stride)
    height, width = (size + draw(st.integers(0, 9)) for size in window)
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 40)), height, width)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # few different values: most windows have several that are the largest
    x = torch.randint(-3, 3, shape, generator=generator).to(dtype)
    x = x + draw(st.sampled_from([0.0, 0.5])) * torch.randn(shape, generator=generator).to(dtype)
    flat = x.reshape(-1)
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=6)):
        if len(flat):
            flat[draw(st.integers(0, len(flat) - 1))] = value
    x = flat.reshape(shape).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(pool(x).shape, generator=generator).to(dtype)
    grad[torch.rand(grad.shape, generator=generator) < 0.2] = -0.0
    if draw(st.booleans()):
        grad = grad.contiguous(memory_format=torch.channels_last)
    return pool, x, grad


@given(cases())
@settings(max_examples=400, deadline=None)
def test_outputs_and_gradients_are_torchs_bit_for_bit(case):
    pool, x, grad = case
    expected = [bits(item) for item in by_torch(pool, x, grad)]
    for isa in range(len(ISAS)):
        found = [bits(item) for item in natively(pool, x, grad, isa)]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_no_number_depends_on_the_number_of_threads(dtype, threads):
    pool, before = nn.MaxPool2d(2), torch.get_num_threads()
    x = torch.randn(9, 20, 28, 28).to(dtype).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(9, 20, 14, 14).to(dtype)
    expected = by_torch(pool, x, grad)
    torch.set_num_threads(threads)
    try:
        found = natively(pool, x, grad, -1)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "limit",
    [
        {"OMP_DYNAMIC": "true", "OMP_NUM_THREADS": "64"},
        {"OMP_THREAD_LIMIT": "2"},
        {"OMP_MAX_ACTIVE_LEVELS": "0"},
        {"OMP_THREAD_LIMIT": "3", "OMP_DYNAMIC": "true"},
    ],
    ids=" ".join,
)
@pytest.mark.long
def test_every_row_is_computed_where_openmp_gives_fewer_threads_than_asked(limit):
    """The limits are read when the runtime is loaded: in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env=environ | limit,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"] * 3, done.stdout


LIMITED = """
import torch
from torch import nn
from engine.native import pooling

def wrong(threads):
    pool = nn.MaxPool2d(2)
    found = 0
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.rand(9, 20, 28, 28).contiguous(memory_format=torch.channels_last)
        grad = torch.rand(9, 20, 14, 14)
        junk = [torch.full((9 * 20 * 28 * 28,), -7.0) for _ in range(3)]
        del junk  # what is not written holds this
        torch.set_num_threads(threads)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours, theirs = pooling.relu_of_max_pool2d(pool, a), pool(torch.relu(b))
        ours.backward(grad)
        theirs.backward(grad)
        found += not (torch.equal(ours, theirs) and torch.equal(a.grad, b.grad))
    return found

assert pooling.LOADED is not None
print(*map(wrong, (2, 5, 64)))
"""


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(16),
    ],
    ids=[
        "windows overlap",
        "beyond the image",
        "a part of a window",
        "windows with holes",
        "large",
    ],
)
def test_other_poolings_are_left_to_torch(pool):
    x = torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    assert not pooling.takes(pool, x)


def test_other_images_are_left_to_torch():
    x, pool = torch.randn(2, 3, 8, 8), nn.MaxPool2d(2)
    assert pooling.takes(pool, x.contiguous(memory_format=torch.channels_last))
    assert not pooling.takes(pool, x)
    lasting = x.contiguous(memory_format=torch.channels_last)
    assert not pooling.takes(pool, lasting.double())
    assert not pooling.takes(pool, lasting.half())
    assert not pooling.takes(pool, lasting.to("meta"))
