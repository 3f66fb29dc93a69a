"""The values of test messages, and their comparison with what arrived.

Each value depends on its position, on the process that sends it and on the round, so that a value
that is missing, misplaced, stale, or from the wrong process is found. They are small whole numbers,
whose sums over 256 processes are exact in float32: every correct result has the same bits.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

PERIOD = 251
"""The values repeat after so many positions: a prime number, no multiple of a chunk's size."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How a received tensor differs from the expected one."""

    num_wrong: int
    num_values: int
    first: int
    """The position of the first wrong value."""
    expected: float
    received: float

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-like data."""
        return asdict(self)


def sent(rank: int, round_: int, count: int, device: torch.device) -> Tensor:
    """Return the ``count`` values that a process sends in a round: float32 of [count]."""
    return _repeated(_period(rank, round_), count, device)


def summed(ranks: Iterable[int], round_: int, count: int, device: torch.device) -> Tensor:
    """Return the sum of what several processes send: float32 of [count]."""
    total = torch.stack([_period(rank, round_) for rank in ranks]).sum(dim=0)
    return _repeated(total, count, device)


def compare(received: Tensor, expected: Tensor) -> Mismatch | None:
    """Compare two float32 tensors of the same shape bit by bit; None: they are equal."""
    differs = received.view(torch.int32) != expected.view(torch.int32)
    num_wrong = int(differs.sum())
    if not num_wrong:
        return None
    first = int(differs.to(torch.uint8).argmax())
    return Mismatch(
        num_wrong, differs.numel(), first, float(expected[first]), float(received[first])
    )


def _period(rank: int, round_: int) -> Tensor:
    positions = torch.arange(PERIOD) + 7 * rank + 13 * round_
    return (positions % PERIOD + rank + 1).to(torch.float32)


def _repeated(period: Tensor, count: int, device: torch.device) -> Tensor:
    return period.to(device).repeat(-(-count // PERIOD))[:count].contiguous()
