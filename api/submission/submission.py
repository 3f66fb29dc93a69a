"""Check a job before it is stored: its inputs, its plan, and where it could run."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool

from api.app_state import AppState
from api.http.access import Caller
from api.submission import scales
from api.submission.available import find_devices
from api.submission.fitting import choose_strategy, mark_fitting, refuse_too_large
from api.submission.start import what_differs
from api.submission.trained import find_checkpoint
from glasshouse.errors import (
    CheckpointMissing,
    DatasetNotFound,
    FieldProblem,
    InvalidSpec,
    NotFound,
    ServiceError,
)
from glasshouse.spec import AnyJob, EvaluateJob, InferJob, ServeJob, Source, TrainJob
from glasshouse.spec.data import sources_in
from glasshouse.spec.labels import text_labels, with_values
from models import published_models
from models.database import Transaction
from models.jobs import checkpoints, jobs
from models.storage import datasets
from models.storage.columns import DatasetColumns


@dataclass(slots=True)
class JobInputs:
    """The inputs of a job, found in the database."""

    datasets: dict[str, Any] = field(default_factory=dict[str, Any])
    """Id → columns and splits."""
    ids: dict[str, str] = field(default_factory=dict[str, str])
    """Reference to a dataset in the job → its id."""
    places: dict[str, str] = field(default_factory=dict[str, str])
    """Id of a dataset → location of its files."""
    uses: set[str] = field(default_factory=set[str])
    checkpoint: str | None = None
    start: str | None = None
    """The checkpoint that training starts from."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Of a serve job, what trained each model, by its reference."""
    network: dict[str, Any] | None = None
    """The resolved spec of the checkpoint's job, or what was uploaded with the checkpoint."""
    start_step: int | None = None
    """Step of the checkpoint that training starts from."""
    has_weights_only: bool = False
    """Whether a client uploaded the checkpoint, so that it belongs to no run of a job."""
    problems: list[FieldProblem] = field(default_factory=list[FieldProblem])


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A job that can be stored."""

    spec: dict[str, Any]
    """As submitted, with ids of datasets instead of names."""
    resolved: dict[str, Any]
    plan: dict[str, Any]
    """Without the resolved spec."""
    uses: frozenset[str]
    devices: list[dict[str, Any]]
    """Devices that the job may get."""


async def prepare(
    app_state: AppState, spec: AnyJob, caller: Caller, *, hold: bool = False
) -> CheckedJob:
    """Check a job, and replace the names of its datasets by ids.

    ``hold``: the job will be stored, so hold the checkpoint that it reads until then.

    Raises:
        InvalidSpec: It cannot run; the error names every field to change.
        DeviceUnavailable: No worker has the device that it asks for.
        PlannerUnavailable: It cannot be checked now.
    """
    found, (chosen, warnings) = await asyncio.gather(
        run_in_threadpool(_find_inputs, app_state, spec, caller, hold),
        run_in_threadpool(find_devices, app_state, spec),
    )
    if found.problems:
        first = found.problems[0]
        raise InvalidSpec(f"{first.pointer}: {first.detail}", problems=found.problems)
    submitted = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for source in sources_in(submitted):
        source["dataset"] = found.ids[source["dataset"]]
    planned = dict(submitted)
    if found.checkpoint is not None:  # fix the checkpoint as of now: newer ones may follow
        planned.pop("job", None)
        planned["checkpoint"] = found.checkpoint
    if found.start is not None:
        planned["init"] = {**planned["init"], "checkpoint": found.start}
    make_plan = partial(app_state.planner.plan, owner=caller.sees or "", models=found.models)
    plan = await make_plan(planned, found.datasets, found.network)
    mark_fitting(plan, chosen)
    if (strategy := choose_strategy(spec, plan)) is not None:
        planned["parallel"] = {**planned["parallel"], "strategy": strategy}
        plan = await make_plan(planned, found.datasets, found.network)
        mark_fitting(plan, chosen)
    resolved = plan.pop("spec")
    refuse_too_large(spec, plan, chosen)
    _check_start(found, resolved, plan)
    if isinstance(spec, TrainJob):
        warnings += await run_in_threadpool(_scale_warnings, app_state, found, resolved)
    plan["warnings"] = [*plan.get("warnings", []), *warnings]
    return CheckedJob(submitted, resolved, plan, frozenset(found.uses), chosen)


def _scale_warnings(
    app_state: AppState, found: JobInputs, resolved: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Return a warning if columns of the first source have very different scales."""
    source = next(part for part in sources_in(resolved))
    name = str(source["dataset"])
    try:
        figures = DatasetColumns(app_state.artifacts.local(found.places[name])).stats()
    except (
        OSError,
        ServiceError,
        ValueError,
    ):  # only advice: without statistics there is no warning
        return []
    columns = found.datasets[name]["columns"]
    warning = scales.scale_warning(resolved, columns, figures.get(source["split"], {}))
    return [] if warning is None else [warning]


