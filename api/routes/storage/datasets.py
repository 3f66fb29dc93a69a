"""Datasets: upload, list, read rows and statistics, delete."""

import hashlib
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http import bodies
from api.http.access import Caller, Read, Submit
from api.http.answers import Json, Paged, bad_parameter, check_match, etag, page_of, tagged
from api.http.bodies import Body, described
from api.schemas import documents
from api.schemas.views import BASE, dataset_json
from api.streaming import waiting
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from api.uploads import unsafe
from api.uploads.receiving import UploadName, declared_bytes
from engine.datasets import formats
from glasshouse import jsonio
from glasshouse.errors import InvalidDataset
from glasshouse.ids import new_id
from glasshouse.spec.data import SIZE
from models.access import quotas
from models.access.idempotency import Answer
from models.database import Transaction
from models.storage import datasets
from models.storage.columns import MAX_ROW_VALUES, DatasetColumns
from models.tables import Dataset

router = APIRouter(prefix=BASE, tags=["datasets"])
MAX_ROWS = 1000
MAX_VALUES = 1_000_000
"""Limit for all rows of a response together."""


class BuiltinRequest(Body):
    """A dataset that comes with the service."""

    builtin: Literal["digits"]


def dataset_tag(dataset: Dataset) -> str:
    """Return the entity tag of a dataset."""
    return etag(dataset.id, dataset.version)


_UPLOAD = described(BuiltinRequest, example={"builtin": "digits"})
_UPLOAD["requestBody"]["content"]["application/octet-stream"] = {
    "schema": {"type": "string", "format": "binary"}
}


def _named(option: str) -> str:
    """Return the formats with an option, for a message."""
    return " and ".join(formats.having(option))


Format = Annotated[
    str | None,
    Query(
        max_length=formats.MAX_NAME_LENGTH,
        description=f"One of {', '.join(formats.formats())}. Default: inferred from the "
        "`Content-Type`, or else from the end of `name`; `GET /catalog/datasets` says how.",
    ),
]
Resize = Annotated[
    str | None,
    Query(pattern=SIZE, description=f"For {_named('resize')}: height x width, such as 32x32."),
]
Header = Annotated[
    bool | None,
    Query(
        description=f"For {_named('header')}: whether the first row names the columns. "
        "Default: the service detects it and reports a guess in the dataset's `notes`."
    ),
]


@router.post(
    "/datasets",
    status_code=201,
    summary="Upload a dataset",
    openapi_extra=_UPLOAD,
    responses=documents.answers(
        201, documents.Dataset, 400, 401, 403, 408, 409, 413, 415, 422, 429, 503
    ),
)
async def create_dataset(  # noqa: PLR0913, PLR0917 (each a parameter of the request)
    request: Request,
    app_state: AppStateDep,
    caller: Submit,
    key: OnceKey,
    name: UploadName = None,
    format: Format = None,  # noqa: A002 (the public name)
    resize: Resize = None,
    header: Header = None,
) -> Response:
    """Stream the file's bytes, or send JSON `{"builtin": "digits"}` for a built-in dataset.

    The dataset can be used when its `state` is `ready`. Each owner has a built-in dataset once:
    another request returns 201 with the existing one, unless that one failed or you give another
    `name`.
    """
    if bodies.media_type(request) == "application/json":
        return await _create_builtin(request, app_state, caller, key, name)
    format = format or formats.inferred(name, bodies.media_type(request))  # noqa: A001
    format = _checked(format, resize, header)  # noqa: A001
    await run_in_threadpool(_admit, app_state, caller, declared_bytes(request))
    dataset_id = new_id("ds")
    source = datasets.source_key(dataset_id)
    opened = app_state.artifacts.receive(source)
    async with app_state.receiving.file(request, caller, opened) as (_, size_bytes, sha256):
        if size_bytes == 0:
            raise InvalidDataset("The body is empty; send the file's bytes.")

    def make(tx: Transaction) -> Answer:
        quotas.admit_upload(tx, caller.owner, app_state.settings, size_bytes=size_bytes)
        row = datasets.add(
            tx,
            owner=caller.owner,
            name=name or f"upload.{format}",
            format=format,
            size_bytes=size_bytes,
            sha256=sha256,
            dataset_id=dataset_id,
            resize=resize,
            header=header,
        )
        return _created(row)

    said = f"{sha256} {name} {format}" + ("" if resize is None else f" {resize}")
    said += "" if header is None else f" header={header}"
    fingerprint = hashlib.sha256(said.encode()).hexdigest()
    token = idempotent.token_of(caller, "POST /datasets", key, fingerprint)
    return await _store(app_state, token, make, source)


