"""Output of a job's processes: the ``log`` events as text or JSON, filtered by line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http import negotiation
from api.http.access import Read
from api.http.answers import bad_parameter, etag, is_fresh, not_modified
from api.http.cursors import seq_of
from api.http.patterns import compiled
from api.http.times import time_of
from api.rendering import log_search
from api.rendering.log_search import Found, LineFilter, Range
from api.routes.observations.events import JobId
from api.schemas import inspection
from api.schemas.documents import Waited
from api.streaming import waiting
from glasshouse.events import LogLevel
from models.jobs import jobs
from models.tables import now

router = APIRouter(prefix="/api/v1", tags=["inside"])
FORMATS = {"text/plain": "text", "application/json": "json"}
MAX_RANK = 1_000_000
_RANK = re.compile(r"[0-9]{1,7}", re.ASCII)
Ranks = Annotated[
    list[str] | None,
    Query(max_length=20, description="Only lines of these ranks, separated by commas."),
]
Level = Annotated[LogLevel | None, Query(description="Only lines of this level and above.")]
Pattern = Annotated[
    str | None,
    Query(max_length=1000, description="Only lines that match this regular expression (RE2)."),
]
Since = Annotated[
    str | None,
    Query(
        max_length=60,
        description="Only lines since this time: ISO 8601, or how long ago (`10m`, `2h30m`).",
    ),
]
After = Annotated[str | None, Query(max_length=30, description="Only output after this event.")]
Before = Annotated[str | None, Query(max_length=30, description="Only output before this event.")]
Tail = Annotated[
    int | None, Query(ge=1, le=1_000_000, description="Only this many of the last lines.")
]


@router.get(
    "/jobs/{id}/logs",
    summary="Get the output of the processes",
    responses=inspection.binary(
        "text/plain", model=inspection.PrintedList, others=(*inspection.READ, 406)
    ),
)
async def get_logs(  # noqa: PLR0913 (each is a parameter of the request)
    request: Request,
    *,
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    rank: Ranks = None,
    level: Level = None,
    grep: Pattern = None,
    since: Since = None,
    after: After = None,
    before: Before = None,
    tail: Tail = None,
    prefer: Waited = None,
) -> Response:
    """Text, or JSON by `Accept`. Filters apply to lines, before `tail`.

    The header `X-Last-Seq` is the cursor to resume from. A response ends after about 32 MiB or two
    seconds. If more is left to search, it has the header `X-Has-More: true`: continue with the same
    parameters and `after=X-Last-Seq`, or with `tail` and `before=X-First-Seq`. In JSON, `next` is
    this cursor. With `Prefer: wait=N`, wait up to N s for the first line.
    """
    del prefer  # read by `waiting`; declared here for the OpenAPI document
    form = negotiation.choose(request, FORMATS)
    at = None if since is None else time_of("since", since, now())
    search = await run_in_threadpool(compiled, "grep", grep) if grep else None
    wanted = LineFilter(_ranks(rank), level, search, at)
    wait_s = waiting.preferred_wait(request)
    reader = _Reader(
        app_state, request, (job, caller.sees), wanted, _Part(after, before, tail), form
    )

    def look() -> Response | None:
        answer, may_grow = reader.look()
        return None if may_grow and wait_s is not None else answer

    limiter = app_state.searches if grep else None
    await waiting.wait_for(app_state.wakeups, app_state.draining, job, look, wait_s or 0, limiter)
    reader.answer.headers.update(waiting.applied(wait_s))
    return reader.answer


class _Part(NamedTuple):
    """Which part of the log is wanted, as the request says it."""

    after: str | None
    before: str | None
    tail: int | None


@dataclass(slots=True)
class _Reader:
    """Answers a request, repeatedly while it waits for the first line."""

    app_state: AppState
    request: Request
    job: tuple[str, str | None]
    """Its id, and whose jobs the caller sees."""
    wanted: LineFilter
    part: _Part
    form: str
    answer: Response = field(init=False)
    """The latest answer."""
    _searched: int = 0
    """Nothing up to this number is wanted."""

    def look(self) -> tuple[Response, bool]:
        """Return the answer now, and whether waiting may lead to one with lines.

        Raises:
            JobNotFound: The job does not exist, or is not the caller's.
            InvalidCursor: A cursor is not one of this log.
            InvalidRequest: The pattern takes too long.
        """
        with self.app_state.database.read() as tx:
            progress = jobs.progress(tx, *self.job)
        last_seq = progress.last_seq
        after = max(seq_of(self.part.after, last_seq), self._searched)
        last = last_seq
        if self.part.before:
            last = max(0, min(last, seq_of(self.part.before, last_seq + 1) - 1))
        since = self.wanted.since and self.wanted.since.isoformat()
        tag = etag(self.job[0], last_seq, self.form, *([since] if since else []))
        headers = {"Vary": "Accept", "X-Last-Seq": str(last)}
        if is_fresh(self.request, tag):
            self.answer = not_modified(tag, headers)
            return self.answer, not progress.has_ended
        read, within = self.app_state.database.read, Range(self.job[0], after, last)
        if self.part.tail is None:
            found = log_search.lines_after(read, within, self.wanted, self.form)
            headers["X-Last-Seq"] = str(found.seq)
        else:
            found = log_search.last_lines(read, within, self.wanted, self.form, self.part.tail)
        self._searched = last
        self.answer = _answer(found, self.form, headers, tag, is_tail=self.part.tail is not None)
        is_final = bool(found.parts) or not found.is_complete or bool(self.part.before)
        return self.answer, not is_final and not progress.has_ended


def _answer(
    found: Found, form: str, headers: dict[str, str], tag: str, *, is_tail: bool
) -> Response:
    headers = headers | {"Cache-Control": "private, no-cache"}
    if found.is_complete:
        headers["ETag"] = tag  # what a search had time for is no version
    else:
        headers["X-Has-More"] = "true"
        if is_tail:
            headers["X-First-Seq"] = str(found.seq)
    if form == "text":
        return Response(
            b"".join(found.parts), headers=headers, media_type="text/plain; charset=utf-8"
        )
    end = b'"has_more":false,"next":null'
    if not found.is_complete:
        end = b'"has_more":true,"next":"%d"' % found.seq
    body = b'{"object":"list","data":[%b],%b}' % (b",".join(found.parts), end)
    return Response(body, headers=headers, media_type="application/json")


def _ranks(given: Sequence[str] | None) -> frozenset[int] | None:
    """Return the ranks, given repeatedly or separated by commas. None: all.

    Raises:
        InvalidRequest: One is not a rank.
    """
    names = {name for text in given or () for name in text.split(",") if name}
    for name in sorted(names):
        if not _RANK.fullmatch(name) or int(name) > MAX_RANK:
            detail = "ranks are whole numbers from 0, separated by commas."
            raise bad_parameter("rank", f"{name[:100]!r} is no rank; {detail}")
    return frozenset(int(name) for name in names) or None
