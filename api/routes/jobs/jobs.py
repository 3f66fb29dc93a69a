"""Jobs: plan, submit, list, get, update, cancel, delete."""

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field as Constraint
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Caller, Read, Submit
from api.http.answers import (
    Json,
    Paged,
    bad_parameter,
    check_match,
    etag,
    page_of,
    tagged,
)
from api.http.bodies import Body, Parsed, body_of, described, parse_job_body
from api.routes.access.quotas import admit
from api.schemas import documents
from api.schemas.views import BASE, job_json
from api.streaming import waiting
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from api.submission.submission import CheckedJob, prepare
from glasshouse import jsonio
from glasshouse.errors import InvalidRequest
from glasshouse.failpoints import failpoint
from glasshouse.ids import is_id
from glasshouse.spec import KINDS, AnyJob
from glasshouse.spec.jobs.job import JobName, Label, LabelValue
from models.access import quotas
from models.access.idempotency import Answer, IdempotencyUse
from models.database import Database, Transaction
from models.jobs import checkpoints, jobs, names, replicas
from models.jobs.jobs import Filter
from models.jobs.needs import Need, wants
from models.state import ENDED, STATES
from models.storage import datasets, references
from models.tables import Job

router = APIRouter(prefix=BASE, tags=["jobs"])
Waited = documents.Waited
_KEPT = ("Location", "Idempotency-Replayed")
"""Headers of the answer to a submission that stay when the job has ended."""


class JobPatch(Body):
    """A merge patch: absent fields stay as they are, null clears a field."""

    name: JobName | None = None
    """Null: the service generates a name."""
    labels: dict[Label, LabelValue | None] | None = Constraint(default=None, max_length=50)
    """Added to the existing labels. A null value removes one label; null for the field removes all.
    """
    priority: int | None = Constraint(default=None, ge=-1000, le=1000)


def job_tag(job: Job) -> str:
    """Return the entity tag of a job; what its replica reports also changes the version."""
    return etag(job.id, job.version)


def shown(database: Database, job: Job) -> dict[str, Any]:
    """Return a job that is not in a transaction, as JSON."""
    if job.kind != "serve":
        return job_json(job, None)
    with database.read() as tx:
        return job_json(job, replicas.of_jobs(tx, [job]).get(job.id))


@router.post(
    "/plan",
    summary="Check a job without storing it",
    openapi_extra=described(*KINDS, example=documents.TRAIN_EXAMPLE),
    responses=documents.answers(200, documents.Plan, 400, 401, 403, 413, 415, 422, 503),
)
async def plan_job(
    app_state: AppStateDep, caller: Read, body: Annotated[Parsed[AnyJob], Depends(parse_job_body)]
) -> Response:
    """Layer table, parameters, memory, FLOPs, possible devices, and warnings."""
    prepared = await prepare(app_state, body.value, caller)
    return Json(
        prepared.plan | {"object": "plan", "spec": prepared.resolved, "devices": prepared.devices}
    )


@router.post(
    "/jobs",
    status_code=201,
    summary="Submit a job",
    openapi_extra=described(*KINDS, example=documents.TRAIN_EXAMPLE),
    responses=documents.answers(201, documents.Job, 400, 401, 403, 409, 413, 415, 422, 429, 503),
)
async def create_job(
    request: Request,
    app_state: AppStateDep,
    caller: Submit,
    key: OnceKey,
    body: Annotated[Parsed[AnyJob], Depends(parse_job_body)],
    prefer: Waited = None,
) -> Response:
    """Check, store and queue a job. It runs as soon as a worker has the devices it asks for.

    With `Prefer: wait=30`, the response waits up to 30 s for the end of the job. That of a short
    `infer` job then has its `result`; if `state` is not `succeeded`, the job has failed or still
    runs.
    """
    del prefer  # read and validated by `waiting` below
    wait_s = waiting.preferred_wait(request)
    answer = await _submitted(app_state, caller, key, body)
    return answer if wait_s is None else await _ended(app_state, caller, answer, wait_s)


async def _submitted(
    app_state: AppState, caller: Caller, key: str | None, body: Parsed[AnyJob]
) -> Response:
    token = idempotent.token_of(caller, "POST /jobs", key, body.raw)
    kept = (
        None
        if token is None
        else await run_in_threadpool(idempotent.earlier, app_state.database, token)
    )
    if kept is not None:
        return idempotent.sent(kept, replayed=True)
    await run_in_threadpool(admit, app_state, caller)  # before the planner, which is expensive
    prepared = await prepare(app_state, body.value, caller, hold=True)
    return await run_in_threadpool(store, app_state, caller, token, prepared)


