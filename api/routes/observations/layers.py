"""The network of a job: its layers with newest statistics, and captured tensors."""

import hashlib
from collections import defaultdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response, StreamingResponse

from api.app_state import AppState, AppStateDep
from api.http import negotiation, ranges
from api.http.access import Read
from api.http.answers import (
    Json,
    Paged,
    bad_parameter,
    etag,
    is_fresh,
    list_of,
    not_modified,
    tagged,
)
from api.http.attempts import OfAttempt
from api.http.ranks import OfRank, OfRanks, of_any, of_one
from api.rendering import pictures, slices, tensors
from api.rendering.tensor_names import tensor_name
from api.rendering.tensors import Array, TensorBody
from api.routes.observations.events import JobId
from api.schemas import inspection
from api.schemas.documents import answers
from glasshouse.errors import ArtifactNotFound, InvalidRequest
from glasshouse.spec.tensor_kinds import LISTED, OF_LAYERS, TENSOR_KINDS
from models.jobs import jobs
from models.observations import captures, ranks, stats
from models.observations.stats import STATISTICS, Newest
from models.tables import Capture

router = APIRouter(prefix="/api/v1", tags=["inside"])
FORMATS = {
    "application/json": "json",
    "application/x-npy": "npy",
    "application/vnd.safetensors": "safetensors",
    "image/png": "png",
}
_MEDIA = {name: media for media, name in FORMATS.items()}
MAX_TENSORS = 200
_SHOWN = (
    "name",
    "type",
    "inputs",
    "output_shape",
    "output_shapes",
    "parameters",
    "trainable",
    "dtype",
    "parameter_shapes",
    "flops",
)
_NAMES: dict[str, Any] = {
    "shared_with": None,
    "input_names": [],
    "inner_inputs": [],
    "inner_outputs": [],
    "state_names": [],
}
"""Names of further tensors that can be watched. Plans of older jobs do not have them."""

Step = Annotated[
    str, Query(pattern=r"^(latest|[0-9]{1,15})$", description="`latest`, or a step number.")
]
Phase = Annotated[
    Literal["train", "evaluate"] | None,
    Query(description="Training steps, or the evaluations after them. Default: both."),
]
Slice = Annotated[str | None, Query(max_length=1000, description="NumPy syntax: `0:4,:,::2`.")]


@router.get(
    "/jobs/{id}/layers",
    summary="List layers",
    responses=answers(200, inspection.LayerList, *inspection.READ),
)
def list_layers(
    request: Request, app_state: AppStateDep, caller: Read, job: JobId, rank: OfRank = None
) -> Response:
    """Each layer with its output shape, its parameters, and its newest statistics by kind."""
    with app_state.database.read() as tx:
        tag = etag(job, jobs.progress(tx, job, caller.sees).version)
        if is_fresh(request, tag):
            return not_modified(tag)
        found = jobs.whole(tx, job, caller.sees)
        newest = stats.newest(tx, job, rank=of_one(found, rank))
    by_tensor: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in sorted(newest, key=lambda row: row.series.phase != "train"):
        by_tensor[row.series.layer].setdefault(row.series.kind, _figures(row))
    of_layer: dict[str, list[str]] = defaultdict(list)
    for name in by_tensor:
        of_layer[name.partition(".")[0]].append(name)
    entries = found.plan.get("layers", [])
    layers = [_layer(entry, by_tensor, of_layer[entry["name"]]) for entry in entries]
    return tagged(request, list_of(layers, cursor=None), tag)


def _figures(row: Newest) -> dict[str, Any]:
    return {"step": row.step, "phase": row.series.phase} | dict(
        zip(STATISTICS, row.figures, strict=True)
    )


def _layer(
    entry: dict[str, Any], by_tensor: dict[str, dict[str, Any]], names: list[str]
) -> dict[str, Any]:
    """Return a layer of the plan. ``stats`` describe its output, ``tensors`` its other tensors."""
    leaves = list(entry.get("output_shapes", {}))
    own = leaves[0] if leaves else entry["name"]
    others = dict.fromkeys([*leaves[1:], *entry.get("parameter_shapes", {}), *names])
    others.pop(own, None)
    shown = {name: entry[name] for name in _SHOWN if name in entry}
    shown |= {name: entry.get(name, without) for name, without in _NAMES.items()}
    shown["stats"] = by_tensor.get(own, {})
    shown["tensors"] = {name: by_tensor[name] for name in others if name in by_tensor}
    return shown


