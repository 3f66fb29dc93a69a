"""Layer statistics in columnar blocks.

A block holds the statistics of some steps: a JSON list of its series, then one zlib-compressed
run of little-endian arrays: series number (uint32), step (uint32 pairs as uint64) and one
float64 per figure. A figure costs at most 8 bytes; nothing is a SQL row per value.
"""

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from glasshouse import jsonio
from glasshouse.events import STATS_COLUMNS
from models.metrics import visible
from models.tables import Attempt, StatsBlock

FIGURES = STATS_COLUMNS[2:]
"""mean, std, min, max, l2, absmax, zeros, nan, inf."""

_HEAD = struct.Struct("<II")


class Series(NamedTuple):
    """What a row of statistics belongs to."""

    layer: str
    kind: str
    phase: str


class Row(NamedTuple):
    """The figures of one tensor at one step, in the order of ``FIGURES``."""

    series: Series
    step: int
    figures: tuple[float, ...]


def add(tx: Session, job: str, attempt: int, records: Sequence[dict[str, Any]]) -> None:
    """Store ``stats`` records (step, phase, rows) as one block."""
    rows = [
        Row(
            Series(row[0], row[1], record["phase"]),
            record["step"],
            tuple(float(jsonio.number(figure)) for figure in row[2:]),
        )
        for record in records
        for row in record["rows"]
    ]
    if not rows:
        return
    steps = [row.step for row in rows]
    tx.add(
        StatsBlock(
            job=job,
            attempt=attempt,
            from_step=min(steps),
            to_step=max(steps),
            data=encode(rows),
        )
    )


def query(  # noqa: PLR0913 (each is a filter)
    tx: Session,
    job: str,
    *,
    layer: str = "*",
    kind: str | None = None,
    phase: str | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
) -> list[Row]:
    """The rows of the series that match, by step; ``layer`` is a glob."""
    wanted = (
        select(StatsBlock.attempt, StatsBlock.data)
        .where(StatsBlock.job == job, visible(tx, job, StatsBlock.attempt, StatsBlock.from_step))
        .order_by(StatsBlock.id)
    )
    if from_step is not None:
        wanted = wanted.where(StatsBlock.to_step >= from_step)
    if to_step is not None:
        wanted = wanted.where(StatsBlock.from_step <= to_step)
    limits = _limits(tx, job)

    def matches(series: Series) -> bool:
        return (
            fnmatchcase(series.layer, layer)
            and kind in (None, series.kind)
            and phase in (None, series.phase)
        )

    found: dict[tuple[Series, int], Row] = {}
    for attempt, data in tx.execute(wanted):
        for row in decode(data, matches):
            if row.step <= limits[attempt] and _within(row.step, from_step, to_step):
                found[row.series, row.step] = row
    return sorted(found.values(), key=lambda row: (row.series, row.step))


def newest(tx: Session, job: str, *, blocks: int = 50) -> list[Row]:
    """The last row of each series in the newest blocks."""
    wanted = (
        select(StatsBlock.data)
        .where(StatsBlock.job == job, visible(tx, job, StatsBlock.attempt, StatsBlock.from_step))
        .order_by(StatsBlock.id.desc())
        .limit(blocks)
    )
    found: dict[Series, Row] = {}
    for data in tx.scalars(wanted):
        for row in decode(data):
            known = found.get(row.series)
            if known is None or known.step < row.step:
                found[row.series] = row
    return sorted(found.values())


def encode(rows: Sequence[Row]) -> bytes:
    """Pack rows into one block."""
    names = sorted({row.series for row in rows})
    number = {series: index for index, series in enumerate(names)}
    head = jsonio.dumps(names).encode()
    columns = zip(*(row.figures for row in rows), strict=True)
    body = b"".join(
        (
            _packed("I", (number[row.series] for row in rows)),
            _packed("Q", (row.step for row in rows)),
            *(_packed("d", column) for column in columns),
        )
    )
    return _HEAD.pack(len(head), len(rows)) + head + zlib.compress(body, 1)


def decode(data: bytes, matches: Any = None) -> Iterable[Row]:
    """Unpack the rows of a block; with ``matches``, only those of the series that it accepts."""
    size, count = _HEAD.unpack_from(data)
    names = [Series(*name) for name in jsonio.loads(data[_HEAD.size : _HEAD.size + size])]
    chosen = [matches is None or matches(series) for series in names]
    if not any(chosen):
        return
    body = zlib.decompress(data[_HEAD.size + size :])
    numbers = _unpacked("I", body[: 4 * count])
    steps = _unpacked("Q", body[4 * count : 12 * count])
    figures = _unpacked("d", body[12 * count :])
    for index in range(count):
        if chosen[numbers[index]]:
            yield Row(names[numbers[index]], steps[index], tuple(figures[index::count]))


def _packed(code: str, values: Iterable[float]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(code: str, data: bytes) -> "array[Any]":
    unpacked: array[Any] = array(code)
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked


def _limits(tx: Session, job: str) -> dict[int, float]:
    """By attempt, the last step whose rows a later attempt has not replaced."""
    rows = tx.execute(
        select(Attempt.n, Attempt.resumed_from_step).where(Attempt.job == job).order_by(Attempt.n)
    ).all()
    limits: dict[int, float] = {}
    limit = float("inf")
    for n, resumed in reversed(rows):
        limits[n] = limit
        limit = min(limit, -1 if resumed is None else resumed)
    return limits


def _within(step: int, from_step: int | None, to_step: int | None) -> bool:
    return (from_step is None or step >= from_step) and (to_step is None or step <= to_step)
