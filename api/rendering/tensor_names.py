"""The names of a job's tensors, and which one a layer's own name refers to."""

from collections.abc import Iterable
from typing import Any

from glasshouse.errors import LayerNotFound
from glasshouse.spec.tensor_kinds import OF_LAYERS
from models.tables import Job

_LOSS = ("loss", "loss.samples", "loss.rows")


def tensor_name(job: Job, layer: str, kind: str) -> str:
    """Return the name of a captured tensor: a leaf, a parameter, or an optimizer state of one.

    Raises:
        LayerNotFound: The network has no tensor of this kind with this name.
    """
    layers: list[dict[str, Any]] = job.plan.get("layers", [])
    names = list(dict.fromkeys(_names(layers, kind)))
    if kind == "output" and not any(entry["name"] == _LOSS[0] for entry in layers):
        names += _LOSS
    if layer in names:
        return layer
    inside = [name for name in names if name.startswith((f"{layer}.", f"{layer}:"))]
    if kind in OF_LAYERS:
        leaves = [name for name in inside if _is_leaf(name, layer)]
        if leaves:
            return leaves[0]
    elif len(inside) == 1:
        return inside[0]
    elif inside:
        what = "states" if kind == "optim_state" else "parameters"
        raise LayerNotFound(f"{layer} has several {what}.", hint=f"Ask for {inside}.")
    some = ", ".join(names[:50])
    raise LayerNotFound(f"The network has no {kind} of {layer[:100]!r}; it has {some or 'none'}.")


def _is_leaf(name: str, layer: str) -> bool:
    """Return whether a name is the layer plus the numbers of a leaf: ``lstm.1.0`` of ``lstm``."""
    return all(part.isdigit() for part in name[len(layer) + 1 :].split("."))


def _names(layers: list[dict[str, Any]], kind: str) -> Iterable[str]:
    for entry in layers:
        if kind in ("output", "output_grad"):
            yield from list(entry.get("output_shapes", {})) or [entry["name"]]
            yield from entry.get("inner_outputs", ())
        elif kind == "input":
            yield from entry.get("input_names", ())
            yield from entry.get("inner_inputs", ())
        elif kind == "optim_state":
            for name in entry.get("parameter_shapes", {}):
                yield from (f"{name}.{key}" for key in entry.get("state_names", ()))
        else:
            yield from entry.get("parameter_shapes", {})
