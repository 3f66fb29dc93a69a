"""Published models: publish checkpoints as versions, list, get, move aliases, delete."""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Path, Request
from pydantic import Field as Constraint
from pydantic import model_validator
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Caller, Read, Submit
from api.http.answers import Json, Paged, check_match, etag, page_of, tagged, time_text
from api.http.bodies import Body, Parsed, body_of, described
from api.schemas import documents, inspection
from api.schemas.views import BASE
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from api.submission.trained import find_checkpoint
from glasshouse import jsonio
from glasshouse.errors import (
    CheckpointMissing,
    FieldProblem,
    InvalidRequest,
    ModelVersionNotFound,
    NotFound,
)
from glasshouse.spec.model_names import (
    MAX_VERSION,
    Alias,
    ModelName,
    ModelReference,
    parse_model_reference,
)
from glasshouse.spec.strict import check_exactly_one
from models import published_models
from models.access.idempotency import Answer
from models.database import Transaction
from models.jobs import checkpoints, jobs, replicas
from models.jobs.replicas import Served
from models.published_models import MAX_ALIASES, PublishedVersion, Summary
from models.tables import PublishedModel

router = APIRouter(prefix=BASE, tags=["models"])
Name = Annotated[str, Path(alias="name", max_length=100, description="Name or id of the model.")]
Version = Annotated[
    str, Path(alias="version", max_length=100, description="A number, an alias, or `latest`.")
]


