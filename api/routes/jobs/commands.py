"""Commands to a running job: change a setting, save a checkpoint, or evaluate."""

from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Query
from pydantic import BeforeValidator, model_validator
from pydantic import Field as Constraint
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Caller, Read, Submit
from api.http.answers import Json, Paged, page_of
from api.http.bodies import Body, Parsed, body_of, described
from api.routes.observations.events import JobId
from api.schemas.documents import Command as CommandDocument
from api.schemas.documents import CommandList, answers
from api.schemas.views import BASE, command_json
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from glasshouse import jsonio
from glasshouse.errors import FieldProblem, InvalidRequest, InvalidSpec, JobEnded
from glasshouse.spec.strict import JsonData, check_exactly_one
from models.access.idempotency import Answer
from models.database import Transaction
from models.jobs import commands, jobs
from models.state import ENDED

router = APIRouter(prefix=BASE, tags=["jobs"])
Setting = Annotated[str, Constraint(min_length=1, max_length=200)]
State = Literal["pending", "applied", "rejected"]


def _refuse_profile(value: Any) -> Any:
    if value == "profile":
        raise ValueError("a running job cannot be profiled yet; metrics time/… are always there")
    return value


class NewCommand(Body):
    """A command to a running job. Give exactly one of the two fields."""

    set: dict[Setting, JsonData] | None = Constraint(default=None, min_length=1, max_length=50)
    """New values of settings by path, such as `optimizer.lr`. Either all apply or none."""
    do: Annotated[Literal["checkpoint", "evaluate"] | None, BeforeValidator(_refuse_profile)] = None
    """Save a checkpoint, or evaluate on the validation rows, after the current step."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        check_exactly_one(self, "set", "do")
        return self


@router.post(
    "/jobs/{id}/commands",
    status_code=201,
    summary="Send a command to a running job",
    openapi_extra=described(NewCommand, example={"set": {"optimizer.lr": 0.001}}),
    responses=answers(201, CommandDocument, 400, 401, 403, 404, 409, 413, 415, 422, 503),
)
async def create_command(
    app_state: AppStateDep,
    caller: Submit,
    job: JobId,
    key: OnceKey,
    body: Annotated[Parsed[NewCommand], Depends(body_of(NewCommand))],
) -> Response:
    """A command is `pending` until it applies at a step boundary, then `applied` with that step.

    You can set every number that torch keeps in the optimizer's parameter groups. You can also set
    `grad_clip.max`, `stop.…`, `evaluate.every_…` and `checkpoint.every_…` if the spec has them. A
    `command` event reports the old and the new values. The change survives a restart of the job.
    """
    token = idempotent.token_of(caller, f"POST /jobs/{job}/commands", key, body.raw)
    stored = await run_in_threadpool(idempotent.earlier, app_state.database, token)
    if stored is not None:
        return idempotent.sent(stored, replayed=True)
    spec = await run_in_threadpool(_spec_now, app_state, caller, job)
    command = body.value
    if command.do == "evaluate" and spec["evaluate"] is None:
        raise _wrong("/do", "the spec has no evaluate, so the job reads no validation rows")
    if command.set is not None:
        try:
            await app_state.planner.check_set(spec, command.set)
        except InvalidSpec as error:
            raise InvalidRequest(error.detail, problems=error.problems) from None
    made = command.model_dump(mode="json", exclude_none=True, exclude_unset=True)

    def make(tx: Transaction) -> Answer:
        row = commands.add(tx, jobs.get(tx, job, caller.sees), made, by=caller.owner)
        shown = command_json(row)
        return Answer(201, {"Location": shown["links"]["self"]}, jsonio.dumps(shown))

    answer, replayed = await run_in_threadpool(idempotent.once, app_state.database, token, make)
    app_state.wake(job)
    return idempotent.sent(answer, replayed=replayed)


@router.get(
    "/jobs/{id}/commands",
    summary="List the commands of a job",
    responses=answers(200, CommandList, 400, 401, 404, 422),
)
def list_commands(
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    page: Paged,
    state: Annotated[list[State] | None, Query(description="One or more states.")] = None,
) -> Response:
    """All commands of the job, oldest first, including probe changes and cancellations."""
    with app_state.database.read() as tx:
        found = jobs.get(tx, job, caller.sees)
        rows = commands.find(
            tx, found.id, states=state or (), after=page.after_id("cmd"), limit=page.limit + 1
        )
    return Json(page_of(rows, page, [command_json(row) for row in rows]))


@router.get(
    "/jobs/{id}/commands/{cmd}",
    summary="Get a command",
    responses=answers(200, CommandDocument, 401, 404),
)
def get_command(app_state: AppStateDep, caller: Read, job: JobId, cmd: str) -> Response:
    """One command to a job, and whether it was applied."""
    with app_state.database.read() as tx:
        found = commands.get(tx, jobs.get(tx, job, caller.sees), cmd)
    return Json(command_json(found))


def _spec_now(app_state: AppState, caller: Caller, job_id: str) -> dict[str, Any]:
    """Return the spec of a job with all settings changed so far.

    Raises:
        JobEnded: The job has ended or is being cancelled.
        InvalidRequest: It is not a training job.
    """
    with app_state.database.read() as tx:
        job = jobs.get(tx, job_id, caller.sees)
        if job.state in (*ENDED, "cancelling"):
            raise JobEnded(f"The job is {job.state}: nothing of it can be changed any more.")
        if job.kind != "train":
            raise _wrong("", f"only a training job takes commands; this one is {job.kind}")
        return commands.spec_now(tx, job)


def _wrong(pointer: str, detail: str) -> InvalidRequest:
    problem = FieldProblem(pointer, detail, "cannot_do")
    return InvalidRequest(str(problem), problems=[problem])