async def _ended(app_state: AppState, caller: Caller, answer: Response, wait_s: int) -> Response:
    """Return the answer to a submission, with the job as it is when it ends or the time is up."""
    job_id = answer.headers["Location"].rpartition("/")[2]

    def look_for_end() -> Job | None:
        job = _found(app_state, caller, job_id)
        return job if job.state in ENDED else None

    ended = await waiting.wait_for(
        app_state.wakeups, app_state.draining, job_id, look_for_end, wait_s
    )
    job = ended or await run_in_threadpool(_found, app_state, caller, job_id)
    headers = {name: answer.headers[name] for name in _KEPT if name in answer.headers}
    headers |= {"ETag": job_tag(job), **waiting.applied(wait_s)}
    document = await run_in_threadpool(shown, app_state.database, job)
    return Json(document, status_code=answer.status_code, headers=headers)


def _found(app_state: AppState, caller: Caller, job_id: str) -> Job:
    with app_state.database.read() as tx:
        return jobs.get(tx, job_id, caller.sees)


def store(
    app_state: AppState,
    caller: Caller,
    token: IdempotencyUse | None,
    prepared: CheckedJob,
    parent: str | None = None,
) -> Response:
    """Store and queue a checked job exactly once, and respond with it."""
    job_id = ""

    def make(tx: Transaction) -> Answer:
        nonlocal job_id
        need = Need.of(wants(prepared.resolved), prepared.resolved["kind"])
        quotas.admit_job(tx, caller.owner, app_state.settings, devices=need.least, field=need.field)
        job = _add(tx, caller, prepared, parent)
        failpoint("submit.commit")
        job_id = job.id
        headers = {"Location": f"{BASE}/jobs/{job.id}", "ETag": job_tag(job)}
        return Answer(201, headers, jsonio.dumps(job_json(job, None)))

    answer, replayed = idempotent.once(app_state.database, token, make)
    if not replayed:
        failpoint("submit.committed")
        notify(app_state, job_id)
    return idempotent.sent(answer, replayed=replayed)


def _add(tx: Transaction, caller: Caller, prepared: CheckedJob, parent: str | None) -> Job:
    references.share(tx, prepared.uses)
    named: dict[str, str | None] = {}
    for used in prepared.uses:  # it may have been deleted while the planner ran
        if is_id(used, "ds"):
            named[used] = datasets.ready(tx, used, None).name
        else:
            named[used] = checkpoints.get(tx, used, None).name
    return jobs.add(
        tx,
        owner=caller.owner,
        spec=prepared.spec,
        resolved=prepared.resolved,
        plan=prepared.plan,
        uses=prepared.uses,
        parent=parent,
        created_by=caller.key_name,
        stem=names.stem_of(prepared.spec, named),
    )


def notify(app_state: AppState, job_id: str) -> None:
    """Notify a dispatcher. If that fails, the sweep of a worker finds the job."""
    app_state.notifier.job_queued()
    failpoint("submit.notified")


@router.get(
    "/jobs",
    summary="List jobs",
    responses=documents.answers(200, documents.JobList, 400, 401, 422),
)
def list_jobs(  # noqa: PLR0913 (each is a filter of the contract)
    app_state: AppStateDep,
    caller: Read,
    page: Paged,
    *,
    state: Annotated[list[str] | None, Query(description="One or more states.")] = None,
    kind: Annotated[
        Literal["train", "infer", "evaluate", "serve", "diagnose"] | None, Query()
    ] = None,
    label: Annotated[
        list[str] | None, Query(description="`key:value`. A job must match all of them.")
    ] = None,
    parent: Annotated[str | None, Query(max_length=64)] = None,
    q: Annotated[str | None, Query(max_length=200, description="Part of the name or id.")] = None,
    name: Annotated[str | None, Query(max_length=200, description="The whole name.")] = None,
    order: Annotated[Literal["desc", "asc"], Query(description="By creation time.")] = "desc",
) -> Response:
    """Newest first, unless `order=asc`."""
    wanted = Filter(
        owner=caller.sees,
        states=_states(state),
        kind=kind,
        labels=_labels(label),
        parent=parent,
        text=q,
        name=name,
    )
    with app_state.database.read() as tx:
        rows = jobs.find(tx, wanted, after=page.after_id("job"), limit=page.limit + 1, order=order)
        found = replicas.of_jobs(tx, rows)
    return Json(page_of(rows, page, [job_json(row, found.get(row.id)) for row in rows]))


def _states(given: list[str] | None) -> tuple[str, ...]:
    wanted = tuple(name.strip() for entry in given or () for name in entry.split(","))
    for name in wanted:
        if name not in STATES:
            raise bad_parameter("state", f"{name[:50]!r} is no state; they are {', '.join(STATES)}")
    return wanted


