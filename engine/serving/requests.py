# ruff: noqa
# pyright: basic
"""TEMPORARY."""

from dataclasses import dataclass, field
from typing import Any

import orjson
import torch

from engine.core.tensor_names import root
from engine.data.augmentation.augmenting import unchanged
from engine.data.columns.fields import BadField
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.sources.inline import ValueMeaning, inline_rows
from engine.inference.classes import classified
from engine.inference.rows import inline_shapes
from glasshouse.errors import FieldProblem


class BadRequest(Exception):
    def __init__(self, problems, status=422):
        super().__init__(str(problems))
        self.problems, self.status = problems, status


@dataclass(frozen=True)
class ModelInputs:
    trained_by: Any
    fields: Any
    shapes: Any
    meaning: Any
    most: Any
    classes: Any
    default_outputs: Any
    steps: Any = field(default_factory=dict)

    @staticmethod
    def of(trained_by, checkpoint):
        graph = trained_by.network
        read = {root(n) for layer in graph.layers for n in layer.reads}
        fields = {n: unchanged(f) for n, f in trained_by.data.fields.items() if n in read}
        preparing = Preparing.of(trained_by.data, Prepared.of(checkpoint))
        return ModelInputs(
            trained_by,
            fields,
            inline_shapes(fields),
            ValueMeaning(fields, preparing),
            None,
            classified(trained_by),
            graph.outputs or (graph.layers[-1].name,),
        )

    def fields_of(self, asked, name):
        if asked.fields is not None:
            return asked.fields
        return ("value", "id", "prob") if name in self.classes else ("value",)


@dataclass(frozen=True)
class Asked:
    rows: Any
    num_rows: int
    outputs: Any
    fields: Any
    top_k: Any
    form: Any = None


def read(head, body, inputs, max_rows=4096):
    try:
        raw = orjson.loads(body)
    except ValueError as e:
        raise BadRequest([FieldProblem("", str(e), "json")], 400)
    try:
        rows = inline_rows(
            raw["inputs"], inputs.shapes, torch.device("cpu"), inputs.most, inputs.meaning
        )
    except (BadField, KeyError) as e:
        raise BadRequest([FieldProblem("/inputs", str(e), "shape")])
    return Asked(
        rows.fields,
        rows.num_rows,
        tuple(raw.get("outputs") or inputs.default_outputs),
        tuple(raw["fields"]) if raw.get("fields") else None,
        raw.get("top_k"),
    )
