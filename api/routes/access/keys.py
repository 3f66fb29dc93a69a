"""API keys, and browser sessions opened by a one-time link."""

from datetime import timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field as Constraint
from starlette.responses import RedirectResponse, Response

from api.app_state import AppStateDep
from api.http.access import COOKIE, Admin, Read
from api.http.answers import Json, Paged, page_of
from api.http.bodies import Body, Parsed, body_of, described
from api.http.dashboard import used_link
from api.schemas import documents
from api.schemas.views import BASE, key_json
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from glasshouse import jsonio
from glasshouse.errors import KeyInvalid
from models import keys
from models.access.idempotency import Answer
from models.database import Transaction

router = APIRouter(prefix=BASE, tags=["keys"])
session_routes = APIRouter(tags=["service"])
TICKET_S = 60
SESSION_S = 12 * 3600
Word = Annotated[str, Constraint(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]


class KeyRequest(Body):
    """The key to create."""

    name: Word
    scopes: tuple[Literal["read", "submit", "admin"], ...] = Constraint(min_length=1, max_length=3)
    owner: Word | None = None
    """The owner of what this key creates. Default: the owner of the key that asks."""


@router.post(
    "/keys",
    status_code=201,
    summary="Create an API key",
    openapi_extra=described(KeyRequest, example={"name": "laptop", "scopes": ["submit"]}),
    responses=documents.answers(201, documents.NewKey, 400, 401, 403, 409, 415, 422),
)
def create_key(
    app_state: AppStateDep,
    caller: Admin,
    once_key: OnceKey,
    body: Annotated[Parsed[KeyRequest], Depends(body_of(KeyRequest))],
) -> Response:
    """The response shows the key once. Only a hash is stored, so a replayed response shows null."""
    wanted = body.value
    secret = ""

    def make(tx: Transaction) -> Answer:
        nonlocal secret
        row, secret = keys.create(
            tx, name=wanted.name, owner=wanted.owner or caller.owner, scopes=wanted.scopes
        )
        shown = key_json(row) | {"key": None}
        return Answer(201, {"Location": f"{BASE}/keys/{row.id}"}, jsonio.dumps(shown))

    token = idempotent.token_of(caller, "POST /keys", once_key, body.raw)
    answer, replayed = idempotent.once(app_state.database, token, make)
    if not replayed:
        shown = jsonio.loads(answer.body) | {"key": secret}
        answer = Answer(answer.status, answer.headers, jsonio.dumps(shown))
    return idempotent.sent(answer, replayed=replayed)


@router.get(
    "/keys",
    summary="List API keys",
    responses=documents.answers(200, documents.KeyList, 400, 401, 403, 422),
)
def list_keys(app_state: AppStateDep, caller: Admin, page: Paged) -> Response:
    """Newest first, including revoked keys."""
    del caller
    with app_state.database.read() as tx:
        rows = keys.find(tx, after=page.after_id("key"), limit=page.limit + 1)
    return Json(page_of(rows, page, [key_json(row) for row in rows]))


@router.delete(
    "/keys/{id}",
    status_code=204,
    summary="Revoke an API key",
    responses=documents.answers(204, None, 401, 403, 404),
)
def delete_key(request: Request, app_state: AppStateDep, caller: Admin, id: str) -> Response:  # noqa: A002
    """The key and its browser sessions are refused from now on.

    Other API processes follow within 2 s.
    """
    del caller
    with app_state.database.write() as tx:
        keys.revoke(tx, id)
    request.app.state.keyring.forget()
    return Response(status_code=204)


@router.post(
    "/tickets",
    status_code=201,
    summary="Create a one-time browser link",
    responses=documents.answers(201, documents.Ticket, 401, 403),
)
def create_ticket(request: Request, app_state: AppStateDep, caller: Read) -> Response:
    """The link works once, within 60 seconds. It opens a session with this key's scopes."""
    with app_state.database.write() as tx:
        secret = keys.derive(tx, caller.key, "ticket", timedelta(seconds=TICKET_S))
    # the Host header was already checked against the allow-list
    url = f"{request.scope['scheme']}://{request.headers['host']}/open?ticket={secret}"
    return Json({"url": url, "expires_in_s": TICKET_S}, status_code=201)


@session_routes.get("/open", summary="Open a browser session", include_in_schema=False)
def open_session(
    request: Request, app_state: AppStateDep, ticket: Annotated[str, Query(max_length=200)]
) -> Response:
    """Redeem a ticket and set the session cookie.

    If it is not valid, a browser gets instructions.
    """
    with app_state.database.write() as tx:
        try:
            key = keys.redeem(tx, ticket)
            secret = keys.derive(tx, key, "session", timedelta(seconds=SESSION_S))
        except KeyInvalid:
            if "text/html" not in request.headers.get("accept", ""):
                raise
            return used_link()
    answer = RedirectResponse("/jobs", status_code=303)
    answer.set_cookie(
        COOKIE,
        secret,
        max_age=SESSION_S,
        httponly=True,
        samesite="strict",
        secure=request.scope["scheme"] == "https",
    )
    return answer
