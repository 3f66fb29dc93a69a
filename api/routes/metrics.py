"""The metric series of a job: a table of them, and their values as columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from numpy.typing import NDArray
from starlette.responses import Response

from api.app_state import House
from api.http import negotiation
from api.http.access import Read
from api.http.answers import etag, is_fresh, list_of, not_modified, tagged
from api.http.attempts import OfAttempt
from api.rendering import columnar
from api.rendering.columnar import Column, RowGroup
from api.routes.events import JobId
from api.schemas import inspection
from api.schemas.documents import answers
from glasshouse.errors import MetricNotFound
from models.database import Transaction
from models.jobs import jobs
from models.observations import metrics
from models.observations.lineage import Asked
from models.observations.metrics import MetricPage, MetricPoint, Summary

router = APIRouter(prefix="/api/v1", tags=["inside"])

FromStep = Annotated[int | None, Query(ge=0, lt=2**53, description="First step, included.")]
ToStep = Annotated[int | None, Query(ge=0, lt=2**53, description="Last step, included.")]
MaxPoints = Annotated[
    int | None,
    Query(
        ge=2,
        le=1_000_000,
        description="At most so many points of each series: first, last, the ends of non-finite "
        "runs and extremes are kept, in this order. Default: all of them, in pages.",
    ),
]


@router.get(
    "/jobs/{id}/metrics",
    summary="What was measured, at a glance",
    responses=answers(200, inspection.MetricList, *inspection.READ),
)
def list_metrics(request: Request, app_state: House, caller: Read, job: JobId) -> Response:
    """Each metric with its last, least and greatest value and its first non-finite step."""
    with app_state.database.read() as tx:
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
    responses=inspection.binary(
        columnar.ARROW, columnar.CSV, model=inspection.Columns, others=(*inspection.READ, 406)
    ),
)
def query_metrics(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    *,
    app_state: House,
    caller: Read,
    job: JobId,
    name: Annotated[list[str], Query(min_length=1, max_length=50)],
    from_step: FromStep = None,
    to_step: ToStep = None,
    max_points: MaxPoints = None,
    attempt: OfAttempt,
) -> Response:
    """Columns over the steps of all the series; null where one has no value. JSON, Arrow or csv.

    Without `max_points` an answer in JSON has about 100,000 values at most. Where there are more,
    `has_more` is true, and `next` is the `from_step` to ask for the others with. Arrow and csv have
    all values, and are sent as they are read.

    With `attempt` there is a column of that name, and with `all` a step may come several times.
    """
    chosen = negotiation.choose(request, columnar.FORMATS)
    names = list(dict.fromkeys(name))
    where: dict[str, Any] = {"from_step": from_step, "to_step": to_step, "asked": attempt}
    with app_state.database.read() as tx:
        standing = jobs.standing(tx, job, caller.sees)
        tag = etag(job, standing.version, chosen)
        headers = {"Vary": "Accept"}
        if is_fresh(request, tag):
            return not_modified(tag, headers)
        if max_points is None:
            found = metrics.page(tx, job, names, **where)
        else:
            given = where | {"max_points": max_points}
            found = MetricPage(
                {each: metrics.query(tx, job, each, **given) for each in names}, None
            )
        _check_known(tx, job, found.series, attempt, has_ended=standing.has_ended)
    headers |= {"ETag": tag, "Cache-Control": "private, no-cache"}
    if chosen == "json":
        return _as_json(found, headers, apart=attempt is not None)

    def parts() -> Iterator[RowGroup]:
        page = found
        yield _part(page.series, apart=attempt is not None)
        while page.next_step is not None:
            with app_state.database.read() as tx:
                page = metrics.page(tx, job, names, **where | {"from_step": page.next_step})
            yield _part(page.series, apart=attempt is not None)

    columns = ["step", "epoch", *(["attempt"] if attempt is not None else []), *names]
    return columnar.streamed(chosen, parts(), columns, headers)


def _check_known(
    tx: Transaction,
    job: str,
    series: Mapping[str, Sequence[MetricPoint]],
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


def _as_json(page: MetricPage, headers: Mapping[str, str], *, apart: bool) -> Response:
    about, columns = _columns(page.series, apart=apart)
    values = {name: columnar.of_json(column) for name, column in columns.items()}
    shown: dict[str, Any] = {name: np.ascontiguousarray(column) for name, column in about.items()}
    more = {"has_more": page.next_step is not None, "next": page.next_step}
    return columnar.answer(shown | {"values": values} | more, headers)


def _part(series: Mapping[str, list[MetricPoint]], *, apart: bool) -> RowGroup:
    about, columns = _columns(series, apart=apart)
    known = {name: Column(column) for name, column in about.items()}
    return RowGroup({}, known | columns)  # a metric has a slash or none of these names


def _columns(
    series: Mapping[str, list[MetricPoint]], *, apart: bool
) -> tuple[dict[str, NDArray[np.int64]], dict[str, Column]]:
    """Step, epoch and attempt of each row, and each series over all rows.

    ``apart``: a step of two attempts makes two rows; else the attempt of a step does not count.
    """

    def key(point: MetricPoint) -> tuple[int, int]:
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
    places = np.array(list(epochs), np.int64).reshape(-1, 2)
    about = {"step": places[:, 0], "epoch": np.array(list(epochs.values()), np.int64)}
    if apart:
        about["attempt"] = places[:, 1]
    return about, columns
