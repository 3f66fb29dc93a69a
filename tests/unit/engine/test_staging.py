"""Rows on their way to a device: the same rows, in memory of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.data.batches.rows import tensors_of
from engine.data.columns import loaded as staging
from engine.data.columns.loaded import LoadedSequence, gathered, moved
from engine.data.columns.ragged import in_memory

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


class Copies(TorchDispatchMode):
    """Notes each copy to the device that stands for CUDA: where it is from, and whether it waits.

    Nothing can be pinned without CUDA: what is asked to be pinned is noted, and usual memory.
    """

    def __init__(self, patch: pytest.MonkeyPatch, device: torch.device) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.copied: list[tuple[int, bool]] = []
        self._device = device
        real = torch.empty

        def empty(*args: Any, pin_memory: bool, **more: Any) -> torch.Tensor:
            assert pin_memory
            self.pinned.append(real(*args, **more))
            return self.pinned[-1]

        def is_pinned_for(values: torch.Tensor, to: torch.device) -> bool:
            return to == device and values.device == CPU

        patch.setattr(staging.torch, "empty", empty)
        patch.setattr(staging, "_is_pinned_for", is_pinned_for)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        more = dict(kwargs or {})
        is_copy = func is torch.ops.aten._to_copy.default and more.get("device") == self._device
        if is_copy and args[0].device == CPU:
            self.copied.append((args[0].data_ptr(), bool(more.get("non_blocking"))))
        return func(*args, **more)


def rows_of(dtype: str, width: tuple[int, ...] = (), **more: Any) -> LoadedSequence:
    """Three rows, of 2, 4 and 4 steps."""
    values = np.arange(1, 10 * int(np.prod(width, dtype=int)) + 1, dtype=dtype)
    values = values.reshape(10, *width)
    return in_memory(values, np.array([2, 4, 4]), **more)


SEQUENCES = {
    "integers": rows_of("int32", is_integer=True, padding_value=-7),
    "long integers": rows_of("int64", is_integer=True),
    "vectors": rows_of("float32", (3,)),
    "bytes": rows_of("uint8", (3,)),
}


@pytest.mark.parametrize("rows", [[0, 1], [2, 1], [0]], ids=str)
@pytest.mark.parametrize("name", SEQUENCES)
def test_every_copy_of_a_batch_of_sequences_is_from_pinned_memory(
    name: str, rows: list[int], monkeypatch: pytest.MonkeyPatch
):
    """The meta device stands for CUDA; the values that are copied are in their stored dtype."""
    item, device = SEQUENCES[name], torch.device("meta")
    rows_B = torch.tensor(rows)
    with monkeypatch.context() as patch, Copies(patch, device) as copies:
        made, _ = tensors_of({"x": item}, rows_B, rows_B, device)
    assert made["x"].device == made["x.lengths"].device == device
    assert len(copies.copied) >= 2  # values, lengths; and the padding, where there is some
    addresses = {tensor.data_ptr() for tensor in copies.pinned}
    assert [one for one in copies.copied if one[0] not in addresses or not one[1]] == []
    assert copies.pinned[0].dtype == item.values.dtype


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_by_way_of_pinned_memory_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    item = SEQUENCES[name]
    for rows_B in (torch.tensor([0, 1]), torch.tensor([2, 1]), torch.tensor([0, 0])):
        plain, lengths_B = item.batch(rows_B, CPU)
        with monkeypatch.context() as patch, Copies(patch, CPU) as copies:
            found, also_B = item.batch(rows_B, CPU)
        assert copies.pinned
        assert torch.equal(found, plain)
        assert found.dtype == plain.dtype
        assert torch.equal(also_B, lengths_B)
        expected = [
            item.values[int(item.starts[row]) :][: int(item.lengths[row])] for row in rows_B
        ]
        for row, values in zip(found, expected, strict=True):
            assert torch.equal(row[: len(values)], values.to(row.dtype))
            assert row[len(values) :].eq(item.padding_value if item.is_integer else 0).all()


def test_a_batch_of_sequences_has_memory_of_its_own():
    item = SEQUENCES["long integers"]
    before = item.values.clone()
    item.batch(torch.tensor([1, 2]), CPU)[0].zero_()
    assert torch.equal(item.values, before)


def test_what_is_there_already_is_not_copied():
    values = torch.arange(3)
    assert moved(values, CPU) is values
