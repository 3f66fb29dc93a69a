"""The operations that are measured: what each process passes, runs and expects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.diagnose import values
from engine.diagnose.bandwidth import ALL_GATHER, ALL_REDUCE, BROADCAST, SEND_RECV
from engine.distributed.group import Group

VALUE_BYTES = 4
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """One run of an operation in one process."""

    run: Callable[[], object]
    received: Tensor
    """Filled by ``run``: float32 of [values]."""
    expected: Tensor


def num_values(op: str, size_bytes: int, processes: int) -> int:
    """Return the number of values of a message; an all-gather's is a multiple of the processes."""
    count = -(-size_bytes // VALUE_BYTES)
    return -(-count // processes) * processes if op == ALL_GATHER else count


def message(
    op: str, group: Group, size_bytes: int, round_: int, device: torch.device, pair: Pair
) -> Message:
    """Create the buffers of an operation. ``pair``: the processes of a point-to-point message.

    Raises:
        KeyError: the operation is not known.
    """
    count = num_values(op, size_bytes, group.size)
    if op == SEND_RECV:
        return _sent_back(group, count, round_, device, pair)
    make = {ALL_REDUCE: _all_reduce, ALL_GATHER: _all_gather, BROADCAST: _broadcast}[op]
    return make(group, count, round_, device)


def _all_reduce(group: Group, count: int, round_: int, device: torch.device) -> Message:
    buffer = values.sent(group.rank, round_, count, device)
    expected = values.summed(range(group.size), round_, count, device)
    return Message(lambda: dist.all_reduce(buffer), buffer, expected)


def _all_gather(group: Group, count: int, round_: int, device: torch.device) -> Message:
    each = count // group.size
    own = values.sent(group.rank, round_, each, device)
    received = torch.zeros(count, device=device)
    parts = [values.sent(rank, round_, each, device) for rank in range(group.size)]
    return Message(lambda: _gather_into(received, own), received, torch.cat(parts))


def _broadcast(group: Group, count: int, round_: int, device: torch.device) -> Message:
    expected = values.sent(0, round_, count, device)
    buffer = expected.clone() if group.is_first else torch.zeros_like(expected)
    return Message(lambda: dist.broadcast(buffer, 0), buffer, expected)


def _sent_back(group: Group, count: int, round_: int, device: torch.device, pair: Pair) -> Message:
    """Return a message from the first process of a pair to the second, and one back."""
    first, second = pair
    other = second if group.rank == first else first
    own = values.sent(group.rank, round_, count, device)
    received = torch.zeros(count, device=device)

    def run() -> None:
        if group.rank == first:
            dist.send(own, other)
            dist.recv(received, other)
        else:
            dist.recv(received, other)
            dist.send(own, other)

    return Message(run, received, values.sent(other, round_, count, device))


def _gather_into(received: Tensor, own: Tensor) -> None:
    newer: Any = getattr(dist, "all_gather_single", None)  # torch 2.11 does not have it
    if newer is None:
        newer = dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
    newer(received, own)
