"""Layer statistics of each watched tensor over steps.

A shipment adds a block per form; ``stats_folding`` turns blocks into chunks of one series each. A
query reads the chunks of matching series, and the blocks that are not folded yet.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from glasshouse import histogram_bins, jsonio
from glasshouse.events import STATS_COLUMNS
from models.observations import lineage
from models.observations.ranks import MERGED
from models.observations.stats_bytes import (
    Block,
    Data,
    Floats,
    Gathered,
    Histograms,
    StatsArrays,
    Steps,
    StoredSeries,
    join,
    pack_block,
    read_names,
    unpack_block,
    unpack_chunk,
)
from models.tables import StatsBlock, StatsChunk, StatsFold, StatsSeries

Form = Literal["stats", "quantiles", "histogram"]
FORMS: tuple[Form, ...] = ("stats", "quantiles", "histogram")
STATISTICS = STATS_COLUMNS[2:]
"""mean, std, min, max, l2, absmax, zeros, nan, inf."""
QUANTILES = tuple(histogram_bins.QUANTILES)
COLUMNS: dict[Form, tuple[str, ...]] = {
    "stats": STATISTICS,
    "quantiles": QUANTILES,
    "histogram": (),
}
_KEYS: dict[Form, str] = {"stats": "rows", "quantiles": "quantiles", "histogram": "histograms"}


class Newest(NamedTuple):
    """The statistics of one tensor at its last step, in the order of ``STATISTICS``."""

    series: StoredSeries
    step: int
    figures: tuple[float, ...]


def add(tx: Session, job: str, attempt: int, records: Sequence[dict[str, Any]]) -> None:
    """Store ``stats`` records as blocks: step, phase, rows, optional quantiles and histograms.

    ``ranks`` is optional too: rows, quantiles and histograms of single processes.
    """
    for form in FORMS:
        block = _block(form, records)
        if block is None:
            continue
        steps = block.data.steps
        tx.add(
            StatsBlock(
                job=job,
                attempt=attempt,
                form=form,
                from_step=int(steps.min()),
                to_step=int(steps.max()),
                data=pack_block(block),
            )
        )


def _block(form: Form, records: Sequence[dict[str, Any]]) -> Block | None:
    numbers: dict[StoredSeries, int] = {}
    owners: list[int] = []
    steps: list[int] = []
    rows: list[Any] = []
    for record in records:
        for part in (record, *record.get("ranks", ())):
            for row in part.get(_KEYS[form], ()):
                series = StoredSeries(row[0], row[1], record["phase"], part.get("rank", MERGED))
                owners.append(numbers.setdefault(series, len(numbers)))
                steps.append(record["step"])
                rows.append(row[2:])
    if not rows:
        return None
    data: Data
    at = np.array(steps, np.int64)
    if form == "histogram":
        held: list[list[int]] = [row[0] for row in rows]
        data = Histograms(
            at,
            np.array([len(some) for some in held], np.int64),
            np.array([number for some in held for number in some], np.uint16),
            np.array([count for row in rows for count in row[1]], np.uint64),
        )
        if len(data.bins) != len(data.counts):
            raise ValueError("a histogram has as many counts as bins")
    else:
        data = StatsArrays(at, _floats(rows).T)
    return Block(list(numbers), np.array(owners, np.uint32), data)


def _floats(rows: list[list[Any]]) -> Floats:
    try:
        return np.array(rows, np.float64)  # also parses the names of NaN and Inf
    except (TypeError, ValueError):
        return np.array([[jsonio.number(figure) for figure in row] for row in rows], np.float64)


def query(  # noqa: PLR0913 (each is a filter)
    tx: Session,
    job: str,
    *,
    form: Form = "stats",
    layer: str = "*",
    kind: str | None = None,
    phase: str | None = None,
    rank: int | None = MERGED,
    from_step: int | None = None,
    to_step: int | None = None,
) -> Generator[tuple[StoredSeries, Any]]:
    """Yield each series with its data, in order. ``layer`` is a glob; ``rank`` None: any.

    Only one series is in memory at a time, because a job can have more than fits.
    """

    def matches(series: StoredSeries) -> bool:
        return (
            fnmatchcase(series.layer, layer)
            and kind in (None, series.kind)
            and phase in (None, series.phase)
            and rank in (None, series.rank)
        )

    reader = _Reader(tx, job, form, matches, (from_step, to_step))
    for series in reader.names():
        found = reader.read(series)
        if found is not None:
            yield series, found


class _Reader:
    """Reads series of one job.

    It reads blocks first: if a fold commits in between, data occurs twice instead of being lost.
    """

    def __init__(
        self,
        tx: Session,
        job: str,
        form: Form,
        matches: Callable[[StoredSeries], bool],
        steps: tuple[int | None, int | None],
    ) -> None:
        self._tx = tx
        self._from, self._to = steps
        self._limits = lineage.limits(tx, job)
        self._blocks = self._gather(job, form, matches)
        self._last_fold = last_fold(tx, job)
        self._chunked: dict[StoredSeries, list[tuple[int, int]]] = defaultdict(list)
        for row in tx.execute(_series_of(job, form)):
            series = StoredSeries(row.layer, row.kind, row.phase, row.rank)
            if matches(series):
                self._chunked[series].append((row.attempt, row.id))

    def names(self) -> list[StoredSeries]:
        """Return every matching series."""
        return sorted(set(self._chunked) | {series for _, series in self._blocks})

    def read(self, series: StoredSeries) -> Data | None:
        """Return the data of one series by step. If a step occurs twice, the later value wins."""
        parts: list[Data] = []
        known = dict(self._chunked.get(series, ()))
        for attempt, limit in sorted(self._limits.items()):
            some: list[Data] = []
            if attempt in known:
                some += [unpack_chunk(data) for data in self._chunks(known[attempt], limit)]
            if (attempt, series) in self._blocks:
                some.append(self._blocks[attempt, series])
            for part in some:
                cut = self._within(part, limit)
                if len(cut.steps):
                    parts.append(cut)
        if not parts:
            return None
        return _by_step(join(parts))

    def _gather(
        self, job: str, form: Form, matches: Callable[[StoredSeries], bool]
    ) -> dict[tuple[int, StoredSeries], Data]:
        wanted = (
            select(StatsBlock.attempt, StatsBlock.data)
            .where(
                StatsBlock.job == job,
                StatsBlock.form == form,
                *lineage.shown(self._tx, job, StatsBlock.attempt, StatsBlock.from_step),
            )
            .order_by(StatsBlock.id)
        )
        if self._from is not None:
            wanted = wanted.where(StatsBlock.to_step >= self._from)
        if self._to is not None:
            wanted = wanted.where(StatsBlock.from_step <= self._to)
        gathered = Gathered(matches)
        for attempt, data in self._tx.execute(wanted):
            gathered.add(attempt, data)
        return gathered.by_series()

    def _chunks(self, series: int, limit: float) -> Iterable[bytes]:
        wanted = select(StatsChunk.data).where(
            StatsChunk.series == series, StatsChunk.fold <= self._last_fold
        )
        if self._from is not None:
            wanted = wanted.where(StatsChunk.to_step >= self._from)
        highest = min(limit, float("inf") if self._to is None else self._to)
        if highest != float("inf"):
            wanted = wanted.where(StatsChunk.from_step <= int(highest))
        return self._tx.scalars(wanted.order_by(StatsChunk.fold))

    def _within(self, part: Data, limit: float) -> Data:
        low = -1 if self._from is None else self._from
        high = min(limit, float("inf") if self._to is None else self._to)
        steps = part.steps
        inside = (steps >= low) & (steps <= high)
        return part if inside.all() else part.take(inside)


def _by_step(data: Data) -> Data:
    steps: Steps = data.steps
    if (np.diff(steps) > 0).all():
        return data
    order = np.argsort(steps, kind="stable")
    ordered = steps[order]
    last = np.append(np.diff(ordered) != 0, True)
    return data.take(order[last])


def newest(tx: Session, job: str, *, rank: int = MERGED) -> list[Newest]:
    """Return the last visible row of each series of a process, or of all together."""
    limit_of = lineage.limits(tx, job)
    found = _newest_in_blocks(tx, job, limit_of, rank)

    def see(series: StoredSeries, step: int, figures: list[float]) -> None:
        if series not in found or found[series].step < step:
            found[series] = Newest(series, step, tuple(figures))

    reader: _Reader | None = None
    for row in tx.execute(_series_of(job, "stats").where(StatsSeries.rank == rank)).all():
        series = StoredSeries(row.layer, row.kind, row.phase, rank)
        if row.last_step <= limit_of.get(row.attempt, -1):
            see(series, row.last_step, np.frombuffer(row.last, "<f8").tolist())
            continue
        # a later attempt hides the end of that attempt: find the last row before it
        reader = reader or _Reader(tx, job, "stats", lambda one: one.rank == rank, (None, None))
        rest = reader.read(series)
        if isinstance(rest, StatsArrays):
            see(series, int(rest.steps[-1]), rest.values[:, -1].tolist())
    return [found[series] for series in sorted(found)]


def _newest_in_blocks(
    tx: Session, job: str, limit_of: dict[int, float], rank: int
) -> dict[StoredSeries, Newest]:
    """Read blocks from the newest back; skip a block if all of its series were already found."""
    wanted = (
        select(StatsBlock.attempt, StatsBlock.data)
        .where(
            StatsBlock.job == job,
            StatsBlock.form == "stats",
            *lineage.shown(tx, job, StatsBlock.attempt, StatsBlock.from_step),
        )
        .order_by(StatsBlock.id.desc())
    )
    found: dict[StoredSeries, Newest] = {}
    names_of = cache(read_names)
    for attempt, data in tx.execute(wanted):
        block = unpack_block(data, names_of)
        missing = [
            place
            for place, series in enumerate(block.names)
            if series.rank == rank and series not in found
        ]
        if not missing or not isinstance(block.data, StatsArrays):
            continue
        steps = np.where(block.data.steps <= limit_of[attempt], block.data.steps, -1)
        for place in missing:
            mine = np.flatnonzero(block.numbers == place)
            latest = int(mine[steps[mine].argmax()])
            if steps[latest] >= 0:
                figures = tuple(block.data.values[:, latest].tolist())
                found[block.names[place]] = Newest(block.names[place], int(steps[latest]), figures)
    return found


def _series_of(job: str, form: Form) -> Any:
    return select(
        StatsSeries.id,
        StatsSeries.attempt,
        StatsSeries.layer,
        StatsSeries.kind,
        StatsSeries.phase,
        StatsSeries.rank,
        StatsSeries.last_step,
        StatsSeries.last,
    ).where(StatsSeries.job == job, StatsSeries.form == form)


def last_fold(tx: Session, job: str) -> int:
    """Return the number of the newest complete fold of a job.

    Ignore chunks with a higher number.
    """
    return tx.scalar(select(func.max(StatsFold.n)).where(StatsFold.job == job)) or 0
