"""Costs of a planned job: parameters and operations by layer, and bytes by category."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from engine.network.layer_groups import layer_groups
from engine.network.shapes import FieldShape, Trace
from engine.network.tensor_plan import TensorPlan
from engine.optim.optimizers import States, sparse_parameters


def table(traced: Trace, states: States | None = None) -> dict[str, Any]:
    """Return the layers one by one, and their totals."""
    layers = [item.describe() for item in traced.layers]
    for item in layers:
        kept = [key for name in item["parameter_names"] for key in (states or {}).get(name, ())]
        item["state_names"] = list(dict.fromkeys(kept))
    return {
        "layers": layers,
        "parameters": sum(item["parameters"] for item in layers),
        "flops": traced.num_flops,
    }


def batch_of(shapes: Mapping[str, FieldShape], num_rows: int) -> dict[str, Tensor]:
    """Return ``num_rows`` rows of all fields, on the meta device."""
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        found |= shape.tensors(name, num_rows)
    return found


def memory(  # noqa: PLR0913 (each is a head)
    traced: Trace,
    network: nn.Module,
    state_bytes: int,
    *,
    data_bytes: int,
    num_averages: int = 0,
    num_snapshots: int = 1,
    training: bool = True,
    step_bytes: int | None = None,
    keeps_gradients: bool = False,
    waiting_bytes: int = 0,
    num_shards: int = 1,
    division: TensorPlan | None = None,
    kept_at: Sequence[str] = (),
    offloads: bool = False,
) -> dict[str, int]:
    """Return bytes by category. Activations: the peak besides parameters and gradients.

    If ``step_bytes`` is None, the peak is not known: it is the layers' outputs for one batch.
    Checkpoint: the copies in host memory, ``num_snapshots`` at once: the one that is written while
    training continues, and the best state if it may have to wait; of its own part.
    ``keeps_gradients``: those of a step's earlier batches exist all along. ``waiting_bytes``:
    batches of a step that are in memory before it begins. ``num_shards``: the processes that each
    keep a part of parameters, gradients and state. Gathered: what a process has whole at once.
    ``division``: how processes divide layers. ``kept_at``: boundaries of activation checkpointing.
    ``offloads``: what belongs to parameters is in host memory (offloaded), and buffers are not.
    """
    parameters = sum(item.nbytes for item in [*network.parameters(), *network.buffers()])
    storages = {
        item.untyped_storage()._cdata: item.untyped_storage().nbytes()  # pyright: ignore[reportPrivateUsage]
        for item in traced.output_leaves().values()
    }
    sparse = sparse_parameters(network)  # its gradients cover only the rows that were read
    dense = [item for name, item in network.named_parameters() if name not in sparse]
    learned = [item for item in dense if item.requires_grad]
    gradients = sum(item.nbytes for item in learned) if training else 0
    activations = sum(storages.values())
    if step_bytes is not None:
        activations = max(0, step_bytes - (0 if keeps_gradients else gradients))
    snapshot = (1 + num_averages) * parameters + state_bytes
    mine = parameters
    if division is not None:
        divided = sum(
            item.nbytes
            for name, item in network.named_parameters()
            if name in division.parameters(network)
        )
        mine -= divided - divided // division.size
        values = {name for name, kind in division.values if kind == "output"}
        made = sum(item.nbytes for n, item in traced.output_leaves().items() if n in values)
        activations = max(0, activations - (made - made // division.size))
    # of everything that belongs to parameters, the same fraction
    shard = lambda size: -(-size * mine // max(1, parameters * num_shards))  # noqa: E731
    heads = {
        "parameters_bytes": shard(parameters),
        "gradients_bytes": shard(gradients),
        "optimizer_state_bytes": shard(state_bytes),
        "averages_bytes": shard(num_averages * parameters),
        "activations_bytes": activations + waiting_bytes,
        "checkpoint_bytes": num_snapshots * shard(snapshot) if training else 0,
        "data_bytes": data_bytes,
    }
    if num_shards > 1:
        heads["gathered_bytes"] = layer_groups(_items(traced, kept_at)).gathered_bytes
    if offloads:
        buffers = sum(item.nbytes for item in network.buffers())
        of_parameters = shard(state_bytes) + shard(num_averages * (parameters - buffers))
        heads |= {
            "parameters_bytes": buffers,
            "gradients_bytes": 0,
            "optimizer_state_bytes": 0,
            "averages_bytes": num_averages * buffers,
            # with the part of each layer before it is gathered, and that of its gradients
            "gathered_bytes": heads["gathered_bytes"] + -(-heads["gathered_bytes"] // num_shards),
            "offloaded_bytes": _pinned(network, num_shards, division) + of_parameters,
        }
    return {**heads, "total_bytes": sum(heads.values())}


def _pinned(network: nn.Module, num_shards: int, division: TensorPlan | None) -> int:
    """Return the bytes of pinned memory of a process's parts of parameters and gradients.

    torch pins a power of two for each tensor (``CachingHostAllocator``).
    """
    divided = set[str]() if division is None else division.parameters(network)
    found = 0
    for name, item in network.named_parameters():
        size = item.nbytes // (division.size if division is not None and name in divided else 1)
        rows = item.shape[0] if item.dim() else 1
        part = -(-rows // num_shards) * (size // max(1, rows))
        pinned = 1 << (part - 1).bit_length() if part else 0
        found += pinned * (2 if item.requires_grad else 1)
    return found


def _items(traced: Trace, kept_at: Sequence[str]) -> list[list[nn.Module]]:
    """Return the layers, with those together that are computed again together."""
    found: list[list[nn.Module]] = []
    last = next((x.layer.name for x in reversed(traced.layers) if x.layer.name in kept_at), None)
    is_inside = False
    for item in traced.layers:
        is_boundary = item.layer.name in kept_at
        if is_boundary or not is_inside:
            found.append([])
        is_inside = (is_inside or is_boundary) and item.layer.name != last
        found[-1].append(item.module)
    return found
