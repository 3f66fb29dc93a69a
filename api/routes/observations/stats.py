"""Layer statistics over steps: scalars, quantiles and histograms, as JSON, Arrow and CSV."""

import heapq
from collections.abc import Generator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from numpy.typing import NDArray
from starlette.responses import Response

from api.app_state import AppStateDep
from api.http import negotiation
from api.http.access import Read
from api.http.answers import bad_parameter, etag, list_of
from api.http.ranks import OfRanks, of_any
from api.rendering import columnar, quantiles
from api.rendering.columnar import Column, RowGroup
from api.routes.observations.events import JobId
from api.routes.observations.layers import Phase, check_kind
from api.routes.observations.metrics import FromStep, ToStep
from api.schemas import inspection
from glasshouse import histogram_bins as universal
from models.database import Transaction
from models.jobs import jobs
from models.observations import ranks, stats
from models.observations.stats import COLUMNS, QUANTILES, STATISTICS, Form
from models.observations.stats_bytes import Histograms, StatsArrays, StoredSeries
from models.observations.thinning import evenly, kept_places

router = APIRouter(prefix="/api/v1", tags=["inside"])
HISTOGRAM: Literal["histogram"] = "histogram"
STATS = (*STATISTICS, *QUANTILES, HISTOGRAM)
MAX_HISTOGRAMS = 2000
_NAMES = ("layer", "kind", "phase", "step")
Edges = NDArray[np.float64]
Counts = NDArray[np.int64]
LayerGlob = Annotated[
    str, Query(max_length=200, description="A glob over layer and parameter names.")
]
Statistics = Annotated[
    list[str] | None,
    Query(
        max_length=20,
        description="Statistics and quantiles, separated by commas. Default: all that "
        "were stored. Others are computed from histograms. Use `histogram` alone.",
    ),
]
MaxSteps = Annotated[
    int,
    Query(
        ge=2,
        le=1_000_000,
        description="Maximum steps per series. Keeps first, last, the ends of NaN or Inf "
        "runs, and extremes. Histograms: at most 2,000, evenly spaced.",
    ),
]


@router.get(
    "/jobs/{id}/stats",
    summary="Layer statistics over steps",
    responses=inspection.binary(
        columnar.ARROW, columnar.CSV, model=inspection.StatsList, others=(*inspection.READ, 406)
    ),
)
def query_stats(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    layer: LayerGlob = "*",
    kind: Annotated[str | None, Query(max_length=40)] = None,
    phase: Phase = None,
    rank: OfRanks = None,
    stat: Statistics = None,
    from_step: FromStep = None,
    to_step: ToStep = None,
    max_points: MaxSteps = 1000,
    bins: Annotated[int, Query(ge=1, le=1000, description="Maximum bins of a histogram.")] = 64,
) -> Response:
    """Columns over steps for each matching tensor; null where a tensor has no value.

    `Accept` chooses JSON, or one long table in Arrow or CSV. The bins of a histogram are the same
    at every step: they are merged from fixed bins that all tensors and steps share. A table has the
    column `rank` if you pass `rank`.
    """
    chosen = negotiation.choose(request, columnar.FORMATS)
    requested = _requested(stat)
    if kind is not None:
        check_kind(kind)
    with app_state.database.read() as tx:
        found_job = jobs.get(tx, job, caller.sees)
        tag = etag(job, found_job.version, chosen)
        headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Accept"}
        known = columnar.fresh(request, tag)
        if known is not None:
            return known
        where = {"layer": layer, "kind": kind, "phase": phase}
        where |= {"from_step": from_step, "to_step": to_step, "rank": of_any(found_job, rank)}
        if requested == [HISTOGRAM]:
            counted = list(_histograms(tx, job, where, max_points, bins))
            return _histogram_answer(chosen, counted, headers, has_rank=rank is not None)
        found = list(_figures(tx, job, where, requested, max_points))
    if chosen == "json":
        return columnar.answer(list_of([_entry(part) for part in found], cursor=None), headers)
    names = [*_names(has_rank=rank is not None), *(requested or _present(found))]
    return columnar.table(chosen, found, names, headers=headers)


