"""Predict with a served model: a replica gets the request as it is, and its answer comes back."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Caller, Read
from api.schemas import documents
from api.schemas.serving import PREDICT_BODY, Prediction
from api.schemas.views import BASE
from api.serving.connection import Reply
from glasshouse.errors import (
    BadRequest,
    FieldProblem,
    InvalidRequest,
    ModelNotFound,
    PredictionFailed,
    QueueFull,
    ServiceError,
    UnsupportedMedia,
)
from glasshouse.spec.model_names import parse_model_reference

router = APIRouter(prefix=BASE, tags=["models"])
MAX_TIMEOUT_S = 600.0
MAX_PRIORITY = 1000
_RESERVED = ("timeout_s", "priority")
CLIENT_GONE = 499
"""The status in the access log of a request whose client did not wait for the answer."""

Name = Annotated[
    str,
    Path(
        alias="name",
        max_length=300,
        description="A published model: `name`, `name@alias` or `name:version`.",
    ),
]


@router.post(
    "/models/{name}/predict",
    summary="Predict",
    openapi_extra=PREDICT_BODY,
    responses=documents.answers(
        200, Prediction, 400, 401, 403, 404, 413, 415, 422, 429, 500, 503, 504
    ),
)
async def predict(request: Request, app_state: AppStateDep, caller: Read, name: Name) -> Response:
    """Run a served model on rows, and return outputs of any of its layers.

    The rows are prepared as in training. A serve job must serve the model; with `replicas.min` 0
    the request starts it.
    """
    if parse_model_reference(name) is None:
        detail = f"{name[:100]!r} refers to no model: write name, name@alias or name:version."
        raise ModelNotFound(detail)
    headers, query = request.headers, dict(request.query_params)
    head: dict[str, Any] = {
        "protocol": "predict",
        "content_type": headers.get("content-type", ""),
        "accept": headers.get("accept", ""),
        "priority": _number(query, "priority", 0, -MAX_PRIORITY, MAX_PRIORITY),
        "query": {key: value for key, value in query.items() if key not in _RESERVED},
    }
    usual_s = app_state.settings.predict_timeout_s
    timeout_s = _number(query, "timeout_s", usual_s, 0.001, MAX_TIMEOUT_S)
    body = await request.body()
    reply = await ask(request, app_state, caller, name, head, body, timeout_s)
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    if reply.head["status"] != 200:
        raise error_of(reply)
    return answer(reply)


async def ask(  # noqa: PLR0913, PLR0917 (a request and who asks)
    request: Request,
    app_state: AppState,
    caller: Caller,
    reference: str,
    head: dict[str, Any],
    body: bytes,
    timeout_s: float,
) -> Reply | None:
    """Send a request to a replica and return its reply; None: the client is gone."""
    asking = asyncio.ensure_future(
        app_state.replicas.ask(caller.owner, reference, head, body, timeout_s)
    )
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    finally:
        leaving.cancel()
        asking.cancel()


async def _left(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answer(reply: Reply) -> Response:
    """Return the response with what a replica answered."""
    head = reply.head
    timing = head.get("timing", {})
    headers = {
        "Server-Timing": ", ".join(
            f"{name.removesuffix('_ms')};dur={value}" for name, value in timing.items()
        ),
        "X-Model-Version": f"{head['model']}:{head['version']}",
        **head.get("headers", {}),
    }
    return Response(reply.body, media_type=head["content_type"], headers=headers)


def error_of(reply: Reply) -> ServiceError:
    """Return the error that a replica answered with."""
    head = reply.head
    code, detail = str(head.get("code")), str(head.get("detail"))
    found = [
        FieldProblem(str(one["pointer"]), str(one["detail"]), str(one["code"]))
        for one in head.get("problems", ())
    ]
    if code == "queue_full":
        return QueueFull(detail, retry_after_s=int(head.get("retry_after_s", 1)))
    if code == "invalid_request":
        kind = {400: BadRequest, 415: UnsupportedMedia}.get(int(head["status"]), InvalidRequest)
        return kind(detail, problems=found)
    return PredictionFailed(detail)


def _number(query: dict[str, str], name: str, default: float, least: float, most: float) -> Any:
    """Return a number of the query.

    Raises:
        InvalidRequest: it is none, or out of range.
    """
    if name not in query:
        return default
    try:
        value = type(default)(query[name])
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        detail = f"{name} is a number from {least:g} to {most:g}, and this is {query[name][:40]!r}"
        problem = FieldProblem(f"/query/{name}", detail, "out_of_range")
        raise InvalidRequest(str(problem), problems=[problem])
    return value