@router.get(
    "/jobs/{id}/captures",
    summary="List captured tensors",
    responses=answers(200, inspection.CaptureList, 400, 401, 404, 422),
)
def list_captures(  # noqa: PLR0913 (each is a parameter of the request)
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    page: Paged,
    layer: Annotated[str | None, Query(max_length=200)] = None,
    kind: Annotated[str | None, Query(max_length=40)] = None,
    phase: Phase = None,
    step: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
    rank: OfRanks = None,
    attempt: OfAttempt,
) -> Response:
    """In the order in which they were captured."""
    if kind is not None:
        check_kind(kind)
    after = page.after_id("cap")
    with app_state.database.read() as tx:
        found = jobs.get(tx, job, caller.sees)
        rows = captures.find(
            tx,
            job,
            layer=layer,
            kind=kind,
            phase=phase,
            step=step,
            rank=of_any(found, rank),
            after=after,
            limit=page.limit + 1,
            attempt_filter=attempt,
        )
    cursor = rows[page.limit - 1].id if len(rows) > page.limit else None
    return Json(list_of([_capture_json(row) for row in rows[: page.limit]], cursor=cursor))


def _capture_json(row: Capture) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "capture",
        "job": row.job,
        "attempt": row.attempt,
        "step": row.step,
        "layer": row.layer,
        "kind": row.kind,
        "phase": row.phase,
        "rank": ranks.shown(row.rank),
        "shape": row.shape,
        "dtype": row.dtype,
        "size_bytes": row.size_bytes,
        "form": row.form,
        "slice": row.slice,
        "captured_from": row.captured_from,
        "href": f"/api/v1/jobs/{row.job}/layers/{row.layer}/{row.kind}?step={row.step}"
        f"{'' if row.phase == 'train' else f'&phase={row.phase}'}"
        f"{'' if row.rank == ranks.MERGED else f'&rank={row.rank}'}",
    }


@router.get(
    "/jobs/{id}/layers/{layer}/{kind}",
    summary="Get a captured tensor",
    responses=inspection.binary(
        "application/x-npy",
        "application/vnd.safetensors",
        "image/png",
        model=inspection.Tensor,
        others=(*inspection.READ, 406),
    ),
)
def get_tensor(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    layer: Annotated[str, Path(max_length=200)],
    kind: Annotated[str, Path(max_length=40)],
    step: Step = "latest",
    phase: Phase = None,
    rank: OfRank = None,
    slice: Slice = None,  # noqa: A002 (the public name)
    format: Annotated[str | None, Query(max_length=40)] = None,  # noqa: A002
    histogram: Annotated[
        int | None, Query(ge=1, le=1000, description="Number of histogram bins. JSON only.")
    ] = None,
) -> Response:
    """JSON has a summary and up to 1,000 values; npy and safetensors have all; png is an image.

    In npy, bfloat16 and the 8-bit float types are converted to float32; safetensors keeps them. A
    whole tensor in safetensors, or in npy without a conversion, supports `Range`. An image shows
    feature maps and filters as a grid; for a batch it shows the first example, unless you pass
    `slice`. The header `X-Picture` says which part of the tensor the image shows, and its range.
    """
    chosen = _format(request, format)
    if histogram is not None and chosen != "json":
        raise bad_parameter("histogram", f"it is a part of the JSON, not of {chosen}.")
    check_kind(kind)
    with app_state.database.read() as tx:
        found = jobs.get(tx, job, caller.sees)
        name = tensor_name(found, layer, kind)
        number = None if step == "latest" else int(step)
        own = of_one(found, rank)
        capture = captures.get(tx, job, name, kind, number, phase=phase, rank=own)
    tag = etag(capture.id, chosen, _digest(slice or "", str(histogram)))
    headers = {
        "ETag": tag,
        "Cache-Control": "private, no-cache",
        "Vary": "Accept",
        "X-Tensor-Step": str(capture.step),
    }
    if is_fresh(request, tag):
        return not_modified(tag, headers)
    whole = _open(app_state, capture)
    if slice is None and (file := tensors.Single.of(whole, chosen)) is not None:
        return _ranged(request, file, chosen, headers)
    if chosen == "json":
        part = _part(whole, slice)
        counted = None if histogram is None else tensors.histogram(part, histogram)
        return Json(_summary(capture, part, slice) | {"histogram": counted}, headers=headers)
    return _bytes_of(capture, whole, slice, chosen, headers)


def _part(whole: Array, slice: str | None) -> Array:  # noqa: A002 (the public name)
    return whole if slice is None else whole[slices.parse(slice, whole.shape)]


