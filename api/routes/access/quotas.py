"""Quotas: the limits of an owner, their current use, and limits set for one owner."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field as Constraint
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Admin, Caller, Read
from api.http.answers import Json
from api.http.bodies import Body, Parsed, body_of, described
from api.routes.access.keys import Word
from api.schemas import documents
from api.schemas.views import BASE
from glasshouse.errors import ScopeTooSmall
from models.access import quotas
from models.database import Transaction

router = APIRouter(prefix=BASE, tags=["quotas"])
Count = Annotated[int | None, Constraint(ge=0, le=2**53)]


class QuotaRequest(Body):
    """The limits of one owner. Fields that are absent or null fall back to the settings."""

    owner: Word
    queued_jobs: Count = None
    running_jobs: Count = None
    devices: Count = None
    storage_bytes: Count = None
    uploads: Count = None
    streams: Count = None
    requests_per_s: float | None = Constraint(default=None, ge=0.01, le=1e6)


@router.get(
    "/quotas",
    summary="Get the quotas of an owner",
    responses=documents.answers(200, documents.Quotas, 401, 403, 422),
)
def get_quotas(
    app_state: AppStateDep,
    caller: Read,
    owner: Annotated[
        str | None, Query(max_length=100, description="Another owner; requires the scope `admin`.")
    ] = None,
) -> Response:
    """The limits in force. Streams and requests are counted per API process."""
    wanted = caller.owner if owner is None else owner
    if wanted != caller.owner and caller.sees is not None:
        raise ScopeTooSmall("The quotas of another owner are for keys with the scope 'admin'.")
    with app_state.database.read() as tx:
        return Json(_quotas_json(app_state, tx, wanted))


@router.put(
    "/quotas",
    summary="Set the quotas of an owner",
    openapi_extra=described(QuotaRequest, example={"owner": "ada", "running_jobs": 2}),
    responses=documents.answers(200, documents.Quotas, 400, 401, 403, 413, 415, 422),
)
def set_quotas(
    request: Request,
    app_state: AppStateDep,
    caller: Admin,
    body: Annotated[Parsed[QuotaRequest], Depends(body_of(QuotaRequest))],
) -> Response:
    """Replace the limits of this owner. Existing jobs and files stay, even above the new limits."""
    wanted = body.value
    limits = {name: getattr(wanted, name) for name in quotas.NAMES}
    given = {name: value for name, value in limits.items() if value is not None}
    with app_state.database.write() as tx:
        quotas.put(tx, wanted.owner, given, by=caller.owner)
        answer = _quotas_json(app_state, tx, wanted.owner)
    request.app.state.keyring.forget()
    return Json(answer)


def _quotas_json(app_state: AppState, tx: Transaction, owner: str) -> dict[str, Any]:
    here = {
        "streams": app_state.streams.num_of_owner[owner],
        "receiving": app_state.receiving.num_of_owner[owner],
    }
    used = quotas.usage(tx, owner)
    return {
        "object": "quotas",
        "owner": owner,
        "limits": quotas.of(tx, owner, app_state.settings).as_dict(),
        "own": quotas.own(tx, owner),
        "used": used | {"uploads": used["uploads"] + here["receiving"], "streams": here["streams"]},
    }


def admit(app_state: AppState, caller: Caller) -> None:
    """Check before planning that the owner may queue one more job. It is checked again on storing.

    Raises:
        QuotaExceeded: The quota is used up.
    """
    with app_state.database.read() as tx:
        quotas.admit_job(tx, caller.owner, app_state.settings)
