"""The metrics of a job: a summary of each, and their values over steps as columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from numpy.typing import NDArray
from starlette.responses import Response

from api.app_state import AppStateDep
from api.http import negotiation
from api.http.access import Read
from api.http.answers import etag, is_fresh, list_of, not_modified, tagged
from api.http.attempts import OfAttempt
from api.rendering import columnar
from api.rendering.columnar import Column, RowGroup
from api.routes.observations.events import JobId
from api.schemas import inspection
from api.schemas.documents import answers
from glasshouse.errors import MetricNotFound
from models.database import Transaction
from models.jobs import jobs
from models.observations import metrics
from models.observations.lineage import AttemptFilter
from models.observations.metrics import MetricPage, MetricPoint, Summary

router = APIRouter(prefix="/api/v1", tags=["inside"])

FromStep = Annotated[int | None, Query(ge=0, lt=2**53, description="First step, inclusive.")]
ToStep = Annotated[int | None, Query(ge=0, lt=2**53, description="Last step, inclusive.")]
MaxPoints = Annotated[
    int | None,
    Query(
        ge=2,
        le=1_000_000,
        description="Maximum points per series. Keeps first, last, the ends of NaN or Inf "
        "runs, and extremes, in this order. Default: all points, in pages.",
    ),
]


@router.get(
    "/jobs/{id}/metrics",
    summary="List metrics",
    responses=answers(200, inspection.MetricList, *inspection.READ),
)
def list_metrics(request: Request, app_state: AppStateDep, caller: Read, job: JobId) -> Response:
    """Each metric with its last, min and max value and its first step with NaN or Inf."""
    with app_state.database.read() as tx:
        tag = etag(job, jobs.progress(tx, job, caller.sees).version)
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
    summary="Get metric values over steps",
    responses=inspection.binary(
        columnar.ARROW, columnar.CSV, model=inspection.Columns, others=(*inspection.READ, 406)
    ),
)
def query_metrics(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    name: Annotated[list[str], Query(min_length=1, max_length=50)],
    from_step: FromStep = None,
    to_step: ToStep = None,
    max_points: MaxPoints = None,
    attempt: OfAttempt,
) -> Response:
    """Columns over the steps of all series; null where a series has no value. JSON, Arrow or CSV.

    Without `max_points`, a JSON response has at most about 100,000 values. If there are more,
    `has_more` is true, and `next` is the `from_step` of the next request. Arrow and CSV have all
    values and are streamed.

    With `attempt`, there is a column of that name. With `attempt=all`, a step may occur several
    times.
    """
    chosen = negotiation.choose(request, columnar.FORMATS)
    names = list(dict.fromkeys(name))
    where: dict[str, Any] = {"from_step": from_step, "to_step": to_step, "attempt_filter": attempt}
    with app_state.database.read() as tx:
        progress = jobs.progress(tx, job, caller.sees)
        tag = etag(job, progress.version, chosen)
        headers = {"Vary": "Accept"}
        if is_fresh(request, tag):
            return not_modified(tag, headers)
        found = _first_page(tx, job, names, where, max_points)
        _check_known(tx, job, found.series, attempt, has_ended=progress.has_ended)
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


def _first_page(
    tx: Transaction, job: str, names: list[str], where: dict[str, Any], max_points: int | None
) -> MetricPage:
    if max_points is None:
        return metrics.page(tx, job, names, **where)
    given = where | {"max_points": max_points}
    return MetricPage({each: metrics.query(tx, job, each, **given) for each in names}, None)


def _check_known(
    tx: Transaction,
    job: str,
    series: Mapping[str, Sequence[MetricPoint]],
    attempt: AttemptFilter,
    *,
    has_ended: bool,
) -> None:
    """Refuse metrics that the job does not have, unless it is running and has no metrics yet."""
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
    return RowGroup({}, known | columns)  # no metric has one of these names


def _columns(
    series: Mapping[str, list[MetricPoint]], *, apart: bool
) -> tuple[dict[str, NDArray[np.int64]], dict[str, Column]]:
    """Return step, epoch and attempt of each row, and each series over all rows.

    With ``apart``, a step of two attempts makes two rows. Otherwise attempts are not distinguished.
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
