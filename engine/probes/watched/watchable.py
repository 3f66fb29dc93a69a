"""Everything of a planned job that can be watched, and why the rest cannot."""

import math
from dataclasses import replace

from torch import Tensor, nn

from engine.core.problems import Findings
from engine.losses.losses import Losses, without_lengths
from engine.network.call_traces import GradientReach, SeenTensor
from engine.network.shapes import Trace, tiny
from engine.optim.optimizers import States
from engine.probes.watched.hook_sites import sample_losses
from engine.probes.watched.select import (
    LOSS,
    LOSS_ROWS,
    LOSS_SAMPLES,
    Layout,
    NamedTensor,
    Scope,
    Watchable,
)
from glasshouse.spec import TrainJob

_NO_STATE = "{} with these arguments keeps no state of its parameters"
_NOT_CALLED = (
    "nothing calls it as a module: the layer that it is in hands its parameters to one function; "
    "watch the module around it"
)
_NO_TENSOR = "it puts out no tensor"
_NOT_FOLLOWED = "what happens inside its layer cannot be followed ahead of time"


def everything(
    spec: TrainJob, traced: Trace, network: nn.Module, loss: Tensor, states: States
) -> Watchable:
    """Return what the probes of a job can watch."""
    reach = GradientReach(loss)
    outputs, inputs = _seen(traced, "outputs"), _seen(traced, "inputs")
    things = {
        "output": {name: _thing(seen) for name, seen in outputs.items()} | _of_loss(spec, traced),
        "input": {name: _thing(seen) for name, seen in inputs.items()},
        "output_grad": {
            name: _thing(seen, lacks=reach.lacks(seen)) for name, seen in outputs.items()
        },
        **_of_parameters(network, reach, states),
    }
    without = (
        {} if things["optim_state"] else {"optim_state": _NO_STATE.format(spec.optimizer.type)}
    )
    return Watchable(things, _silent(traced), _closed(traced), without)


def check_cuts(traced: Trace, loss: Tensor, findings: Findings) -> None:
    """Add findings for layers that are asked for gradients that never arrive."""
    reach = GradientReach(loss)
    for position, item in enumerate(traced.layers):
        layer, pointer = item.layer, f"/network/layers/{position}"
        seen = [found for found in item.record.outputs.values() if not found.path]
        if layer.output_grad_clip is not None and all(reach.lacks(found) for found in seen):
            detail = f"no gradient reaches the output of layer {layer.name!r}: leave it out"
            findings.problem(f"{pointer}/output_grad_clip", detail, "no_gradient")
        learned = [x for x in item.module.parameters() if x.requires_grad]
        if layer.shared_with is None and learned and not any(map(reach.reaches, learned)):
            detail = f"no gradient reaches the parameters of layer {layer.name!r}: they are not"
            findings.warn(pointer, f"{detail} trained", "no_gradient")


def layout_of(item: Tensor) -> Layout:
    """Return the shape and item size of a tensor."""
    return tuple(item.shape), item.element_size()


def _seen(traced: Trace, side: str) -> dict[str, SeenTensor]:
    """Return the inputs or outputs: those of layers, then those of the modules inside them."""
    of_layers: list[dict[str, SeenTensor]] = [
        getattr(layer.record, side) for layer in traced.layers
    ]
    found = [item for of_layer in of_layers for item in of_layer.items()]
    return dict(sorted(found, key=lambda item: bool(item[1].path)))


def _thing(seen: SeenTensor, *, lacks: str = "") -> NamedTensor:
    scope: Scope = "inner" if seen.path else "layer"
    return NamedTensor(
        seen.size_bytes, seen.owner, seen.is_first, scope, lacks, layout=layout_of(seen.tensor)
    )


def _of_parameters(
    network: nn.Module, reach: GradientReach, states: States
) -> dict[str, dict[str, NamedTensor]]:
    found: dict[str, dict[str, NamedTensor]] = {
        kind: {} for kind in ("param", "param_grad", "update", "optim_state")
    }
    for name, item in network.named_parameters():
        size = item.numel() * item.element_size()
        lacks = "" if reach.reaches(item) else "no gradient reaches {}"
        layout = layout_of(item)
        thing = NamedTensor(size, name, scope="parameter", layout=layout)
        found["param"][name] = found["update"][name] = thing
        found["param_grad"][name] = replace(thing, lacks=lacks)
        for key, kept in states.get(name, {}).items():
            full = f"{name}.{key}"
            thing = NamedTensor(
                kept.num_bytes, full, scope="parameter", lacks=lacks, layout=kept.layout
            )
            found["optim_state"][full] = thing
    return found


def _of_loss(spec: TrainJob, traced: Trace) -> dict[str, NamedTensor]:
    """Return the loss under its own names, unless a layer or field has taken them."""
    layers = {layer.name for layer in spec.network.layers}
    asked = any(glob.startswith(LOSS) for probe in spec.probes for glob in probe.layers)
    if LOSS in layers or not asked:
        return {}
    taken = ""
    if LOSS in spec.data.fields:
        taken = "a data field is named loss, and so {} means nothing here; rename the field"
    inputs = [traced.values[name] for name in spec.loss_inputs]
    num_rows = next((item.shape[0] for item in inputs if item.dim()), 0)

    def thing(layout: Layout, lacks: str = "") -> NamedTensor:
        shape, item_bytes = layout
        size = item_bytes * math.prod(shape)
        return NamedTensor(size, LOSS, scope="loss", lacks=taken or lacks, layout=layout)

    return {
        LOSS: thing(((), 4)),
        LOSS_SAMPLES: thing(((num_rows,), 4), _why_no_samples(spec, inputs)),
        LOSS_ROWS: thing(((num_rows,), 8)),
    }


def _why_no_samples(spec: TrainJob, inputs: list[Tensor]) -> str:
    criterion = Losses.of(without_lengths(spec))
    try:
        try:
            sample_losses(criterion.to("meta"), inputs)
        except NotImplementedError:  # no meta kernel: use one tiny batch of real numbers
            sample_losses(criterion.to_empty(device="cpu"), [tiny(item) for item in inputs])
    except Exception as cause:
        return f"{str(cause).splitlines()[0][:200]}: it does not say {{}}"
    return ""


def _silent(traced: Trace) -> dict[str, str]:
    """Return inner modules that a step never calls, or that have no output."""
    found: dict[str, str] = {}
    for layer in traced.layers:
        name, record = layer.layer.name, layer.record
        with_output = {seen.path for seen in record.outputs.values()}
        for path, module in layer.module.named_modules():
            if not path or path in with_output or isinstance(module, nn.ModuleList):
                continue
            reason = _NO_TENSOR if path in record.called else _NOT_CALLED
            found[f"{name}.{path}"] = reason if layer.is_followed else _NOT_FOLLOWED
    return found


def _closed(traced: Trace) -> dict[str, str]:
    """Return how to open each layer that is one fused operation."""
    found: dict[str, str] = {}
    for item in traced.layers:
        if isinstance(item.module, nn.RNNBase):
            name, cell, leaves = item.layer.name, item.layer.type, ", ".join(item.outputs)
            found[name] = (
                f"{name!r} is one fused {cell}, whose inner steps are no tensors of their own. "
                f"Watch what it puts out ({leaves}: all steps, then the last states), or write one "
                f"{cell}Cell per step, each shared_with the first"
            )
    return found
