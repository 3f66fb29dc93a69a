"""Tensors of which each process has a part: torch's DTensors, beside tensors that are whole.

Every function accepts both, and a plain tensor is its own whole. Methods that exchange values are
collective: all processes of the job call them, in the same order.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.core.device_groups import on

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

DIVIDING = "tensor"
"""The axis of the mesh along which layers are divided: the last one."""
# Both modules take half a second to import. Until a job imports them, nothing is sharded.
_OF_TENSORS, _OF_MODULES = "torch.distributed.tensor", "torch.distributed.fsdp"


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether this process may have a part of the tensor only."""
    loaded = sys.modules.get(_OF_TENSORS)
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def gather_parameters(modules: Iterable[nn.Module]) -> None:
    """Make the parameters of sharded modules whole until the end of their backward pass."""
    if (loaded := sys.modules.get(_OF_MODULES)) is not None:
        for module in modules:
            if isinstance(module, loaded.FSDPModule):
                module.unshard()  # pyright: ignore[reportCallIssue]


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of this process, which shares its memory; it may have no value at all."""
    if not is_sharded(tensor):  # first: it is called for each watched tensor
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def own_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this process's part of each tensor."""
    return [own_part(item) for item in tensors]


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Collective for a sharded one."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        outer, inner = _axes_of(tensor)
        if outer is None or inner is None:
            return tensor.full_tensor()
        part = _from_local(tensor.to_local(), outer, _size_of_part(tensor, inner)).full_tensor()
        return _from_local(part, inner, tensor.shape).full_tensor().to(tensor.device)


@torch.no_grad()
def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the part of a whole tensor that this process has of ``like``; exchanges nothing."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    part = tensor.to(like.device)
    for axes in reversed(_axes_of(like)):
        if axes is not None:
            part = _distributed(part, axes).to_local()
    return from_part(part, like)


def is_offloaded(tensor: Tensor) -> bool:
    """Whether this process has its part in host memory, and computes on another device."""
    return tensor.is_cpu and computing_type(tensor) != "cpu"


def computing_type(tensor: Tensor) -> str:
    """Return the type of the device that computes with a tensor: its own unless it is offloaded."""
    return tensor.device_mesh.device_type if is_sharded(tensor) else tensor.device.type


def settle_copies(tensors: Iterable[Tensor]) -> None:
    """Wait until the device has read parts that are in host memory, before they are overwritten.

    Copies of pinned memory read it when their stream reaches them. After a backward pass they have
    all been made, because torch waits for its gradients; after a forward pass alone they may not.
    """
    if any(map(is_offloaded, tensors)):
        torch.accelerator.synchronize()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the part of a process is in the whole tensor."""

    shape: torch.Size
    """Of the whole tensor."""
    indices: tuple[Tensor, ...]
    """For each axis of the whole tensor, the indices that the part has, ascending, int64."""


def place_of(tensor: Tensor) -> Place | None:
    """Return where this process's part is; None: it has the whole tensor. Exchanges nothing."""
    if not is_sharded(tensor):
        return None
    how = (tensor.device_mesh, tuple(tensor.placements), tensor.shape)
    if how not in _places:
        indices = tuple(_indices(tensor, axis) for axis in range(tensor.dim()))
        _places[how] = Place(tensor.shape, indices)
    return _places[how]


_places: dict[tuple[Any, ...], Place] = {}
"""The places of tensors by how they are sharded: the state of an optimizer is as its parameters."""


@torch.no_grad()
def _indices(tensor: "DTensor", axis: int) -> Tensor:
    """Return the indices along an axis that this process has: those of a vector divided alike."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 (loaded by now)

    found = torch.arange(tensor.shape[axis], device=tensor.device)
    for axes in reversed(_axes_of(tensor)):
        if axes is not None:
            mesh, kinds = axes
            divides = [not kind.is_replicate() and kind.dim == axis for kind in kinds]  # pyright: ignore
            alike = [
                _along_first(kind) if is_it else Replicate()
                for kind, is_it in zip(kinds, divides, strict=True)
            ]
            found = _distributed(found, (mesh, alike)).to_local()
    return found.cpu()


_Axes = tuple["DeviceMesh", "Sequence[Placement]"]
"""Axes of a mesh of processes, and how a tensor is placed along each."""


def _axes_of(tensor: "DTensor") -> tuple[_Axes | None, _Axes | None]:
    """Return the axes along which whole layers are sharded, and that along which they are divided.

    ``fully_shard`` shards the part that a process has of a divided layer. If the division is by
    blocks, torch does not put such a tensor together on every mesh, so this is done axis by axis.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    names = mesh.mesh_dim_names or ()
    if DIVIDING not in names:
        return (mesh, placements), None
    if mesh.ndim == 1:
        return None, (mesh, placements)
    others = names[:-1]
    outer = mesh[others]
    kinds = [_plain(kind) for kind in placements[:-1]]
    return (outer, kinds), (mesh[DIVIDING], placements[-1:])


