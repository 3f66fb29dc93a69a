"""The event log of a job, as a polled list and as a stream."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Read
from api.http.answers import Paged, bad_parameter, etag, is_fresh, not_modified, time_text
from api.http.attempts import OfAttempt
from api.http.cursors import pairs_of, seq_of, types_of
from api.schemas import inspection
from api.schemas.documents import Waited, answers
from api.schemas.views import job_json
from api.streaming import waiting
from api.streaming.streams import StreamStart
from api.streaming.tails import EventFilter
from glasshouse import jsonio
from models.jobs import jobs, replicas
from models.observations import events
from models.observations.events import EventPage
from models.state import ENDED
from models.tables import now

MAX_JOBS = 32
PAGE_BYTES = 8 * 1024 * 1024
router = APIRouter(prefix="/api/v1", tags=["events"])

JobId = Annotated[str, Path(alias="id", max_length=64, description="Id of the job.")]
Types = Annotated[
    list[str] | None,
    Query(max_length=20, description="Only these event types, separated by commas."),
]
After = Annotated[
    str | None,
    Query(
        max_length=4000,
        description="Resume after this cursor. The header `Last-Event-ID` overrides it.",
    ),
]
_WRONG = (400, 401, 404, 422, 429, 503)
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events as they happen: `hello` with a snapshot of the job, then the log, "
        "then `end`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    204: {"description": "The job has ended and the client has all its events."},
    **{status: answer for status, answer in answers(200, None, *_WRONG).items() if status != 200},
}


@router.get(
    "/jobs/{id}/events",
    summary="List events",
    responses=answers(200, inspection.EventList, *inspection.READ),
)
async def list_events(  # noqa: PLR0913 (each is a part of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    page: Paged,
    types: Types = None,
    attempt: OfAttempt,
    prefer: Waited = None,
) -> Response:
    """Events in order. With `Prefer: wait=N`, wait up to N s for new events."""
    del prefer  # read by `waiting`; declared here for the OpenAPI document
    wanted = types_of(types)
    wait_s = waiting.preferred_wait(request)
    latest: list[tuple[EventPage, str]] = []

    def look() -> tuple[EventPage, str] | None:
        with app_state.database.read() as tx:
            progress = jobs.progress(tx, job, caller.sees)
            seq = seq_of(page.after, progress.last_seq)
            names = None if wanted is None else sorted(wanted)
            found = events.read(
                tx,
                job,
                seq,
                types=names,
                limit=page.limit,
                max_bytes=PAGE_BYTES,
                attempt_filter=attempt,
            )
        tag = etag(job, found.seq, found.seq < found.last_seq)
        latest[:] = [(found, tag)]
        is_news = bool(found.events) and not is_fresh(request, tag)
        return latest[0] if is_news or progress.has_ended else None

    await waiting.wait_for(app_state.wakeups, app_state.draining, job, look, wait_s or 0)
    found, tag = latest[0]
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"} | waiting.applied(wait_s)
    if is_fresh(request, tag):
        return not_modified(tag, headers)
    return Response(_envelope(found), headers=headers, media_type="application/json")


def _envelope(page: EventPage) -> bytes:
    """Return the list, built from the same texts that the stream sends."""
    more = page.seq < page.last_seq
    data = ",".join(event.as_json() for event in page.events)
    tail = f'"has_more":true,"next":"{page.seq}"' if more else '"has_more":false,"next":null'
    return f'{{"object":"list","data":[{data}],{tail}}}'.encode()


@router.get("/jobs/{id}/stream", summary="Stream events of a job", responses=_STREAM)
async def stream_job(  # noqa: PLR0913 (each is a part of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    types: Types = None,
    attempt: OfAttempt,
    after: After = None,
) -> Response:
    """Server-sent events. Resume with `Last-Event-ID` or `after`: no event is lost or repeated."""
    wanted = types_of(types)
    cursor = request.headers.get("last-event-id") or after
    starts = await run_in_threadpool(_starts, app_state, caller.sees, {job: cursor})
    return app_state.streams.response(caller, starts, EventFilter(wanted, attempt), many=False)


@router.get("/stream", summary="Stream events of several jobs", responses=_STREAM)
async def stream_jobs(  # noqa: PLR0913 (each is a part of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: Annotated[list[str], Query(min_length=1, max_length=MAX_JOBS)],
    types: Types = None,
    attempt: OfAttempt,
    after: After = None,
) -> Response:
    """One stream of up to 32 jobs. Its event ids are `job:seq` pairs, one for each job."""
    if len(set(job)) != len(job):
        raise bad_parameter("job", "a job is named twice.")
    wanted = types_of(types)
    cursors = pairs_of(request.headers.get("last-event-id") or after, job)
    positions = {name: cursors.get(name) for name in job}
    starts = await run_in_threadpool(_starts, app_state, caller.sees, positions)
    return app_state.streams.response(caller, starts, EventFilter(wanted, attempt), many=True)


def _starts(
    app_state: AppState, owner: str | None, cursors: dict[str, str | None]
) -> Sequence[StreamStart]:
    starts: list[StreamStart] = []
    with app_state.database.read() as tx:
        for job_id, cursor in cursors.items():
            job = jobs.get(tx, job_id, owner)
            hello = {
                "job": job.id,
                "seq": job.last_seq,
                "attempt": job.attempt,
                "at": time_text(now()),
                "type": "hello",
                "snapshot": job_json(job, replicas.of_jobs(tx, [job]).get(job.id)),
            }
            starts.append(
                StreamStart(
                    job=job.id,
                    seq=seq_of(cursor, job.last_seq),
                    last_seq=job.last_seq,
                    ended=job.state in ENDED,
                    hello=jsonio.dumps(hello),
                )
            )
    return starts
