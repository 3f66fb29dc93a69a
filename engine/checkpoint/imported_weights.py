"""Check that weights that a client uploads fit their network: names, shapes, dtypes.

The planner receives only the header of the file, never the weights. Depends on torch and graphs,
not on files.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine.checkpoint.checkpoint import FORMAT
from engine.core import arguments
from engine.core.precision import dtype_name
from engine.core.problems import Findings, one
from engine.core.safetensors_header import DTYPE_NAMES
from engine.core.tensor_names import root
from engine.network.layer_types import layer_classes, layer_parameters
from engine.network.network import Network, inputs_of
from glasshouse.spec import Graph, Layer, UploadedNetwork

Header = Mapping[str, Mapping[str, Any]]
"""For each tensor of the file: its ``dtype``, as safetensors names it, and its ``shape``."""
_MAX_PROBLEMS = 20


def check_upload(upload: UploadedNetwork, tensors: Header) -> dict[str, Any]:
    """Compare a network with the tensors of a file.

    Returns:
        ``upload`` with the inputs of all layers filled in, and ``state``: the contents of the
        checkpoint's ``state.json``.

    Raises:
        SpecProblems: they do not fit each other, or the network cannot be built.
    """
    graph = _resolved(upload)
    _check_sizes(graph)
    with torch.device("meta"):
        wanted = Network(graph, graph.outputs or ()).state_dict()
    _compare(wanted, tensors)
    whole = upload.model_copy(update={"network": graph}).model_dump(mode="json")
    state = {"format": FORMAT, "step": 0, "epoch": 0, "final": True, "metrics": {}}
    return {"upload": whole, "state": {**state, "spec": whole, "parts": {"model": {}}}}


def _resolved(upload: UploadedNetwork) -> Graph:
    """Fill in the inputs and outputs of the graph; each input must exist before it is read."""
    graph, fields = upload.network.graph(), tuple(upload.fields)
    findings = Findings()
    layers: list[Layer] = []
    known = {*fields}
    for position, layer in enumerate(graph.layers):
        if layer.inputs is None and not position and not fields:
            detail = f"layer {layer.name!r} reads the first field: give fields, or its inputs"
            raise one(f"/network/layers/{position}/inputs", detail, "unknown_input")
        inputs = inputs_of(graph, position, fields)
        for number, name in enumerate(inputs):
            if root(name) not in known and (fields or root(name) in _names(graph)):
                detail = f"layer {layer.name!r} reads {name!r}, which is no field and no earlier"
                pointer = f"/network/layers/{position}/inputs/{number}"
                findings.problem(pointer, f"{detail} layer", "unknown_input")
        known.add(layer.name)
        layers.append(layer.model_copy(update={"inputs": inputs}))
    outputs = graph.outputs or (graph.layers[-1].name,)
    for number, name in enumerate(outputs):
        if root(name) not in _names(graph):
            detail = f"there is no layer {name!r} to return"
            findings.problem(f"/network/outputs/{number}", detail, "unknown_layer")
    findings.stop()
    return graph.model_copy(update={"layers": tuple(layers), "outputs": outputs})


def _names(graph: Graph) -> set[str]:
    return {layer.name for layer in graph.layers}


def _check_sizes(graph: Graph) -> None:
    """Build each layer, so that problems are reported at its arguments.

    Raises:
        SpecProblems: a layer has wrong arguments, or lacks a size, which cannot be inferred here.
    """
    for position, layer in enumerate(graph.layers):
        if layer.shared_with is not None:
            continue
        pointer = f"/network/layers/{position}"
        known = layer_parameters(layer.type, pointer)
        given = arguments.check(known, dict(layer.args), f"{pointer}/args", layer.type)
        for name in arguments.missing(known, given):
            detail = f"{layer.type} needs {name}: with weights all sizes are given"
            raise one(f"{pointer}/args/{name}", detail, "missing")
        if layer.type not in layer_classes():
            continue
        try:
            with torch.device("meta"):
                alone = layer.model_copy(update={"inputs": ("x",)})
                Network(graph.model_copy(update={"layers": (alone,)}), ())
        except Exception as cause:
            reason = str(getattr(cause, "cause", cause)).strip().splitlines() or [""]
            raise one(f"{pointer}/args", f"{layer.type}: {reason[0][:300]}", "args") from cause


def _compare(state: Mapping[str, torch.Tensor], tensors: Header) -> None:
    findings = Findings()
    for name, item in state.items():
        pointer = f"/tensors/{name}"
        found = tensors.get(name)
        if found is None:
            findings.problem(pointer, f"the file has no {name!r}, which the network has", "missing")
        elif list(found["shape"]) != list(item.shape):
            both = f"{list(found['shape'])} in the file and {list(item.shape)} in the network"
            findings.problem(pointer, f"{name!r} has the shape {both}", "shape")
        elif found["dtype"] != (wanted := DTYPE_NAMES.get(dtype_name(item.dtype))):
            both = f"{found['dtype']} in the file and {wanted} in the network"
            findings.problem(pointer, f"{name!r} has the type {both}", "dtype")
    for name in tensors:
        if name not in state:
            detail = f"the file has {name[:100]!r}, which the network has not"
            findings.problem(f"/tensors/{name[:100]}", detail, "unknown_tensor")
    del findings.problems[_MAX_PROBLEMS:]
    findings.stop()
