"""Check a job before it is stored: its inputs, its plan, and where it could run."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from api.app_state import AppState
from api.http.access import Caller
from api.submission import scales
from api.submission.start import what_differs
from glasshouse.errors import (
    CheckpointMissing,
    CheckpointNotFound,
    DatasetNotFound,
    DeviceUnavailable,
    FieldProblem,
    InvalidSpec,
    JobNotFound,
    ServiceError,
)
from glasshouse.spec import AnyJob, Devices, DiagnoseJob, InferJob, Source, TrainJob
from glasshouse.spec.data import sources_in
from glasshouse.spec.labels import text_labels, with_values
from models.database import Transaction
from models.fleet import cores, workers
from models.jobs import checkpoints, jobs
from models.jobs.needs import GIB, Need, wants
from models.storage import datasets
from models.storage.columns import DatasetColumns
from models.tables import Device, Worker

_PROCESSES = "/parallel/processes"


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
        run_in_threadpool(_find_devices, app_state, spec),
    )
    if found.problems:
        first = found.problems[0]
        raise InvalidSpec(f"{first.pointer}: {first.detail}", problems=found.problems)
    submitted = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for source in sources_in(submitted):
        source["dataset"] = found.ids[source["dataset"]]
    planned = dict(submitted)
    if found.checkpoint is not None:  # fix the newest checkpoint of the job as of now
        planned.pop("job", None)
        planned["checkpoint"] = found.checkpoint
    make_plan = partial(app_state.planner.plan, owner=caller.sees or "")
    plan = await make_plan(planned, found.datasets, found.network)
    _mark_fitting(plan, chosen)
    if (strategy := _choose_strategy(spec, plan)) is not None:
        planned["parallel"] = {**planned["parallel"], "strategy": strategy}
        plan = await make_plan(planned, found.datasets, found.network)
        _mark_fitting(plan, chosen)
    resolved = plan.pop("spec")
    _refuse_too_large(spec, plan, chosen)
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


def _mark_fitting(plan: Mapping[str, Any], devices: list[dict[str, Any]]) -> None:
    """Add to each strategy of a plan whether it ``fits``; None: no memory is known."""
    for one in _strategies(plan):
        processes = plan["parallel"]["processes"]
        sizes = _sizes(devices, one["memory"], processes, one.get("host_bytes"))
        one["fits"] = any(size.is_enough for size in sizes) if sizes else None


def _strategies(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    parallel: Mapping[str, Any] = plan.get("parallel") or {}
    return parallel.get("strategies", [])


def _choose_strategy(spec: AnyJob, plan: Mapping[str, Any]) -> str | None:
    """Return what ``auto`` stands for if it is not the strategy of the plan, which is the first."""
    if not isinstance(spec, TrainJob) or spec.parallel.strategy != "auto" or spec.processes == 1:
        return None
    first, *others = _strategies(plan)
    if first["fits"] is not False:
        return None
    able = (one for one in others if not one.get("cpu_offload"))
    return next((one["strategy"] for one in able if one["fits"]), None)


def _refuse_too_large(spec: AnyJob, plan: Mapping[str, Any], devices: list[dict[str, Any]]) -> None:
    """Refuse a job that fits on no device: the out-of-memory killer would end it, or worse."""
    pointer, fix = "/network", "make the network or the batch smaller"
    if isinstance(spec, DiagnoseJob):
        pointer, fix = "/sizes_bytes", "send smaller messages, or use fewer processes"
    if parts := _parts(plan):
        _refuse_overfull(parts, spec.devices, devices)
    for one in _strategies(plan):
        if one["fits"]:
            more = ", and parallel.cpu_offload to true" if one.get("cpu_offload") else ""
            fix = f"set parallel.strategy to {one['strategy']}{more}, or {fix}"
    processes = 1 if isinstance(spec, InferJob) else spec.processes
    sizes = _sizes(devices, plan["memory"], processes, _host_bytes(plan))
    if parts:
        on_host = _on_host(plan["memory"], 1, None)
        sizes = [host for one in devices if (host := _host_size(one, on_host))]
    if not sizes or any(size.is_enough for size in sizes):
        return
    largest = max(sizes)
    what = "the largest device that it may get"
    if largest.is_of_host:
        what = "the largest host of such a device"
        pointer, fix = "/data", "take fewer rows"
        fix += ", or use fewer processes" if processes > 1 else ""
        if isinstance(spec, TrainJob) and spec.data.shuffle.buffer_size is None:
            fix = f"set data.shuffle.buffer_size, which keeps rows in files, or {fix}"
        if plan["memory"].get("offloaded_bytes"):
            pointer = "/parallel/cpu_offload"
            fix = f"remove cpu_offload, make the network smaller, or {fix}"
    detail = (
        f"it needs about {largest.needed_bytes / 2**30:.1f} GiB, and {what} has "
        f"{largest.size_bytes / 2**30:.1f} GiB; {fix}"
    )
    problem = FieldProblem(pointer, detail, "too_large")
    raise InvalidSpec(f"{pointer}: {detail}", problems=[problem])


def _parts(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what each device has of a job whose layers are placed."""
    parallel: Mapping[str, Any] = plan.get("parallel") or {}
    return parallel.get("devices", [])


