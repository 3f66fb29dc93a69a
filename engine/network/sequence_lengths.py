"""Find which lengths each layer uses, by tracing a graph with rows of two lengths.

An axis of a layer's input that grows with the rows of a field is the steps of that field's rows. A
network that fits only one length would fail at the first batch whose longest row differs, so it is
refused here. Depends on graphs and shapes, not on data.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.core.problems import Findings, SpecProblems
from engine.core.tensor_names import lengths_of, root
from engine.network.layer_types import layers_with_lengths, takes_lengths
from engine.network.recurrent import REPLACED
from engine.network.shapes import FieldShape, Trace, TracedLayer, trace

_RECURRENT = {name for name, cls in REPLACED.items() if issubclass(cls, nn.RNNBase)}


def assign_lengths(
    traced: Trace, fields: Mapping[str, FieldShape], batch_size: int, findings: Findings
) -> Trace:
    """Fill in the lengths of each layer that uses some, and report those that do not fit.

    Raises:
        SpecProblems: the network fits rows of one length only.
    """
    asked = {item.layer.name for item in traced.layers if item.layer.lengths is not None}
    for position, item in enumerate(traced.layers):
        if item.layer.name in asked:
            _check_asked(position, item, fields, traced, findings)
    if not any(shape.is_sequence for shape in fields.values()):
        return traced
    growth = _growth(fields)
    longer = _trace_longer(traced, fields, growth, batch_size)
    for position, item in enumerate(traced.layers):
        if takes_lengths(item.layer.type) and item.layer.name not in asked:
            axes = _Axes(item, traced, longer)
            _assign(position, item, axes, (fields, growth), findings)
    return traced


class Steps(NamedTuple):
    """Which axes of a value are as long as the rows of sequences."""

    axes: list[int]
    field: str | None
    """The sequence field that axis 1 runs over; None unless axis 1 is the only such axis."""


def stepwise(traced: Trace, fields: Mapping[str, FieldShape], batch_size: int) -> dict[str, str]:
    """Return by name the values whose axis 1 is the steps of a sequence field, with the field.

    Raises:
        SpecProblems: the network fits rows of one length only.
    """
    found = steps_of(traced, fields, batch_size, [*traced.values])
    return {name: item.field for name, item in found.items() if item.field is not None}


def steps_of(
    traced: Trace, fields: Mapping[str, FieldShape], batch_size: int, names: Sequence[str]
) -> dict[str, Steps]:
    """Return those of the named values with axes that grow with the rows of a sequence field.

    Raises:
        SpecProblems: the network fits rows of one length only.
    """
    if not any(shape.is_sequence for shape in fields.values()):
        return {}
    growth = _growth(fields)
    longer = _trace_longer(traced, fields, growth, batch_size)
    found: dict[str, Steps] = {}
    for name in names:
        before, after = traced.values[name], longer.values[name]
        if axes := _grown(before, after):
            field = _field_of(before, after, 1, (fields, growth)) if axes == [1] else None
            found[name] = Steps(axes, field)
    return found


def _growth(fields: Mapping[str, FieldShape]) -> dict[str, int]:
    """Return how many steps longer each sequence is in the second trace: unique per field."""
    names = [name for name, shape in fields.items() if shape.is_sequence]
    return {name: 1 + 64 * number for number, name in enumerate(names)}


def _trace_longer(
    traced: Trace, fields: Mapping[str, FieldShape], growth: dict[str, int], batch_size: int
) -> Trace:
    try:
        return _trace_grown(traced, fields, growth, batch_size)
    except SpecProblems as error:
        if _shrink(fields, growth):
            with contextlib.suppress(SpecProblems):
                return _trace_grown(traced, fields, growth, batch_size)
        why = "a batch is padded to its longest row, and the network fits one length only"
        findings = Findings()
        for item in error.problems:
            detail = f"{why}; pool over the steps. With rows one step longer: {item.detail}"
            findings.problem(item.pointer, detail, "length")
        raise SpecProblems(findings.problems) from error


def _shrink(fields: Mapping[str, FieldShape], growth: dict[str, int]) -> bool:
    """Make sequences shorter instead of longer; return False if the rows are too short for it.

    This is for a network that accepts shorter rows but no longer ones.
    """
    fewer = {name: -(2**number) for number, name in enumerate(growth)}
    if any(fields[name].shape[0] + less < 1 for name, less in fewer.items()):
        return False
    growth.update(fewer)
    return True


def _trace_grown(
    traced: Trace, fields: Mapping[str, FieldShape], growth: Mapping[str, int], batch_size: int
) -> Trace:
    grown = dict(fields)
    for name, more in growth.items():
        first, *rest = fields[name].shape
        grown[name] = replace(fields[name], shape=(first + more, *rest))
    return trace(traced.graph(), grown, batch_size, Findings())


def _check_asked(
    position: int,
    item: TracedLayer,
    fields: Mapping[str, FieldShape],
    traced: Trace,
    findings: Findings,
) -> None:
    """Check the lengths that a layer names; a sequence field stands for those of its rows."""
    pointer = f"/network/layers/{position}/lengths"
    layer, name = item.layer, str(item.layer.lengths)
    if not takes_lengths(layer.type):
        detail = f"layer {layer.name!r}: {layer.type} takes no lengths; these do: "
        findings.problem(pointer, detail + ", ".join(sorted(layers_with_lengths())), "no_lengths")
        return
    if layer.lengths is False:
        return
    if name in fields and fields[name].is_sequence:
        name = lengths_of(name)
    found = traced.values.get(name)
    if found is None:
        kind = "a data field" if root(name) in fields else "a layer"
        findings.problem(pointer, f"{name!r} is no lengths: {kind} has none", "unknown_input")
    elif found.dim() != 1 or found.dtype != torch.int64:
        detail = f"{name!r} is no lengths: it has the shape {list(found.shape)} and"
        detail += f" {str(found.dtype).removeprefix('torch.')}, and lengths are one int64 per row"
        findings.problem(pointer, detail, "shape")
    item.layer = layer.model_copy(update={"lengths": name})


class _Axes:
    """A layer's input in both traces."""

    def __init__(self, item: TracedLayer, traced: Trace, longer: Trace) -> None:
        counted = layers_with_lengths()[item.layer.type].counted_input
        name = (item.layer.inputs or ("",))[counted]
        self.before, self.after = traced.values[name], longer.values[name]
        is_first = item.layer.type in _RECURRENT and not item.layer.args.get("batch_first")
        self.steps = 0 if is_first else 1
        """The axis that the layer treats as the steps."""


