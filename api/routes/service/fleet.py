"""Devices, workers, and the queue with the reason why each job waits."""

from collections.abc import Collection, Iterable, Mapping
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
from models.fleet import heartbeats, workers
from models.fleet.workers import Given, Queued
from models.jobs.needs import Need
from models.tables import Device, Worker, now

router = APIRouter(prefix="/api/v1", tags=["machines"])


@router.get(
    "/devices",
    summary="List devices",
    responses=answers(200, inspection.DeviceList, 401),
)
def list_devices(app_state: AppStateDep, caller: Read) -> Response:
    """Every device. Jobs of other owners are not named; their devices are ``busy``."""
    with app_state.database.read() as tx:
        rows = workers.all_devices(tx, lease_ms=_lease_ms(app_state))
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
    summary="List workers",
    responses=answers(200, inspection.WorkerList, 401),
)
def list_workers(app_state: AppStateDep, caller: Read) -> Response:
    """Every worker: ``active``, ``draining``, ``stopped`` (gracefully), or ``lost``."""
    del caller
    with app_state.database.read() as tx:
        rows = workers.all_workers(tx, lease_ms=_lease_ms(app_state))
    return Json(list_of([_worker_json(row, state) for row, state in rows], cursor=None))


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
        "info": row.info,
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
        remaining = quotas.remaining(tx, app_state.settings) if waiting else {}
        fleet = Fleet.read(tx, app_state) if waiting else Fleet({}, [], ())
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

    numbers: set[int] = field(default_factory=set[int])
    free: set[int] = field(default_factory=set[int])

    def has_enough(self, kind: str, need: Need) -> bool:
        """Return whether enough devices are free for a job."""
        free = sum(need.fits(number) for number in self.free)
        return free >= need.count(kind, len(self.numbers), free)


class Fleet:
    """The devices of workers that take jobs, read once for all queued jobs."""

    def __init__(
        self, states: Mapping[str, str], placed: Iterable[Given], short: Collection[str]
    ) -> None:
        """Take the states of all workers by name. ``short``: workers with a nearly full disk."""
        self._states = states
        self._short = short
        self._hosts: dict[str, dict[str, _Host]] = {}
        self._known: dict[tuple[str, str], tuple[str, bool]] = {}
        for worker, _, kind, number, healthy, free in placed:
            if healthy:
                host = self._hosts.setdefault(kind, {}).setdefault(worker, _Host())
                host.numbers.add(number)
                if free:
                    host.free.add(number)

    @classmethod
    def read(cls, tx: Transaction, app_state: AppState) -> "Fleet":
        """Read the workers and their devices from the database."""
        lease_ms = _lease_ms(app_state)
        states = {row.id: state for row, state in workers.all_workers(tx, lease_ms=lease_ms)}
        short = heartbeats.low_on_disk(tx, app_state.settings.min_free_bytes)
        return cls(states, workers.devices_to_give(tx, lease_ms=lease_ms), short)

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
        cuda = {name: len(host.numbers) for name, host in self._hosts.get("cuda", {}).items()}
        kinds = need.kinds(cuda)
        hosts = [
            (kind, worker, host)
            for kind in kinds
            for worker, host in self._hosts.get(kind, {}).items()
            if named in (None, worker) and need.is_on(host.numbers)
        ]
        if not hosts:
            return f"no {kinds[0]} device", False
        if all(worker in self._short for _, worker, _ in hosts):
            return "the disk of every worker is nearly full", False
        if not any(need.fits(number) for _, _, host in hosts for number in host.free):
            return "no free device", False
        enough = any(host.has_enough(kind, need) for kind, _, host in hosts)
        return "about to start" if enough else "not enough free devices", True

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
