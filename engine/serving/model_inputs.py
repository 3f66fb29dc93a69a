"""What a trained network reads and returns, known before the first request."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from engine.core.problems import Findings, SpecProblems
from engine.core.tensor_names import root
from engine.data.augmentation.augmenting import unchanged
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.sources.inline import ValueMeaning
from engine.inference.classes import Classes, classified
from engine.inference.rows import inline_shapes
from engine.network.network import needed_layers
from engine.network.sequence_lengths import Steps, steps_of
from engine.network.shapes import FieldShape, Trace, trace
from engine.serving.asked import Asked
from glasshouse.errors import SpecFailed
from glasshouse.spec import Field, LanguageModelWindows, Trained

_TRACED_ROWS = 13
"""Unlikely to be the size of another axis."""
_STEPS = (64, 16, 4, 256, 1, 1024, 4096)
"""Lengths of sequences that are tried, because a network may have a shortest or a longest."""
_MAX_KNOWN = 100
"""The most lists of outputs, which clients choose, that are remembered."""


@dataclass(frozen=True)
class OutputShape:
    """An output of the network."""

    item: tuple[int, ...]
    """The shape of the value of one row, or of one step; -1: depends on the rows."""
    dtype: torch.dtype
    steps: str | None
    """The sequence field for each of whose steps there is a value; None: one for each row."""
    has_rows: bool
    """Whether its first axis is the rows."""

    @property
    def num_classes(self) -> int | None:
        """The size of the axis that ``id``, ``prob`` and ``top_k`` are along; None: it has none."""
        return self.item[-1] if self.item else None


class Wanted(NamedTuple):
    """The outputs of a request."""

    outputs: tuple[str, ...]
    fields: tuple[tuple[str, ...], ...]
    """For each output."""
    top_k: int | None


@dataclass(frozen=True)
class ModelInputs:
    """What a trained network reads, and how values of requests become its fields."""

    trained_by: Trained
    fields: Mapping[str, Field]
    """The fields that layers of the network read, without augmentation."""
    shapes: Mapping[str, FieldShape]
    meaning: ValueMeaning
    """Normalization, vocabularies and classes."""
    most: int | None
    """Sequences are truncated to this many steps."""
    classes: Mapping[str, Classes]
    """The outputs that score classes."""
    default_outputs: tuple[str, ...]
    outputs: Mapping[str, OutputShape]
    """All outputs by name: layers, and the leaves of those that return several tensors."""
    steps: Mapping[str, str]
    """The sequence field of each output with a value per step."""
    _needed: dict[tuple[str, ...], tuple[str, ...]] = field(
        default_factory=dict[tuple[str, ...], tuple[str, ...]], repr=False, compare=False
    )

    @staticmethod
    def of(trained_by: Trained, prepared: Prepared) -> "ModelInputs":
        """Trace the network once. ``prepared``: what training learned from its rows.

        Raises:
            SpecFailed: the network cannot be traced.
        """
        graph = trained_by.network
        read = {root(name) for layer in graph.layers for name in layer.reads}
        fields = {
            name: unchanged(item) for name, item in trained_by.data.fields.items() if name in read
        }
        shapes = inline_shapes(fields)
        preparing = replace(Preparing.of(trained_by.data, prepared), on_bad_row="fail")
        limit = trained_by.data.sequence
        outputs = _outputs(trained_by, shapes)
        return ModelInputs(
            trained_by,
            fields,
            shapes,
            ValueMeaning(fields, preparing),
            limit.max_length if limit.overflow == "truncate" else None,
            classified(trained_by),
            graph.outputs or (graph.layers[-1].name,),
            outputs,
            {name: item.steps for name, item in outputs.items() if item.steps is not None},
        )

    @cached_property
    def default_wanted(self) -> Wanted | None:
        """What a request wants that does not say it; None: an output has no axis of rows."""
        names = self.default_outputs
        if not all(name in self.outputs and self.outputs[name].has_rows for name in names):
            return None
        return Wanted(names, tuple(self.default_fields(name) for name in names), None)

    def needed(self, outputs: tuple[str, ...]) -> tuple[str, ...]:
        """Return the fields that outputs depend on; those that do not exist depend on none."""
        found = self._needed.get(outputs)
        if found is not None:
            return found
        layers = needed_layers(self.trained_by.network, outputs)
        read = {root(name) for layer in layers for name in layer.reads}
        found = tuple(name for name in self.fields if name in read)
        if len(self._needed) < _MAX_KNOWN and all(name in self.outputs for name in outputs):
            self._needed[outputs] = found
        return found

    def depends_on_longest(self, outputs: tuple[str, ...]) -> bool:
        """Return whether the shape of an output depends on the longest row of its batch.

        Then requests are computed alone: attention weights are [rows, steps, steps].
        """
        return any(-1 in self.outputs[name].item for name in outputs)

    def fields_of(self, asked: Asked, name: str) -> tuple[str, ...]:
        """Return what a request wants of one of its outputs: ``value``, ``id`` …."""
        return asked.fields[asked.outputs.index(name)]

    def default_fields(self, name: str, top_k: int | None = None) -> tuple[str, ...]:
        """Return what is returned of an output if a request does not say it."""
        found = ("value", "id", "prob") if name in self.classes else ("value",)
        return found if top_k is None else (*found, "top_k")


def _outputs(trained_by: Trained, shapes: Mapping[str, FieldShape]) -> dict[str, OutputShape]:
    """Trace the network, with sequences of the first length that it takes."""
    first: SpecProblems | None = None
    for num_steps in _lengths(trained_by, shapes):
        sized = {
            name: replace(item, shape=(num_steps, *item.shape[1:])) if item.is_sequence else item
            for name, item in shapes.items()
        }
        try:
            traced = trace(trained_by.network, sized, _TRACED_ROWS, Findings())
            grown = steps_of(traced, sized, _TRACED_ROWS, [*traced.values])
        except SpecProblems as cause:
            first = first or cause
            continue
        layers = {item.layer.name for item in traced.layers}
        return {
            name: _output(name, traced, grown) for name in traced.values if root(name) in layers
        }
    raise SpecFailed(f"The network cannot be traced: {first}"[:1000])


def _lengths(trained_by: Trained, shapes: Mapping[str, FieldShape]) -> Iterator[int]:
    """Yield the lengths of sequences to try."""
    windows, limit = trained_by.data.windows, trained_by.data.sequence.max_length
    if windows is not None:
        is_block = isinstance(windows, LanguageModelWindows)
        yield windows.length if is_block else 2 * windows.window
    if limit is not None:
        yield limit
    yield from _STEPS if any(item.is_sequence for item in shapes.values()) else (1,)


def _output(name: str, traced: Trace, grown: Mapping[str, Steps]) -> OutputShape:
    value = traced.values[name]
    shape, steps = list(value.shape), grown.get(name)
    field_name = None if steps is None else steps.field
    for axis in () if steps is None else steps.axes:
        shape[axis] = -1
    has_rows = bool(shape) and value.shape[0] == _TRACED_ROWS
    dtype = torch.float32 if value.dtype == torch.bfloat16 else value.dtype
    return OutputShape(tuple(shape[1 if field_name is None else 2 :]), dtype, field_name, has_rows)