def _refuse_overfull(
    parts: list[dict[str, Any]], wanted: Devices, devices: list[dict[str, Any]]
) -> None:
    """Refuse layers on a device that is too small for them, if its memory is known."""
    for part in parts:
        ids = wanted.ids
        able = devices
        if ids is not None:
            able = [one for one in devices if one["id"] == f"cuda:{ids[part['device']]}"]
        sizes = [one["memory_bytes"] for one in able if one["memory_bytes"] is not None]
        needed = part["memory"]["total_bytes"]
        if sizes and needed > max(sizes):
            pointer = "/network/layers"
            detail = f"the layers on device {part['device']} need about {needed / 2**30:.1f} GiB,"
            detail += f" and the largest device that it may be has {max(sizes) / 2**30:.1f} GiB:"
            detail += " give some of them another device, or make the batch smaller"
            problem = FieldProblem(pointer, detail, "too_large")
            raise InvalidSpec(f"{pointer}: {detail}", problems=[problem])


def _host_bytes(plan: Mapping[str, Any]) -> int | None:
    """Return what several processes need of one host together; None: there is one process."""
    parallel: Mapping[str, Any] = plan.get("parallel") or {}
    return parallel.get("host_bytes")


class _Size(NamedTuple):
    """The memory of a device or of its host, and what is needed of it."""

    size_bytes: int
    needed_bytes: int
    is_of_host: bool = False
    """Whether it is the memory of the host of a CUDA device."""

    @property
    def is_enough(self) -> bool:
        return self.needed_bytes <= self.size_bytes


def _sizes(
    devices: list[dict[str, Any]],
    memory: Mapping[str, int],
    processes: int,
    host_bytes: int | None = None,
) -> list[_Size]:
    """Return the memory of each device, or that of its host if only that is too small.

    Devices whose memory is not known are omitted. On CPU cores all processes share the memory of
    the host. Checkpoints are written from host memory on every device. Rows that take more than a
    quarter of a CUDA device's memory are not moved to it, as in `engine.data.batches.rows`.
    ``memory``: of each process, or of the one that needs the most; ``host_bytes``: of all together,
    if there are several.
    """
    host_only, rows = memory["checkpoint_bytes"], memory.get("data_bytes", 0)
    each = memory["total_bytes"] - host_only - memory.get("offloaded_bytes", 0)
    together = each * processes + host_only if host_bytes is None else host_bytes
    on_host = _on_host(memory, processes, host_bytes)
    found: list[_Size] = []
    for one in devices:
        size, host = one["memory_bytes"], _host_size(one, on_host)
        own = None
        if size is not None:
            on_device = each - rows if rows > size // 4 else each
            own = _Size(size, together if one["kind"] == "cpu" else on_device)
        if host is not None and not host.is_enough and (own is None or own.is_enough):
            own = host
        found += [] if own is None else [own]
    return found


def _on_host(memory: Mapping[str, int], processes: int, host_bytes: int | None) -> int:
    """Return what a job on CUDA devices needs of its host's memory, as of `_sizes`.

    Each process reads its rows into it first, and checkpoints are written from it. Of processes
    that differ, at least that much. What is offloaded counts in ``host_bytes``.
    """
    saved, rows = memory["checkpoint_bytes"], memory.get("data_bytes", 0)
    if host_bytes is not None and "offloaded_bytes" in memory:
        return host_bytes
    if host_bytes is not None:
        saved = max(saved, host_bytes - processes * (memory["total_bytes"] - saved))
    return processes * rows + saved