def _check_start(found: JobInputs, resolved: dict[str, Any], plan: Mapping[str, Any]) -> None:
    """Check that a continued run matches its checkpoint and has steps left."""
    if found.start_step is None or found.network is None or resolved["init"]["load"] != "all":
        return
    pointer, num_steps = "/init/load", plan["num_steps"]
    if found.has_weights_only:
        detail = "the checkpoint was sent by a client and has weights only; load 'model'"
        raise _wrong_start(pointer, detail)
    others = what_differs(found.network, resolved)
    if others:
        detail = f"'all' continues the checkpoint's run, and {', '.join(others)} differ from it;"
        raise _wrong_start(pointer, detail + " load 'model', or leave them as they were")
    if num_steps is not None and num_steps <= found.start_step:
        raise _wrong_start("/stop", _ends_before(resolved["stop"], found.start_step, num_steps))


def _ends_before(stop: Mapping[str, Any], start_step: int, num_steps: int) -> str:
    """Suggest a ``stop`` that leaves something to train after a checkpoint."""
    if stop.get("steps") is not None:
        name, more = "steps", start_step + stop["steps"]
    else:
        name, epochs = "epochs", stop["epochs"]
        more = math.ceil(start_step * epochs / num_steps) + epochs
    return (
        f"the checkpoint was made after {start_step} steps, and stop.{name}={stop[name]} ends the "
        f"training after {num_steps}, counted from its beginning; add stop.{name}={more}, for one"
    )


def _wrong_start(pointer: str, detail: str) -> InvalidSpec:
    problem = FieldProblem(pointer, detail, "cannot_start")
    return InvalidSpec(f"{pointer}: {detail}", problems=[problem])


def _find_inputs(app_state: AppState, spec: AnyJob, caller: Caller, hold: bool) -> JobInputs:
    found = JobInputs()
    sources: dict[str, str] = {}
    if isinstance(spec, TrainJob):
        several = not isinstance(spec.data.train, Source)
        for number, source in enumerate(spec.data.sources):
            sources[f"/data/train{f'/{number}' if several else ''}/dataset"] = source.dataset
        for place, source in spec.data.validations.items():
            sources[f"/data/{place}/dataset"] = source.dataset
    elif isinstance(spec, InferJob | EvaluateJob) and spec.data is not None:
        sources["/data/dataset"] = spec.data.dataset
    init = spec.init if isinstance(spec, TrainJob) else None
    begins = isinstance(spec, InferJob | EvaluateJob | ServeJob) or init is not None
    with app_state.database.write() if hold and begins else app_state.database.read() as tx:
        for pointer, reference in sources.items():
            _find_dataset(tx, found, pointer, reference, caller)
        if isinstance(spec, InferJob | EvaluateJob):
            _find_checkpoint(tx, found, spec, caller, hold=hold)
        elif isinstance(spec, ServeJob):
            _find_models(tx, found, spec, caller, hold=hold)
        elif init is not None:
            _find_start(tx, found, init.checkpoint, caller, hold=hold)
    if isinstance(spec, TrainJob):
        _add_labels(app_state, found, spec)
    return found


