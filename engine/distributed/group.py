"""The group of processes that train one job together, on torch.distributed.

Process 0 decides and reports. What the processes exchange besides gradients is small: sums of
losses and counts, and JSON documents. Nothing is pickled. A group of one exchanges nothing.

Every method is collective: all processes of the group call it, in the same order.
"""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from glasshouse import jsonio

_LOOPBACK = ("lo", "lo0")
TIMEOUT = timedelta(hours=24)
"""The longest that a collective waits. The supervisor ends a job that stalls long before."""


@dataclass(frozen=True, slots=True)
class Group:
    """One process's view of the group."""

    rank: int = 0
    """The number of this process, from 0."""
    size: int = 1
    """The number of processes."""

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this process decides and reports."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the processes, and return it."""
        if not self.is_alone:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, document: Any) -> Any:
        """Return the JSON document of process 0; the others pass anything."""
        if self.is_alone:
            return document
        data = _encoded(document) if self.is_first else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        dist.broadcast(size, 0)
        if not self.is_first:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return _decoded(data)

    def gather(self, document: Any) -> list[Any]:
        """Return the JSON documents of all processes, by rank; empty except in process 0."""
        if self.is_alone:
            return [document]
        own = _encoded(document)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([own.numel()]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        if not self.is_first:
            dist.gather(padded, None, 0)
            return []
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.gather(padded, found, 0)
        return [_decoded(data[: int(size)]) for data, size in zip(found, sizes, strict=True)]

    def gather_alike(self, label: str, numbers: Tensor) -> list[Tensor] | None:
        """Return the tensors of all processes, by rank; empty except in process 0.

        None in all processes if their labels or numbers of values differ.
        """
        if self.is_alone:
            return [numbers]
        own = torch.tensor([numbers.numel(), crc32(label.encode())])
        all_own = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(all_own, own)
        if any(not torch.equal(item, own) for item in all_own):
            return None
        if not numbers.numel():
            return [numbers] * self.size if self.is_first else []
        found = [torch.empty_like(numbers) for _ in range(self.size)] if self.is_first else None
        dist.gather(numbers, found, 0)
        return found or []

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of process 0."""
        if not self.is_alone:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def gather_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each tensor with the rows of all processes, by rank; empty except in process 0.

        A name that a process does not have, or whose shapes differ in more than axis 0, is left
        out.
        """
        if self.is_alone:
            return dict(tensors)
        shapes = self.gather({name: [*item.shape] for name, item in tensors.items()})
        wanted = self.broadcast([*_common(shapes)])
        found: dict[str, Tensor] = {}
        for name in wanted:
            own = tensors[name].detach().contiguous()
            if not self.is_first:
                dist.send(own.cpu(), 0)
                continue
            rows = [own.cpu()]
            for rank in range(1, self.size):
                part = torch.empty(shapes[rank][name], dtype=own.dtype)
                dist.recv(part, rank)
                rows.append(part)
            found[name] = torch.cat(rows)
        return found


ALONE = Group()
"""The group of a job with one process."""


def connect(rank: int, size: int, store: Path) -> Group:
    """Join the group; ``store``: a new file that all processes of this host can open.

    CPU tensors travel over gloo, those of accelerators over the backend that torch has for them.
    The process leaves the group when it exits.
    """
    if size == 1:
        return ALONE
    loopback = [name for _, name in socket.if_nameindex() if name in _LOOPBACK]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if loopback:
            os.environ.setdefault(variable, loopback[0])
    dist.init_process_group(
        init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    return Group(rank, size)


def _common(shapes: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """Return the names that all processes have, with shapes that differ in axis 0 only."""
    first, *others = shapes or [{}]
    return [
        name
        for name, shape in first.items()
        if shape and all(name in other and other[name][1:] == shape[1:] for other in others)
    ]


def _encoded(document: Any) -> Tensor:
    return torch.frombuffer(bytearray(jsonio.dumps(document).encode()), dtype=torch.uint8)


def _decoded(data: Tensor) -> Any:
    return jsonio.loads(data.numpy().tobytes())
