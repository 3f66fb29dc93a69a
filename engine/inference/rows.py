"""Rows of an inference: their fields, prepared as in training, from files or from a request."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from engine.core.problems import Findings
from engine.core.tensor_names import root
from engine.data.augmentation.augmenting import unchanged
from engine.data.batches.rows import Rows
from engine.data.columns.fields import BadField, network_shape
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.table import StoredTable, Table
from engine.data.sources.inline import ValueMeaning, inline_rows
from engine.data.sources.reading import SourceReader
from engine.data.sources.streamed import StreamedRows
from engine.data.sources.streamed_windows import WindowReader
from engine.network.network import needed_layers
from engine.network.sequence_lengths import stepwise
from engine.network.shapes import FieldShape, trace
from glasshouse import jsonio
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    Field,
    Graph,
    InferJob,
    SequenceField,
    Sequences,
    Shuffle,
    Source,
    Trained,
)

_TRACED_ROWS = 4
READ_AHEAD = 1
"""Batches that a thread reads while the network computes."""


@dataclass(frozen=True)
class Inputs:
    """The weights and rows of an inference job."""

    checkpoint: Path
    table: Table | None
    device: torch.device


def outputs_of(job: InferJob, graph: Graph) -> tuple[str, ...]:
    """Return the layers whose outputs are returned."""
    return job.outputs or graph.outputs or (graph.layers[-1].name,)


def fields_needed(job: InferJob, trained_by: Trained) -> dict[str, Field]:
    """Return the data fields that the requested outputs depend on; the others need not exist."""
    graph = trained_by.network
    layers = needed_layers(graph, outputs_of(job, graph))
    read = {root(name) for layer in layers for name in layer.reads}
    given = (job.data.fields if job.data is not None else None) or {}
    return {
        name: like_trained(given[name], field) if name in given else unchanged(field)
        for name, field in trained_by.data.fields.items()
        if name in read
    }


_LEARNED = ("dim", "classes", "tokens", "vocabulary", "fill")


def like_trained(given: Field, trained: Field) -> Field:
    """Fill the unset options of an inference field from the field used in training."""
    if type(given) is not type(trained):
        return given
    left_out = [key for key in _LEARNED if getattr(given, key, trained) is None]
    if getattr(given, "classes", None) is not None:
        left_out = [key for key in left_out if key != "dim"]
    return given.model_copy(update={key: getattr(trained, key) for key in left_out})


def not_as_trained(given: Field, trained: Field | None) -> tuple[str, str] | None:
    """Return key and reason if a field differs from training where it must not; else None."""
    if getattr(given, "augment", ()):
        return "augment", "only rows that are trained on are changed: leave it out"
    if trained is None:
        return None
    fill, learned = getattr(given, "fill", None), getattr(trained, "fill", None)
    if fill in ("mean", "median") and fill != learned:
        detail = f"the training rows' {fill} is not known: the network was trained with fill"
        return "fill", f"{detail} {jsonio.dumps(learned)}; give a number, or leave it out"
    for key in ("classes", "tokens", "vocabulary"):
        mine = getattr(given, key, None)
        if mine is not None and key != "classes" and mine != getattr(trained, key, None):
            return key, "the network was trained with another: leave it out"
    return None


def rows_of(
    job: InferJob,
    trained_by: Trained,
    inputs: Inputs,
    *,
    look: Callable[[int], None],
    bad_rows: IO[str],
) -> Rows:
    """Return the rows, cut as in the training job, all of them; the rest as in `streamed`.

    Raises:
        DataFailed: they cannot be read, or do not fit the fields.
    """
    fields = fields_needed(job, trained_by)
    limit = trained_by.data.sequence
    most = limit.max_length if limit.overflow == "truncate" else None
    known = Prepared.of(inputs.checkpoint)
    preparing = replace(Preparing.of(trained_by.data, known), on_bad_row="fail")
    if job.data is not None:
        return streamed(
            Source(dataset=job.data.dataset, split=job.data.split),
            fields,
            inputs,
            replace(preparing, on_bad_row=job.data.on_bad_row),
            Sequences(max_length=most),
            seed=0,
            look=look,
            bad_rows=bad_rows,
        )
    meaning = ValueMeaning(fields, preparing)
    try:
        return inline_rows(job.inputs or {}, inline_shapes(fields), inputs.device, most, meaning)
    except (BadField, KeyError) as cause:
        raise DataFailed(f"The inputs do not fit the network: {cause}") from cause


def streamed(  # noqa: PLR0913 (a source, how it is read, and who hears of it)
    source: Source,
    fields: dict[str, Field],
    inputs: Inputs,
    preparing: Preparing,
    limit: Sequences,
    *,
    seed: int,
    look: Callable[[int], None],
    bad_rows: IO[str],
) -> StreamedRows:
    """Return rows that are read from files in their stored order, a batch ahead.

    ``seed``: of the order that a fraction is taken in. ``look`` is called while rows are scanned
    before the first batch. Rows that are dropped are listed in ``bad_rows``, a JSON object a line.

    Raises:
        DataFailed: they cannot be read, or do not fit the fields.
    """
    if inputs.table is None:
        raise DataFailed("The job was handed no rows.")
    table = StoredTable(inputs.table.directory)
    if preparing.windows is not None:
        reader = WindowReader(source, fields, table, preparing.windows, preparing.known, look)
    else:

        def note(row: int, detail: str) -> None:
            bad_rows.write(json.dumps({"row": row, "error": detail}) + "\n")

        reader = SourceReader(
            source,
            fields,
            table,
            seed=seed,
            limit=limit,
            preparing=preparing,
            look=look,
            note=note,
        )
    return StreamedRows(reader, inputs.device, shuffle=Shuffle(), workers=READ_AHEAD)


def steps_in(
    trained_by: Trained, fields: Mapping[str, Field], wanted: Sequence[str], rows: Rows, size: int
) -> dict[str, str]:
    """Return the sequence field of each requested output that has a value per step.

    ``size``: rows of a batch.
    """
    shapes = inline_shapes({name: trained_by.data.fields[name] for name in fields})
    if not any(isinstance(field, SequenceField) for field in fields.values()):
        return {}
    first = rows.batch(slice(0, min(size, rows.num_rows)))
    for name, lengths in first.lengths.items():
        longest = max(1, int(lengths.max()))
        shapes[name] = replace(shapes[name], shape=(longest, *shapes[name].shape[1:]))
    layers = tuple(needed_layers(trained_by.network, wanted))
    pruned = trained_by.network.model_copy(update={"layers": layers, "outputs": None})
    traced = trace(pruned, shapes, _TRACED_ROWS, Findings())
    found = stepwise(traced, shapes, _TRACED_ROWS)
    return {name: found[name] for name in wanted if name in found}


def inline_shapes(fields: Mapping[str, Field]) -> dict[str, FieldShape]:
    """Return the shapes of inline values; a resolved dense field knows its shape."""
    return {
        name: FieldShape(field.shape or (), torch.float32)
        if isinstance(field, DenseField)
        else network_shape(field, 1, field.dim)
        for name, field in fields.items()
    }
