"""The group of processes that train one job together, on torch.distributed.

Process 0 decides and reports. What the processes exchange besides gradients is small: sums of
losses and counts, and JSON documents. Nothing is pickled. A group of one exchanges nothing.

Every method but ``send``, ``receive``, ``post`` and ``read`` is collective: all processes of the
group call it, in the same order.
"""

import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from engine.core.precision import dtype_name
from engine.distributed.waiting import waiting
from glasshouse import jsonio

_LOOPBACK = ("lo", "lo0")
_HOST = torch.device("cpu")
TIMEOUT = timedelta(hours=24)
"""The longest that a collective waits. The supervisor ends a job that stalls long before."""


@dataclass(frozen=True, slots=True)
class Group:
    """One process's view of the group."""

    rank: int = 0
    """The number of this process, from 0."""
    size: int = 1
    """The number of processes."""
    num_peers: int = 1
    """How many processes, of adjacent ranks, have the same rows: those that divide layers, or the
    stages of a pipeline."""
    is_staged: bool = False
    """Whether each process has only some of the layers: those of its stages."""
    store: Any = field(default=None, compare=False, repr=False)
    """torch's store of the group, if it has several processes."""

    @property
    def share(self) -> int:
        """Which share of the rows this process has, from 0."""
        return self.rank // self.num_peers

    @property
    def num_shares(self) -> int:
        """The number of shares into which rows are divided."""
        return self.size // self.num_peers

    @property
    def counts(self) -> bool:
        """Whether this process stands for its rows: one of those with the same rows does.

        In a pipeline it is the one with the last stage, which has the losses.
        """
        return self.rank % self.num_peers == self._place_that_counts

    @property
    def _place_that_counts(self) -> int:
        return self.num_peers - 1 if self.is_staged else 0

    @property
    def place(self) -> int:
        """The number of this process among those with the same rows, from 0."""
        return self.rank % self.num_peers

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

    def sum_of_rows(self, tensor: Tensor) -> Tensor:
        """Return the sum over the rows of all processes of what each has computed of its rows."""
        return self.sum(self.counted(tensor))

    def counted(self, tensor: Tensor) -> Tensor:
        """Return what this process contributes to a sum over rows: 0 if another stands for them."""
        return tensor if self.counts else torch.zeros_like(tensor)

    def over_stages(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the stages of a pipeline; elsewhere the tensor."""
        if not self.is_staged:
            return tensor
        return self.sum(tensor.clone() if self.share == 0 else torch.zeros_like(tensor))

    def norm_over_stages(self, norm: Tensor) -> Tensor:
        """Return the 2-norm of all values, of the norm of those of this process's stages."""
        if not self.is_staged:
            return norm
        return self.over_stages(norm.double().square()).sqrt().to(norm.dtype)

    def same_rows(self) -> Any:
        """Return torch's group of the processes with the same rows; None: all processes.

        The first call is collective.
        """
        return None if self.num_shares == 1 else _with_same_rows(self.size, self.num_peers)

    def other_rows(self) -> Any:
        """Return torch's group of the processes with all shares of the rows; None: all processes.

        The first call is collective.
        """
        return None if self.num_peers == 1 else _with_other_rows(self.size, self.num_peers)

    def same_parameters(self) -> Any:
        """Return torch's group of the processes that may have parts of the same parameters.

        None: all processes, or this one only. The first call is collective.
        """
        return self.other_rows() if self.is_staged and self.num_shares > 1 else None

    @property
    def first_alike(self) -> int:
        """The rank of the first process with the same layers."""
        return self.place if self.is_staged else 0

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to replace a tensor by its sum; the function waits for it and returns it."""
        work = None if self.is_alone else dist.all_reduce(tensor, async_op=True)

        def wait() -> Tensor:
            if work is not None:
                work.wait()
            return tensor

        return wait

    def broadcast(self, document: Any, source: int = 0) -> Any:
        """Return the JSON document of process ``source``; the others pass anything."""
        if self.is_alone:
            return document
        is_own = self.rank == source
        data = _encoded(document) if is_own else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        dist.broadcast(size, source)
        if not is_own:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, source)
        return _decoded(data)

    def send(self, document: Any, to: int) -> None:
        """Send a JSON document to one process, which calls `receive`."""
        data = _encoded(document)
        dist.send(torch.tensor([data.numel()]), to)
        dist.send(data, to)

    def receive(self, sender: int) -> Any:
        """Return the JSON document that one process sends."""
        size = torch.zeros(1, dtype=torch.int64)
        with waiting.receiving(sender):
            dist.recv(size, sender)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, sender)
        return _decoded(data)

    def post(self, name: str, text: str) -> None:
        """Let the other processes read a text under a name, once. For any thread."""
        self.store.set(f"post/{name}", text)

    def read(self, name: str, sender: int) -> str:
        """Wait until process ``sender`` has posted a text, and return it. For any thread."""
        with waiting.receiving(sender):
            return self.store.get(f"post/{name}").decode()

    def of_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the first process that stands for its rows, on the host.

        The others pass anything.
        """
        source = self._place_that_counts
        own = {name: item.detach().cpu().contiguous() for name, item in tensors.items()}
        kinds = {name: [[*item.shape], dtype_name(item.dtype)] for name, item in own.items()}
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in self.broadcast(kinds, source).items():
            found[name] = (
                own[name]
                if self.rank == source
                else torch.empty(shape, dtype=getattr(torch, dtype))
            )
            dist.broadcast(found[name], source)
        return found

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

    def is_alike(self, label: str, number: int) -> bool:
        """Whether all processes have passed the same text and the same number."""
        if self.is_alone:
            return True
        own = torch.tensor([number, crc32(label.encode())])
        all_own = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(all_own, own)
        return all(torch.equal(item, own) for item in all_own)

    def start_gather(self, numbers: Tensor) -> "Gathering":
        """Start to send a tensor on the host, of the same shape in all processes, to process 0."""
        if self.is_alone or not numbers.numel():
            return Gathering([numbers] * self.size if self.is_first else [], None)
        found = [torch.empty_like(numbers) for _ in range(self.size)] if self.is_first else None
        work = dist.gather(numbers, found, 0, async_op=True)
        return Gathering(found or [], work, numbers)

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of process 0; in a pipeline, of the first with the stage."""
        if self.is_alone or (self.is_staged and self.num_shares == 1):
            return
        source, group = (self.place, self.other_rows()) if self.is_staged else (0, None)
        for tensor in tensors:
            dist.broadcast(tensor, source, group=group)

    def gather_rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each tensor with the rows of all processes, by rank; empty except in process 0.

        Of processes with the same rows, the first one's are taken. A name that a process does not
        have, or whose shapes differ in more than axis 0, is not returned.
        """
        return {name: torch.cat(parts) for name, parts in self.gather_parts(tensors).items()}

    def gather_parts(
        self, tensors: Mapping[str, Tensor], apart: Collection[str] = ()
    ) -> dict[str, list[Tensor]]:
        """Return the tensors of all processes, by name and rank; empty except in process 0.

        Of processes with the same rows, the first one's are taken. A name that a process does not
        have, or whose shapes differ in more than axis 0, is not returned. Those in ``apart``, the
        same in all processes, are taken of every process and may have any shapes. In a pipeline, a
        name is that of the stage that has it.
        """
        if self.is_alone:
            return {name: [tensor] for name, tensor in tensors.items()}
        kinds = self.gather(
            {name: [[*item.shape], dtype_name(item.dtype)] for name, item in tensors.items()}
        )
        senders = self.broadcast(self._senders(kinds, apart))
        found: dict[str, list[Tensor]] = {}
        for name, ranks in senders.items():
            if not self.is_first:
                if self.rank in ranks:
                    dist.send(tensors[name].detach().contiguous().cpu(), 0)
                continue
            rows: list[Tensor] = []
            for rank in ranks:
                if rank == 0:
                    rows.append(tensors[name].detach().contiguous().cpu())
                    continue
                shape, dtype = kinds[rank][name]
                part = torch.empty(shape, dtype=getattr(torch, dtype))
                with waiting.receiving(rank):
                    dist.recv(part, rank)
                rows.append(part)
            found[name] = rows
        return found

    def _senders(
        self, kinds: Sequence[Mapping[str, Any]], apart: Collection[str]
    ) -> dict[str, list[int]]:
        """Return the ranks whose tensors are taken, by name.

        ``kinds``: by rank, the shape and the dtype of each tensor.
        """
        if not kinds:  # not process 0
            return {}
        if not self.is_staged:
            shapes = [{name: kind[0] for name, kind in own.items()} for own in kinds]
            every, first = [*range(self.size)], [*range(0, self.size, self.num_peers)]
            return {name: every if name in apart else first for name in _common(shapes, apart)}
        found: dict[str, list[int]] = {}
        for place in range(self.num_peers):  # those of one stage have the same layers
            ranks = range(place, self.size, self.num_peers)
            for name in kinds[place]:
                there = [rank for rank in ranks if name in kinds[rank]]
                tails = {tuple(kinds[rank][name][0][1:]) for rank in there}
                if name not in found and (len(tails) == 1 or name in apart):
                    found[name] = there
        return found


class Gathering:
    """Tensors of all processes on their way to process 0. It looks like a ``torch.Event``."""

    def __init__(self, found: list[Tensor], work: Any, sent: Tensor | None = None) -> None:
        self._found = found
        self._work = work
        self._sent = sent  # must live until it has been sent

    def query(self) -> bool:
        """Whether all have arrived."""
        return self._work is None or self._work.is_completed()

    def synchronize(self) -> None:
        """Wait until all have arrived."""
        if self._work is not None:
            self._work.wait()

    def wait(self) -> list[Tensor]:
        """Wait; return the tensors by rank, empty except in process 0."""
        self.synchronize()
        return self._found


ALONE = Group()
"""The group of a job with one process."""


def connect(
    rank: int,
    size: int,
    store: Path,
    timeout: timedelta = TIMEOUT,
    device: torch.device = _HOST,
) -> Group:
    """Join the group; ``store``: a new file that all processes of this host can open.

    CPU tensors travel over gloo, those of ``device`` over the backend that torch has for it. The
    process leaves the group when it exits. ``timeout``: the longest that a collective waits.
    """
    if size == 1:
        return ALONE
    loopback = [name for _, name in socket.if_nameindex() if name in _LOOPBACK]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if loopback:
            os.environ.setdefault(variable, loopback[0])
    with waiting.joining():
        shared = dist.FileStore(str(store), size)  # pyright: ignore[reportPrivateImportUsage]
        shared.set_timeout(timeout)
        dist.init_process_group(
            backends(device), store=shared, rank=rank, world_size=size, timeout=timeout
        )
    return Group(rank, size, store=shared)


def backends(device: torch.device) -> str:
    """Return the backends for messages of the host and of a device: ``cpu:gloo,cuda:nccl``.

    If none is named, torch creates that of the accelerator only (``BackendConfig``).
    """
    if device.type == "cpu":
        return dist.Backend.GLOO
    own = dist.get_default_backend_for_device(device)
    return f"cpu:{dist.Backend.GLOO},{device.type}:{own}"


@cache
def _with_same_rows(size: int, num_peers: int) -> Any:
    ranks = [[*range(first, first + num_peers)] for first in range(0, size, num_peers)]
    return dist.new_subgroups_by_enumeration(ranks)[0]


@cache
def _with_other_rows(size: int, num_peers: int) -> Any:
    ranks = [[*range(first, size, num_peers)] for first in range(num_peers)]
    return dist.new_subgroups_by_enumeration(ranks)[0]


def _common(
    shapes: Sequence[Mapping[str, Sequence[int]]], apart: Collection[str] = ()
) -> list[str]:
    """Return the names that all processes have, with shapes that differ in axis 0 only.

    Those in ``apart`` may have any shapes.
    """
    first, *others = shapes or [{}]
    return [
        name
        for name, shape in first.items()
        if shape
        and all(
            name in other and (other[name][1:] == shape[1:] or name in apart) for other in others
        )
    ]


def _encoded(document: Any) -> Tensor:
    return torch.frombuffer(bytearray(jsonio.dumps(document).encode()), dtype=torch.uint8)


def _decoded(data: Tensor) -> Any:
    return jsonio.loads(data.numpy().tobytes())
