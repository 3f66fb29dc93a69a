"""The hardware, who has it, and why a job waits."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import Response

from api import inside
from api.access import Admin, Caller, Read
from api.answers import Json, list_of, time_text
from api.documents import answers
from api.resources import House, Resources
from api.views import not_before
from models import quotas, vitals, workers
from models.tables import Device, Job, Worker, now

router = APIRouter(prefix="/api/v1", tags=["machines"])
Placed = Sequence[tuple[Device, str]]
"""Devices, each with the state of its worker."""


@router.get(
    "/devices",
    summary="Devices and who has them",
    responses=answers(200, inside.DeviceList, 401),
)
def list_devices(house: House, caller: Read) -> Response:
    """Every device. Jobs of others are not named; their devices are ``busy``."""
    with house.database.read() as tx:
        rows = workers.all_devices(tx, lease_ms=_lease_ms(house))
        owners = workers.owners(tx, [row.job for row, _ in rows if row.job is not None])
    data = [_device_json(row, state, caller, owners) for row, state in rows]
    return Json(list_of(data, cursor=None))


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
    summary="Machines that run jobs",
    responses=answers(200, inside.WorkerList, 401),
)
def list_workers(house: House, caller: Read) -> Response:
    """Every worker: ``active``, ``draining``, ``stopped`` (gracefully), or ``lost``."""
    del caller
    with house.database.read() as tx:
        rows = workers.all_workers(tx, lease_ms=_lease_ms(house))
    return Json(list_of([_worker_json(row, state) for row, state in rows], cursor=None))


@router.post(
    "/workers/{id}/drain",
    status_code=202,
    summary="Give a worker no more jobs",
    responses=answers(202, inside.Worker, 401, 403, 404, 422),
)
def drain_worker(
    house: House, caller: Admin, worker: Annotated[str, Path(alias="id", max_length=200)]
) -> Response:
    """Its running jobs go on; new ones go elsewhere until it is started again."""
    del caller
    with house.database.write() as tx:
        workers.drain(tx, worker)
        rows = workers.all_workers(tx, lease_ms=_lease_ms(house))
    (found,) = [_worker_json(row, state) for row, state in rows if row.id == worker]
    return Json(found, status_code=202)


@router.delete(
    "/workers/{id}",
    status_code=204,
    summary="Remove a worker",
    responses=answers(204, None, 401, 403, 404, 409, 422),
)
def remove_worker(
    house: House, caller: Admin, worker: Annotated[str, Path(alias="id", max_length=200)]
) -> Response:
    """Delete a worker that was stopped or is lost, and its devices. One that runs is refused.

    It registers again when it is started again.
    """
    del caller
    with house.database.write() as tx:
        workers.remove(tx, worker, lease_ms=_lease_ms(house))
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
        "info": row.info,
    }


@router.get(
    "/queue",
    summary="Jobs that wait, and why",
    responses=answers(200, inside.QueuedJobList, 401),
)
def list_queue(house: House, caller: Read) -> Response:
    """In the order in which they will start. Jobs of others only count in ``position``."""
    with house.database.read() as tx:
        waiting = workers.queue(tx)
        placed = workers.all_devices(tx, lease_ms=_lease_ms(house))
        short = vitals.short_of_room(tx, house.settings.min_free_bytes)
        active = {
            row.id
            for row, state in workers.all_workers(tx, lease_ms=_lease_ms(house))
            if state == "active"
        }
        rooms = quotas.rooms(tx, house.settings)
    data = [
        {
            "object": "queued_job",
            "position": position,
            "job": job.id,
            "name": job.name,
            "priority": job.priority,
            "queued_at": time_text(job.queued_at),
            "devices": job.resolved.get("devices", {}),
            "reason": rests(job)
            or (
                "the quota of its owner is used up"
                if job.owner in rooms and rooms[job.owner].is_used_up
                else why(job, position, placed, active, short)
            ),
        }
        for position, job in enumerate(waiting)
        if caller.sees in (None, job.owner)
    ]
    return Json(list_of(data, cursor=None))


def rests(job: Job) -> str | None:
    """When a job is tried again that failed a moment ago, in words."""
    is_due = job.not_before_ms is None or job.not_before_ms <= now().timestamp() * 1000
    return None if is_due else f"tried again at {not_before(job)}"


def why(  # noqa: PLR0911 (each is a reason)
    job: Job, position: int, placed: Placed, active: set[str], short: Collection[str] = ()
) -> str:
    """Why a queued job does not run yet, in words."""
    wish = job.resolved.get("devices", {})
    named = wish.get("worker")
    if named is not None and named not in active:
        return f"no worker {named}"
    if not active:
        return "no worker"
    healthy = [
        row
        for row, state in placed
        if state == "active" and row.healthy and named in (None, row.worker)
    ]
    kind = _kind(wish, healthy)
    fitting = [row for row in healthy if row.kind == kind and _is_named(row, wish)]
    if not fitting:
        return f"no {kind} device"
    if all(row.worker in short for row in fitting):
        return "the disk of every worker is nearly full"
    if not any(row.job is None for row in fitting):
        return "no free device"
    if position:
        return f"behind {position} job{'s' if position > 1 else ''}"
    return "not enough free devices" if _needs_more(wish, kind, fitting) else "about to start"


def _kind(wish: dict[str, Any], healthy: Sequence[Device]) -> str:
    asked = wish.get("type", "auto")
    if asked != "auto":
        return str(asked)
    return "cuda" if any(row.kind == "cuda" for row in healthy) else "cpu"


def _is_named(row: Device, wish: dict[str, Any]) -> bool:
    ids = wish.get("ids")
    return not ids or row.number in ids


def _needs_more(wish: dict[str, Any], kind: str, fitting: Sequence[Device]) -> bool:
    if kind != "cpu":
        return False
    free: dict[str, int] = {}
    cores: dict[str, int] = {}
    for row in fitting:
        cores[row.worker] = cores.get(row.worker, 0) + 1
        free[row.worker] = free.get(row.worker, 0) + (row.job is None)
    threads = wish.get("threads")
    return all(free[name] < (threads or max(1, cores[name] // 2)) for name in free)


def _lease_ms(house: Resources) -> int:
    return round(house.settings.lease_s * 1000)
