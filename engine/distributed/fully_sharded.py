"""Fully sharded data parallelism: each process has a part of every parameter and of its state.

torch's ``fully_shard`` (FSDP2) gathers the parameters of a layer before its forward and its
backward pass, frees them afterwards, and leaves each process with its part of the gradients, summed
over the processes. The loss of a process is already its part of the loss of the global batch, so
gradients are summed and not averaged.
"""

import warnings
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules inside of a layer that are gathered one at a time."""


class FullySharded:
    """A network whose parameters are sharded. They become DTensors in place; buffers stay whole."""

    is_sharded = True

    def __init__(self, network: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
        """Each layer, and each block of a transformer, is gathered by itself.

        Layers of types that are not torch's may return their parameters or views of them, whose
        memory must stay: they are gathered at the beginning of a forward pass, and freed at the end
        of the backward pass.

        ``mesh``: one axis, over which parameters are sharded; or two, of which the first has
        copies.
        """
        for module in dict.fromkeys(layers):
            for block in module.modules():
                if isinstance(block, _BLOCKS):
                    fully_shard(block, mesh=mesh)
            is_of_torch = type(module).__module__.startswith("torch.nn.")
            has_own = (
                not isinstance(module, FSDPModule) and next(module.parameters(), None) is not None
            )
            if is_of_torch and has_own:
                fully_shard(module, mesh=mesh)
        root: FSDPModule = fully_shard(network, mesh=mesh)
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            # An operation in place on what a sharded layer returns may remove the hook that gathers
            # its parameters for the backward pass. torch warns of it for each view.
            if getattr(module, "inplace", False):
                setattr(module, "inplace", False)  # noqa: B010 (not an attribute of all modules)
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        self._network = network
        self._root = root

    def forward(self, batch: Mapping[str, Tensor], *, is_last: bool) -> dict[str, Tensor]:
        """Run the forward pass of a batch; ``is_last``: the last of its step."""
        self._root.set_requires_gradient_sync(is_last)
        found: dict[str, Tensor] = self._network(batch)
        return found
