"""A process group for the simulated accelerator, as NCCL is one for CUDA.

Its messages travel over gloo, from and to copies in host memory. A result is in the device's memory
only after its work was waited for, on the stream that is current then: before, the memory contains
what it contained.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator.simulated import NAME

BACKEND = "simulated_gloo"


class Work(dist._Work):
    """A message on its way, and the memory of the device that its result belongs into."""

    def __init__(
        self,
        inner: Any,
        results: Sequence[tuple[Tensor, Tensor]],
        outputs: Any,
        sent: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self._sent = sent
        self._inner = inner
        self._results = [*results]
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the message, and queue the copies of its result to the device."""
        self._inner.wait()
        for there, here in self._results:
            there.copy_(here)
        self._results, self._sent, self._outputs = (
            [],
            [],
            None,
        )  # torch may keep what was waited for
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def get_future(self) -> Any:
        outputs = self._outputs
        self.wait()
        found = torch.futures.Future()
        found.set_result(outputs)
        return found


def _on_host(value: Any, copies: list[Tensor], results: list[tuple[Tensor, Tensor]] | None) -> Any:
    """Return an argument with its tensors in host memory, which are added to ``copies``.

    ``results``: what receives values, with its copy; None: the argument does not.
    """
    if isinstance(value, (list, tuple)):
        return [_on_host(item, copies, results) for item in value]
    if not isinstance(value, Tensor) or value.device.type != NAME:
        return value
    here = value.detach().cpu().contiguous()
    copies.append(here)
    if results is not None:
        results.append((value.detach(), here))
    return here


def _of_device(method: str, num_outputs: int = 1) -> Callable[..., Any]:
    """Return a method of the group: gloo's, of host memory.

    ``num_outputs``: how many of the first arguments receive values.
    """

    def run(self: "ProcessGroup", *given: Any, opts: Any = None) -> Any:
        given = given if opts is None else (*given, opts)
        results: list[tuple[Tensor, Tensor]] = []
        copies: list[Tensor] = []  # must live until the message has been sent
        mine = [
            _on_host(value, copies, results if number < num_outputs else None)
            for number, value in enumerate(given)
        ]
        if not copies:
            self.check_host()
        work = getattr(self.gloo, method)(*mine)
        if not copies:
            return work
        outputs = given[0] if isinstance(given[0], list) else [given[0]]
        return Work(work, results, outputs, copies)

    return run


def _one_by_one(method: str) -> Callable[..., Any]:
    """Return a method that sends several tensors, of which gloo sends one."""

    def run(self: "ProcessGroup", outputs: Any, inputs: Any, *more: Any) -> Any:
        sends = getattr(self, method)
        works = [sends(*both) for both in zip(outputs, inputs, strict=True)]
        return Several(works, outputs)

    return run


class Several(dist._Work):
    """Several messages on their way."""

    def __init__(self, works: Sequence[Any], outputs: Any) -> None:
        super().__init__()
        self._works = works
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        self.wait()
        found = torch.futures.Future()
        found.set_result(self._outputs)
        return found


class ProcessGroup(dist.ProcessGroup):
    """The group of one process."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._name = self._description = ""
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout)
        # torch asks the backend of a device for what it supports
        self._register_backend(torch.device(NAME), self.BackendType.CUSTOM, self.gloo)

    def check_host(self) -> None:
        """Refuse messages of the host as torch does, unless the group has a backend for them.

        A group in Python takes the place of all of a group's backends.
        """
        if "cpu:" not in dist.distributed_c10d._world.pg_backend_config[self]:
            raise RuntimeError("No backend type associated with device type cpu")

    def getBackendName(self) -> str:  # noqa: N802 (of torch)
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._description = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    allreduce = _of_device("allreduce")
    allreduce_coalesced = _of_device("allreduce_coalesced")
    broadcast = _of_device("broadcast")
    reduce = _of_device("reduce")
    allgather = _of_device("allgather")
    _allgather_base = _of_device("_allgather_base")
    allgather_into_tensor_coalesced = _one_by_one("_allgather_base")
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_gather_single = _allgather_base
    gather = _of_device("gather")
    scatter = _of_device("scatter")
    reduce_scatter = _of_device("reduce_scatter")
    _reduce_scatter_base = _of_device("_reduce_scatter_base")
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_tensor_coalesced = _one_by_one("_reduce_scatter_base")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    alltoall_base = _of_device("alltoall_base")
    all_to_all_single = alltoall_base
    send = _of_device("send", 0)
    recv = _of_device("recv")
    barrier = _of_device("barrier", 0)


def _created(options: Any, _of_backend: Any) -> ProcessGroup:
    rank, size = options.group_rank, options.group_size
    return ProcessGroup(options.store, rank, size, options.timeout)


def register() -> None:
    """Make it the group of the simulated accelerator in this process."""
    dist.Backend.register_backend(BACKEND, _created, extended_api=True, devices=[NAME])
