"""Plots of a job's series, for curl, notebooks and chat. Drawn in a thread."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.app_state import AppStateDep
from api.http.access import Read
from api.http.answers import bad_parameter, etag, is_fresh, not_modified
from api.http.ranks import OfRank, of_one
from api.rendering import drawing
from api.rendering.drawing import HistogramSeries, Line
from api.routes.observations.events import JobId
from api.routes.observations.layers import check_kind, tensor_name
from api.routes.observations.stats import share_edges
from api.schemas import inspection
from glasshouse.errors import MetricNotFound
from models.database import Transaction
from models.jobs import jobs
from models.observations import metrics, stats
from models.observations.ranks import MERGED
from models.observations.stats import STATISTICS
from models.observations.stats_bytes import Histograms
from models.observations.thinning import evenly
from models.tables import Job

router = APIRouter(prefix="/api/v1", tags=["inside"])
MAX_POINTS = 2000
MAX_SERIES = 12
MAX_CELLS = 400
"""Maximum steps in a heat map."""
MAX_BARS = 80
MEDIA = {"png": "image/png", "svg": "image/svg+xml"}
_NAMES = {
    "loss": ("loss",),
    "lr": ("lr",),
    "throughput": ("samples_per_s", "tokens_per_s"),
}
_BULK, _FAR = 0.98, 30
"""A tail beyond 30 times the magnitude that covers 98 % of the values is drawn on a log scale."""
_L2 = STATISTICS.index("l2")


@router.get(
    "/jobs/{id}/plots/{plot}",
    summary="Plot a series",
    responses=inspection.binary(*MEDIA.values(), others=inspection.READ),
)
def get_plot(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    plot: Literal["loss", "lr", "throughput", "gradient_flow", "histogram"],
    layer: Annotated[
        str | None,
        Query(max_length=200, description="For `histogram`: a layer or parameter. For "
              "`gradient_flow`: a glob."),
    ] = None,
    kind: Annotated[str | None, Query(max_length=40, description="For `histogram`.")] = None,
    rank: OfRank = None,
    format: Literal["png", "svg"] = "png",  # noqa: A002 (the public name)
) -> Response:  # fmt: skip
    """`loss`, `lr`, `throughput`: values over steps, with a red line at NaN or Inf.

    `gradient_flow`: the L2 norm of each parameter's gradient, at the newest step and over all.
    `histogram`: the distribution of one tensor's values over the steps. Both take `rank`.
    """
    _check(plot, layer, kind, rank)
    with app_state.database.read() as tx:
        found = jobs.get(tx, job, caller.sees)
        tag = etag(job, found.version, plot, format)
        if is_fresh(request, tag):
            return not_modified(tag)
        draw = _reader(tx, found, plot, _Drawn(layer, kind, of_one(found, rank)), format)
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    return Response(draw(), headers=headers, media_type=MEDIA[format])


class _Drawn(NamedTuple):
    """What a plot of tensors shows."""

    layer: str | None
    kind: str | None
    rank: int

    @property
    def title(self) -> str:
        """The end of the plot's title."""
        return "" if self.rank == MERGED else f", rank {self.rank}"


def _check(plot: str, layer: str | None, kind: str | None, rank: str | None) -> None:
    if kind is not None:
        check_kind(kind)
    if plot == "histogram" and layer is None:
        raise bad_parameter("layer", "a histogram is of one layer or parameter; name it.")
    if plot not in ("histogram", "gradient_flow") and layer is not None:
        raise bad_parameter("layer", f"{plot} is not of a layer.")
    if plot not in ("histogram", "gradient_flow") and rank is not None:
        raise bad_parameter("rank", f"{plot} has no values of single processes.")
    if plot != "histogram" and kind is not None:
        raise bad_parameter("kind", f"{plot} is not of a kind of tensor.")


