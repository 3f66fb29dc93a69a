"""Read the rows of a source into memory, checked against their fields.

Shape suffixes: N = rows of the split.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import torch

from engine.data.batches.rows import Loaded, MemoryRows, place
from engine.data.columns.checks import BadRows, without
from engine.data.columns.dense import DenseReading, IntegerReading
from engine.data.columns.normalization import Blocks, find_figures
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.ragged import Kept, limited
from engine.data.columns.sequences import SequenceReading
from engine.data.columns.table import Table
from engine.data.columns.vocabulary import Tokens
from engine.data.sources.joined import taken_rows
from engine.data.sources.text_windows import load_windows
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    Field,
    IntegerField,
    IntegerSequenceField,
    Sequences,
    Source,
)

Reading = DenseReading | IntegerReading | SequenceReading


def load(  # noqa: PLR0913 (a source, how it is read, and to where)
    source: Source,
    fields: dict[str, Field],
    table: Table,
    *,
    seed: int,
    device: torch.device,
    limit: Sequences = Sequences(),  # noqa: B008 (frozen)
    preparing: Preparing = Preparing(),  # noqa: B008 (frozen)
) -> MemoryRows:
    """Read the rows of a source, onto the device if they fit well, otherwise into host memory.

    Statistics and vocabularies that ``preparing`` lacks are computed from these rows. All of them
    are in ``prepared`` of the result.

    Raises:
        DataFailed: the data does not fit its declaration, or no rows remain.
    """
    if preparing.windows is not None:
        return load_windows(preparing.windows, source, fields, table, device, preparing.known)
    readings = readings_of(fields, table, source.split, preparing)
    num_rows = table.num_rows(source.split)
    taken, _ = taken_rows(table, source, seed)
    good = without(flaws_of(readings), taken, num_rows, preparing.on_bad_row)
    limits = {
        name: item.column
        for name, item in readings.items()
        if isinstance(item, SequenceReading) and item.is_limited
    }
    kept = limited(limits, good.rows, limit)
    rows = kept.rows
    if not (num_taken := num_rows if rows is None else len(rows)):
        raise DataFailed(_no_rows(source, kept, good))

    def passes(name: str) -> Blocks:
        reading = readings[name]
        assert not isinstance(reading, IntegerReading)  # noqa: S101 (it needs no statistics)
        return reading.passes(rows, limit)

    def vocabulary(name: str) -> Tokens:
        reading = readings[name]
        assert isinstance(reading, SequenceReading)  # noqa: S101 (only it has tokens)
        return reading.vocabulary(rows, limit)

    prepared = prepare(fields, preparing, passes, vocabulary)
    loaded = {name: item.load(rows, limit, prepared) for name, item in readings.items()}
    made = place(loaded, num_taken, device, rows)
    made.left_out = good.left_out | kept.left_out
    made.prepared = None if prepared.is_empty else prepared
    return made


def _no_rows(source: Source, kept: Kept, good: Kept) -> str:
    """Return why a source has no rows: ``good`` fit the fields, ``kept`` are short enough."""
    detail = f"split {source.split!r} has no rows"
    detail += " in this fraction" if source.fraction else ""
    detail += " that are short enough" if kept.left_out else ""
    detail += " that fit the fields" if good.left_out and not kept.left_out else ""
    return detail


def load_fields(
    fields: Mapping[str, Field], table: Table, split: str, limit: Sequences, preparing: Preparing
) -> dict[str, Loaded]:
    """Read all rows of a split of a table, or of a part of one, into memory.

    No statistics are computed from them, and a bad row is an error.

    Raises:
        DataFailed: the data does not fit its declaration.
    """
    readings = readings_of(fields, table, split, preparing)
    without(flaws_of(readings), None, table.num_rows(split), "fail")
    known = preparing.known or Prepared()
    return {name: item.load(None, limit, known) for name, item in readings.items()}


def readings_of(
    fields: Mapping[str, Field], table: Table, split: str, preparing: Preparing
) -> dict[str, Reading]:
    """Create the readers for the columns of each field."""
    return {
        name: reading_of(name, field, table, split, preparing) for name, field in fields.items()
    }


def reading_of(name: str, field: Field, table: Table, split: str, preparing: Preparing) -> Reading:
    """Create the reader for the columns of a field."""
    normalize = preparing.normalize.get(name)
    if isinstance(field, IntegerField):
        return IntegerReading(name, field, table, split)
    if isinstance(field, DenseField):
        return DenseReading(name, field, table, split, normalize)
    return SequenceReading(name, field, table, split, normalize)


def flaws_of(readings: Mapping[str, Reading]) -> Iterator[BadRows]:
    """Yield the flaws of the rows of a split, field by field."""
    return chain.from_iterable(reading.flaws() for reading in readings.values())


def prepare(
    fields: Mapping[str, Field],
    preparing: Preparing,
    passes: Callable[[str], Blocks],
    vocabulary: Callable[[str], Tokens],
) -> Prepared:
    """Return known statistics and vocabularies, and compute the others from training rows.

    Args:
        fields: the fields that are read.
        preparing: what is known, and what is normalized.
        passes: returns for a field what reads its values from the start.
        vocabulary: builds the vocabulary of a text field.

    Raises:
        DataFailed: a feature has no value to compute its fill from.
    """
    known, found = preparing.known or Prepared(), Prepared()
    for name, field in fields.items():
        if name in known.figures:
            found.figures[name] = known.figures[name]
        elif name in known.tokens:
            found.tokens[name] = known.tokens[name]
        elif isinstance(field, IntegerSequenceField) and field.tokens is not None:
            found.tokens[name] = vocabulary(name)
        elif isinstance(field, DenseField | DenseSequenceField) and (
            name in preparing.normalize or field.fill in ("mean", "median")
        ):
            normalize = preparing.normalize.get(name)
            found.figures[name] = find_figures(
                name, passes(name), field.scale, field.fill, normalize
            )
    return found
