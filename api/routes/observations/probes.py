"""The probes of a job: add, change and remove them while it runs."""

from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Depends, Query, Request
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Caller, Read, Submit
from api.http.answers import Json, check_match, etag, list_of
from api.http.bodies import Body, Parsed, body_of, described, parse
from api.routes.observations.events import JobId
from api.schemas import inspection
from api.schemas.documents import answers
from api.schemas.views import BASE, probe_json
from api.submission import idempotent
from api.submission.idempotent import OnceKey
from api.submission.submission import datasets_of
from glasshouse import jsonio
from glasshouse.errors import (
    FieldProblem,
    InvalidRequest,
    InvalidSpec,
    JobEnded,
    ProbeNotFound,
)
from glasshouse.spec import Form, Probe
from models.access.idempotency import Answer
from models.database import Transaction
from models.jobs import jobs
from models.observations import probes
from models.observations.probes import CheckedProbe
from models.state import ENDED
from models.tables import Job
from models.tables import Probe as Row

router = APIRouter(prefix=BASE, tags=["inside"])
_EXAMPLE = {"layers": ["conv*"], "kinds": ["output"], "every": 1, "want": ["stats"]}
_ADAPTER: TypeAdapter[Probe] = TypeAdapter(Probe)
_NULL = ("max_overhead",)
"""Fields where null is a value, not the default."""


class ProbePatch(Body):
    """A merge patch: absent fields stay as they are, null takes the default.

    For `max_overhead`, null means no budget.
    """

    layers: list[str] | None = None
    kinds: list[str] | None = None
    every: int | None = None
    at: list[int] | None = None
    on: str | None = None
    phase: str | None = None
    max_overhead: float | None = None
    start: int | None = None
    stop: int | None = None
    point: Literal["raw", "clipped"] | None = None
    want: list[Form] | None = None
    slice: str | None = None
    max_bytes: int | None = None
    lossless: bool | None = None
    ranks: Literal["merged", "all"] | list[int] | None = None


def probe_tag(row: Row) -> str:
    """Return the entity tag of a probe. It covers the request, not measurements."""
    return etag(row.id, row.revision)


@router.post(
    "/jobs/{id}/probes",
    status_code=201,
    summary="Add a probe",
    openapi_extra=described(Probe, example=_EXAMPLE),
    responses=answers(201, inspection.AttachedProbe, 400, 401, 403, 404, 409, 413, 415, 422, 503)
    | answers(200, inspection.EstimatedProbe),
)
async def create_probe(
    *,
    app_state: AppStateDep,
    caller: Submit,
    job: JobId,
    key: OnceKey,
    dry_run: Annotated[
        bool, Query(description="Add nothing: 200 with matches and estimated cost.")
    ] = False,
    body: Annotated[Parsed[Probe], Depends(body_of(Probe))],
) -> Response:
    """Attach a probe. A running job applies it at the next step boundary.

    The response lists what it matches and the bytes per step. A `probe` event and `applied_step`
    say from which step it applies.
    """
    if dry_run:
        checked = await _check(app_state, caller, job, body.value)
        return Json(await run_in_threadpool(_estimated, app_state, job, checked))
    token = idempotent.token_of(caller, f"POST /jobs/{job}/probes", key, body.raw)
    kept = await run_in_threadpool(idempotent.earlier, app_state.database, token)
    if kept is not None:
        return idempotent.sent(kept, replayed=True)
    checked = await _check(app_state, caller, job, body.value)

    def make(tx: Transaction) -> Answer:
        row = probes.add(tx, jobs.get(tx, job, caller.sees), checked, by=caller.owner)
        return Answer(201, {"Location": _path(row)}, jsonio.dumps(probe_json(row)))

    answer, replayed = await run_in_threadpool(idempotent.once, app_state.database, token, make)
    app_state.wake(job)
    return idempotent.sent(answer, replayed=replayed)


@router.get(
    "/jobs/{id}/probes",
    summary="List the probes of a job",
    responses=answers(200, inspection.AttachedProbeList, 400, 401, 404, 422),
)
def list_probes(
    app_state: AppStateDep,
    caller: Read,
    job: JobId,
    removed: Annotated[bool, Query(description="Include removed and rejected probes.")] = False,
) -> Response:
    """Probes of the spec first, then the others in the order in which they were added."""
    with app_state.database.read() as tx:
        found = probes.of_job(tx, jobs.get(tx, job, caller.sees).id, gone=removed)
    return Json(list_of([probe_json(row) for row in found], cursor=None))


@router.get(
    "/jobs/{id}/probes/{prb}",
    summary="Get a probe",
    responses=answers(200, inspection.AttachedProbe, 401, 404),
)
def get_probe(app_state: AppStateDep, caller: Read, job: JobId, prb: str) -> Response:
    """What it watches, and whether the job has applied it."""
    with app_state.database.read() as tx:
        row = probes.get(tx, jobs.get(tx, job, caller.sees), prb)
    return Json(probe_json(row), headers={"ETag": probe_tag(row)})