def _names(*, has_rank: bool) -> list[str]:
    return [*_NAMES, "rank"] if has_rank else [*_NAMES]


def _with_rank(series: StoredSeries, columns: dict[str, Column]) -> RowGroup:
    """Return rows with the texts of a series, and its rank as a column; without: all processes."""
    num = len(columns["step"].values)
    there = None if series.rank != ranks.MERGED else np.zeros(num, bool)
    rank = Column(np.full(num, series.rank, np.int64), there)
    return RowGroup(_texts(series), {**columns, "rank": rank})


def _texts(series: StoredSeries) -> dict[str, str]:
    return {"layer": series.layer, "kind": series.kind, "phase": series.phase}


def _requested(given: Sequence[str] | None) -> list[str]:
    names = list(dict.fromkeys(name for text in given or () for name in text.split(",") if name))
    for name in names:
        if name not in STATS:
            raise bad_parameter("stat", f"{name[:100]!r} is none of {', '.join(STATS)}.")
    if HISTOGRAM in names and len(names) > 1:
        raise bad_parameter("stat", "histogram cannot be asked for together with figures.")
    return names


def _present(parts: Sequence[RowGroup]) -> list[str]:
    """Return the columns that any part has, in the usual order.

    If none has any: the nine scalars.
    """
    some = [name for name in STATS if any(name in part.columns for part in parts)]
    return some or list(STATISTICS)


def _entry(part: RowGroup) -> dict[str, Any]:
    values = {name: columnar.of_json(column) for name, column in part.columns.items()}
    rank = values.pop("rank")[0]
    return dict(part.texts) | {"rank": rank, "step": values.pop("step"), "values": values}


def _figures(
    tx: Transaction, job: str, where: dict[str, Any], requested: list[str], max_points: int
) -> Generator[RowGroup]:
    """Yield the thinned series one by one, each with all scalars and quantiles of one tensor."""
    forms: list[Form] = [
        form
        for form in COLUMNS
        if any(not requested or name in requested for name in COLUMNS[form])
    ]
    if not {*QUANTILES}.isdisjoint(requested):
        forms.append(HISTOGRAM)

    def run(form: Form) -> Generator[tuple[StoredSeries, Form, Any]]:
        for series, data in stats.query(tx, job, form=form, **where):
            yield series, form, data

    runs = [run(form) for form in forms]
    for series, group in groupby(
        heapq.merge(*runs, key=lambda item: item[0]), key=lambda item: item[0]
    ):
        found = {form: data for _, form, data in group}
        if (counted := found.pop(HISTOGRAM, None)) is not None:
            most = min(max_points, MAX_HISTOGRAMS)
            found["quantiles"] = quantiles.filled(found.get("quantiles"), counted, most)
        steps, columns = _side_by_side([*found.items()], requested)
        kept = _kept(columns, max_points)
        thin = {
            name: Column(
                column.values[kept], None if column.present is None else column.present[kept]
            )
            for name, column in columns.items()
        }
        nothing = Column(np.full(len(kept), np.nan), np.zeros(len(kept), bool))
        shown = {name: thin.get(name, nothing) for name in requested or thin}
        yield _with_rank(series, {"step": Column(steps[kept]), **shown})


def _side_by_side(
    found: Sequence[tuple[Any, StatsArrays]], requested: list[str]
) -> tuple[NDArray[np.int64], dict[str, Column]]:
    every = [data.steps for _, data in found]
    steps = every[0]
    if len(every) > 1 and not np.array_equal(every[0], every[1]):
        steps = np.union1d(*every)
    columns: dict[str, Column] = {}
    for form, data in found:
        present = None
        places = np.arange(len(steps))
        if len(data.steps) < len(steps):
            places = np.searchsorted(steps, data.steps)
            present = np.zeros(len(steps), bool)
            present[places] = True
        for name, values in zip(COLUMNS[form], data.values, strict=True):
            spread = values
            if present is not None:
                spread = np.full(len(steps), np.nan)
                spread[places] = values
            columns[name] = Column(spread, present)
    order = requested or [name for name in STATS if name in columns]
    return steps, {name: columns[name] for name in order if name in columns}