def _assign(
    position: int,
    item: TracedLayer,
    axes: _Axes,
    known: tuple[Mapping[str, FieldShape], Mapping[str, int]],
    findings: Findings,
) -> None:
    grown = _grown(axes.before, axes.after)
    if not grown:
        return
    pointer = f"/network/layers/{position}"
    about = f"layer {item.layer.name!r} ({item.layer.type})"
    if axes.steps == 0 and grown == [1]:
        detail = f"{about} takes axis 0 for the steps, and they are axis 1: set batch_first to true"
        findings.problem(f"{pointer}/args/batch_first", detail, "batch_first")
        return
    field = _field_of(axes.before, axes.after, axes.steps, known)
    if grown != [axes.steps] or field is None:
        detail = f"{about} takes an input of shape {list(axes.before.shape)}, whose steps are not"
        detail += " those of one sequence field; name the layer's lengths"
        findings.problem(f"{pointer}/lengths", detail, "no_lengths")
        return
    item.layer = item.layer.model_copy(update={"lengths": lengths_of(field)})


def _grown(before: Tensor, after: Tensor) -> list[int]:
    """Return the axes whose length differs in the second trace."""
    both = zip(before.shape, after.shape, strict=True)
    return [axis for axis, (old, new) in enumerate(both) if old != new]


def _field_of(
    before: Tensor,
    after: Tensor,
    axis: int,
    known: tuple[Mapping[str, FieldShape], Mapping[str, int]],
) -> str | None:
    """Return the field whose steps an axis runs over: equal lengths in both traces."""
    fields, growth = known
    if axis >= before.dim():
        return None
    more = int(after.shape[axis] - before.shape[axis])
    for name, number in growth.items():
        if number == more and fields[name].shape[0] == before.shape[axis]:
            return name
    return None
