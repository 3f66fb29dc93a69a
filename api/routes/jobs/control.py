"""Pause, resume, retry and fork jobs."""

from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends
from pydantic import Field as Constraint
from pydantic import JsonValue, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Caller, Submit
from api.http.bodies import Body, Parsed, body_of, described, parse_spec
from api.routes.jobs.jobs import accepted, notify, store
from api.routes.observations.events import JobId
from api.schemas.documents import Job as JobDocument
from api.schemas.documents import answers
from api.schemas.views import BASE
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from api.submission.start import merged, what_differs
from api.submission.submission import prepare
from glasshouse.errors import (
    CheckpointNotFound,
    FieldProblem,
    InvalidRequest,
    InvalidSpec,
    JobNotEnded,
)
from glasshouse.spec import AnyJob
from glasshouse.spec.strict import check_at_most_one
from models.database import Transaction
from models.jobs import checkpoints, commands, jobs, pausing
from models.state import ENDED
from models.tables import Checkpoint, Job

router = APIRouter(prefix=BASE, tags=["jobs"])
_MADE = (400, 401, 403, 404, 409, 413, 415, 422, 503)


class Fork(Body):
    """What to change in the forked job."""

    spec: dict[str, JsonValue] = Constraint(default={})
    """A merge patch on the job's resolved spec with the settings changed up to that step. Null
    takes a default."""
    checkpoint: str | None = Constraint(default=None, min_length=1, max_length=64)
    """The checkpoint to start from; it must belong to this job. Default: the newest."""
    step: int | None = Constraint(default=None, ge=0)
    """Instead of `checkpoint`: use the checkpoint of this step."""
    load: Literal["all", "model"] | None = None
    """`all` continues the run: the optimizer, the random generators and the position in the data
    are loaded too. `model` loads only the weights and starts at step 0. Default: `all`, unless the
    patch changes the network, the training data, the seed or the type of the optimizer."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_at_most_one(self, "checkpoint", "step")
        return self


@router.post(
    "/jobs/{id}/pause",
    status_code=202,
    summary="Pause a job",
    responses=answers(202, JobDocument, 401, 403, 404, 409),
)
def pause_job(app_state: AppStateDep, caller: Submit, job: JobId) -> Response:
    """Ask a job to save a checkpoint at the next step boundary and to release its devices.

    It is `pausing` until then, and `paused` until it is resumed or cancelled. A job that reaches no
    step boundary in time is paused at its last checkpoint. A queued job is paused at once.
    """
    with app_state.database.write() as tx:
        row = pausing.request_pause(tx, jobs.get(tx, job, caller.sees, lock=True))
    app_state.wake(job)
    return accepted(app_state, row)


@router.post(
    "/jobs/{id}/resume",
    status_code=202,
    summary="Resume a paused job",
    responses=answers(202, JobDocument, 401, 403, 404, 409),
)
def resume_job(app_state: AppStateDep, caller: Submit, job: JobId) -> Response:
    """Queue a paused job again. It resumes from its checkpoint, on any machine.

    A job that is still `pausing` is queued as soon as it is paused.
    """
    with app_state.database.write() as tx:
        row = pausing.request_resume(tx, jobs.get(tx, job, caller.sees, lock=True))
    if row.state == "queued":
        notify(app_state, job)
    app_state.wake(job)
    return accepted(app_state, row)


@router.post(
    "/jobs/{id}/retry",
    status_code=201,
    summary="Submit an ended job again",
    responses=answers(201, JobDocument, *_MADE),
)
async def retry_job(app_state: AppStateDep, caller: Submit, job: JobId, key: OnceKey) -> Response:
    """Create a new job with the spec that this one was submitted with, from the beginning.

    Its `parent` is this job.
    """

    def read() -> dict[str, Any]:
        with app_state.database.read() as tx:
            found = jobs.whole(tx, job, caller.sees)
        if found.state not in ENDED:
            raise JobNotEnded(f"The job is {found.state}; only one that has ended is tried again.")
        return found.spec

    token = idempotent.token_of(caller, f"POST /jobs/{job}/retry", key, b"")
    stored = await run_in_threadpool(idempotent.earlier, app_state.database, token)
    if stored is not None:
        return idempotent.sent(stored, replayed=True)
    spec = parse_spec(await run_in_threadpool(read))
    prepared = await prepare(app_state, spec, caller, hold=True)
    return await run_in_threadpool(store, app_state, caller, token, prepared, job)


@router.post(
    "/jobs/{id}/fork",
    status_code=201,
    summary="Fork a job from one of its checkpoints",
    openapi_extra=described(
        Fork, example={"spec": {"optimizer": {"args": {"lr": 0.001}}}, "step": 400}
    ),
    responses=answers(201, JobDocument, *_MADE),
)
async def fork_job(
    app_state: AppStateDep,
    caller: Submit,
    job: JobId,
    key: OnceKey,
    body: Annotated[Parsed[Fork], Depends(body_of(Fork))],
) -> Response:
    """Create a new job with a changed spec that starts from a checkpoint of this one.

    Its `parent` is this job, and `init` of its spec says what is loaded.
    """
    token = idempotent.token_of(caller, f"POST /jobs/{job}/fork", key, body.raw)
    stored = await run_in_threadpool(idempotent.earlier, app_state.database, token)
    if stored is not None:
        return idempotent.sent(stored, replayed=True)
    try:
        spec = await run_in_threadpool(_forked, app_state, caller, job, body.value)
        prepared = await prepare(app_state, spec, caller)  # `_forked` holds the checkpoint
    except InvalidSpec as error:
        raise _inside(error) from None
    return await run_in_threadpool(store, app_state, caller, token, prepared, job)


def _forked(app_state: AppState, caller: Caller, job_id: str, fork: Fork) -> AnyJob:
    """Return the spec of a fork.

    Raises:
        CheckpointMissing, CheckpointNotFound: There is no checkpoint to start from.
        InvalidRequest, InvalidSpec: The job cannot be forked with these changes.
    """
    if "init" in fork.spec:
        detail = "what to start from is said by checkpoint or step, and load, beside spec"
        raise _wrong("/spec/init", detail)
    with app_state.database.write() as tx:  # to hold the checkpoint until the job is stored
        job = jobs.whole(tx, job_id, caller.sees)
        if job.kind != "train":
            raise _wrong("", f"only a training job is forked; this one is of the kind {job.kind}")
        saved = _checkpoint(tx, job, fork)
        base = commands.spec_at(tx, job.id, job.resolved, saved.step + 1)
    spec = merged(base, fork.spec)
    load = fork.load or ("model" if what_differs(base, spec) else "all")
    return parse_spec(spec | {"init": {"checkpoint": saved.id, "load": load}})


def _checkpoint(tx: Transaction, job: Job, fork: Fork) -> Checkpoint:
    if fork.checkpoint is not None:
        saved = checkpoints.get(tx, fork.checkpoint, job.owner)
        if saved.job != job.id:
            raise _wrong("/checkpoint", f"it is {_source_of(saved.job)}")
        checkpoints.hold(tx, saved.id)
        return saved
    if fork.step is None:
        return checkpoints.newest(tx, job, hold=True)
    found = checkpoints.of_job(tx, job.id)
    of_step = [row for row in found if row.step == fork.step]
    if not of_step:
        steps = ", ".join(str(row.step) for row in found[-20:]) or "none"
        raise CheckpointNotFound(f"There is no checkpoint of step {fork.step}; there is: {steps}.")
    checkpoints.hold(tx, of_step[-1].id)
    return of_step[-1]


def _source_of(job: str | None) -> str:
    if job is None:
        return "one that was sent: begin a job with it by init.checkpoint"
    return f"a checkpoint of {job}: fork that one"


def _wrong(pointer: str, detail: str) -> InvalidRequest:
    problem = FieldProblem(pointer, detail, "cannot_fork")
    return InvalidRequest(str(problem), problems=[problem])


def _inside(error: InvalidSpec) -> InvalidSpec:
    """Return the spec error with pointers into the request that contains the spec."""
    found = [
        FieldProblem(f"/spec{item.pointer}", item.detail, item.code) for item in error.problems
    ]
    detail = f"/spec{error.detail}" if error.detail.startswith("/") else error.detail
    return InvalidSpec(detail, problems=found)
