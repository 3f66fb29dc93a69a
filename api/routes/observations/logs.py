"""Output of a job's processes: the ``log`` events as text or JSON."""

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.app_state import AppStateDep
from api.http import negotiation
from api.http.access import Read
from api.http.answers import etag, is_fresh, list_of, not_modified, tagged
from api.http.cursors import seq_of
from api.routes.observations.events import JobId
from api.schemas import inspection
from glasshouse import jsonio
from models.database import Transaction
from models.jobs import jobs
from models.observations import events
from models.observations.events import LoggedEvent

router = APIRouter(prefix="/api/v1", tags=["inside"])
FORMATS = {"text/plain": "text", "application/json": "json"}
MAX_BYTES = 32 * 1024 * 1024
Entry = dict[str, Any]


@router.get(
    "/jobs/{id}/logs",
    summary="Get the output of the processes",
    responses=inspection.binary(
        "text/plain", model=inspection.PrintedList, others=(*inspection.READ, 406)
    ),
)
def get_logs(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    rank: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
    after: Annotated[
        str | None, Query(max_length=30, description="Only output after this event.")
    ] = None,
    tail: Annotated[
        int | None, Query(ge=1, le=1_000_000, description="Only this many of the last lines.")
    ] = None,
    grep: Annotated[
        str | None, Query(max_length=1000, description="Only lines that contain this text.")
    ] = None,
) -> Response:
    """Text, or JSON by `Accept`. The header `X-Last-Seq` is the cursor to resume from."""
    chosen = negotiation.choose(request, FORMATS)
    with app_state.database.read() as tx:
        last_seq = jobs.progress(tx, job, caller.sees).last_seq
        seq = seq_of(after, last_seq)
        tag = etag(job, last_seq, chosen)
        headers = {"Vary": "Accept", "X-Last-Seq": str(last_seq)}
        if is_fresh(request, tag):
            return not_modified(tag, headers)
        if tail is None:
            found, last_seq = _forward(tx, job, seq)
            entries = _chosen(found, rank, grep)
        else:
            entries = _last_lines(tx, job, seq, tail, rank, grep)
    headers["X-Last-Seq"] = str(last_seq)
    if chosen == "json":
        return tagged(request, list_of(entries, cursor=None), tag, headers)
    text = "".join(f"{line}\n" for entry in entries for line in entry["lines"])
    headers |= {"ETag": tag, "Cache-Control": "private, no-cache"}
    return Response(text, headers=headers, media_type="text/plain; charset=utf-8")


def _forward(tx: Transaction, job: str, seq: int) -> tuple[list[LoggedEvent], int]:
    found: list[LoggedEvent] = []
    size = 0
    while size < MAX_BYTES:
        page = events.read(tx, job, seq, types=["log"], max_bytes=MAX_BYTES)
        found += [event for event in page.events if event.type == "log"]  # not the gap event
        size += sum(len(event.payload) for event in page.events)
        seq = page.seq
        if seq >= page.last_seq:
            break
    return found, seq


def _chosen(found: Iterable[LoggedEvent], rank: int | None, grep: str | None) -> list[Entry]:
    entries: list[Entry] = []
    for event in found:
        entry = jsonio.loads(event.as_json())
        if rank is not None and entry["rank"] != rank:
            continue
        if grep is not None:
            entry["lines"] = [line for line in entry["lines"] if grep in line]
        if entry["lines"]:
            entries.append(entry)
    return entries


def _last_lines(
    tx: Transaction, job: str, seq: int, tail: int, rank: int | None, grep: str | None
) -> list[Entry]:
    limit = max(100, tail)
    while True:  # doubles the range until there are enough lines or no more events
        newest = events.tail(tx, job, "log", limit)
        entries = _chosen((event for event in newest if event.seq > seq), rank, grep)
        enough = sum(len(entry["lines"]) for entry in entries) >= tail
        if enough or len(newest) < limit or newest[0].seq <= seq:
            break
        limit *= 2
    kept: list[Entry] = []
    for entry in reversed(entries):
        entry["lines"] = entry["lines"][-tail:]
        tail -= len(entry["lines"])
        kept.append(entry)
        if tail <= 0:
            break
    return kept[::-1]
