"""Files of jobs: checkpoints with their weights, and named artifacts."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from api.app_state import AppState, AppStateDep
from api.http.access import Read, Submit
from api.http.answers import etag, is_fresh, list_of, not_modified, tagged, time_text
from api.routes.observations.events import JobId
from api.schemas import inspection
from api.schemas.documents import answers
from glasshouse.errors import ArtifactNotFound
from models.jobs import checkpoint_retention, checkpoints, jobs
from models.observations import outputs
from models.tables import Checkpoint, JobArtifact

router = APIRouter(prefix="/api/v1")
WEIGHTS = "model.safetensors"
LEARNED = "data.safetensors"
SAFETENSORS = "application/vnd.safetensors"
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9.+-]+/[A-Za-z0-9.+-]+(; ?charset=[A-Za-z0-9-]+)?")
CheckpointId = Annotated[str, Path(alias="id", max_length=64, description="Id of the checkpoint.")]


def checkpoint_json(row: Checkpoint, best: Mapping[str, str]) -> dict[str, Any]:
    """Return a checkpoint as JSON. ``best`` maps ids of best checkpoints to the reason."""
    path = f"/api/v1/checkpoints/{row.id}"
    return {
        "id": row.id,
        "object": "checkpoint",
        "name": row.name,
        "job": row.job,
        "attempt": row.attempt,
        "step": row.step,
        "epoch": row.epoch,
        "final": row.final,
        "best": row.id in best,
        "reason": best.get(row.id),
        "state": row.state,
        "size_bytes": row.size_bytes,
        "files": row.files,
        "metrics": row.metrics,
        "created_at": time_text(row.created_at),
        "links": {"self": path, "weights": f"{path}/weights", "network": f"{path}/network"}
        | ({"data": f"{path}/data"} if LEARNED in row.files else {}),
    }


@router.get(
    "/jobs/{id}/checkpoints",
    tags=["checkpoints"],
    summary="List the checkpoints of a job",
    responses=answers(200, inspection.CheckpointList, *inspection.READ),
)
def list_checkpoints(
    request: Request, app_state: AppStateDep, caller: Read, job: JobId
) -> Response:
    """Complete and damaged checkpoints by step, without those of steps that ran again."""
    with app_state.database.read() as tx:
        jobs.progress(tx, job, caller.sees)
        rows = checkpoints.of_job(tx, job)
        best = checkpoint_retention.best(tx, [job])
    damaged = sum(row.state == "damaged" for row in rows)
    ends = [rows[place].id for place in (0, -1)] if rows else []
    tag = etag(job, len(rows), damaged, *ends, *best)
    return tagged(request, list_of([checkpoint_json(row, best) for row in rows], cursor=None), tag)


@router.get(
    "/checkpoints/{id}",
    tags=["checkpoints"],
    summary="Get a checkpoint",
    responses=answers(200, inspection.Checkpoint, *inspection.READ),
)
def get_checkpoint(
    request: Request, app_state: AppStateDep, caller: Read, checkpoint: CheckpointId
) -> Response:
    """Its step, its files with their digests, and the metrics at that step."""
    with app_state.database.read() as tx:
        row = checkpoints.get(tx, checkpoint, caller.sees)
        best = checkpoint_retention.best(tx, [row.job] if row.job else [])
    return tagged(request, checkpoint_json(row, best), etag(row.id, row.state, row.id in best))


@router.get(
    "/checkpoints/{id}/weights",
    tags=["checkpoints"],
    summary="Download the weights as safetensors",
    responses=inspection.binary(SAFETENSORS, others=inspection.READ),
)
def get_weights(
    request: Request, app_state: AppStateDep, caller: Read, checkpoint: CheckpointId
) -> Response:
    """The network's parameters and buffers, under torch's names. Supports range requests."""
    with app_state.database.read() as tx:
        row = checkpoints.get(tx, checkpoint, caller.sees)
    return _part(request, app_state, row, WEIGHTS, f"{row.id}.safetensors")


@router.get(
    "/checkpoints/{id}/data",
    tags=["checkpoints"],
    summary="Download the preprocessing state as safetensors",
    responses=inspection.binary(SAFETENSORS, others=inspection.READ),
)
def get_learned(
    request: Request, app_state: AppStateDep, caller: Read, checkpoint: CheckpointId
) -> Response:
    """Normalization and fill values and vocabularies, by field. Supports range requests."""
    with app_state.database.read() as tx:
        row = checkpoints.get(tx, checkpoint, caller.sees)
    if LEARNED not in row.files:
        detail = "Its job learned nothing of the training rows: it neither normalizes, nor fills"
        raise ArtifactNotFound(f"{detail} missing values by them, nor reads texts.")
    return _part(request, app_state, row, LEARNED, f"{row.id}-data.safetensors")


@router.delete(
    "/checkpoints/{id}",
    tags=["checkpoints"],
    status_code=204,
    summary="Delete a checkpoint",
    response_class=Response,
    responses=answers(204, None, 401, 403, 404, 409, 422),
)
def delete_checkpoint(app_state: AppStateDep, caller: Submit, checkpoint: CheckpointId) -> Response:
    """Refused while a job that has not ended uses it, or would resume from it."""
    with app_state.database.write() as tx:
        row = checkpoints.get(tx, checkpoint, caller.sees)
        checkpoints.delete(tx, row)
    app_state.artifacts.delete(row.key)
    return Response(status_code=204)


def artifact_json(row: JobArtifact) -> dict[str, Any]:
    """Return a named file of a job as JSON."""
    return {
        "object": "artifact",
        "job": row.job,
        "name": row.name,
        "media_type": row.media_type,
        "size_bytes": row.size_bytes,
        "created_at": time_text(row.created_at),
        "href": f"/api/v1/jobs/{row.job}/artifacts/{row.name}",
    }


@router.get(
    "/jobs/{id}/artifacts",
    tags=["inside"],
    summary="List the artifacts of a job",
    responses=answers(200, inspection.ArtifactList, *inspection.READ),
)
def list_artifacts(request: Request, app_state: AppStateDep, caller: Read, job: JobId) -> Response:
    """Sorted by name."""
    with app_state.database.read() as tx:
        jobs.progress(tx, job, caller.sees)
        rows = outputs.of_job(tx, job)
    newest = max((row.created_at.timestamp() for row in rows), default=0.0)
    tag = etag(job, len(rows), round(newest * 1000))
    return tagged(request, list_of([artifact_json(row) for row in rows], cursor=None), tag)


@router.get(
    "/jobs/{id}/artifacts/{name}",
    tags=["inside"],
    summary="Download an artifact",
    responses=inspection.binary("application/octet-stream", others=inspection.READ),
)
def get_artifact(
    request: Request,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    name: Annotated[str, Path(max_length=200)],
) -> Response:
    """Sent as an attachment. Supports range requests."""
    with app_state.database.read() as tx:
        jobs.progress(tx, job, caller.sees)
        row = outputs.get(tx, job, name)
    size = (row.size_bytes, round(row.created_at.timestamp() * 1000))
    return _file(request, app_state, row.key, row.name, row.media_type, etag(job, *size))


def _part(request: Request, app_state: AppState, row: Checkpoint, part: str, name: str) -> Response:
    """Return one file of a checkpoint; the name for the download contains the checkpoint's id."""
    tag = etag(row.files.get(part, {}).get("sha256") or row.id)
    return _file(request, app_state, f"{row.key}/{part}", name, SAFETENSORS, tag)


def _file(
    request: Request, app_state: AppState, key: str, name: str, media: str, tag: str
) -> Response:
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if is_fresh(request, tag):
        return not_modified(tag)
    try:
        path = app_state.artifacts.local(key)
    except FileNotFoundError:
        raise ArtifactNotFound(f"The file {name!r} is gone.") from None
    if not _MEDIA_TYPE.fullmatch(media):  # the rank chose it
        media = "application/octet-stream"
    return OpenedFile(path, filename=name, media_type=media, headers=headers)


class OpenedFile(FileResponse):
    """Sends a file that may be deleted at any time, because it is opened before the headers go out.

    A part of an inference is deleted when its result is complete. Starlette opens a file after it
    has sent the headers.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file.

        Raises:
            ArtifactNotFound: it is gone.
        """
        try:
            handle = await run_in_threadpool(os.open, self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ArtifactNotFound(f"The file {self.filename!r} is gone.") from None
        try:
            self.path = f"/dev/fd/{handle}"  # also of a deleted file
            await super().__call__(scope, receive, send)
        finally:
            os.close(handle)
