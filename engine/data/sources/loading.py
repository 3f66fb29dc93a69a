"""Read the rows of a source into memory, checked against their fields.

Shape suffixes: N = rows of the split.
"""

from collections.abc import Iterator, Mapping
from typing import TypeGuard

import torch
from torch import Tensor

from engine.data.batches.rows import Loaded, MemoryRows, place
from engine.data.columns.checks import BadRows, without
from engine.data.columns.dense import DenseReading
from engine.data.columns.integers import IntegerReading
from engine.data.columns.prepared import WINDOWS, Prepared, Preparing
from engine.data.columns.ragged import limited
from engine.data.columns.sequences import SequenceReading
from engine.data.columns.table import Table
from engine.data.sources.joined import taken_rows
from engine.data.sources.text_windows import WindowReading
from glasshouse.errors import DataFailed
from glasshouse.spec import DenseField, DenseSequenceField, Field, IntegerField, Sequences, Source

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
        return _load_windows(source, fields, table, device=device, preparing=preparing)
    readings = {
        name: reading_of(name, field, table, source.split, preparing)
        for name, field in fields.items()
    }
    num_rows = table.num_rows(source.split)
    taken, _ = taken_rows(table, source, seed)
    good = without(_all_flaws(readings), taken, num_rows, preparing.on_bad_row)
    limits = {
        name: item.column
        for name, item in readings.items()
        if isinstance(item, SequenceReading) and item.is_limited
    }
    kept = limited(limits, good.rows, limit)
    rows, left_out = kept.rows, good.left_out | kept.left_out
    num_taken = num_rows if rows is None else len(rows)
    _check_some(source, num_taken, limited=bool(kept.left_out), dropped=bool(good.left_out))
    prepared = _prepared(readings, rows, limit, preparing)
    loaded = {name: _loaded(item, name, rows, limit, prepared) for name, item in readings.items()}
    made = place(loaded, num_taken, device, rows)
    made.left_out = left_out
    made.prepared = None if prepared.is_empty else prepared
    return made


def _load_windows(
    source: Source,
    fields: dict[str, Field],
    table: Table,
    *,
    device: torch.device,
    preparing: Preparing,
) -> MemoryRows:
    assert preparing.windows is not None  # noqa: S101 (the caller looked)
    reading = WindowReading(preparing.windows, table, source)
    prepared = preparing.known
    if prepared is None or WINDOWS not in prepared.tokens:
        prepared = Prepared(tokens={WINDOWS: reading.build(fields)})
    loaded = reading.load(fields, prepared.tokens[WINDOWS])
    made = place(loaded, reading.num_rows, device)
    made.prepared = prepared
    return made


def load_fields(
    fields: Mapping[str, Field], table: Table, split: str, limit: Sequences, preparing: Preparing
) -> dict[str, Loaded]:
    """Read all rows of a split of a table, or of a part of one, into memory.

    No statistics are computed from them, and a bad row is an error.

    Raises:
        DataFailed: the data does not fit its declaration.
    """
    readings = {n: reading_of(n, item, table, split, preparing) for n, item in fields.items()}
    without(_all_flaws(readings), None, table.num_rows(split), "fail")
    known = preparing.known or Prepared()
    return {name: _loaded(item, name, None, limit, known) for name, item in readings.items()}


def flaws_of(
    fields: Mapping[str, Field], table: Table, split: str, preparing: Preparing
) -> Iterator[BadRows]:
    """Yield the flaws of the rows of a split, field by field."""
    for name, field in fields.items():
        yield from reading_of(name, field, table, split, preparing).flaws()


def reading_of(name: str, field: Field, table: Table, split: str, preparing: Preparing) -> Reading:
    """Create the reader for the columns of a field."""
    normalize = preparing.normalize.get(name)
    if isinstance(field, IntegerField):
        return IntegerReading(name, field, table, split)
    if isinstance(field, DenseField):
        return DenseReading(name, field, table, split, normalize)
    return SequenceReading(name, field, table, split, normalize)


def _all_flaws(readings: Mapping[str, Reading]) -> Iterator[BadRows]:
    for reading in readings.values():
        yield from reading.flaws()


def _check_some(source: Source, num_rows: int, *, limited: bool, dropped: bool) -> None:
    if num_rows:
        return
    detail = f"split {source.split!r} has no rows"
    detail += " in this fraction" if source.fraction else ""
    detail += " that are short enough" if limited else " that fit the fields" if dropped else ""
    raise DataFailed(detail)


def _prepared(
    readings: Mapping[str, Reading], rows: Tensor | None, limit: Sequences, preparing: Preparing
) -> Prepared:
    """Return known statistics and vocabularies, and compute the others from these rows."""
    known = preparing.known or Prepared()
    found = Prepared()
    for name, reading in readings.items():
        if name in known.figures:
            found.figures[name] = known.figures[name]
        elif name in known.tokens:
            found.tokens[name] = known.tokens[name]
        elif isinstance(reading, SequenceReading):
            reading.prepare(found, rows, limit)
        elif isinstance(reading, DenseReading) and needs_figures(reading.field, name, preparing):
            found.figures[name] = reading.find(rows)
    return found


def needs_figures(
    field: Field, name: str, preparing: Preparing
) -> TypeGuard[DenseField | DenseSequenceField]:
    """Whether statistics of a field's values must be computed."""
    is_of_numbers = isinstance(field, DenseField | DenseSequenceField)
    return is_of_numbers and (name in preparing.normalize or field.fill in ("mean", "median"))


def _loaded(
    reading: Reading, name: str, rows: Tensor | None, limit: Sequences, prepared: Prepared
) -> Loaded:
    if isinstance(reading, IntegerReading):
        return reading.load(rows)
    if isinstance(reading, DenseReading):
        return reading.load(rows, prepared.figures.get(name))
    return reading.load(rows, limit, prepared)
