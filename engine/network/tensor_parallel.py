"""Tensor parallelism: each process computes a part of a layer, on the rows of all of them.

The parts of parameters are torch's DTensors, and what crosses from a part to the whole is a
redistribution of them. Between two layers there are plain tensors, whole or this process's part.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

# What follows torch's name for queries, keys and values in one weight is not public (2.11 to 2.13).
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore
from torch.nn import functional as F

from engine.core.device import seed_all
from engine.network.layers import work_out_of_place
from engine.network.own_layers.attention import DotProductAttention
from engine.network.tensor_plan import TensorPlan

_WHOLE = (Replicate(),)


class TensorParallel:
    """The divided layers of a network, which change in place: their parameters become DTensors."""

    is_sharded = True

    def __init__(self, network: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
        """``mesh``: one axis, the processes that have the same rows."""
        self._network = network
        self._values = plan.values
        self._mesh = mesh
        # not get_submodule, which fails for names of attributes that a user may choose
        modules = dict(network.named_modules())
        for name, blocks in plan.columns.items():
            self._divide(modules[name], _columns, weight=_along(0, blocks), bias=_along(0, blocks))
        for name in plan.gathered:
            if isinstance(modules[name], nn.Embedding):
                self._divide(modules[name], _gathered_embedding, weight=Shard(1))
            else:
                self._divide(modules[name], _gathered, weight=Shard(0), bias=Shard(0))
        for name in plan.rows:
            self._divide(modules[name], _rows, weight=Shard(1))
        for name in plan.entries:
            self._divide(modules[name], _entries, weight=Shard(0))
        for name in plan.heads:
            attention = modules[name]
            assert isinstance(attention, DotProductAttention)  # noqa: S101
            attention.num_heads //= plan.size
        for name in plan.drawing:
            module = modules[name]
            module.forward = partial(_drawn, module.forward, mesh.get_local_rank())
        work_out_of_place(network)  # torch refuses it for what comes of a DTensor

    def _divide(
        self, module: nn.Module, forward: Callable[..., Tensor], **placements: Placement
    ) -> None:
        """Keep this process's part of some parameters of a module, and compute with that."""
        for parameter_name, kind in placements.items():
            whole = getattr(module, parameter_name)
            if whole is not None:
                part = distribute_tensor(whole.detach(), self._mesh, [kind], src_data_rank=None)
                own = nn.Parameter(part, requires_grad=whole.requires_grad)
                module.register_parameter(parameter_name, own)
        module.forward = partial(forward, module, self._mesh)

    def forward(self, batch: Mapping[str, Tensor], *, is_last: bool) -> dict[str, Tensor]:
        """Run the forward pass of a batch."""
        del is_last
        found: dict[str, Tensor] = self._network(batch)
        return found

    def as_part(self, name: str, kind: str, tensor: Tensor) -> Tensor:
        """Return a value of a layer as the part that it is of the whole, if it is one.

        ``kind``: ``input``, ``output`` or ``output_grad``.
        """
        blocks = self._values.get((name, kind))
        if blocks is None or isinstance(tensor, DTensor):
            return tensor
        shape = [*tensor.shape]
        shape[-1] *= self._mesh.size()
        stride = torch.empty(shape, device="meta").stride()
        placements = [_along(tensor.dim() - 1, blocks)]
        return DTensor.from_local(
            tensor.detach(),
            self._mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )


def _along(axis: int, blocks: int) -> Placement:
    """Return how an axis is divided of which each process has a part of every block."""
    return Shard(axis) if blocks == 1 else _StridedShard(axis, split_factor=blocks)


def _shared(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that all processes have; its gradients are summed over them."""
    return DTensor.from_local(x, mesh, _WHOLE, run_check=False)


def _whole(x: Any) -> Tensor:
    """Return the whole of a tensor, put together or summed over the processes."""
    found: Tensor = x.redistribute(placements=_WHOLE).to_local()
    return found


def _columns(module: Any, mesh: DeviceMesh, x: Tensor) -> Tensor:
    found: Any = F.linear(_shared(x, mesh), module.weight, module.bias)
    return found.to_local()


def _gathered(module: Any, mesh: DeviceMesh, x: Tensor) -> Tensor:
    return _whole(F.linear(_shared(x, mesh), module.weight, module.bias))


def _gathered_embedding(module: Any, mesh: DeviceMesh, x: Tensor) -> Tensor:
    ids = _shared(x, mesh)
    options = module.padding_idx, None, 2.0, module.scale_grad_by_freq
    return _whole(F.embedding(ids, module.weight, *options))


def _rows(module: Any, mesh: DeviceMesh, x: Tensor) -> Tensor:
    part = DTensor.from_local(x, mesh, [Shard(x.dim() - 1)], run_check=False)
    found = _whole(F.linear(part, module.weight))
    return found if module.bias is None else found + module.bias.to(found.dtype)


def _entries(module: Any, mesh: DeviceMesh, x: Tensor) -> Tensor:
    read = F.linear if x.is_floating_point() else F.embedding
    return _whole(read(_shared(x, mesh), module.weight))


def _drawn(forward: Callable[..., Tensor], rank: int, *inputs: Any, **keywords: Any) -> Tensor:
    """Run a layer that draws random numbers for its part: others than the other processes.

    What it draws follows from the generator that all of them have alike, so a recomputation draws
    the same.
    """
    seed = int(torch.randint(2**62, ()))
    device = next(item for item in inputs if isinstance(item, Tensor)).device
    options: dict[str, Any] = {"devices": []}  # the default would be all devices of one type
    if device.type != "cpu":
        options = {"devices": [device.index or 0], "device_type": device.type}
    with torch.random.fork_rng(**options):
        torch.default_generator.manual_seed(seed + rank)
        seed_all(seed + rank)
        return forward(*inputs, **keywords)
