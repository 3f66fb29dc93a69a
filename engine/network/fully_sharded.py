"""Fully sharded data parallelism: each process has a part of every parameter and of its state.

torch's ``fully_shard`` (FSDP2) gathers the parameters of a group of layers before its forward and
its backward pass, frees them afterwards, and leaves each process with its part of the gradients,
summed over the processes. The loss of a process is already its part of the loss of the global
batch, so gradients are summed and not averaged.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.utils import swap_tensors

from engine.core.device import named
from engine.core.shards import is_sharded
from engine.network.layer_groups import layer_groups
from engine.network.layers import Made, Runnable, Several, steps_of

Outputs = dict[str, Tensor]


class FullySharded:
    """A network whose parameters are sharded. They become DTensors in place; buffers stay whole."""

    is_sharded = True

    def __init__(
        self,
        network: nn.Module,
        plan: Sequence[Runnable],
        mesh: DeviceMesh,
        *,
        offloads: bool = False,
    ) -> None:
        """``plan``: what the network runs; it must run the new ``plan`` instead.

        ``mesh``: one axis, over which parameters are sharded; or two: the first has copies. What
        is on the host is moved to its device, a group at a time. ``offloads``: parts of parameters
        stay in host memory.
        """
        policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        groups = layer_groups([_modules(item) for item in plan])
        for module in groups.apart:
            _shard(module, mesh, policy)
        without = {*groups.apart, *groups.kept}
        self.plan: list[Runnable] = []
        units: list[nn.Module] = []
        for begin, end, size in zip([0, *groups.ends], groups.ends, groups.sizes, strict=False):
            if not size:
                self.plan += plan[begin:end]
                continue
            gathered = _Gathered(plan[begin:end], without)
            _shard(gathered.unit, mesh, policy)
            self.plan.append(gathered)
            units.append(gathered.unit)
        root = _Root([*groups.apart, *units, *groups.kept])
        self._root = _shard(root, mesh, policy)
        _move(network, mesh)  # buffers of layers without parameters
        _sum_gradients(root)
        _work_out_of_place(network)
        self._network = network

    def forward(self, batch: Mapping[str, Tensor], *, is_last: bool) -> Outputs:
        """Run the forward pass of a batch; ``is_last``: the last of its step."""
        self._root.set_requires_gradient_sync(is_last)
        found: Outputs = self._network(batch)
        return found

    def gathering(self, run: Callable[[], Outputs]) -> Outputs:
        """Run all layers of a pass."""
        found: Outputs = self._root(run)  # pyright: ignore[reportCallIssue]
        return found


def _shard(module: nn.Module, mesh: DeviceMesh, policy: OffloadPolicy) -> FSDPModule:
    _move(module, mesh)
    return fully_shard(module, mesh=mesh, offload_policy=policy)


@torch.no_grad()
def _move(module: nn.Module, mesh: DeviceMesh) -> None:
    """Move what is not sharded to the device of the mesh.

    torch moves it too, but to CUDA and the like only: elsewhere a tensor's ``data`` cannot be
    replaced by that of another device.
    """
    device = named(mesh.device_type)
    for tensor in [*module.parameters(), *module.buffers()]:
        if not is_sharded(tensor) and tensor.device.type != device.type:
            there = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, requires_grad=tensor.requires_grad)
            swap_tensors(tensor, there)


def _sum_gradients(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _work_out_of_place(network: nn.Module) -> None:
    """Let no layer work in place.

    An operation in place on what a sharded layer returns may remove the hook that gathers its
    parameters for the backward pass. torch warns of it for each view.
    """
    for module in network.modules():
        if getattr(module, "inplace", False):
            setattr(module, "inplace", False)  # noqa: B010 (not an attribute of all modules)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")


class _Root(nn.Module):
    """What torch needs to see of a whole pass: its beginning, its end, and all groups."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, run: Callable[[], Outputs]) -> Outputs:
        """Run the pass. It has no tensors as arguments: torch would move all to the device."""
        return run()


class _Unit(nn.Module):
    """The modules whose parameters are gathered together."""

    def __init__(
        self, parts: Iterable[nn.Module], compute: Callable[[Mapping[str, Tensor]], Made]
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._compute = compute

    def forward(self, given: Mapping[str, Tensor]) -> Made:
        """Run the layers."""
        return self._compute(given)


class _Gathered(Several):
    """Layers whose parameters are gathered before them and freed after them."""

    def __init__(self, items: Sequence[Runnable], without: Collection[nn.Module]) -> None:
        """``without``: modules that something else gathers."""
        super().__init__(items)
        parts = (step.module for step in self.steps if step.module not in without)
        self.unit = _Unit(dict.fromkeys(parts), self.compute)

    def run(self, values: Mapping[str, Tensor]) -> Made:
        """Return the outputs of its layers that later layers read."""
        found: Made = self.unit(self.given(values))
        return found


def _modules(item: Runnable) -> list[nn.Module]:
    return [step.module for step in steps_of(item)]
