"""Workers, their devices, and the queue of jobs that wait for them."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, exists, func, literal, select, text, tuple_, update
from sqlalchemy.orm import Session

from glasshouse.errors import WorkerNotFound, WorkerRunning
from models.database import now_ms
from models.jobs.leases import Claim
from models.jobs.needs import BRIEF
from models.state import LIVE
from models.tables import Device, Job, Worker, now


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A device in the inventory of a machine."""

    id: str
    kind: str
    number: int
    name: str
    uuid: str | None = None
    memory_bytes: int | None = None
    healthy: bool = True
    reason: str | None = None


def register(  # noqa: PLR0913 (the columns of a worker)
    tx: Session,
    *,
    worker: str,
    host: str,
    pid: int,
    version: str,
    info: dict[str, Any],
    devices: Sequence[FoundDevice],
    instance: str = "",
) -> None:
    """Create or update a worker and its devices. Leases stay.

    ``instance`` identifies the process. If another process may have the name, call `other_process`
    first, in the same transaction.
    """
    time_ms = tx.scalars(select(now_ms())).one()
    row = tx.get(Worker, worker)
    if row is None:
        row = Worker(id=worker, draining=False)
        tx.add(row)
    row.host, row.pid, row.version, row.info = host, pid, version, info
    row.instance = instance
    row.started_at = now()
    row.draining = False
    row.stopped_ms = None
    row.beat_ms = row.canary_ms = time_ms
    tx.flush()
    refresh_devices(tx, worker, devices, instance=instance)


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Another process with the same worker name, by its last heartbeat."""

    host: str
    pid: int
    beat_ms: int
    silent_s: float
    """Seconds since its last heartbeat, by the database's clock."""


def other_process(
    tx: Session, worker: str, *, known: Collection[str], lease_ms: int
) -> OtherProcess | None:
    """Return the unknown process that has the name and sent a heartbeat within the lease.

    ``known``: instances that are no rivals: the caller, and one that is known to have ended. Until
    the end of the transaction, no other process can ask for the same name.
    """
    if tx.get_bind().dialect.name == "postgresql":
        lock = text("SELECT pg_advisory_xact_lock(7241312, hashtext(:worker))")
        tx.execute(lock, {"worker": worker})
    row = tx.get(Worker, worker, populate_existing=True)
    if row is None or row.stopped_ms is not None or row.instance in known:
        return None
    silent_ms = tx.scalars(select(now_ms())).one() - row.beat_ms
    if silent_ms >= lease_ms:
        return None
    return OtherProcess(row.host, row.pid, row.beat_ms, max(0, silent_ms) / 1000)


def refresh_devices(
    tx: Session,
    worker: str,
    devices: Sequence[FoundDevice],
    *,
    info: dict[str, Any] | None = None,
    instance: str = "",
) -> None:
    """Update a worker's devices. A missing device that a job has becomes unhealthy.

    ``info``: new facts about the host; None: they are as before. Changes nothing if another process
    has taken the worker's name. Locks the worker, then its devices in the order of their ids. All
    code that locks several of these rows uses this order, or locks devices only.
    """
    if not _lock(tx, worker, instance):
        return
    if info is not None:
        tx.execute(update(Worker).where(Worker.id == worker).values(info=info))
    known = {row.id: row for row in _locked_devices(tx, worker)}
    for found in devices:
        row = known.pop(found.id, None)
        if row is None:
            row = Device(worker=worker, id=found.id)
            tx.add(row)
        row.kind, row.number, row.name = found.kind, found.number, found.name
        row.uuid, row.memory_bytes = found.uuid, found.memory_bytes
        row.healthy, row.reason = found.healthy, found.reason
    for row in known.values():
        if row.job is None:
            tx.execute(delete(Device).where(Device.worker == worker, Device.id == row.id))
        else:
            row.healthy, row.reason = False, "the worker no longer finds it"
    tx.flush()