def _host_size(device: Mapping[str, Any], needed_bytes: int) -> _Size | None:
    """Return the memory of a CUDA device's host; None: it is not known, or a CPU core."""
    size = device["host_memory_bytes"]
    if size is None or device["kind"] == "cpu":
        return None
    return _Size(size, needed_bytes, is_of_host=True)


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
    found, owner = JobInputs(), caller.sees
    sources: dict[str, str] = {}
    if isinstance(spec, TrainJob):
        several = not isinstance(spec.data.train, Source)
        for number, source in enumerate(spec.data.sources):
            sources[f"/data/train{f'/{number}' if several else ''}/dataset"] = source.dataset
        if spec.data.validation is not None:
            sources["/data/validation/dataset"] = spec.data.validation.dataset
    elif isinstance(spec, InferJob) and spec.data is not None:
        sources["/data/dataset"] = spec.data.dataset
    init = spec.init if isinstance(spec, TrainJob) else None
    begins = isinstance(spec, InferJob) or init is not None
    with app_state.database.write() if hold and begins else app_state.database.read() as tx:
        for pointer, reference in sources.items():
            _find_dataset(tx, found, pointer, reference, caller)
        if isinstance(spec, InferJob):
            _find_checkpoint(tx, found, spec, owner, hold=hold)
        elif init is not None:
            _find_start(tx, found, init.checkpoint, owner, hold=hold)
    if isinstance(spec, TrainJob):
        _add_labels(app_state, found, spec)
    return found


def _add_labels(app_state: AppState, found: JobInputs, spec: TrainJob) -> None:
    """Add the texts of label columns to the descriptions of datasets."""
    for name, dataset in found.datasets.items():
        labels = text_labels(spec.data.fields, dataset["columns"])
        if labels:
            stats = DatasetColumns(app_state.artifacts.local(found.places[name])).stats()
            dataset["columns"] = with_values(dataset["columns"], stats, labels)


def _find_start(
    tx: Transaction, found: JobInputs, checkpoint_id: str, owner: str | None, *, hold: bool
) -> None:
    try:
        saved = checkpoints.get(tx, checkpoint_id, owner)
        if hold:
            checkpoints.hold(tx, saved.id)
        found.network = checkpoints.trained(tx, saved)
    except (CheckpointNotFound, JobNotFound) as error:
        found.problems.append(FieldProblem("/init/checkpoint", error.detail, error.code))
        return
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
    tx: Any, found: JobInputs, spec: InferJob, owner: str | None, *, hold: bool
) -> None:
    try:
        if spec.checkpoint is not None:
            checkpoint = checkpoints.get(tx, spec.checkpoint, owner)
            if hold:
                checkpoints.hold(tx, checkpoint.id)
        else:
            job = jobs.get(tx, spec.job or "", owner)
            checkpoint = checkpoints.newest(tx, job, hold=hold)
    except (CheckpointNotFound, JobNotFound, CheckpointMissing) as error:
        pointer = "/checkpoint" if spec.checkpoint is not None else "/job"
        found.problems.append(FieldProblem(pointer, error.detail, error.code))
        return
    found.checkpoint = checkpoint.id
    found.uses.add(checkpoint.id)
    found.network = checkpoints.trained(tx, checkpoint)


