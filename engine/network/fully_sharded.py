"""Fully sharded data parallelism: each process has a part of every parameter and of its state.

torch's ``fully_shard`` (FSDP2) gathers the parameters of a group of layers before its forward and
its backward pass, frees them afterwards, and leaves each process with its part of the gradients,
summed over the processes. The loss of a process is already its part of the loss of the global
batch, so gradients are summed and not averaged.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.utils import swap_tensors

from engine.core.device import named
from engine.core.shards import is_sharded
from engine.network.layer_groups import layer_groups
from engine.network.layers import Made, Runnable, Several, steps_of, work_out_of_place

Outputs = dict[str, Tensor]


class FullySharded:
    """A network whose parameters are sharded. They become DTensors in place; buffers stay whole."""

    is_sharded = True

    def __init__(
        self,
        network: nn.Module,
        plans: Mapping[int, Sequence[Runnable]],
        mesh: DeviceMesh,
        *,
        whole: Collection[nn.Module] = (),
        is_staged: bool = False,
        offloads: bool = False,
    ) -> None:
        """Shard a network.

        Args:
            network: its parameters become DTensors. What is on the host is moved to the device of
                the mesh, a group at a time.
            plans: what it runs in one pass, or in that of each stage. It must run `plans` instead.
            mesh: one axis, over which parameters are sharded; or two: the first has copies.
            whole: modules that are not sharded.
            is_staged: whether a step has several passes whose order processes do not agree on.
                Parameters then stay gathered until `free`.
            offloads: whether the parts of parameters stay in host memory.
        """
        self._network = network
        self._mesh = mesh
        self._is_staged = is_staged
        self._policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        self._roots: dict[int, _Root] = {}
        self.plans: dict[int, list[Runnable]] = {}
        """What the network must run, which gathers parameters before their layers."""
        for number, plan in plans.items():
            self.plans[number], self._roots[number] = self._grouped(plan, whole)
        for module in (*whole, network):  # also buffers of layers without parameters
            _move(module, mesh)
        # In place on what a sharded layer returns, an operation may remove the hook that gathers
        # its parameters for the backward pass. torch warns of it for each view.
        work_out_of_place(network)
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")

    def _grouped(
        self, plan: Sequence[Runnable], whole: Collection[nn.Module]
    ) -> "tuple[list[Runnable], _Root]":
        """Shard the layers of a plan; return the plan that gathers them."""
        layers = [[step.module for step in steps_of(item)] for item in plan]
        groups = layer_groups([[x for x in some if x not in whole] for some in layers])
        for module in groups.apart:
            self._shard(module)
        without = {*groups.apart, *groups.kept, *whole}
        found: list[Runnable] = []
        units: list[nn.Module] = []
        for begin, end, size in zip([0, *groups.ends], groups.ends, groups.sizes, strict=False):
            if not size:
                found += plan[begin:end]
                continue
            gathered = _Gathered(plan[begin:end], without)
            self._shard(gathered.unit)
            found.append(gathered)
            units.append(gathered.unit)
        root = _Root([*groups.apart, *units, *groups.kept])
        self._shard(root)
        for module in _sharded_modules(root):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if self._is_staged:
                # By default torch gathers what it expects next, from the order of earlier passes.
                # After passes without a backward pass it expects something else, and gathers again.
                module.set_modules_to_backward_prefetch([module])
        return found, root

    def _shard(self, module: nn.Module) -> None:
        _move(module, self._mesh)
        frees = False if self._is_staged else None
        fully_shard(
            module, mesh=self._mesh, reshard_after_forward=frees, offload_policy=self._policy
        )

    def forward(self, batch: Mapping[str, Tensor], *, is_last: bool) -> Outputs:
        """Run the forward pass of a batch; ``is_last``: the last of its step."""
        for root in self._roots.values():
            root.set_requires_gradient_sync(is_last)
        found: Outputs = self._network(batch)
        return found

    def gathering(self, run: Callable[[], Outputs], stage: int = 0) -> Outputs:
        """Run all layers of a pass."""
        found: Outputs = self._roots[stage](run)
        return found

    def begin_backward(self, stage: int, *, is_last: bool) -> None:
        """Prepare a backward pass of a stage; ``is_last``: of its step.

        The last one sums the gradients of all of them over the processes.
        """
        root = self._roots[stage]
        root.set_is_last_backward(is_last)
        root.set_requires_gradient_sync(is_last)
        root.set_reshard_after_backward(is_last)

    def free(self) -> None:
        """Free the parameters that are gathered. Exchanges nothing."""
        for root in self._roots.values():
            for module in _sharded_modules(root):
                module.reshard()


def _sharded_modules(root: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


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


class _Root(nn.Module):
    """What torch needs to see of a whole pass: its beginning, its end, and all groups.

    `fully_shard` makes it an ``FSDPModule``.
    """

    set_is_last_backward: Callable[[bool], None]
    set_requires_gradient_sync: Callable[[bool], None]
    set_reshard_after_backward: Callable[[bool], None]

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