def _plain(kind: "Placement") -> "Placement":
    """Return how the part of a divided layer is sharded, of how the whole one is."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 (loaded by now)

    return Replicate() if kind.is_replicate() else Shard(kind.dim)  # pyright: ignore


def _along_first(kind: Any) -> "Placement":
    """Return how a vector is divided, of how a tensor is divided along one of its axes."""
    from torch.distributed.tensor import Shard  # noqa: PLC0415 (loaded by now)

    return Shard(0) if type(kind) is Shard else type(kind)(0, split_factor=kind.split_factor)


def _size_of_part(tensor: "DTensor", axes: _Axes) -> torch.Size:
    """Return the shape of the part of a divided layer, before it is sharded: all are equal."""
    mesh, (kind,) = axes
    shape = [*tensor.shape]
    if not kind.is_replicate():
        shape[kind.dim] //= mesh.size()  # pyright: ignore[reportAttributeAccessIssue]
    return torch.Size(shape)


def _from_local(part: Tensor, axes: _Axes, shape: torch.Size) -> "DTensor":
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (loaded by now)

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, *axes, run_check=False, shape=shape, stride=stride)


def _distributed(tensor: Tensor, axes: _Axes) -> "DTensor":
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 (loaded by now)

    return distribute_tensor(tensor, *axes, src_data_rank=None)


def from_part(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which ``part`` is this process's part, sharded as ``like`` is.

    It is on the device of ``like``.
    """
    if not is_sharded(like):
        return part
    if is_offloaded(like):  # from_local moves what it is given to the device that computes
        made = torch.empty_like(like, dtype=part.dtype)
        own_part(made).copy_(part)
        return made
    return type(like).from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def num_copies(tensor: Tensor, among: Any = None) -> int:
    """Return the number of processes that have the same part as this one.

    ``among``: torch's group of the processes that have parts of it; None: all.
    """
    size = dist.get_world_size(among) if dist.is_initialized() else 1
    if not is_sharded(tensor):
        return size
    mesh = tensor.device_mesh
    return size // math.prod(
        mesh.size(axis) for axis, kind in enumerate(tensor.placements) if not kind.is_replicate()
    )


def counts_here(tensor: Tensor, first: int = 0) -> bool:
    """Whether this process is the first of those that have the same part.

    ``first``: the rank of the first process that has a part of the tensor.
    """
    if not is_sharded(tensor):
        return not dist.is_initialized() or dist.get_rank() == first
    mesh = tensor.device_mesh
    # The first process is the first along every axis, also along those that the mesh does not have.
    return int(mesh.mesh.min()) == first and all(
        mesh.get_local_rank(axis) == 0
        for axis, kind in enumerate(tensor.placements)
        if kind.is_replicate()
    )


@torch.no_grad()
def norms(
    tensors: Sequence[Tensor],
    order: float,
    home: torch.device | None = None,
    among: Any = None,
) -> Tensor:
    """Return the norm of each whole tensor, [T]. Collective if any is sharded.

    ``order`` is 2 or Inf. ``home``: the device of the result, if the tensors are on several.
    ``among``: torch's group of the processes that have parts of them; None: all. Over parts, a norm
    overflows only if it is itself too large for its type, or if the square of a part's norm is.
    """
    if not any(is_sharded(item) for item in tensors):
        each = torch._foreach_norm([*tensors], order)  # pyright: ignore
        return torch.stack(each if home is None else on(home, each))  # pyright: ignore
    parts = own_parts(tensors)
    # torch refuses the largest value of no value
    found = torch._foreach_norm([x if x.numel() else x.new_zeros(1) for x in parts], order)  # pyright: ignore
    own: Tensor = torch.stack([item.to(parts[0].device) for item in found]).double()
    if order == math.inf:
        return largest_of_all(own, among).to(parts[0].dtype)
    squares = own.square() / own.new_tensor([num_copies(item, among) for item in tensors])
    dist.all_reduce(squares, group=among)
    return squares.sqrt().to(parts[0].dtype)


def largest_of_all(numbers: Tensor, among: Any = None) -> Tensor:
    """Return the largest values of those that the processes pass; NaN if one is. Collective.

    ``among``: torch's group of the processes; None: all.
    """
    is_nan = numbers.isnan()
    # gloo and NCCL may leave out NaN: one message has the values, and where they are NaN
    both = torch.stack([torch.where(is_nan, -math.inf, numbers), is_nan.to(numbers.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=among)
    return torch.where(both[1] > 0, math.nan, both[0])