def _checked(
    format: str | None,  # noqa: A002 (the public name)
    resize: str | None,
    header: bool | None,
) -> str:
    """Check the format and the options that depend on it, and return the format."""
    unsafe.refuse_name(format)
    known = formats.formats().get(format or "")
    if known is None:
        shown = "is missing" if format is None else f"may not be {format[:40]!r}"
        raise bad_parameter("format", f"it {shown}; the formats are {', '.join(formats.formats())}")
    for option, value in (("resize", resize), ("header", header)):
        if value is not None and option not in known.options:
            several = "s" if len(formats.having(option)) > 1 else ""
            detail = f"it is for the format{several} {_named(option)} only; leave it out"
            raise bad_parameter(option, detail)
    return known.name


async def _create_builtin(
    request: Request, app_state: AppState, caller: Caller, key: str | None, name: str | None
) -> Response:
    body = await bodies.body_of(BuiltinRequest)(request)
    builtin, dataset_id = body.value.builtin, new_id("ds")

    called, form = name or builtin, datasets.BUILTIN + builtin

    def make(tx: Transaction) -> Answer:
        quotas.lock(tx, caller.owner)  # two concurrent requests create one dataset
        known = datasets.builtin(tx, caller.owner, form, called)
        if known is not None:
            return _created(known)
        quotas.admit_upload(tx, caller.owner, app_state.settings, size_bytes=0)
        row = datasets.add(
            tx,
            owner=caller.owner,
            dataset_id=dataset_id,
            name=called,
            format=form,
            size_bytes=0,
            sha256=None,
        )
        return _created(row)

    token = idempotent.token_of(caller, "POST /datasets", key, body.raw + (name or "").encode())
    # a built-in dataset has no file; deleting a missing file does nothing
    return await _store(app_state, token, make, datasets.source_key(dataset_id))


async def _store(
    app_state: AppState,
    token: idempotent.IdempotencyUse | None,
    make: Callable[[Transaction], Answer],
    source: str,
) -> Response:
    answer, replayed = await idempotent.once_with_files(app_state, token, make, source)
    if not replayed:
        await run_in_threadpool(app_state.notifier.upload_stored)
    return idempotent.sent(answer, replayed=replayed)


def _created(row: Dataset) -> Answer:
    headers = {"Location": f"{BASE}/datasets/{row.id}", "ETag": dataset_tag(row)}
    return Answer(201, headers, jsonio.dumps(dataset_json(row)))


def _admit(app_state: AppState, caller: Caller, size_bytes: int) -> None:
    with app_state.database.read() as tx:
        quotas.admit_upload(tx, caller.owner, app_state.settings, size_bytes=size_bytes)


@router.get(
    "/datasets",
    summary="List datasets",
    responses=documents.answers(200, documents.DatasetList, 400, 401, 422),
)
def list_datasets(
    app_state: AppStateDep,
    caller: Read,
    page: Paged,
    sha256: documents.Digest = None,
    name: Annotated[str | None, Query(max_length=200)] = None,
) -> Response:
    """Newest first. `sha256`: only your own whose file has that digest.

    `name`: only those named so.
    """
    owner = caller.sees if sha256 is None else caller.owner
    with app_state.database.read() as tx:
        rows = datasets.find(
            tx,
            owner=owner,
            after=page.after_id("ds"),
            limit=page.limit + 1,
            sha256=sha256,
            name=name,
        )
    return Json(page_of(rows, page, [dataset_json(row) for row in rows]))


