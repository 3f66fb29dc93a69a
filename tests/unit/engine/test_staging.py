"""Rows on their way to a device: the same rows, in memory of their own."""

import pytest
import torch

from engine.data import staging
from engine.data.staging import gathered

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("rows", [slice(2, 5), slice(0, 0), torch.tensor([4, 0, 0, 7])])
def test_rows_are_copied(rows: torch.Tensor | slice, dtype: torch.dtype):
    values = torch.arange(24).reshape(8, 3).to(dtype)
    found = gathered(values, rows, CPU)
    assert torch.equal(found, values[rows])
    assert found.dtype == dtype
    found.zero_()
    assert values.sum() == 276


@pytest.mark.parametrize("rows", [slice(2, 5), torch.tensor([4, 0, 0, 7])])
def test_what_is_gathered_into_pinned_memory_is_the_same(
    rows: torch.Tensor | slice, monkeypatch: pytest.MonkeyPatch
):
    """Without CUDA nothing can be pinned: here the memory is the usual one."""
    real = torch.empty

    def empty(*args: object, pin_memory: bool, **more: object) -> torch.Tensor:
        assert pin_memory
        return real(*args, **more)  # pyright: ignore

    values = torch.randn(8, 3, 2)
    with monkeypatch.context() as patch:
        patch.setattr(staging.torch, "empty", empty)
        found = staging._pinned(values, rows)  # pyright: ignore[reportPrivateUsage]
    assert torch.equal(found, values[rows])