def _kept(columns: dict[str, Column], max_points: int) -> NDArray[np.intp]:
    num = len(next(iter(columns.values())).values)
    if num <= max_points:
        return np.arange(num)
    if all(column.present is None for column in columns.values()):
        return kept_places([column.values for column in columns.values()], max_points)
    share = max_points // len(columns)
    if share < 2:
        return evenly(num, max_points)
    kept: list[NDArray[np.intp]] = []
    for values, present in columns.values():
        there = np.arange(num) if present is None else np.flatnonzero(present)
        kept.append(there[kept_places([values[there]], share)])
    return np.unique(np.concatenate(kept))


# --- histograms ---------------------------------------------------------------------------------


class SharedHistograms:
    """The histograms of one tensor over steps, with shared edges."""

    def __init__(self, series: StoredSeries, data: Histograms, bins: int) -> None:
        self.series = series
        self.steps = data.steps
        self.edges, self.counts = share_edges(data, bins)

    def as_json(self) -> dict[str, Any]:
        """Return the histograms as JSON."""
        return _texts(self.series) | {
            "rank": ranks.shown(self.series.rank),
            "step": self.steps,
            "edges": np.ascontiguousarray(self.edges),
            "counts": self.counts,
        }

    def as_part(self) -> RowGroup:
        """Return the long form: one row for each step and non-empty bin."""
        rows, bars = np.nonzero(self.counts)
        columns = {
            "step": Column(self.steps[rows]),
            "low": Column(self.edges[:-1][bars]),
            "high": Column(self.edges[1:][bars]),
            "count": Column(self.counts[rows, bars]),
        }
        return _with_rank(self.series, columns)


def share_edges(data: Histograms, bins: int | None) -> tuple[Edges, Counts]:
    """Return edges that all steps share, and the counts of each step: (steps, bins).

    With ``bins`` None, no bins are merged; a gap between existing bins is a bin too.
    """
    numbers, entries = np.unique(data.bins, return_inverse=True)
    if not len(numbers):
        return np.zeros(0), np.zeros((len(data.steps), 0), np.int64)
    totals = np.bincount(entries, weights=data.counts.astype(np.float64)).astype(np.int64)
    sides = np.array([universal.edges(number) for number in numbers.tolist()])
    if bins is None:
        edges = np.unique(sides)
    else:
        edges = np.array(universal.coarse(numbers.tolist(), totals.tolist(), bins).edges)
    middles: Edges = sides.mean(axis=1)
    bars: Counts = np.searchsorted(edges, middles, side="right") - 1
    counts = np.zeros((len(data.steps), len(edges) - 1), np.int64)
    rows = np.repeat(np.arange(len(data.steps)), data.sizes)
    np.add.at(counts, (rows, bars[entries]), data.counts.astype(np.int64))
    return edges, counts


def _histograms(
    tx: Transaction, job: str, where: dict[str, Any], max_points: int, bins: int
) -> Generator[SharedHistograms]:
    for series, data in stats.query(tx, job, form="histogram", **where):
        kept = evenly(len(data.steps), min(max_points, MAX_HISTOGRAMS))
        yield SharedHistograms(series, data.take(kept), bins)


def _histogram_answer(
    chosen: str, found: list[SharedHistograms], headers: dict[str, str], *, has_rank: bool
) -> Response:
    if chosen == "json":
        return columnar.answer(list_of([one.as_json() for one in found], cursor=None), headers)
    names = [*_names(has_rank=has_rank), "low", "high", "count"]
    return columnar.table(chosen, [one.as_part() for one in found], names, headers=headers)
