"""A field's values in memory: rows of equal size, or sequences that are padded in batches.

Values stay on the device that batches are created on. Starts and lengths of sequences stay in host
memory, so the width of a batch is known without waiting for a device.

Rows are copied to CUDA through pinned memory, so that no copy blocks: torch copies asynchronously
only from there. They are gathered directly into it, which needs no second copy on the host. torch's
allocator of pinned memory keeps a block until the device has read it.

Shape suffixes: B = rows of a batch, T = steps of its longest row, N = rows of the split, S = the
steps of all rows together.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from engine.core.device import is_accelerator
from engine.data.augmentation.augmenting import Change


@dataclass(frozen=True)
class LoadedField:
    """A field's values in memory, as stored, and how to create a batch from them."""

    values: Tensor
    divide_by: float | None = None
    scale: float | None = None
    is_integer: bool = False
    normal: tuple[Tensor, Tensor] | None = None
    """Shift and divisor of a batch, if the values are not normalized beforehand."""

    def to(self, device: torch.device) -> "LoadedField":
        """Return a copy with the values on a device."""
        return replace(self, values=self.values.to(device))

    def ready(self, device: torch.device) -> "LoadedField":
        """Return a copy whose shift and divisor are on a device."""
        if self.normal is None:
            return self
        shift, divisor = self.normal
        return replace(self, normal=(shift.to(device), divisor.to(device)))

    def taken(self, rows_B: Tensor) -> "LoadedField":
        """Return some of the rows, in the given order."""
        return replace(self, values=self.values.index_select(0, rows_B))

    @property
    def nbytes(self) -> int:
        """Bytes to move to a device."""
        return self.values.nbytes

    def batch(
        self, rows_B: Tensor | slice, device: torch.device, change: Change | None = None
    ) -> Tensor:
        """Return the rows as the network takes them, always in newly allocated memory.

        ``change`` is applied before they are normalized.
        """
        stored = gathered(self.values, rows_B, device)
        if self.is_integer:
            return stored
        x = in_units(stored, self.divide_by, self.scale)
        if change is not None:
            x = change(x)
        if self.normal is None:
            return x
        shift, divisor = self.normal
        return x.sub_(shift).div_(divisor)


@dataclass(frozen=True)
class LoadedSequence:
    """A sequence field's rows in memory, as stored, and how to create a batch from them."""

    values: Tensor
    """The concatenated values of all rows, [S] or [S, dim], on the device for batches."""
    starts: Tensor
    """Where each row begins, in host memory."""
    lengths: Tensor
    """In host memory."""
    divide_by: float | None = None
    scale: float | None = None
    is_integer: bool = False
    padding_value: int = 0
    weights: Tensor | None = None
    """For a sparse field: the values of its indices, [S, 1]."""
    around: Tensor | None = None
    """Offsets of a window's steps from its start, on the device of the values; None: consecutive
    steps."""

    def to(self, device: torch.device) -> "LoadedSequence":
        """Return a copy with the values on a device."""
        weights = None if self.weights is None else self.weights.to(device)
        around = None if self.around is None else self.around.to(device)
        return replace(self, values=self.values.to(device), weights=weights, around=around)

    def taken(self, rows_B: Tensor) -> "LoadedSequence":
        """Return some of the rows, in the given order."""
        return replace(self, starts=self.starts[rows_B], lengths=self.lengths[rows_B])

    def ready(self, device: torch.device) -> "LoadedSequence":
        """Return this object: a batch needs nothing but the values."""
        return self

    def cut(self, most: int) -> "LoadedSequence":
        """Return the same rows, truncated to the first ``most`` steps."""
        return replace(self, lengths=self.lengths.clamp(max=most))

    @cached_property
    def longest(self) -> int:
        """The steps of the longest row; 0 without rows."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @property
    def nbytes(self) -> int:
        """Bytes to move to a device."""
        return self.values.nbytes + (0 if self.weights is None else self.weights.nbytes)

    def batch(self, rows_B: Tensor | slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows, padded to the longest of them, and their lengths, in host memory.

        ``rows_B`` are in host memory. The batch has at least one step.
        """
        starts_B, lengths_B = self.starts[rows_B], self.lengths[rows_B]
        num_steps = max(1, int(lengths_B.max()))
        home = self.values.device
        steps_T = torch.arange(num_steps, device=home)
        around_T = steps_T if self.around is None else self.around[:num_steps]
        index_BT = moved(starts_B, home)[:, None] + around_T
        if int(lengths_B.min()) == num_steps:
            return self._read(self._stored(index_BT, device)), lengths_B
        is_padding_BT = steps_T >= moved(lengths_B, home)[:, None]
        x = self._read(self._stored(index_BT.masked_fill_(is_padding_BT, 0), device))
        is_padding_BT = moved(is_padding_BT, device)
        if self.is_integer:
            return x.masked_fill_(is_padding_BT, self.padding_value), lengths_B
        return x.masked_fill_(is_padding_BT[..., None], 0.0), lengths_B

    def _stored(self, index_BT: Tensor, device: torch.device) -> Tensor:
        """Return the values at some indices, on a device, newly allocated; zeros without values.

        To CUDA they are copied in the stored dtype, through pinned memory.
        """
        shape = (*index_BT.shape, *self.values.shape[1:])
        if not len(self.values):
            return torch.zeros(shape, dtype=self.values.dtype, device=device)
        return gathered(self.values, index_BT.reshape(-1), device).reshape(shape)

    def _read(self, stored: Tensor) -> Tensor:
        if self.is_integer:
            return stored.to(torch.int64)
        return in_units(stored, self.divide_by, self.scale)


def in_units(stored: Tensor, divide_by: float | None, scale: float | None) -> Tensor:
    """Convert stored values to float32, in the network's units before they are normalized."""
    x = stored.to(torch.float32)
    if divide_by is not None:
        x.div_(divide_by)
    elif scale is not None:
        x.mul_(scale)
    return x


# --- to the device ---------------------------------------------------------------------------


def gathered(values: Tensor, rows_B: Tensor | slice, device: torch.device) -> Tensor:
    """Return rows of a tensor on a device, in newly allocated memory.

    ``rows_B`` are on the device of ``values``, or a slice with a start and a stop.
    """
    if _is_pinned_for(values, device):
        landed = None
        with contextlib.suppress(RuntimeError):  # no more memory can be pinned: copy without it
            landed = _pinned(values, rows_B)
        if landed is not None:
            return landed.to(device, non_blocking=True)
    if isinstance(rows_B, slice):
        return values[rows_B].clone().to(device)
    return values.index_select(0, rows_B).to(device)


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device. A tensor that is already there is returned as it is."""
    if _is_pinned_for(values, device):
        return gathered(values, slice(0, len(values)), device)
    return values.to(device)


def _is_pinned_for(values: Tensor, device: torch.device) -> bool:
    return values.is_cpu and is_accelerator(device)


def _pinned(values: Tensor, rows_B: Tensor | slice) -> Tensor:
    found = values[rows_B] if isinstance(rows_B, slice) else None
    num_rows = len(rows_B) if found is None else len(found)  # pyright: ignore[reportArgumentType]
    landed = torch.empty((num_rows, *values.shape[1:]), dtype=values.dtype, pin_memory=True)
    if found is not None:
        return landed.copy_(found)
    return torch.index_select(values, 0, rows_B, out=landed)  # pyright: ignore