@router.patch(
    "/jobs/{id}/probes/{prb}",
    summary="Change a probe",
    openapi_extra=described(ProbePatch, media=("application/merge-patch+json", "application/json")),
    responses=answers(
        200, inspection.AttachedProbe, 400, 401, 403, 404, 409, 412, 413, 415, 422, 503
    ),
)
async def update_probe(
    request: Request,
    app_state: AppStateDep,
    caller: Submit,
    job: JobId,
    prb: str,
    body: Annotated[Parsed[ProbePatch], Depends(body_of(ProbePatch))],
) -> Response:
    """A merge patch. The probe is `pending` until the job has applied the change.

    With `If-Match`, the update fails if someone else changed the probe.
    """

    def still(row: Row) -> None:
        check_match(request, probe_tag(row))

    def merge() -> Probe:
        with app_state.database.read() as tx:
            row = probes.get(tx, jobs.get(tx, job, caller.sees), prb)
        still(row)
        if row.state in ("removed", "rejected"):
            raise ProbeNotFound(f"The probe {row.id} was {row.state}.")
        merged = row.body | body.value.model_dump(mode="json", exclude_unset=True)
        kept = {name: value for name, value in merged.items() if value is not None or name in _NULL}
        return parse(_ADAPTER, jsonio.dumps(kept).encode(), roots=(Probe,))

    checked = await _check(app_state, caller, job, await run_in_threadpool(merge), replaces=prb)

    def store() -> Row:
        with app_state.database.write() as tx:
            found = jobs.get(tx, job, caller.sees)
            return probes.change(tx, found, prb, checked, by=caller.owner, still=still)

    row = await run_in_threadpool(store)
    app_state.wake(job)
    return Json(probe_json(row), headers={"ETag": probe_tag(row)})


@router.delete(
    "/jobs/{id}/probes/{prb}",
    status_code=202,
    summary="Remove a probe",
    responses=answers(202, inspection.AttachedProbe, 401, 403, 404, 409),
)
def remove_probe(app_state: AppStateDep, caller: Submit, job: JobId, prb: str) -> Response:
    """Remove a probe. Its data stays. `applied_step` is the first step that it does not watch."""
    with app_state.database.write() as tx:
        found = jobs.get(tx, job, caller.sees)
        row = probes.remove(tx, found, prb, by=caller.owner)
    app_state.wake(job)
    return Json(probe_json(row), status_code=202, headers={"Location": _path(row)})


def _estimated(app_state: AppState, job: str, checked: CheckedProbe) -> dict[str, Any]:
    with app_state.database.read() as tx:
        cost_s = probes.estimate(checked, probes.of_job(tx, job))
    return {
        "object": "probe_estimate",
        "matched": checked.matched,
        "bytes_per_step": checked.bytes_per_step,
        "estimated_cost_s": cost_s,
    }


async def _check(
    app_state: AppState, caller: Caller, job_id: str, probe: Probe, *, replaces: str | None = None
) -> CheckedProbe:
    """Have the planner check a probe together with the others of its job.

    Raises:
        InvalidRequest: It cannot watch what it names. The problem has a pointer and a reason.
        JobEnded: The job has ended.
    """

    def read() -> tuple[Job, list[Row], dict[str, Any]]:
        with app_state.database.read() as tx:
            found = jobs.get(tx, job_id, caller.sees)
            if found.state in ENDED:
                raise JobEnded(f"The job has ended: it {found.state}.")
            if found.kind != "train":
                detail = f"only a training job is watched; this one is of the kind {found.kind}"
                raise InvalidRequest(detail, problems=[FieldProblem("", detail, "not_trained")])
            return found, probes.of_job(tx, job_id), datasets_of(tx, found.resolved)

    job, rows, metas = await run_in_threadpool(read)
    body = probe.model_dump(mode="json")
    others = [row.body for row in rows if row.id != replaces and row.state != "failed"]
    whole = [*others, body]
    try:
        plan = await app_state.planner.plan(
            job.resolved | {"probes": whole}, metas, owner=job.owner
        )
    except InvalidSpec as error:
        raise _pointing(error, len(whole) - 1) from None
    found = cast("dict[str, Any]", plan["probes"][-1])
    return CheckedProbe(body, found["matched"], found["bytes_per_step"])


def _pointing(error: InvalidSpec, number: int) -> InvalidRequest:
    """Return the planner's error with pointers into the probe from the request."""
    prefix = f"/probes/{number}"
    found = [
        FieldProblem(item.pointer.removeprefix(prefix), item.detail, item.code)
        for item in error.problems
    ]
    return InvalidRequest(error.detail.removeprefix(prefix), problems=found)


def _path(row: Row) -> str:
    return f"{BASE}/jobs/{row.job}/probes/{row.id}"