def _labels(given: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in given or ():
        name, colon, value = entry.partition(":")
        if not colon or not name:
            raise bad_parameter("label", f"{entry[:100]!r} is not of the form key:value")
        found[name] = value
    return found


@router.get(
    "/jobs/{id}",
    summary="Get a job",
    responses=documents.answers(200, documents.Job, 304, 400, 401, 404),
)
async def get_job(
    request: Request,
    app_state: AppStateDep,
    caller: Read,
    id: str,  # noqa: A002
    prefer: Waited = None,
) -> Response:
    """One job. With `Prefer: wait=30`, the response waits up to 30 s for a change.

    A change is relative to the version in `If-None-Match`, or without it to the current one.
    """
    del prefer  # read and validated by `waiting` below
    wait_s = waiting.preferred_wait(request)
    seen: str | None = None

    look = partial(_found, app_state, caller, id)

    def look_for_change() -> Job | None:
        nonlocal seen
        job = look()
        if seen is None:
            tag = request.headers.get("if-none-match")
            seen = job_tag(job) if tag is None else tag.strip().removeprefix("W/")
        return job if job_tag(job) != seen or job.state in ENDED else None

    if wait_s is None:
        job = await run_in_threadpool(look)
    else:
        changed = await waiting.wait_for(
            app_state.wakeups, app_state.draining, id, look_for_change, wait_s
        )
        job = changed or await run_in_threadpool(look)
    document = await run_in_threadpool(shown, app_state.database, job)
    return tagged(request, document, job_tag(job), waiting.applied(wait_s))


@router.patch(
    "/jobs/{id}",
    summary="Update the name, labels or priority",
    openapi_extra=described(JobPatch, media=("application/merge-patch+json", "application/json")),
    responses=documents.answers(200, documents.Job, 400, 401, 403, 404, 412, 415, 422),
)
def update_job(
    request: Request,
    app_state: AppStateDep,
    caller: Submit,
    id: str,  # noqa: A002
    body: Annotated[Parsed[JobPatch], Depends(body_of(JobPatch))],
) -> Response:
    """A merge patch. With `If-Match`, the update fails if someone else changed the job."""
    with app_state.database.write() as tx:
        job = jobs.get(tx, id, caller.sees, lock=True)
        check_match(request, job_tag(job))
        job = jobs.patch(tx, job, _changes(job, body.value))
    app_state.wake(id)
    return Json(shown(app_state.database, job), headers={"ETag": job_tag(job)})


def _changes(job: Job, patch: JobPatch) -> dict[str, Any]:
    changes = patch.model_dump(exclude_unset=True)
    if "priority" in changes and changes["priority"] is None:
        changes["priority"] = 0
    if "labels" in changes:
        given = patch.labels
        merged: dict[str, Any] = {} if given is None else job.labels | given
        labels = {name: value for name, value in merged.items() if value is not None}
        changes["labels"] = labels
        if len(labels) > 50:
            raise InvalidRequest("/labels: a job may have 50 labels at most")
    return changes


@router.delete(
    "/jobs/{id}",
    status_code=204,
    summary="Delete an ended job",
    responses=documents.answers(204, None, 401, 403, 404, 409, 412),
)
def delete_job(
    request: Request,
    app_state: AppStateDep,
    caller: Submit,
    id: str,  # noqa: A002
) -> Response:
    """Delete a job that has ended, with its events, series, captures and checkpoints.

    The job is 404 as soon as this returns. A worker deletes its rows and files in the background.
    """
    with app_state.database.write() as tx:
        job = jobs.get(tx, id, caller.sees, lock=True)
        check_match(request, job_tag(job))
        jobs.delete(tx, job)
    app_state.wake(id)
    return Response(status_code=204)


@router.post(
    "/jobs/{id}/cancel",
    status_code=202,
    summary="Cancel a job",
    responses=documents.answers(202, documents.Job, 401, 403, 404, 409, 422),
)
def cancel_job(
    app_state: AppStateDep,
    caller: Submit,
    id: str,  # noqa: A002
    force: Annotated[bool, Query(description="Do not wait for a step boundary.")] = False,
) -> Response:
    """Ask a job to stop at the next step boundary; if it does not, it is stopped by a signal.

    A queued or paused job stops at once.
    """
    with app_state.database.write() as tx:
        job = jobs.get(tx, id, caller.sees, lock=True)
        job = jobs.request_cancel(tx, job, by=caller.owner, force=force)
    app_state.wake(id)
    return accepted(app_state, job)


def accepted(app_state: AppState, job: Job) -> Response:
    """Return 202 with the job."""
    headers = {"ETag": job_tag(job), "Location": f"{BASE}/jobs/{job.id}"}
    return Json(shown(app_state.database, job), status_code=202, headers=headers)


@router.get(
    "/jobs/{id}/spec",
    summary="Get a job's spec",
    responses=documents.answers(200, None, 401, 404, 422),
)
def get_job_spec(
    app_state: AppStateDep,
    caller: Read,
    id: str,  # noqa: A002
    resolved: Annotated[bool, Query(description="Fill in every default and size.")] = False,
) -> Response:
    """The spec as submitted, or as resolved. You can submit either again."""
    with app_state.database.read() as tx:
        job = jobs.whole(tx, id, caller.sees)
    return Json(job.resolved if resolved else job.spec)