def _find_models(
    tx: Transaction, found: JobInputs, spec: ServeJob, caller: Caller, *, hold: bool
) -> None:
    """Find the models of a serve job, which are the owner's own."""
    for number, entry in enumerate(spec.entries):
        references = {"": entry.model}
        for part in ("canary", "shadow"):
            if (other := getattr(entry, part)) is not None:
                references[f"/{part}/model"] = other.model
        for place, reference in references.items():
            try:
                one = published_models.by_reference(tx, reference, owner=caller.owner)
                if hold:
                    checkpoints.hold(tx, one.checkpoint.id)
                found.models[reference] = checkpoints.trained(tx, one.checkpoint)
                found.uses.add(one.checkpoint.id)
            except NotFound as error:
                pointer = f"/models/{number}{place}"
                found.problems.append(FieldProblem(pointer, error.detail, error.code))


def _add_labels(app_state: AppState, found: JobInputs, spec: TrainJob) -> None:
    """Add the texts of label columns to the descriptions of datasets."""
    for name, dataset in found.datasets.items():
        labels = text_labels(spec.data.fields, dataset["columns"])
        if labels:
            stats = DatasetColumns(app_state.artifacts.local(found.places[name])).stats()
            dataset["columns"] = with_values(dataset["columns"], stats, labels)


def _find_start(
    tx: Transaction, found: JobInputs, reference: str, caller: Caller, *, hold: bool
) -> None:
    try:
        saved = find_checkpoint(tx, reference, caller, hold=hold)
        found.network = checkpoints.trained(tx, saved)
    except NotFound as error:
        found.problems.append(FieldProblem("/init/checkpoint", error.detail, error.code))
        return
    found.start = saved.id
    found.start_step = saved.step
    found.has_weights_only = saved.job is None
    found.uses.add(saved.id)


def datasets_of(tx: Transaction, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns and splits of a stored job's datasets, as the planner expects them."""
    names = {part["dataset"] for part in sources_in(resolved)}
    rows = [datasets.get(tx, name, None) for name in sorted(names)]
    return {row.id: {"columns": row.columns, "splits": row.splits} for row in rows}


def _find_dataset(tx: Any, found: JobInputs, pointer: str, reference: str, caller: Caller) -> None:
    try:
        row = datasets.referred(tx, reference, owner=caller.owner, sees=caller.sees)
    except DatasetNotFound as error:
        found.problems.append(FieldProblem(pointer, error.detail, "dataset_not_found"))
        return
    found.ids[reference] = row.id
    if row.state != "ready":
        why = f": {row.problem.get('detail')}" if row.problem else "; wait until it is ready"
        detail = f"the dataset {row.id} is {row.state}{why}"
        found.problems.append(FieldProblem(pointer, detail, "dataset_not_ready"))
        return
    found.datasets[row.id] = {"columns": row.columns, "splits": row.splits}
    found.places[row.id] = row.key
    found.uses.add(row.id)


def _find_checkpoint(
    tx: Any, found: JobInputs, spec: InferJob | EvaluateJob, caller: Caller, *, hold: bool
) -> None:
    try:
        if spec.checkpoint is not None:
            checkpoint = find_checkpoint(tx, spec.checkpoint, caller, hold=hold)
        else:
            job = jobs.get(tx, spec.job or "", caller.sees)
            checkpoint = checkpoints.newest(tx, job, hold=hold)
    except (NotFound, CheckpointMissing) as error:
        pointer = "/checkpoint" if spec.checkpoint is not None else "/job"
        found.problems.append(FieldProblem(pointer, error.detail, error.code))
        return
    found.checkpoint = checkpoint.id
    found.uses.add(checkpoint.id)
    found.network = checkpoints.trained(tx, checkpoint)