@router.get(
    "/datasets/{id}",
    summary="Get a dataset",
    responses=documents.answers(200, documents.Dataset, 304, 400, 401, 404),
)
async def get_dataset(
    request: Request,
    app_state: AppStateDep,
    caller: Read,
    id: str,  # noqa: A002
    prefer: documents.Waited = None,
) -> Response:
    """One dataset, by id or name. With `Prefer: wait=30`, wait up to 30 s until it has been read.

    A name refers to your own dataset. If several of that name differ in content, the answer is 404.
    """
    del prefer
    wait_s = waiting.preferred_wait(request)

    def look(reference: str) -> Dataset:
        with app_state.database.read() as tx:
            return datasets.referred(tx, reference, owner=caller.owner, sees=caller.sees)

    row = await run_in_threadpool(look, id)
    if wait_s is not None:
        found = row.id

        def look_whether_read() -> Dataset | None:
            row = look(found)
            return None if row.state == "pending" else row

        read = await waiting.wait_for(
            app_state.wakeups, app_state.draining, found, look_whether_read, wait_s
        )
        row = read or await run_in_threadpool(look, found)
    return tagged(request, dataset_json(row), dataset_tag(row), waiting.applied(wait_s))


@router.get(
    "/datasets/{id}/rows",
    summary="Get rows of a dataset",
    responses=documents.answers(200, documents.Rows, 401, 404, 409, 422),
)
def list_dataset_rows(  # noqa: PLR0913, PLR0917 (each a parameter of the request)
    app_state: AppStateDep,
    caller: Read,
    id: str,  # noqa: A002
    split: Annotated[str | None, Query(max_length=64, description="Default: the first.")] = None,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    limit: Annotated[int, Query(ge=1, description="At most 1000.")] = 20,
    values: Annotated[
        int,
        Query(
            ge=1,
            le=MAX_VALUES,
            description="Maximum values per row. More values per row means fewer rows.",
        ),
    ] = MAX_ROW_VALUES,
) -> Response:
    """Rows of a split in stored order. Long values are shortened."""
    columns = _open(app_state, caller, id)
    splits = columns.meta["splits"]
    chosen = next(iter(splits), "all") if split is None else split
    if chosen not in splits:
        raise bad_parameter("split", f"there is no {chosen!r}; there are {', '.join(splits)}")
    rows = columns.rows(chosen, offset, min(limit, MAX_ROWS, MAX_VALUES // values), values)
    after = offset + len(rows)
    more = after < splits[chosen]
    return Json(
        {
            "object": "list",
            "data": rows,
            "has_more": more,
            "next": str(after) if more else None,
            "split": chosen,
            "offset": offset,
            "num_rows": splits[chosen],
            "note": columns.note(values),
        }
    )


@router.get(
    "/datasets/{id}/stats",
    summary="Get column statistics",
    responses=documents.answers(200, documents.DatasetStats, 401, 404, 409),
)
def get_dataset_stats(app_state: AppStateDep, caller: Read, id: str) -> Response:  # noqa: A002
    """For each split and column: count, missing, min, max, mean, std, unique values."""
    return Json({"object": "dataset_stats", "splits": _open(app_state, caller, id).stats()})


def _open(app_state: AppState, caller: Caller, dataset_id: str) -> DatasetColumns:
    with app_state.database.read() as tx:
        row = datasets.referred(tx, dataset_id, owner=caller.owner, sees=caller.sees)
        row = datasets.ready(tx, row.id, None)
    return DatasetColumns(app_state.artifacts.local(row.key))


@router.delete(
    "/datasets/{id}",
    status_code=204,
    summary="Delete a dataset",
    responses=documents.answers(204, None, 401, 403, 404, 409, 412),
)
def delete_dataset(
    request: Request,
    app_state: AppStateDep,
    caller: Submit,
    id: str,  # noqa: A002
) -> Response:
    """Refused while a job that has not ended uses it."""
    with app_state.database.write() as tx:
        row = datasets.get(tx, id, caller.sees, lock=True)
        check_match(request, dataset_tag(row))
        datasets.delete(tx, row)
    app_state.artifacts.delete(f"datasets/{row.id}")
    app_state.artifacts.delete(datasets.source_key(row.id))
    return Response(status_code=204)
