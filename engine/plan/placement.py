"""Plan a job whose layers are on several devices: the memory of each, and what is copied."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from engine.core.problems import Findings
from engine.core.tensor_names import root
from engine.learner.averaging import num_copies
from engine.metrics.metrics import wanted
from engine.network.shapes import Trace
from engine.optim.optimizers import States, sparse_parameters
from glasshouse.spec import TrainJob
from glasshouse.spec.placement import home_of, placed

OF_PARAMETERS = (
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_state_bytes",
    "averages_bytes",
)
"""The memory that belongs to parameters."""
Copies = dict[tuple[str, int], int]
"""The bytes of each copy of a step's batch, by the value and the device that it is copied to."""


def check_placed(spec: TrainJob, findings: Findings) -> None:
    """Warn of devices that no layer is on."""
    if spec.parallel.strategy != "placed":
        return
    used = {*placed(spec.network.layers).values()}
    for device in range(spec.devices.num_devices or 0):
        if device not in used:
            detail = f"no layer is on device {device}, which the job takes: ask for fewer devices"
            findings.warn("/devices", f"{detail}, or give a layer this device", "unused_device")


def parts(
    spec: TrainJob, traced: Trace, network: nn.Module, states: States, memory: Mapping[str, int]
) -> dict[str, Any]:
    """Return the devices of a job, each with its layers and its memory, and the copied bytes.

    ``memory``: the bytes of the whole job. Activations: the peak of the whole step in proportion to
    the outputs of the layers on a device, and the copies that it receives. The data is on device 0.
    """
    where = placed(spec.network.layers)
    copies = _copies(spec, traced, where)
    num_devices = spec.devices.num_devices or 1
    outputs = [_output_bytes(traced, where, device) for device in range(num_devices)]
    devices: list[dict[str, Any]] = []
    for device in range(num_devices):
        received = sum(size for (_, to), size in copies.items() if to == device)
        share = outputs[device] / max(1, sum(outputs))
        heads = _of_modules(spec, network, states, where, device)
        heads["activations_bytes"] = round(memory["activations_bytes"] * share) + received
        heads["data_bytes"] = 0 if device else memory["data_bytes"]
        layers = [name for name, at in where.items() if at == device]
        total = {"total_bytes": sum(heads.values())}
        devices.append({"device": device, "layers": layers, "memory": heads | total})
    return {
        "strategy": spec.parallel.strategy,
        "processes": 1,
        "axes": {},
        "global_batch_size": spec.global_batch_size,
        "exchanged_bytes": spec.accumulate * _exchanged(spec, traced, copies),
        "divided": [],
        "strategies": [],
        "devices": devices,
    }


def _copies(spec: TrainJob, traced: Trace, where: Mapping[str, int]) -> Copies:
    """Return what a forward pass copies, without activation checkpointing."""
    layers = [item.layer for item in traced.layers]
    read = [(name, where[layer.name]) for layer in layers for name in layer.reads]
    home = home_of(where, spec.loss_reads)
    read += [(name, home) for name in wanted(spec)]
    away = [(name, to) for name, to in read if where.get(root(name), 0) != to]
    return {one: traced.values[one[0]].nbytes for one in away if one[0] in traced.values}


def _exchanged(spec: TrainJob, traced: Trace, copies: Copies) -> int:
    """Return the bytes that the passes of a batch copy: values there, and gradients back."""
    home = home_of(placed(spec.network.layers), spec.loss_reads)
    inside = {name for item in traced.layers for name in item.layer.reads} | {*spec.loss_reads}
    total = 0
    for (name, to), size in copies.items():
        is_graded = traced.values[name].requires_grad and (name in inside or to != home)
        total += 2 * size if is_graded else size
    return total


def _output_bytes(traced: Trace, where: Mapping[str, int], device: int) -> int:
    """Return the bytes of what the layers of a device put out."""
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()  # pyright: ignore[reportPrivateUsage]
        for item in traced.layers
        if where[item.layer.name] == device
        for leaf in item.outputs.values()
    }
    return sum(storages.values())


def _of_modules(
    spec: TrainJob, network: nn.Module, states: States, where: Mapping[str, int], device: int
) -> dict[str, int]:
    """Return the bytes of the parameters on a device, and of what belongs to them."""
    found = Counter[str](dict.fromkeys(OF_PARAMETERS, 0))
    for owner, heads in of_each(spec, network, states).items():
        if where[owner] == device:
            found.update(heads)
    return dict(found)


def of_each(spec: TrainJob, network: nn.Module, states: States) -> dict[str, dict[str, int]]:
    """Return the bytes of each module's parameters, and of what belongs to them, by its name."""
    sparse = sparse_parameters(network)
    found: dict[str, dict[str, int]] = {}
    for owner, module in network.named_children():
        learned = {f"{owner}.{name}": item for name, item in module.named_parameters()}
        parameters = sum(item.nbytes for item in [*learned.values(), *module.buffers()])
        graded = [x for name, x in learned.items() if x.requires_grad and name not in sparse]
        kept = [state for name in learned for state in states.get(name, {}).values()]
        sizes = (
            parameters,
            sum(item.nbytes for item in graded),
            sum(state.num_bytes for state in kept),
            num_copies(spec.average) * parameters,
        )
        found[owner] = dict(zip(OF_PARAMETERS, sizes, strict=True))
    return found
