"""The Open Inference Protocol (KServe v2): its HTTP endpoints, as Triton has them.

Errors are problem documents that also have the protocol's ``error``.
"""

from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Caller, Read, Submit
from api.http.answers import Json
from api.http.bodies import Body, parse, read_json_bytes
from api.routes.service.catalog import VERSION
from api.routes.service.readiness import Readiness
from api.routes.serving.predict import CLIENT_GONE, ask
from api.schemas import documents
from api.schemas.inference_protocol import (
    INFER_BODY,
    InferenceModelMetadata,
    InferenceResponse,
    ModelIndex,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from api.serving.inference_protocol import decoded, encoded, head_of, reference_of, wanted_coding
from api.serving.predictions import error_of, headers_of
from api.serving.served_models import index_of
from glasshouse.errors import BadRequest, Unavailable
from models import published_models

router = APIRouter(prefix="/v2", tags=["inference"])
SERVER = {
    "name": "glasshouse",
    "version": VERSION,
    "extensions": [
        "binary_tensor_data",
        "classification",
        "model_repository",
        "schedule_policy",
    ],
}

Name = Annotated[
    str,
    Path(
        alias="name",
        max_length=300,
        description="A served model: `name` (its newest version), `name@alias` or `name:version`.",
    ),
]
Version = Annotated[
    str,
    Path(alias="version", max_length=100, description="The number of a version, or an alias."),
]


class IndexRequest(Body):
    """Which models the index lists."""

    ready: bool = False
    """Only models that are ready."""


@router.get(
    "", summary="Get metadata of the server", responses=documents.answers(200, ServerMetadata, 401)
)
async def get_server_metadata(caller: Read) -> Response:
    """The version, and the extensions of the protocol that are supported."""
    del caller
    return Json(SERVER)


@router.get(
    "/health/live",
    summary="Check that the server is alive",
    responses=documents.answers(200, ServerLive),
)
async def get_server_live() -> Response:
    """Always answers 200. Needs no key."""
    return Json({"live": True})


@router.get(
    "/health/ready",
    summary="Check that the server is ready",
    responses=documents.answers(200, ServerReady, 503),
)
def get_server_ready(request: Request) -> Response:
    """Answers 503 while this process cannot serve requests. Needs no key."""
    readiness: Readiness = request.app.state.readiness
    if readiness.report().status == "down":
        raise Unavailable("This process cannot serve requests: GET /readyz has its checks.")
    return Json({"ready": True})


_ABOUT = (401, 403, 404, 503)


@router.get(
    "/models/{name}",
    summary="Get metadata of a model",
    responses=documents.answers(200, InferenceModelMetadata, *_ABOUT, 504),
)
async def get_model_metadata(
    request: Request, app_state: AppStateDep, caller: Read, name: Name
) -> Response:
    """The tensors that the newest version reads and returns."""
    return await _metadata(request, app_state, caller, reference_of(name))


@router.get(
    "/models/{name}/versions/{version}",
    summary="Get metadata of a version of a model",
    responses=documents.answers(200, InferenceModelMetadata, *_ABOUT, 504),
)
async def get_model_version_metadata(
    request: Request, app_state: AppStateDep, caller: Read, name: Name, version: Version
) -> Response:
    """The tensors that a version reads and returns."""
    return await _metadata(request, app_state, caller, reference_of(name, version))


@router.get(
    "/models/{name}/ready",
    summary="Check that a model is ready",
    responses=documents.answers(200, ModelReady, *_ABOUT),
)
async def get_model_ready(app_state: AppStateDep, caller: Read, name: Name) -> Response:
    """Whether a replica serves the newest version.

    Also a model whose serve job is paused because no request came is ready: a request resumes it.
    """
    await app_state.replicas.check_ready(caller.owner, reference_of(name))
    return Json({"name": name, "ready": True})


@router.get(
    "/models/{name}/versions/{version}/ready",
    summary="Check that a version of a model is ready",
    responses=documents.answers(200, ModelReady, *_ABOUT),
)
async def get_model_version_ready(
    app_state: AppStateDep, caller: Read, name: Name, version: Version
) -> Response:
    """Whether a replica serves a version."""
    await app_state.replicas.check_ready(caller.owner, reference_of(name, version))
    return Json({"name": name, "ready": True})


_INFER = documents.answers(
    200, InferenceResponse, 400, 401, 403, 404, 413, 415, 422, 429, 500, 503, 504
)


@router.post("/models/{name}/infer", summary="Infer", openapi_extra=INFER_BODY, responses=_INFER)
async def infer(request: Request, app_state: AppStateDep, caller: Read, name: Name) -> Response:
    """Run the newest version of a served model on tensors.

    Inputs are fields of the network, and outputs are `<layer>/<field>` of any of its layers. A
    serve job must serve the model. Bytes of tensors may follow the JSON (the binary tensor data
    extension), and the body may be compressed.
    """
    return await _infer(request, app_state, caller, reference_of(name))


@router.post(
    "/models/{name}/versions/{version}/infer",
    summary="Infer with a version of a model",
    openapi_extra=INFER_BODY,
    responses=_INFER,
)
async def infer_version(
    request: Request, app_state: AppStateDep, caller: Read, name: Name, version: Version
) -> Response:
    """Run a version of a served model on tensors."""
    return await _infer(request, app_state, caller, reference_of(name, version))


# --- the model repository extension ----------------------------------------------------------


@router.post(
    "/repository/index",
    summary="List served models",
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {
                "application/json": {
                    "schema": {"type": "object", "properties": {"ready": {"type": "boolean"}}},
                    "example": {"ready": True},
                }
            },
        }
    },
    responses=documents.answers(200, ModelIndex, 400, 401, 403, 422),
)
async def list_served_models(request: Request, app_state: AppStateDep, caller: Read) -> Response:
    """The versions that your serve jobs serve; with `{"ready": true}` only those that are ready."""
    asked = IndexRequest()
    if await request.body():
        body = await read_json_bytes(request)
        asked = parse(TypeAdapter(IndexRequest), body, roots=(IndexRequest,))
    entries = index_of(await app_state.replicas.routes_of(caller.owner))
    return Json([one for one in entries if one["state"] == "READY" or not asked.ready])


