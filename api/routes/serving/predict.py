"""Predict with a served model or a training job.

A process of the job gets the request as it is, and its answer comes back.
"""

import asyncio
import re
from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Caller, Read
from api.http.problems import request_id_of
from api.routes.observations.events import JobId
from api.schemas import documents
from api.schemas.serving import PREDICT_BODY, JobPrediction, Prediction
from api.schemas.views import BASE
from api.serving.connection import Reply
from api.serving.inference_protocol import decoded
from api.serving.predictions import error_of, head_of, headers_of
from glasshouse.errors import ModelNotFound
from glasshouse.spec.model_names import parse_model_reference

router = APIRouter(prefix=BASE, tags=["models"])
job_routes = APIRouter(prefix=BASE, tags=["jobs"])
CLIENT_GONE = 499
"""The status in the access log of a request whose client did not wait for the answer."""
_OWN_ID = re.compile(r"req_[0-9a-f]{24}")
"""A request id that this service creates; one that a client chose is not passed on."""

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
        200, Prediction, 400, 401, 403, 404, 406, 413, 415, 422, 429, 500, 503, 504
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
    head, body, timeout_s = await _read(request, app_state)
    return _response(await ask(request, app_state, caller, name, head, body, timeout_s))


@job_routes.post(
    "/jobs/{id}/predict",
    summary="Predict with the current weights of a training job",
    openapi_extra=PREDICT_BODY,
    responses=documents.answers(
        200, JobPrediction, 400, 401, 403, 404, 406, 409, 413, 415, 422, 429, 500, 503, 504
    ),
)
async def predict_with_job(
    request: Request, app_state: AppStateDep, caller: Read, job: JobId
) -> Response:
    """Run the network of a running training job on rows, and return outputs of any of its layers.

    The job answers between two steps, with the weights that a checkpoint of that step has. Nothing
    of the training changes. A job whose processes have parts of the network cannot answer.
    """
    head, body, timeout_s = await _read(request, app_state)
    asking = app_state.training_jobs.ask(caller.sees, job, head, body, timeout_s)
    return _response(await unless_left(request, asking))


async def _read(request: Request, app_state: AppState) -> tuple[dict[str, Any], bytes, float]:
    """Return the head for the process that answers, the body, and how long the client waits."""
    query = dict(request.query_params)
    usual_s = app_state.settings.predict_timeout_s
    head, timeout_s = head_of(dict(request.headers.raw), query, usual_s)
    coding = request.headers.get("content-encoding", "")
    most = app_state.settings.max_predict_bytes
    return head, await decoded(await request.body(), coding, most), timeout_s


def _response(reply: Reply | None) -> Response:
    """Return the response of a reply; None: the client is gone."""
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    if reply.head["status"] != 200:
        raise error_of(reply)
    return Response(reply.body, media_type=reply.head["content_type"], headers=headers_of(reply))


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
    if _OWN_ID.fullmatch(request_id := request_id_of(request.scope)):
        head["request_id"] = request_id
    return await unless_left(
        request, app_state.replicas.ask(caller.owner, reference, head, body, timeout_s)
    )


async def unless_left(request: Request, reply: Awaitable[Reply]) -> Reply | None:
    """Return a reply; None: the client is gone before it comes."""
    asking = asyncio.ensure_future(reply)
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
