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
from torch import nn

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
    grown = _Grown(traced, fields, batch_size)
    for position, item in enumerate(traced.layers):
        if takes_lengths(item.layer.type) and item.layer.name not in asked:
            _assign(position, item, grown, findings)
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
    grown = _Grown(traced, fields, batch_size)
    found: dict[str, Steps] = {}
    for name in names:
        if axes := grown.axes(name):
            found[name] = Steps(axes, grown.field_of(name, 1) if axes == [1] else None)
    return found


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


class _Grown:
    """A graph's trace beside one with rows of other lengths."""

    def __init__(self, traced: Trace, fields: Mapping[str, FieldShape], batch_size: int) -> None:
        """Trace with longer rows, or with shorter ones if the network accepts no longer ones.

        Raises:
            SpecProblems: the network fits rows of one length only.
        """
        self._traced, self._fields, self._batch_size = traced, fields, batch_size
        names = [name for name, shape in fields.items() if shape.is_sequence]
        self._growth = {name: 1 + 64 * number for number, name in enumerate(names)}
        """How many steps longer each sequence is in the second trace: unique per field."""
        try:
            self._other = self._trace()
        except SpecProblems as error:
            longer = error
        else:
            return
        self._growth = {name: -(2**number) for number, name in enumerate(names)}
        if all(fields[name].shape[0] + less >= 1 for name, less in self._growth.items()):
            with contextlib.suppress(SpecProblems):
                self._other = self._trace()
                return
        why = "a batch is padded to its longest row, and the network fits one length only"
        findings = Findings()
        for item in longer.problems:
            detail = f"{why}; pool over the steps. With rows one step longer: {item.detail}"
            findings.problem(item.pointer, detail, "length")
        raise SpecProblems(findings.problems) from longer

    def _trace(self) -> Trace:
        grown = dict(self._fields)
        for name, more in self._growth.items():
            first, *rest = grown[name].shape
            grown[name] = replace(grown[name], shape=(first + more, *rest))
        return trace(self._traced.graph(), grown, self._batch_size, Findings())

    def shapes(self, name: str) -> tuple[torch.Size, torch.Size]:
        """Return a value's shape in both traces."""
        return self._traced.values[name].shape, self._other.values[name].shape

    def axes(self, name: str) -> list[int]:
        """Return the axes of a value whose length differs in the second trace."""
        both = zip(*self.shapes(name), strict=True)
        return [axis for axis, (old, new) in enumerate(both) if old != new]

    def field_of(self, name: str, axis: int) -> str | None:
        """Return the field whose steps an axis runs over: equal lengths in both traces."""
        before, after = self.shapes(name)
        if axis >= len(before):
            return None
        more = after[axis] - before[axis]
        for field, number in self._growth.items():
            if number == more and self._fields[field].shape[0] == before[axis]:
                return field
        return None


def _assign(position: int, item: TracedLayer, grown: _Grown, findings: Findings) -> None:
    name = (item.layer.inputs or ("",))[layers_with_lengths()[item.layer.type].counted_input]
    is_first = item.layer.type in _RECURRENT and not item.layer.args.get("batch_first")
    steps = 0 if is_first else 1  # the axis that the layer treats as the steps
    axes = grown.axes(name)
    if not axes:
        return
    pointer = f"/network/layers/{position}"
    about = f"layer {item.layer.name!r} ({item.layer.type})"
    if steps == 0 and axes == [1]:
        detail = f"{about} takes axis 0 for the steps, and they are axis 1: set batch_first to true"
        findings.problem(f"{pointer}/args/batch_first", detail, "batch_first")
        return
    field = grown.field_of(name, steps)
    if axes != [steps] or field is None:
        shape = list(grown.shapes(name)[0])
        detail = f"{about} takes an input of shape {shape}, whose steps are not"
        detail += " those of one sequence field; name the layer's lengths"
        findings.problem(f"{pointer}/lengths", detail, "no_lengths")
        return
    item.layer = item.layer.model_copy(update={"lengths": lengths_of(field)})
