"""The request log of a serve job."""

import re
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from api.app_state import AppStateDep
from api.http.access import Read, Submit
from api.http.answers import Paged, bad_parameter, time_text
from api.routes.observations.events import JobId
from api.schemas import inspection
from api.schemas.documents import answers
from glasshouse import jsonio
from models.jobs import jobs
from models.observations import served_requests
from models.observations.served_requests import RequestFilter
from models.tables import ServedRequest

router = APIRouter(prefix="/api/v1", tags=["inside"])
_STATUS = re.compile(r"[1-5][0-9]{2}", re.ASCII)
Model = Annotated[
    str | None, Query(max_length=200, description="Only requests to this model, by its name.")
]
Statuses = Annotated[
    list[str] | None,
    Query(max_length=20, description="Only these statuses (`200`, `429`), separated by commas."),
]


@router.get(
    "/jobs/{id}/requests",
    summary="List recorded requests",
    responses=answers(200, inspection.ServedRequestList, *inspection.READ),
)
def list_requests(
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    page: Paged,
    model: Model = None,
    status: Statuses = None,
) -> Response:
    """Requests that a serve job has recorded, newest first. Empty without `request_log`.

    A page ends after about 8 MiB.
    """
    wanted = RequestFilter(model, _statuses(status))
    after = page.after_id("rec")
    with app_state.database.read() as tx:
        found = served_requests.read(
            tx, jobs.get(tx, job, caller.sees), wanted, after=after, limit=page.limit
        )
        data = ",".join(_document(row) for row in found.rows)
    end = jsonio.dumps({"has_more": found.cursor is not None, "next": found.cursor})
    body = f'{{"object":"list","data":[{data}],{end[1:]}'
    headers = {"Cache-Control": "private, no-cache"}
    return Response(body.encode(), headers=headers, media_type="application/json")


@router.delete(
    "/jobs/{id}/requests",
    status_code=204,
    summary="Delete recorded requests",
    responses=answers(204, None, 401, 403, 404),
)
def delete_requests(app_state: AppStateDep, caller: Submit, job: JobId) -> Response:
    """Delete all requests that a serve job has recorded. It continues to record."""
    with app_state.database.write() as tx:
        served_requests.clear(tx, jobs.get(tx, job, caller.sees))
    return Response(status_code=204)


def _document(row: ServedRequest) -> str:
    """Return a request as JSON; its details are sent as they were stored."""
    head = {
        "id": row.id,
        "object": "served_request",
        "job": row.job,
        "replica": row.replica,
        "at": time_text(row.at),
        "model": row.model,
        "version": row.version,
        "status": row.status,
        "code": row.code,
    }
    return f"{jsonio.dumps(head)[:-1]},{row.details[1:]}"


def _statuses(given: Sequence[str] | None) -> frozenset[int]:
    """Return the statuses, given repeatedly or separated by commas.

    Raises:
        InvalidRequest: one is no status.
    """
    names = {name for text in given or () for name in text.split(",") if name}
    for name in sorted(names):
        if not _STATUS.fullmatch(name):
            detail = f"{name[:100]!r} is no HTTP status; write 200, 422, 429 or another"
            raise bad_parameter("status", f"{detail}, separated by commas.")
    return frozenset(int(name) for name in names)