def _reader(tx: Transaction, job: Job, plot: str, tensor: _Drawn, form: str) -> Callable[[], bytes]:
    """Read the data of a plot.

    Return a function that draws it; drawing is slow and needs no database.
    """
    title = job.name or job.id
    if plot == "gradient_flow":
        gradients = _gradients(tx, job, tensor)
        return partial(drawing.flow, f"{title}: gradients{tensor.title}", gradients, form)
    if plot == "histogram":
        return _histogram(tx, job, tensor, form)
    return partial(drawing.lines, title, plot, _metrics(tx, job.id, plot), form)


def _metrics(tx: Transaction, job: str, plot: str) -> dict[str, Line]:
    names = [row.name for row in metrics.names(tx, job)]
    wanted = [name for name in names if name.rpartition("/")[2] in _NAMES[plot]][:MAX_SERIES]
    if not wanted:
        raise MetricNotFound(f"The job has reported nothing to draw as {plot}.")
    series: dict[str, Line] = {}
    for name in wanted:
        points = metrics.query(tx, job, name, max_points=MAX_POINTS)
        steps = np.array([point.step for point in points], np.int64)
        series[name] = Line(steps, np.array([point.value for point in points], np.float64))
    return series


def _gradients(tx: Transaction, job: Job, tensor: _Drawn) -> dict[str, Line]:
    """Return the L2 norm of the gradient by parameter, in the network's order."""
    found: dict[str, Line] = {}
    where: dict[str, Any] = {"layer": tensor.layer or "*", "rank": tensor.rank}
    for series, data in stats.query(tx, job.id, kind="param_grad", **where):
        if series.phase == "train":
            kept = evenly(len(data.steps), MAX_CELLS)
            found[series.layer] = Line(data.steps[kept], data.values[_L2][kept])
    if not found:
        raise MetricNotFound(
            "The job has no statistics of gradients to draw.",
            hint='Watch them: a probe with "kinds": ["param_grad"] and "want": ["stats"].',
        )
    layers: list[dict[str, Any]] = job.plan.get("layers", [])
    order = [name for entry in layers for name in entry.get("parameter_shapes", {})]
    ranks = {name: rank for rank, name in enumerate(order)}
    return dict(sorted(found.items(), key=lambda item: (ranks.get(item[0], len(ranks)), item[0])))


def _histogram(tx: Transaction, job: Job, tensor: _Drawn, form: str) -> Callable[[], bytes]:
    layer, kind = tensor.layer or "", tensor.kind
    if kind is not None:
        layer = tensor_name(job, layer, kind)
    where: dict[str, Any] = {"layer": literal(layer), "kind": kind, "rank": tensor.rank}
    found = stats.query(tx, job.id, form="histogram", **where)
    some = next(found, None)
    if some is None:
        raise MetricNotFound(
            f"The job has no histograms of {layer[:100]!r} to draw.",
            hint='Ask for them: a probe whose want holds "histogram".',
        )
    series, data = some
    data = data.take(evenly(len(data.steps), MAX_CELLS))
    title = f"{job.name or job.id}: {series.kind} of {series.layer}{tensor.title}"
    return lambda: drawing.histograms(title, spread(data), form)


def spread(data: Histograms) -> HistogramSeries:
    """Return the histograms to draw, with a second scale if a few values are far from the rest."""
    edges, counts = share_edges(data, None)
    if not len(edges):
        return HistogramSeries(data.steps, edges, counts)
    sizes = np.maximum(np.abs(edges[:-1]), np.abs(edges[1:]))
    order = np.argsort(sizes)
    totals = counts.sum(axis=0)[order]
    bulk = float(sizes[order][np.searchsorted(np.cumsum(totals), _BULK * totals.sum())])
    if float(sizes.max()) > _FAR * bulk:
        return HistogramSeries(data.steps, edges, counts, bulk)
    return HistogramSeries(data.steps, *share_edges(data, MAX_BARS))


def literal(name: str) -> str:
    """Return a glob that matches only this name."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)