def _lock(tx: Session, worker: str, instance: str) -> bool:
    query = select(Worker.id).where(Worker.id == worker, Worker.instance == instance)
    return tx.scalar(query.with_for_update(key_share=True)) is not None


def _locked_devices(tx: Session, worker: str) -> list[Device]:
    query = select(Device).where(Device.worker == worker).order_by(Device.id)
    found = tx.scalars(query.with_for_update(), execution_options={"populate_existing": True})
    return list(found)


def quarantine(tx: Session, claim: Claim, reason: str) -> bool:
    """Make the devices of an attempt unavailable until the worker's inventory finds them free.

    Called before the attempt's end is written, in the same transaction. False: it has none.
    """
    held = tx.scalars(
        update(Device)
        .where(Device.job == claim.job, Device.fence == claim.fence)
        .values(healthy=False, reason=reason)
        .returning(Device.id)
    )
    return bool(held.all())


def beat(tx: Session, worker: str, *, instance: str = "") -> bool:
    """Send a heartbeat. False: the worker was removed, or another process has its name."""
    mine = (Worker.id == worker, Worker.instance == instance)
    beaten = update(Worker).where(*mine).values(beat_ms=now_ms()).returning(Worker.id)
    return tx.scalar(beaten) is not None


def retire(tx: Session, worker: str, *, instance: str = "") -> None:
    """Mark a worker as stopped gracefully. Does nothing if another process has its name."""
    mine = (Worker.id == worker, Worker.instance == instance)
    tx.execute(update(Worker).where(*mine).values(stopped_ms=now_ms()))


def forget(tx: Session, worker: str) -> None:
    """Delete a worker and its devices."""
    _locked_devices(tx, worker)
    tx.execute(delete(Worker).where(Worker.id == worker))


def remove(tx: Session, worker: str, *, lease_ms: int) -> None:
    """Delete a worker that no longer runs, and its devices.

    Raises:
        WorkerNotFound: There is none of this name.
        WorkerRunning: It runs, or a job still uses its devices.
    """
    row = tx.get(Worker, worker, populate_existing=True, with_for_update=True)
    if row is None:
        raise WorkerNotFound(f"No worker has the id {worker}.")
    time_ms = tx.scalars(select(now_ms())).one()
    if _state(row, time_ms - lease_ms) in ("active", "draining"):
        silent_s = (time_ms - row.beat_ms) / 1000
        raise WorkerRunning(
            f"The worker {worker} runs on {row.host}: its last heartbeat was {silent_s:.1f} s ago. "
            "Stop it first."
        )
    held = {device.job for device in _locked_devices(tx, worker) if device.job is not None}
    if held:
        raise WorkerRunning(
            f"The job {min(held)} still has devices of the worker {worker}. Cancel it, or wait "
            f"until its lease runs out, {lease_ms / 1000:g} s after the worker's last heartbeat."
        )
    tx.execute(delete(Worker).where(Worker.id == worker))


def drain(tx: Session, worker: str, *, instance: str | None = None) -> None:
    """Stop assigning jobs to a worker. ``instance``: only if this process has the name.

    Raises:
        WorkerNotFound: There is none of this name.
    """
    wanted = Worker.id == worker
    if instance is not None:
        wanted &= Worker.instance == instance
    done = tx.scalar(update(Worker).where(wanted).values(draining=True).returning(Worker.id))
    if done is None:
        raise WorkerNotFound(f"No worker has the id {worker}.")


def all_workers(tx: Session, *, lease_ms: int) -> list[tuple[Worker, str]]:
    """Return every worker with its state.

    ``active``, ``draining``, ``stopped`` (gracefully), or ``lost`` (no heartbeat for longer than
    the lease).
    """
    time = tx.scalars(select(now_ms())).one()
    rows = tx.scalars(select(Worker).order_by(Worker.id))
    return [(row, _state(row, time - lease_ms)) for row in rows]


