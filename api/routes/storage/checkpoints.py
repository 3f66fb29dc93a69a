"""Create checkpoints from uploaded weights, list all checkpoints and get a checkpoint's network."""

import hashlib
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http import bodies
from api.http.access import Caller, Read, Submit
from api.http.answers import Json, Paged, page_of, tagged
from api.routes.storage.files import WEIGHTS, CheckpointId, checkpoint_json
from api.schemas import documents, inspection
from api.schemas.views import BASE
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from api.uploads.header import Header, read_header
from api.uploads.receiving import UploadName, declared_bytes
from glasshouse import jsonio
from glasshouse.errors import BadRequest, InvalidCheckpoint, InvalidSpec
from glasshouse.ids import new_id
from glasshouse.spec import UploadedNetwork
from models.access import quotas
from models.access.idempotency import Answer
from models.database import Transaction
from models.jobs import checkpoint_retention, checkpoints

router = APIRouter(prefix=BASE, tags=["checkpoints"])
_STATE, _MANIFEST = "state.json", "manifest.json"
_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
Files = dict[str, dict[str, Any]]


@router.post(
    "/checkpoints",
    status_code=201,
    summary="Upload weights",
    openapi_extra=_UPLOAD,
    responses=documents.answers(
        201, inspection.Checkpoint, 400, 401, 403, 408, 409, 413, 422, 429, 503
    ),
)
async def create_checkpoint(
    request: Request,
    app_state: AppStateDep,
    caller: Submit,
    key: OnceKey,
    name: UploadName = None,
) -> Response:
    """Upload a safetensors file as a stream. Names, shapes and dtypes must match the network.

    The file's metadata must hold the network as `network` and its input fields as `fields`. Both
    are JSON, as in a job's spec.
    """
    await run_in_threadpool(_admit, app_state, caller, declared_bytes(request))
    checkpoint_id = new_id("ckpt")
    artifact = f"checkpoints/{checkpoint_id}"
    opened = app_state.artifacts.receive(f"{artifact}/{WEIGHTS}")
    try:
        async with app_state.receiving.file(request, caller, opened) as (path, size_bytes, sha256):
            header = await run_in_threadpool(read_header, path, app_state.settings.max_json_bytes)
            checked = await _check(app_state, caller, header)
        columns = await run_in_threadpool(
            _write_beside, app_state, artifact, checked["state"], (size_bytes, sha256)
        )
    except BaseException:
        await run_in_threadpool(app_state.artifacts.delete, artifact)
        raise

    def make(tx: Transaction) -> Answer:
        quotas.admit_weights(tx, caller.owner, app_state.settings, size_bytes=columns["size_bytes"])
        row = checkpoints.upload(
            tx,
            id=checkpoint_id,
            owner=caller.owner,
            name=name,
            network=checked["upload"],
            sha256=sha256,
            key=artifact,
            **columns,
        )
        headers = {"Location": f"{BASE}/checkpoints/{row.id}"}
        return Answer(201, headers, jsonio.dumps(checkpoint_json(row, {})))

    fingerprint = hashlib.sha256(f"{sha256} {name}".encode()).hexdigest()
    token = idempotent.token_of(caller, "POST /checkpoints", key, fingerprint)
    answer, replayed = await idempotent.once_with_files(app_state, token, make, artifact)
    return idempotent.sent(answer, replayed=replayed)


async def _check(app_state: AppState, caller: Caller, header: Header) -> dict[str, Any]:
    """Have the planner compare the weights with their network.

    Raises:
        InvalidCheckpoint: The file does not say which network its weights belong to.
        InvalidSpec: The network is invalid, or the weights belong to another network.
    """
    if "network" not in header.metadata:
        raise InvalidCheckpoint(
            "The file does not say which network its weights are of: give it as JSON in the "
            "metadata 'network' of the safetensors file, and what it reads as 'fields'."
        )
    said: dict[str, Any] = {}
    for what in ("network", "fields"):
        if what in header.metadata:
            try:
                said[what] = bodies.load(header.metadata[what].encode(), InvalidSpec)
            except BadRequest as error:
                raise InvalidCheckpoint(f"The metadata {what!r}: {error.detail}") from None
    upload = bodies.parse_as(UploadedNetwork, said)
    asked = upload.model_dump(mode="json", exclude_unset=True)
    return await app_state.planner.check_upload(asked, header.tensors, owner=caller.owner)


def _write_beside(
    app_state: AppState, artifact: str, state: dict[str, Any], weights: tuple[int, str]
) -> dict[str, Any]:
    """Write the state and the manifest.

    Return the digest and size of each file and the total size.
    """
    files: Files = {WEIGHTS: {"size_bytes": weights[0], "sha256": weights[1]}}
    for name, content in ((_STATE, state), (_MANIFEST, files)):
        text = json.dumps(jsonio.named(content), indent=1).encode()
        with _open(app_state, f"{artifact}/{name}") as path:
            path.write_bytes(text)
        files[name] = {"size_bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    return {"files": files, "size_bytes": sum(file["size_bytes"] for file in files.values())}


def _open(app_state: AppState, key: str) -> AbstractContextManager[Path]:
    return app_state.artifacts.receive(key)


def _admit(app_state: AppState, caller: Caller, size_bytes: int) -> None:
    with app_state.database.read() as tx:
        quotas.admit_weights(tx, caller.owner, app_state.settings, size_bytes=size_bytes)


@router.get(
    "/checkpoints",
    summary="List checkpoints",
    responses=documents.answers(200, inspection.CheckpointList, 400, 401, 422),
)
def list_all_checkpoints(
    app_state: AppStateDep, caller: Read, page: Paged, sha256: documents.Digest = None
) -> Response:
    """Newest first.

    With `sha256`, only your own uploaded checkpoints whose file has that digest.
    """
    owner = caller.sees if sha256 is None else caller.owner
    with app_state.database.read() as tx:
        rows = checkpoints.find(
            tx, owner=owner, sha256=sha256, after=page.after_id("ckpt"), limit=page.limit + 1
        )
        best = checkpoint_retention.best(tx, {row.job for row in rows if row.job is not None})
    return Json(page_of(rows, page, [checkpoint_json(row, best) for row in rows]))


@router.get(
    "/checkpoints/{id}/network",
    summary="Get the network of a checkpoint",
    responses=documents.answers(200, inspection.CheckpointNetwork, *inspection.READ),
)
def get_network(
    request: Request, app_state: AppStateDep, caller: Read, checkpoint: CheckpointId
) -> Response:
    """The graph that the weights belong to, and the fields that it reads."""
    with app_state.database.read() as tx:
        row = checkpoints.get(tx, checkpoint, caller.sees)
        made = checkpoints.trained(tx, row)
    fields = made["fields"] if "fields" in made else made["data"]["fields"]
    found = {"object": "checkpoint_network", "network": made["network"], "fields": fields}
    return tagged(request, found, f'"{row.id}"')
