"""The metric series of a job: a table of them, and their values as columns."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api import columnar, inside, negotiation
from api.access import Read
from api.answers import etag, is_fresh, list_of, not_modified, tagged
from api.attempts import OfAttempt
from api.columnar import Column, Part
from api.documents import answers
from api.events import JobId
from api.resources import House
from glasshouse.errors import MetricNotFound
from models import jobs, metrics
from models.database import Transaction
from models.lineage import Asked
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
    responses=inside.binary(
        columnar.ARROW, columnar.CSV, model=inside.Columns, others=(*inside.READ, 406)
    ),
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
    attempt: OfAttempt,
) -> Response:
    """Columns over the steps of all the series; null where one has no value. JSON, Arrow or csv.

    With `attempt` there is a column of that name, and with `all` a step may come several times.
    """
    chosen = negotiation.choose(request, columnar.FORMATS)
    names = list(dict.fromkeys(name))
    with house.database.read() as tx:
        standing = jobs.standing(tx, job, caller.sees)
        tag = etag(job, standing.version, chosen)
        headers = {"Vary": "Accept"}
        if is_fresh(request, tag):
            return not_modified(tag, headers)
        span = {"from_step": from_step, "to_step": to_step, "max_points": max_points}
        series = {each: metrics.query(tx, job, each, asked=attempt, **span) for each in names}
        _check_known(tx, job, series, attempt, has_ended=standing.has_ended)
    headers |= {"ETag": tag, "Cache-Control": "private, no-cache"}
    return _answer(chosen, series, headers, apart=attempt is not None)


def _check_known(
    tx: Transaction,
    job: str,
    series: Mapping[str, Sequence[Point]],
    attempt: Asked,
    *,
    has_ended: bool,
) -> None:
    """Refuse the name of a metric that the job does not have, and will not have."""
    empty = [name for name, points in series.items() if not points]
    known = [row.name for row in metrics.names(tx, job, attempt)] if empty else []
    unknown = [name for name in empty if name not in known]
    if unknown and (known or has_ended):
        raise MetricNotFound(
            f"The job has reported no metric {unknown[0][:200]!r}; it has "
            f"{', '.join(known[:50]) or 'none'}."
        )


def _answer(
    chosen: str, series: dict[str, list[Point]], headers: Mapping[str, str], *, apart: bool
) -> Response:
    epochs, columns = _columns(series, apart=apart)
    places = np.array(list(epochs), np.int64).reshape(-1, 2)
    about = {"step": places[:, 0], "epoch": np.array(list(epochs.values()), np.int64)}
    if apart:
        about["attempt"] = places[:, 1]
    if chosen == "json":
        values = {name: columnar.of_json(column) for name, column in columns.items()}
        told = {name: np.ascontiguousarray(column) for name, column in about.items()}
        return columnar.answer(told | {"values": values}, headers)
    known = {name: Column(column) for name, column in about.items()}
    part = Part({}, known | columns)  # a metric has a slash or none of these names
    return columnar.table(chosen, [part], list(part.columns), headers=headers)


def _columns(
    series: dict[str, list[Point]], *, apart: bool
) -> tuple[dict[tuple[int, int], int], dict[str, Column]]:
    """The epoch of each step of any series, and each series over all of these steps.

    ``apart``: a step of two attempts counts as two; else the attempt of a step is 0.
    """

    def key(point: Point) -> tuple[int, int]:
        return point.step, point.attempt if apart else 0

    epochs: dict[tuple[int, int], int] = {}
    for points in series.values():
        for point in points:
            epochs.setdefault(key(point), point.epoch)
    epochs = dict(sorted(epochs.items()))
    place = {found: number for number, found in enumerate(epochs)}
    columns: dict[str, Column] = {}
    for name, points in series.items():
        values = np.full(len(place), np.nan)
        present = np.zeros(len(place), bool)
        mine = [place[key(point)] for point in points]
        values[mine] = [point.value for point in points]
        present[mine] = True
        columns[name] = Column(values, None if present.all() else present)
    return epochs, columns
