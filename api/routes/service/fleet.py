"""Devices, workers, and the queue with the reason why each job waits."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import Response

from api.app_state import AppState, AppStateDep
from api.http.access import Admin, Caller, Read
from api.http.answers import Json, list_of, time_text
from api.schemas import inspection
from api.schemas.documents import answers
from glasshouse import jsonio
from models.access import quotas
from models.database import Transaction
from models.fleet import cores, heartbeats, workers
from models.fleet.cores import FlexibleJob
from models.fleet.workers import Given, Queued
from models.jobs.needs import GIB, Need
from models.tables import Device, Worker, now

router = APIRouter(prefix="/api/v1", tags=["machines"])


@router.get(
    "/devices",
    summary="List devices",
    responses=answers(200, inspection.DeviceList, 401),
)
def list_devices(app_state: AppStateDep, caller: Read) -> Response:
    """Every device. Jobs of other owners are not named; their devices are ``busy``."""
    return Json(list_of(_devices(app_state, caller)[1], cursor=None))


def _devices(
    app_state: AppState, caller: Caller
) -> tuple[list[tuple[Worker, str]], list[dict[str, Any]]]:
    """Return all workers with their states, and all devices as the caller may see them."""
    with app_state.database.read() as tx:
        lease_ms = _lease_ms(app_state)
        found = workers.all_workers(tx, lease_ms=lease_ms)
        rows = workers.all_devices(tx, lease_ms=lease_ms)
        owners = workers.owners(tx, [row.job for row, _ in rows if row.job is not None])
    facts: dict[str, dict[str, Any]] = {row.id: row.info.get("devices") or {} for row, _ in found}
    data = [
        _device_json(row, state, caller, owners)
        | _facts_json(facts[row.worker].get(row.id), caller)
        for row, state in rows
    ]
    return found, data


def _facts_json(facts: Mapping[str, Any] | None, caller: Caller) -> dict[str, Any]:
    """Return what the driver reported of a device. Only admins see the ids of processes."""
    shown: dict[str, Any] = {name: (facts or {}).get(name) for name in inspection.DEVICE_FACTS}
    if shown["processes"] is not None and caller.sees is not None:
        shown["processes"] = [one | {"pid": None} for one in shown["processes"]]
    return shown


def _device_json(row: Device, state: str, caller: Caller, owners: dict[str, str]) -> dict[str, Any]:
    visible = row.job is not None and caller.sees in (None, owners.get(row.job))
    healthy = row.healthy and state != "stopped"
    usable = healthy and state == "active"
    return {
        "object": "device",
        "worker": row.worker,
        "worker_state": state,
        "id": row.id,
        "kind": row.kind,
        "number": row.number,
        "name": row.name,
        "uuid": row.uuid,
        "memory_bytes": row.memory_bytes,
        "healthy": healthy,
        "reason": row.reason if state != "stopped" else "its worker was stopped",
        "state": "busy" if row.job is not None else "free" if usable else "unavailable",
        "job": row.job if visible else None,
    }


@router.get(
    "/workers",
    summary="List workers",
    responses=answers(200, inspection.WorkerList, 401),
)
def list_workers(app_state: AppStateDep, caller: Read) -> Response:
    """Every worker: ``active``, ``draining``, ``stopped`` (gracefully), or ``lost``."""
    del caller
    with app_state.database.read() as tx:
        rows = workers.all_workers(tx, lease_ms=_lease_ms(app_state))
    return Json(list_of([_worker_json(row, state) for row, state in rows], cursor=None))


@router.get(
    "/system",
    summary="List hardware and versions",
    responses=answers(200, inspection.SystemList, 401),
)
def list_systems(app_state: AppStateDep, caller: Read) -> Response:
    """The processors, memory, accelerators and library versions of each worker's host.

    A fact that a host does not report is null. Facts are as of `measured_at`.
    """
    found, devices = _devices(app_state, caller)
    data = [
        _system_json(row, state, [one for one in devices if one["worker"] == row.id])
        for row, state in found
    ]
    return Json(list_of(data, cursor=None))


def _system_json(row: Worker, state: str, devices: list[dict[str, Any]]) -> dict[str, Any]:
    info = row.info
    cpu: dict[str, Any] = {**(info.get("cpu") or {}), "core_flops": info.get("core_flops")}
    reported: dict[str, Any] = {**(info.get("versions") or {}), "glasshouse": row.version}
    reported |= {name: info[name] for name in ("python", "torch", "triton") if info.get(name)}
    return {
        "object": "system",
        "worker": row.id,
        "state": state,
        "host": row.host,
        "platform": info.get("platform"),
        "measured_at": info.get("measured_at"),
        "versions": {name: reported.get(name) for name in inspection.VERSIONS},
        "cpu": {name: cpu.get(name) for name in inspection.Processors.model_fields},
        "memory": {
            "total_bytes": info.get("memory_bytes"),
            "available_bytes": info.get("memory_available_bytes"),
        },
        "devices": [one for one in devices if one["kind"] != "cpu"],
    }


@router.post(
    "/workers/{id}/drain",
    status_code=202,
    summary="Drain a worker",
    responses=answers(202, inspection.Worker, 401, 403, 404, 422),
)
def drain_worker(
    app_state: AppStateDep, caller: Admin, worker: Annotated[str, Path(alias="id", max_length=200)]
) -> Response:
    """Running jobs continue. The worker gets no new jobs until it is started again."""
    del caller
    with app_state.database.write() as tx:
        workers.drain(tx, worker)
        rows = workers.all_workers(tx, lease_ms=_lease_ms(app_state))
    (found,) = [_worker_json(row, state) for row, state in rows if row.id == worker]
    return Json(found, status_code=202)


@router.delete(
    "/workers/{id}",
    status_code=204,
    summary="Remove a worker",
    responses=answers(204, None, 401, 403, 404, 409, 422),
)
def remove_worker(
    app_state: AppStateDep, caller: Admin, worker: Annotated[str, Path(alias="id", max_length=200)]
) -> Response:
    """Delete a stopped or lost worker and its devices. A running worker is refused.

    It registers again when it is started again.
    """
    del caller
    with app_state.database.write() as tx:
        workers.remove(tx, worker, lease_ms=_lease_ms(app_state))
    return Response(status_code=204)


def _worker_json(row: Worker, state: str) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "worker",
        "state": state,
        "host": row.host,
        "version": row.version,
        "started_at": time_text(row.started_at),
        "last_seen_at": time_text(datetime.fromtimestamp(row.beat_ms / 1000, UTC)),
        "stopped_at": None
        if row.stopped_ms is None
        else time_text(datetime.fromtimestamp(row.stopped_ms / 1000, UTC)),
        "draining": row.draining,
        "info": {name: fact for name, fact in row.info.items() if name != "devices"},
    }


@router.get(
    "/queue",
    summary="List queued jobs",
    responses=answers(200, inspection.QueuedJobList, 401),
)
def list_queue(app_state: AppStateDep, caller: Read) -> Response:
    """In the order in which they start, with the reason.

    Jobs of others only count in ``position``.
    """
    with app_state.database.read() as tx:
        waiting = workers.queue(tx, owner=caller.sees)
        flexible = cores.flexible_jobs(tx) if waiting else []
        surplus = cores.surplus_by_owner(flexible)
        remaining = quotas.remaining(tx, app_state.settings, surplus) if waiting else {}
        fleet = Fleet.read(tx, app_state, flexible) if waiting else Fleet({}, [], ())
    used_up = {owner for owner, room in remaining.items() if room.is_used_up}
    data = [
        {
            "object": "queued_job",
            "position": job.position,
            "job": job.job,
            "name": job.name,
            "priority": job.priority,
            "queued_at": time_text(job.queued_at),
            "devices": job.wants,
            "reason": waiting_reason(job)
            or ("the quota of its owner is used up" if job.owner in used_up else fleet.why(job)),
        }
        for job in waiting
    ]
    return Json(list_of(data, cursor=None))


def waiting_reason(job: Queued) -> str | None:
    """Say when a job that failed a moment ago is retried, or return None."""
    if job.not_before_ms is None or job.not_before_ms <= now().timestamp() * 1000:
        return None
    return f"tried again at {time_text(datetime.fromtimestamp(job.not_before_ms / 1000, UTC))}"


@dataclass(slots=True)
class _Host:
    """Healthy devices of one kind on one worker."""

    devices: list[Given] = field(default_factory=list[Given])

    def fitting(self, need: Need) -> list[Given]:
        """Return the devices that a job may have."""
        return [one for one in self.devices if need.fits(one.number, one.memory_bytes)]

    def has_free(self, need: Need) -> bool:
        """Return whether one of them is free."""
        return any(one.free for one in self.fitting(need))

    def has_enough(self, kind: str, need: Need) -> bool:
        """Return whether enough of them are free."""
        fit = self.fitting(need)
        free = sum(one.free for one in fit)
        return free >= need.count(kind, len(fit), free)

    def has_cores(self, kind: str, need: Need) -> bool:
        """Return whether enough of these cores are free beside devices of a kind."""
        free = sum(one.free for one in self.devices)
        return free >= need.num_cores(kind, len(self.devices), free)


class Fleet:
    """The devices of workers that take jobs, read once for all queued jobs."""

    def __init__(
        self,
        states: Mapping[str, str],
        placed: Iterable[Given],
        short: Collection[str],
        surplus: Collection[tuple[str, str]] = (),
    ) -> None:
        """Take the states of all workers by name.

        ``short``: workers with a nearly full disk. ``surplus``: the worker and id of cores that
        their jobs give up as soon as another job needs them.
        """
        self._states = states
        self._short = short
        self._hosts: dict[str, dict[str, _Host]] = {}
        self._known: dict[tuple[str, str], tuple[str, bool]] = {}
        for one in placed:
            if one.healthy:
                hosts = self._hosts.setdefault(one.kind, {})
                has_room = one.free or (one.worker, one.id) in surplus
                hosts.setdefault(one.worker, _Host()).devices.append(one._replace(free=has_room))

    @classmethod
    def read(cls, tx: Transaction, app_state: AppState, flexible: Sequence[FlexibleJob]) -> "Fleet":
        """Read the workers and their devices from the database."""
        lease_ms = _lease_ms(app_state)
        states = {row.id: state for row, state in workers.all_workers(tx, lease_ms=lease_ms)}
        short = heartbeats.low_on_disk(tx, app_state.settings.min_free_bytes)
        placed = workers.with_host_memory(tx, workers.devices_to_give(tx, lease_ms=lease_ms))
        return cls(states, placed, short, cores.surplus(flexible))

    def why(self, job: Queued) -> str:
        """Return why a queued job does not run yet."""
        key = (jsonio.dumps(job.wants), job.kind)
        if key not in self._known:
            self._known[key] = self._look(Need.of(job.wants, job.kind))
        reason, is_free = self._known[key]
        if is_free and job.position:
            return f"behind {job.position} job{'s' if job.position > 1 else ''}"
        return reason

    def _look(self, need: Need) -> tuple[str, bool]:
        """Return the reason, and whether a device that the job could use is free."""
        named = need.worker
        if (absent := self._absent(named)) is not None:
            return absent, False
        cuda = {name: len(host.fitting(need)) for name, host in self._hosts.get("cuda", {}).items()}
        kinds = need.kinds(cuda)
        hosts = [
            (kind, worker, host)
            for kind in kinds
            for worker, host in self._hosts.get(kind, {}).items()
            if named in (None, worker) and need.is_on({one.number for one in host.fitting(need)})
        ]
        hosts = [(kind, worker, host) for kind, worker, host in hosts if host.fitting(need)]
        if not hosts:
            least = need.min_memory_bytes / GIB
            return f"no {kinds[0]} device{f' with {least:g} GiB' if least else ''}", False
        if all(worker in self._short for _, worker, _ in hosts):
            return "the disk of every worker is nearly full", False
        if not any(host.has_free(need) for _, _, host in hosts):
            return "no free device", False
        return self._look_at_free(need, hosts)

    def _look_at_free(self, need: Need, hosts: list[tuple[str, str, _Host]]) -> tuple[str, bool]:
        """Return as `_look` does, where a device is free; ``hosts``: kind, worker, devices."""
        enough = [(kind, worker) for kind, worker, host in hosts if host.has_enough(kind, need)]
        if not enough:
            return "not enough free devices", True
        cores = self._hosts.get("cpu", {})
        if any(cores.get(worker, _Host()).has_cores(kind, need) for kind, worker in enough):
            return "about to start", True
        return "not enough free CPU cores", False

    def _absent(self, named: str | None) -> str | None:
        """Return why no worker, or not the worker that the job names, can take it; else None."""
        if named is None:
            return None if "active" in self._states.values() else "no worker"
        state = self._states.get(named)
        if state in (None, "active"):
            return None if state else f"no worker {named}"
        return f"worker {named} was stopped" if state == "stopped" else f"worker {named} is {state}"


def _lease_ms(app_state: AppState) -> int:
    return round(app_state.settings.lease_s * 1000)