class ModelRequest(Body):
    """The checkpoint to publish. Give exactly one of `checkpoint` and `job`."""

    name: ModelName
    """The name of the model. A new name creates the model, a known one adds a version."""
    checkpoint: str | None = Constraint(default=None, min_length=1, max_length=500)
    """The id of the checkpoint, or a version of a published model: `name`, `name@alias` or
    `name:version`."""
    job: str | None = Constraint(default=None, min_length=1, max_length=64)
    """Instead of `checkpoint`: the id of a job, whose newest complete checkpoint is published."""
    aliases: tuple[Alias, ...] = Constraint(default=(), max_length=MAX_ALIASES)
    """Aliases of the new version. Those that the model already has move to it."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "checkpoint", "job")
        return self


class ModelPatch(Body):
    """A merge patch of the aliases: absent ones stay as they are."""

    aliases: dict[Alias, Annotated[int, Constraint(ge=1, le=MAX_VERSION)] | None] = Constraint(
        default={}, max_length=2 * MAX_ALIASES
    )
    """Alias → the number of the version that it names from now on. Null removes the alias."""


def model_json(model: PublishedModel, summary: Summary, served: Sequence[Served]) -> dict[str, Any]:
    """Return a model as JSON, without its versions. ``served``: what all serve jobs serve."""
    return {
        "id": model.id,
        "object": "model",
        "name": model.name,
        "latest": summary.latest,
        "num_versions": summary.num_versions,
        "aliases": summary.aliases,
        "served_by": [
            {"job": one.job, "reference": one.reference, "version": one.version, "state": one.state}
            for one in served
            if (one.owner, one.model) == (model.owner, model.name)
        ],
        "created_at": time_text(model.created_at),
        "updated_at": time_text(model.updated_at),
        "links": {"self": f"{BASE}/models/{model.name}"},
    }


def version_json(one: PublishedVersion) -> dict[str, Any]:
    """Return a version of a model as JSON, with what is known of its checkpoint."""
    path, saved = f"{BASE}/models/{one.model.name}", one.checkpoint
    return {
        "object": "model_version",
        "model": one.model.name,
        "version": one.version.number,
        "aliases": list(one.aliases),
        "checkpoint": saved.id,
        "job": saved.job,
        "step": saved.step,
        "epoch": saved.epoch,
        "state": saved.state,
        "size_bytes": saved.size_bytes,
        "metrics": saved.metrics,
        "created_at": time_text(one.version.created_at),
        "created_by": one.version.created_by,
        "links": {
            "self": f"{path}/versions/{one.version.number}",
            "model": path,
            "checkpoint": f"{BASE}/checkpoints/{saved.id}",
        },
    }


def _whole(tx: Transaction, model: PublishedModel) -> tuple[dict[str, Any], str]:
    """Return a model with its versions, and its entity tag."""
    found = published_models.versions(tx, model)
    summary = published_models.summaries(tx, [model.id])[model.id]
    shown = model_json(model, summary, replicas.served(tx, model.owner))
    tag = _tag(model, found, shown["served_by"])
    return shown | {"versions": [version_json(one) for one in found]}, tag


def _tag(
    model: PublishedModel,
    found: Sequence[PublishedVersion],
    served_by: Sequence[dict[str, Any]] = (),
) -> str:
    """Return the entity tag; of what serves the model, which changes by itself, as an extra."""
    damaged = sum(one.checkpoint.state == "damaged" for one in found)
    extra = hashlib.sha256(jsonio.dumps(served_by).encode()).hexdigest()[:12] if served_by else None
    return etag(model.id, model.revision, damaged, extra=extra)


@router.post(
    "/models",
    status_code=201,
    summary="Publish a checkpoint as a version of a model",
    openapi_extra=described(
        ModelRequest,
        example={"name": "mnist", "checkpoint": "ckpt_…", "aliases": ["production"]},
    ),
    responses=documents.answers(
        201, inspection.ModelVersion, 400, 401, 403, 409, 413, 415, 422, 503
    ),
)
async def publish_model(
    app_state: AppStateDep,
    caller: Submit,
    key: OnceKey,
    body: Annotated[Parsed[ModelRequest], Depends(body_of(ModelRequest))],
) -> Response:
    """The versions of a model are numbered from 1. Their checkpoints cannot be deleted.

    The name is that of your own model, also if another owner has one of the same name.
    """
    token = idempotent.token_of(caller, "POST /models", key, body.raw)
    stored = await run_in_threadpool(idempotent.earlier, app_state.database, token)
    if stored is not None:
        return idempotent.sent(stored, replayed=True)
    wanted = body.value
    checkpoint_id = await run_in_threadpool(_held, app_state, caller, wanted)

    def make(tx: Transaction) -> Answer:
        one = published_models.publish(
            tx,
            owner=caller.owner,
            name=wanted.name,
            checkpoint_id=checkpoint_id,
            aliases=wanted.aliases,
            created_by=caller.key_name,
        )
        shown = version_json(one)
        return Answer(201, {"Location": shown["links"]["self"]}, jsonio.dumps(shown))

    try:
        answer, replayed = await run_in_threadpool(idempotent.once, app_state.database, token, make)
    except NotFound as error:
        raise _unknown(wanted, error) from None
    return idempotent.sent(answer, replayed=replayed)


def _held(app_state: AppState, caller: Caller, wanted: ModelRequest) -> str:
    """Return the checkpoint to publish, held so that no newer one supersedes it until it is."""
    try:
        with app_state.database.write() as tx:
            if wanted.checkpoint is not None:
                return find_checkpoint(tx, wanted.checkpoint, caller, hold=True).id
            job = jobs.get(tx, wanted.job or "", caller.sees)
            return checkpoints.newest(tx, job, hold=True).id
    except (NotFound, CheckpointMissing) as error:
        raise _unknown(wanted, error) from None


def _unknown(wanted: ModelRequest, error: NotFound | CheckpointMissing) -> InvalidRequest:
    """Return the 422 error about what the body refers to."""
    pointer = "/job" if wanted.checkpoint is None else "/checkpoint"
    problem = FieldProblem(pointer, error.detail, error.code)
    return InvalidRequest(str(problem), problems=[problem])


@router.get(
    "/models",
    summary="List models",
    responses=documents.answers(200, inspection.ModelList, 400, 401, 422),
)
def list_models(app_state: AppStateDep, caller: Read, page: Paged) -> Response:
    """Newest first."""
    with app_state.database.read() as tx:
        rows = published_models.find(
            tx, owner=caller.sees, after=page.after_id("mdl"), limit=page.limit + 1
        )
        found = published_models.summaries(tx, [row.id for row in rows])
        served = replicas.served(tx, caller.sees)
    return Json(page_of(rows, page, [model_json(row, found[row.id], served) for row in rows]))


@router.get(
    "/models/{name}",
    summary="Get a model",
    responses=documents.answers(200, inspection.Model, 304, 401, 404, 422),
)
def get_model(request: Request, app_state: AppStateDep, caller: Read, name: Name) -> Response:
    """A model with its versions, newest first."""
    with app_state.database.read() as tx:
        model = published_models.get(tx, name, owner=caller.owner, sees=caller.sees)
        shown, tag = _whole(tx, model)
    return tagged(request, shown, tag)


@router.get(
    "/models/{name}/versions/{version}",
    summary="Get a version of a model",
    responses=documents.answers(200, inspection.ModelVersion, 304, 401, 404, 422),
)
def get_model_version(
    request: Request, app_state: AppStateDep, caller: Read, name: Name, version: Version
) -> Response:
    """By its number, by an alias, or the newest one as `latest`."""
    with app_state.database.read() as tx:
        model = published_models.get(tx, name, owner=caller.owner, sees=caller.sees)
        one = published_models.version(tx, model, _reference(model.name, version))
    return tagged(request, version_json(one), _tag(model, [one]))


@router.patch(
    "/models/{name}",
    summary="Move or remove aliases of a model",
    openapi_extra=described(
        ModelPatch,
        media=("application/merge-patch+json", "application/json"),
        example={"aliases": {"production": 3}},
    ),
    responses=documents.answers(200, inspection.Model, 400, 401, 403, 404, 412, 413, 415, 422),
)
def update_model(
    request: Request,
    app_state: AppStateDep,
    caller: Submit,
    name: Name,
    body: Annotated[Parsed[ModelPatch], Depends(body_of(ModelPatch))],
) -> Response:
    """A merge patch: all aliases of the request move at once, or none.

    With `If-Match`, the update fails if someone else changed the model.
    """
    with app_state.database.write() as tx:
        model = _locked(tx, request, caller, name)
        published_models.set_aliases(tx, model, body.value.aliases)
        shown, tag = _whole(tx, model)
    return Json(shown, headers={"ETag": tag})


@router.delete(
    "/models/{name}",
    status_code=204,
    summary="Delete a model",
    responses=documents.answers(204, None, 401, 403, 404, 409, 412, 422),
)
def delete_model(request: Request, app_state: AppStateDep, caller: Submit, name: Name) -> Response:
    """Delete a model with its versions and aliases. The checkpoints stay.

    Refused while a job that has not ended uses one of them.
    """
    with app_state.database.write() as tx:
        published_models.delete(tx, _locked(tx, request, caller, name))
    return Response(status_code=204)


@router.delete(
    "/models/{name}/versions/{version}",
    status_code=204,
    summary="Delete a version of a model",
    responses=documents.answers(204, None, 401, 403, 404, 409, 412, 422),
)
def delete_model_version(
    request: Request, app_state: AppStateDep, caller: Submit, name: Name, version: Version
) -> Response:
    """Delete a version by its number; the checkpoint stays, and the number is not used again.

    Refused for the only version, while an alias names it, and while a job that has not ended uses
    its checkpoint.
    """
    with app_state.database.write() as tx:
        model = _locked(tx, request, caller, name)
        number = _reference(model.name, version).number
        if number is None:
            detail = f"A version is deleted by its number, not by {version!r}."
            raise ModelVersionNotFound(detail)
        published_models.delete_version(tx, model, number)
    return Response(status_code=204)


def _locked(tx: Transaction, request: Request, caller: Caller, name: str) -> PublishedModel:
    """Return a model that this transaction has locked, after the check of ``If-Match``."""
    model = published_models.get(tx, name, owner=caller.owner, sees=caller.sees, lock=True)
    if "if-match" in request.headers:
        check_match(request, _tag(model, published_models.versions(tx, model)))
    return model


def _reference(name: str, version: str) -> ModelReference:
    """Read the version in a path: a number or an alias."""
    mark = ":" if version.isascii() and version.isdigit() else "@"
    found = parse_model_reference(f"{name}{mark}{version}")
    if found is None:
        raise ModelVersionNotFound(f"The model {name!r} has no version {version!r}.")
    return found