@router.post(
    "/repository/models/{name}/load",
    summary="Load a model: not supported",
    responses=documents.answers(400, None, 400, 401, 403, 404),
)
async def load_model(app_state: AppStateDep, caller: Submit, name: Name) -> Response:
    """Always refused: a serve job loads models."""
    await run_in_threadpool(_check_published, app_state, caller, reference_of(name))
    detail = "Models are loaded by serve jobs: submit one,"
    raise BadRequest(f'{detail} {{"kind": "serve", "models": ["{name}"]}}.')


@router.post(
    "/repository/models/{name}/unload",
    summary="Unload a model: not supported",
    responses=documents.answers(400, None, 400, 401, 403, 404),
)
async def unload_model(app_state: AppStateDep, caller: Submit, name: Name) -> Response:
    """Always refused: cancel the serve job instead."""
    await run_in_threadpool(_check_published, app_state, caller, reference_of(name))
    raise BadRequest(f"{name} is unloaded when its serve job is cancelled: cancel that job.")


def _check_published(app_state: AppState, caller: Caller, reference: str) -> None:
    with app_state.database.read() as tx:
        published_models.by_reference(tx, reference, owner=caller.owner)


# --- requests to replicas --------------------------------------------------------------------


async def _metadata(
    request: Request, app_state: AppState, caller: Caller, reference: str
) -> Response:
    patience_s = app_state.settings.predict_timeout_s
    head = {"protocol": "metadata"}
    reply = await ask(request, app_state, caller, reference, head, b"", patience_s)
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    if reply.head["status"] != 200:
        raise error_of(reply)
    return Response(reply.body, media_type=reply.head["content_type"])


async def _infer(request: Request, app_state: AppState, caller: Caller, reference: str) -> Response:
    settings = app_state.settings
    head = head_of(dict(request.headers.raw))
    body = await request.body()
    coding = request.headers.get("content-encoding", "")
    body = await decoded(body, coding, settings.max_predict_bytes)
    reply = await ask(request, app_state, caller, reference, head, body, settings.predict_timeout_s)
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    if reply.head["status"] != 200:
        raise error_of(reply)
    headers, content = headers_of(reply), reply.body
    wanted = wanted_coding(request.headers.get("accept-encoding", ""))
    if wanted is not None:
        headers["content-encoding"], content = wanted, await encoded(content, wanted)
    return Response(content, media_type=reply.head["content_type"], headers=headers)
