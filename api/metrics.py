"""The metric series of a job: a table of them, and their values as columns."""

import csv
import io
import math
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api import inside, negotiation
from api.access import Read
from api.answers import etag, is_fresh, list_of, not_modified, tagged
from api.documents import answers
from api.events import JobId
from api.resources import House
from glasshouse import jsonio
from glasshouse.errors import MetricNotFound
from models import jobs, metrics
from models.metrics import Point, Summary

router = APIRouter(prefix="/api/v1", tags=["inside"])

FromStep = Annotated[int | None, Query(ge=0, lt=2**53, description="First step, included.")]
ToStep = Annotated[int | None, Query(ge=0, lt=2**53, description="Last step, included.")]
MaxPoints = Annotated[
    int | None,
    Query(
        ge=2,
        le=1_000_000,
        description="About so many points of each series: first, last, extremes and every "
        "non-finite run are kept. Left out: all.",
    ),
]
FORMATS = {"application/json": "json", "text/csv": "csv"}


@router.get(
    "/jobs/{id}/metrics",
    summary="What was measured, at a glance",
    responses=answers(200, inside.MetricList, *inside.READ),
)
def list_metrics(request: Request, house: House, caller: Read, job: JobId) -> Response:
    """Each metric with its last, least and greatest value and its first non-finite step."""
    with house.database.read() as tx:
        tag = etag(job, jobs.standing(tx, job, caller.sees).version)
        if is_fresh(request, tag):
            return not_modified(tag)
        found = metrics.names(tx, job)
    return tagged(request, list_of([_entry(row) for row in found], cursor=None), tag)


def _entry(row: Summary) -> dict[str, Any]:
    return {
        "name": row.name,
        "last": row.last,
        "last_step": row.last_step,
        "min": row.min,
        "max": row.max,
        "count": row.num_values,
        "first_nonfinite_step": row.first_nonfinite_step,
    }


@router.get(
    "/jobs/{id}/metrics/query",
    summary="Values of metrics over steps",
    responses=inside.binary("text/csv", model=inside.Columns, others=(*inside.READ, 406)),
)
def query_metrics(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    *,
    house: House,
    caller: Read,
    job: JobId,
    name: Annotated[list[str], Query(min_length=1, max_length=50)],
    from_step: FromStep = None,
    to_step: ToStep = None,
    max_points: MaxPoints = None,
) -> Response:
    """Columns over the steps of all the series; null where one has no value. JSON or csv."""
    chosen = negotiation.choose(request, FORMATS)
    names = list(dict.fromkeys(name))
    with house.database.read() as tx:
        standing = jobs.standing(tx, job, caller.sees)
        tag = etag(job, standing.version, chosen)
        headers = {"Vary": "Accept"}
        if is_fresh(request, tag):
            return not_modified(tag, headers)
        series = {
            wanted: metrics.query(tx, job, wanted, from_step=from_step, to_step=to_step)
            for wanted in names
        }
        empty = [wanted for wanted, points in series.items() if not points]
        known = [row.name for row in metrics.names(tx, job)] if empty else []
    unknown = [wanted for wanted in empty if wanted not in known]
    if unknown and (known or standing.has_ended):
        raise MetricNotFound(
            f"The job has reported no metric {unknown[0][:200]!r}; it has "
            f"{', '.join(known[:50]) or 'none'}."
        )
    if max_points is not None:
        series = {key: metrics.thin(points, max_points) for key, points in series.items()}
    columns = _columns(series)
    if chosen == "json":
        return tagged(request, columns, tag, headers)
    headers |= {"ETag": tag, "Cache-Control": "private, no-cache"}
    return Response(_csv(columns), headers=headers, media_type="text/csv; charset=utf-8")


def _columns(series: dict[str, list[Point]]) -> dict[str, Any]:
    epochs: dict[int, int] = {}
    for points in series.values():
        for point in points:
            epochs.setdefault(point.step, point.epoch)
    steps = sorted(epochs)
    values: dict[str, list[float | None]] = {}
    for name, points in series.items():
        by_step = {point.step: point.value for point in points}
        values[name] = [by_step.get(step) for step in steps]
    return {"step": steps, "values": values, "epoch": [epochs[step] for step in steps]}


def _csv(columns: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["step", "epoch", *(_safe(name) for name in columns["values"])])
    for row in zip(columns["step"], columns["epoch"], *columns["values"].values(), strict=True):
        writer.writerow(["" if value is None else _number(value) for value in row])
    return text.getvalue()


def _safe(name: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name[:1] in "=+-@\t\r" else name


def _number(value: float) -> Any:
    return value if math.isfinite(value) else jsonio.named(value)
