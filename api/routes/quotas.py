"""Quotas: what an owner may use, what they use now, and other limits for one of them."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field as Constraint
from starlette.responses import Response

from api.app_state import AppState, House
from api.http.access import Admin, Caller, Read
from api.http.answers import Json
from api.http.bodies import Body, Parsed, body_of, described
from api.routes.keys import Word
from api.schemas import documents
from api.schemas.views import BASE
from glasshouse.errors import ScopeTooSmall
from models.access import quotas
from models.database import Transaction

router = APIRouter(prefix=BASE, tags=["quotas"])
Count = Annotated[int | None, Constraint(ge=0, le=2**53)]


class QuotaRequest(Body):
    """The limits of one owner. What is left out or null is what the settings say."""

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
    summary="What an owner may use, and uses",
    responses=documents.answers(200, documents.Quotas, 401, 403, 422),
)
def get_quotas(
    app_state: House,
    caller: Read,
    owner: Annotated[
        str | None, Query(max_length=100, description="Another owner's: for admins.")
    ] = None,
) -> Response:
    """The limits in force. Streams and requests count in each process of the API by itself."""
    wanted = caller.owner if owner is None else owner
    if wanted != caller.owner and caller.sees is not None:
        raise ScopeTooSmall("The quotas of another owner are for keys with the scope 'admin'.")
    with app_state.database.read() as tx:
        return Json(_quotas_json(app_state, tx, wanted))


@router.put(
    "/quotas",
    summary="Set what an owner may use",
    openapi_extra=described(QuotaRequest, example={"owner": "ada", "running_jobs": 2}),
    responses=documents.answers(200, documents.Quotas, 400, 401, 403, 413, 415, 422),
)
def set_quotas(
    request: Request,
    app_state: House,
    caller: Admin,
    body: Annotated[Parsed[QuotaRequest], Depends(body_of(QuotaRequest))],
) -> Response:
    """Replaces the owner's own limits. What they have already stays, even if it is more."""
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
    """Whether one more job could wait, asked before it is looked at; asked again as it is stored.

    Raises:
        QuotaExceeded: it could not.
    """
    with app_state.database.read() as tx:
        quotas.admit_job(tx, caller.owner, app_state.settings)