def all_devices(tx: Session, *, lease_ms: int) -> list[tuple[Device, str]]:
    """Return every device with the state of its worker."""
    states = {row.id: state for row, state in all_workers(tx, lease_ms=lease_ms)}
    rows = tx.scalars(select(Device).order_by(Device.worker, Device.kind, Device.number))
    return [(row, states[row.worker]) for row in rows]


def info_of(tx: Session, worker: str) -> dict[str, Any]:
    """Return what a worker reported about its host; empty if the worker is unknown."""
    row = tx.get(Worker, worker)
    return {} if row is None else dict(row.info)


def devices_of(tx: Session, job: Job) -> list[Device]:
    """Return the devices that a job has now, or the cores that it shares; CUDA devices first."""
    query = select(Device).order_by(Device.kind.desc(), Device.number)
    held = list(tx.scalars(query.where(Device.job == job.id)))
    if held or job.kind not in BRIEF:
        return held
    shared = [one["id"] for one in job.devices if one["kind"] == "cpu"]
    return list(tx.scalars(query.where(Device.worker == job.worker, Device.id.in_(shared))))


def owners(tx: Session, job_ids: Sequence[str]) -> dict[str, str]:
    """Return the owners of these jobs."""
    mine = (Job.id.in_(set(job_ids)), Job.deleted_at.is_(None))
    rows = tx.execute(select(Job.id, Job.owner).where(*mine))
    return {row.id: row.owner for row in rows}


def lock_queue(tx: Session) -> None:
    """Allow only one dispatcher at a time. On SQLite the write transaction is the lock."""
    if tx.get_bind().dialect.name == "postgresql":
        tx.execute(text("SELECT pg_advisory_xact_lock(7241309)"))


def is_due() -> ColumnElement[bool]:
    """Return the condition that a queued job may be tried now, because it waits for no retry."""
    return Job.not_before_ms.is_(None) | (Job.not_before_ms <= now_ms())


class QueuedJob(NamedTuple):
    """A queued job and the devices it asks for."""

    job: str
    owner: str
    kind: str
    wants: dict[str, Any]
    queued_at: datetime


def asked_for(
    tx: Session,
    *,
    without: Collection[str] = (),
    most: int = 100,
    starved_since: datetime | None = None,
) -> list[QueuedJob]:
    """Return the jobs that may run now: highest priority first, then oldest.

    Among an owner's jobs that ask for the same devices, only the first ``most``: if these do not
    fit, no other does, and they must not hide jobs that ask for something else. Jobs queued before
    ``starved_since`` are counted separately.

    ``without``: owners whose jobs may not start now.
    """
    starved = literal(value=False) if starved_since is None else Job.queued_at <= starved_since
    order = (Job.priority.desc(), Job.id)
    alike = (Job.wants, Job.kind, Job.owner, starved)
    place = func.row_number().over(partition_by=alike, order_by=order).label("place")
    columns = (Job.id, Job.owner, Job.kind, Job.wants, Job.queued_at)
    query = select(*columns, Job.priority, place).where(Job.state == "queued", is_due())
    if without:
        query = query.where(Job.owner.not_in(without))
    found = query.subquery()
    first = select(found).where(found.c.place <= most)
    rows = tx.execute(first.order_by(found.c.priority.desc(), found.c.id))
    return [QueuedJob(*row[:5]) for row in rows]


class Queued(NamedTuple):
    """A queued job, as shown in the queue."""

    position: int
    """Number of jobs ahead of it, of all owners."""
    job: str
    owner: str
    kind: str
    name: str | None
    priority: int
    wants: dict[str, Any]
    queued_at: datetime
    not_before_ms: int | None


def queue(tx: Session, *, owner: str | None = None, limit: int = 1000) -> list[Queued]:
    """Return queued jobs: highest priority first, then oldest. ``owner`` None: all owners."""
    order = (Job.priority.desc(), Job.id)
    position = (func.row_number().over(order_by=order) - 1).label("position")
    columns = (Job.id, Job.owner, Job.kind, Job.name, Job.priority, Job.wants)
    query = select(position, *columns, Job.queued_at, Job.not_before_ms)
    found = query.where(Job.state == "queued").subquery()
    wanted = select(found).order_by(found.c.position).limit(limit)
    if owner is not None:
        wanted = wanted.where(found.c.owner == owner)
    return [Queued(*row) for row in tx.execute(wanted)]