def _bytes_of(
    capture: Capture,
    whole: Array,
    slice: str | None,  # noqa: A002 (the public name)
    chosen: str,
    headers: dict[str, str],
) -> Response:
    part = _part(whole, slice)
    if chosen == "png":
        return _picture(part, headers, has_batch=slice is None and capture.kind in OF_LAYERS)
    title = {"step": str(capture.step), "layer": capture.layer, "kind": capture.kind}
    body = tensors.npy(part) if chosen == "npy" else tensors.safetensors({"tensor": part}, title)
    return _streamed(body, chosen, headers)


def _format(request: Request, wanted: str | None) -> str:
    if wanted is None:
        return negotiation.choose(request, FORMATS)
    if wanted not in _MEDIA:
        raise bad_parameter("format", f"{wanted!r} is none of {', '.join(_MEDIA)}.")
    return wanted


def check_kind(kind: str) -> None:
    """Check that this is a kind of tensor.

    Raises:
        InvalidRequest: It is not.
    """
    if kind not in TENSOR_KINDS:
        raise InvalidRequest(f"{kind!r} is not a kind of tensor; the kinds are {LISTED}.")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]


def _open(app_state: AppState, capture: Capture) -> Array:
    try:
        return tensors.open_tensor(app_state.artifacts.local(capture.key), capture.tensor)
    except FileNotFoundError:
        raise ArtifactNotFound("The file of this capture is gone.") from None


def _summary(capture: Capture, part: Array, text: str | None) -> dict[str, Any]:
    values, complete = tensors.values_of(part)
    return _capture_json(capture) | {
        "object": "tensor",
        "slice": text,
        "captured_slice": capture.slice,
        "shape": list(part.shape),
        "captured_shape": capture.shape,
        "stats": tensors.figures(part),
        "values": values,
        "truncated": not complete,
    }


def _ranged(
    request: Request, file: tensors.Single, chosen: str, headers: dict[str, str]
) -> Response:
    """Return a file of one tensor, or the byte range that the request asks for."""
    headers = headers | {"Accept-Ranges": "bytes"}
    size = file.size_bytes
    try:
        stretch = ranges.wanted(request, size, headers["ETag"])
    except ranges.Unsatisfiable:
        return Response(status_code=416, headers=headers | {"Content-Range": f"bytes */{size}"})
    if stretch is None:
        return _streamed(file.between(0, size), chosen, headers)
    begin, end = stretch
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    answer = _streamed(file.between(begin, end), chosen, headers)
    answer.status_code = 206
    return answer


def _picture(part: Array, headers: dict[str, str], *, has_batch: bool) -> Response:
    picture = pictures.draw(part, has_batch=has_batch)
    description = f"{picture.shown}; {picture.low:.6g} to {picture.high:.6g}"
    return Response(
        picture.png, headers=headers | {"X-Picture": description}, media_type=_MEDIA["png"]
    )


def _streamed(body: TensorBody, chosen: str, headers: dict[str, str]) -> Response:
    headers = headers | {"Content-Length": str(body.size_bytes)}
    return StreamingResponse(body.stream(), headers=headers, media_type=_MEDIA[chosen])


@router.get(
    "/jobs/{id}/tensors",
    summary="Get several captured tensors as one safetensors file",
    responses=inspection.binary("application/vnd.safetensors", others=inspection.READ),
)
def get_tensors(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    name: Annotated[
        list[str],
        Query(min_length=1, max_length=MAX_TENSORS, description="`conv1/output`; repeatable."),
    ],
    step: Step = "latest",
    *,
    phase: Phase = None,
    rank: OfRank = None,
) -> Response:
    """The tensors have the names you asked for. The file's metadata holds the step of each."""
    rows: dict[str, Capture] = {}
    with app_state.database.read() as tx:
        found = jobs.get(tx, job, caller.sees)
        own = of_one(found, rank)
        for wanted in dict.fromkeys(name):
            layer, slash, kind = wanted.rpartition("/")
            if not slash:
                raise bad_parameter("name", f"{wanted[:100]!r} is not layer/kind")
            check_kind(kind)
            stored = tensor_name(found, layer, kind)
            number = None if step == "latest" else int(step)
            rows[wanted] = captures.get(tx, job, stored, kind, number, phase=phase, rank=own)
    tag = etag(_digest(*rows, *(row.id for row in rows.values())))
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    steps = {row.step for row in rows.values()}
    if len(steps) == 1:
        headers["X-Tensor-Step"] = str(*steps)
    if is_fresh(request, tag):
        return not_modified(tag, headers)
    opened = {wanted: _open(app_state, row) for wanted, row in rows.items()}
    metadata = {wanted: str(row.step) for wanted, row in rows.items()}
    return _streamed(tensors.safetensors(opened, metadata), "safetensors", headers)