def _find_devices(
    app_state: AppState, spec: AnyJob
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return the devices that the job may get, and warnings.

    Raises:
        DeviceUnavailable: The service has workers, but none with a matching healthy device.
    """
    wanted, lease_ms = spec.devices, int(app_state.settings.lease_s * 1000)
    with app_state.database.read() as tx:
        known = workers.all_devices(tx, lease_ms=lease_ms)
        found = workers.all_workers(tx, lease_ms=lease_ms)
        surplus = cores.surplus(cores.flexible_jobs(tx))
    hosts = {row.id: row for row, _ in found}
    states = {row.id: state for row, state in found}
    names = set(hosts)
    if not names:
        return [], [_warning("no worker is there yet: the job waits until one starts")]
    if wanted.worker is not None and wanted.worker not in names:
        detail = f"there is no worker {wanted.worker!r}; there are {_listed(names)}"
        raise _unavailable("/devices/worker", detail)
    if wanted.worker is not None and states[wanted.worker] == "stopped":
        there = _listed({name for name, state in states.items() if state == "active"})
        detail = f"the worker {wanted.worker!r} was stopped; start it again, or leave worker out"
        raise _unavailable("/devices/worker", f"{detail}. Workers that run: {there or 'none'}")
    able = [(row, state) for row, state in known if wanted.worker in (None, row.worker)]
    fitting = [(row, state) for row, state in able if row.healthy and _fits(row, wanted)]
    if not fitting:
        raise _unavailable(*_why_none(wanted, [row for row, _ in able]))
    fitting = _with_memory(wanted, fitting, hosts)
    num_cores = Counter(row.worker for row, _ in able if row.healthy and row.kind == "cpu")
    _check_number(spec, Counter((row.worker, row.kind) for row, _ in fitting), num_cores)
    warnings: list[dict[str, str]] = []
    if all(state != "active" for _, state in fitting):
        warnings.append(_warning("no worker with such a device takes jobs now: the job waits"))
    return [
        _shown(
            row,
            hosts[row.worker],
            free=state == "active" and (row.job is None or (row.worker, row.id) in surplus),
        )
        for row, state in fitting
    ], warnings


def _check_number(
    spec: AnyJob, numbers: Mapping[tuple[str, str], int], num_cores: Mapping[str, int]
) -> None:
    """Check that a worker has enough devices, and cores beside them.

    ``numbers``: the healthy devices that fit, by worker and kind. ``num_cores``: the healthy cores
    of each worker.

    Raises:
        DeviceUnavailable: none has.
    """
    need = Need.of(wants(spec.model_dump(mode="json")), spec.kind)
    able = [
        (kind, num_cores.get(worker, 0))
        for (worker, kind), found in numbers.items()
        if found >= need.count(kind, found, found)
    ]
    if any(found >= need.num_cores(kind, found, found) for kind, found in able):
        return
    if able:  # CUDA devices, and threads for each process
        most = max(found for _, found in able)
        number = need.num_cores("cuda", most, most)
        detail = f"no worker with such devices has {number} CPU cores; the most is {most}: set"
        raise _unavailable("/devices/threads", f"{detail} fewer threads, or leave it out")
    most = max(numbers.values())
    if spec.devices.type == "cpu":
        number = need.count("cpu", most, most)
        detail = f"no worker has {number} CPU cores; the most is {most}"
        several = f"{detail}, and each of {need.processes} processes needs one"
        raise _unavailable(
            *(("/devices/threads", detail) if need.threads else (_PROCESSES, several))
        )
    if need.ids is not None:
        listed = ", ".join(map(str, need.ids))
        raise _unavailable("/devices/ids", f"no worker has all of the devices {listed}")
    detail = f"no worker has {need.num_cuda} healthy devices; the most is {most}"
    raise _unavailable("/devices/count" if spec.devices.count else _PROCESSES, detail)


def _with_memory(
    wanted: Devices, found: list[tuple[Device, str]], hosts: Mapping[str, Worker]
) -> list[tuple[Device, str]]:
    """Return the devices that have the memory that the job asks for.

    Raises:
        DeviceUnavailable: none has it.
    """
    least = wanted.min_memory_gib
    if least is None:
        return found
    sizes = [_memory_of(row, hosts[row.worker]) or 0 for row, _ in found]
    fitting = [one for one, size in zip(found, sizes, strict=True) if size >= int(least * GIB)]
    if not fitting:
        kind = "device" if wanted.type == "auto" else f"{wanted.type} device"
        detail = f"no worker has a {kind} with {least:g} GiB of memory; the most is"
        raise _unavailable(
            "/devices/min_memory_gib", f"{detail} {max(sizes) / GIB:.1f} GiB: ask for less"
        )
    return fitting


def _memory_of(row: Device, host: Worker) -> int | None:
    """Return the memory of a device; of a CPU core, that of its host."""
    return host.info.get("memory_bytes") if row.kind == "cpu" else row.memory_bytes


def _fits(row: Device, wanted: Devices) -> bool:
    if wanted.type == "auto":
        return True
    if row.kind != wanted.type:
        return False
    return wanted.ids is None or row.number in wanted.ids


def _why_none(wanted: Devices, able: list[Device]) -> tuple[str, str]:
    matching = [row for row in able if _fits(row, wanted)]
    if matching:
        row = matching[0]
        return "/devices", f"{row.id} of {row.worker} is not healthy: {row.reason or 'no reason'}"
    there = _listed({f"{row.id} ({row.worker})" for row in able if row.kind != "cpu"})
    pointer = "/devices/ids" if wanted.ids is not None else "/devices"
    ids = f" {', '.join(map(str, wanted.ids))}" if wanted.ids is not None else ""
    return pointer, f"no worker has the {wanted.type} device{ids}; there is {there or 'only CPU'}"


def _unavailable(pointer: str, detail: str) -> DeviceUnavailable:
    problem = FieldProblem(pointer, detail, "device_unavailable")
    return DeviceUnavailable(f"{pointer}: {detail}", problems=[problem])


def _warning(detail: str) -> dict[str, str]:
    return {"pointer": "/devices", "detail": detail, "code": "waits"}


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:20]) + (" …" if len(shown) > 20 else "")


def _shown(row: Device, host: Worker, *, free: bool) -> dict[str, Any]:
    shown: Mapping[str, Any] = {
        "worker": row.worker,
        "kind": row.kind,
        "id": row.id,
        "name": row.name,
        "memory_bytes": _memory_of(row, host),
        "host_memory_bytes": host.info.get("memory_bytes"),
        "free": free,
    }
    return dict(shown)