def any_waits(tx: Session) -> bool:
    """Return whether a queued job may be tried now."""
    query = select(Job.id).where(Job.state == "queued", is_due()).limit(1)
    return tx.scalar(query) is not None


class Given(NamedTuple):
    """A device of a worker that takes jobs."""

    worker: str
    id: str
    kind: str
    number: int
    healthy: bool = True
    free: bool = True
    """Whether no job has it."""
    memory_bytes: int | None = None
    """None: it is not known, or it is a CPU core, which has no memory of its own."""


def devices_to_give(tx: Session, *, lease_ms: int, without: Collection[str] = ()) -> list[Given]:
    """Return the devices of workers that take jobs.

    ``without``: workers that get no jobs.
    """
    active = select(Worker.id).where(
        Worker.stopped_ms.is_(None),
        Worker.draining.is_(False),
        Worker.beat_ms >= now_ms() - lease_ms,
        Worker.id.not_in(without),
    )
    columns = (Device.worker, Device.id, Device.kind, Device.number, Device.healthy)
    query = select(*columns, Device.job.is_(None), Device.memory_bytes)
    return [Given(*row) for row in tx.execute(query.where(Device.worker.in_(active)))]


def with_host_memory(tx: Session, given: Iterable[Given]) -> list[Given]:
    """Return the devices; CPU cores have the memory of their worker's host."""
    rows = tx.execute(select(Worker.id, Worker.info))
    memory: dict[str, int | None] = {row.id: row.info.get("memory_bytes") for row in rows}
    return [
        one._replace(memory_bytes=memory.get(one.worker)) if one.kind == "cpu" else one
        for one in given
    ]


def usable_cores(tx: Session) -> list[tuple[str, str, str | None]]:
    """Return all healthy CPU cores: worker, id, and the job that has it."""
    query = select(Device.worker, Device.id, Device.job)
    rows = tx.execute(query.where(Device.kind == "cpu", Device.healthy))
    return [(worker, id_, job) for worker, id_, job in rows]


def devices(tx: Session, wanted: Collection[tuple[str, str]]) -> dict[tuple[str, str], Device]:
    """Return existing devices by worker and id."""
    query = select(Device).where(tuple_(Device.worker, Device.id).in_(sorted(wanted)))
    return {(row.worker, row.id): row for row in tx.scalars(query)}


def hold(
    tx: Session, wanted: Collection[tuple[str, str]], *, wait: bool = True
) -> dict[tuple[str, str], Device]:
    """Lock devices, (worker, id), in order, and return those that exist.

    ``wait`` False: leave out those that another transaction has locked.
    """
    query = select(Device).where(tuple_(Device.worker, Device.id).in_(sorted(wanted)))
    query = query.order_by(Device.worker, Device.id).with_for_update(skip_locked=not wait)
    rows = tx.scalars(query, execution_options={"populate_existing": True})
    return {(row.worker, row.id): row for row in rows}


def sharing(tx: Session) -> dict[str, int]:
    """Return how many brief jobs each worker runs on cores of other jobs."""
    has_devices = exists(select(Device.id).where(Device.job == Job.id))
    query = select(Job.worker, func.count()).where(
        Job.state.in_(LIVE), Job.kind.in_(BRIEF), ~has_devices
    )
    return {str(worker): int(count) for worker, count in tx.execute(query.group_by(Job.worker))}


def _state(worker: Worker, oldest_ms: int) -> str:
    if worker.stopped_ms is not None:
        return "stopped"
    if worker.beat_ms < oldest_ms:
        return "lost"
    return "draining" if worker.draining else "active"
