"""Quotas of owners: their own limits, or those of the settings. Counted in SQL.

New use is counted in the transaction that creates it, with the owner locked, so that two concurrent
requests cannot both take the last place. Jobs above ``running_jobs`` and ``devices`` are not
refused: they wait.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

from sqlalchemy import Select, delete, func, select, text
from sqlalchemy.orm import Session

from glasshouse.errors import FieldProblem, InvalidSpec, QuotaExceeded
from models.database import insert_into
from models.settings import Settings
from models.state import LIVE
from models.tables import (
    Capture,
    Checkpoint,
    Dataset,
    Device,
    Job,
    JobArtifact,
    Quota,
    ServedRequest,
    now,
)

_RETRY_AFTER_S = {"queued_jobs": 10, "storage_bytes": 60, "uploads": 5, "streams": 10}


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """The quotas of one owner. None: no limit."""

    queued_jobs: int
    running_jobs: int | None
    devices: int | None
    storage_bytes: int | None
    uploads: int
    streams: int
    requests_per_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the limits by name."""
        return asdict(self)


NAMES = tuple(field.name for field in fields(QuotaLimits))


def defaults(settings: Settings) -> QuotaLimits:
    """Return the limits of owners without limits of their own."""
    return QuotaLimits(**{name: getattr(settings, f"quota_{name}") for name in NAMES})


def of(tx: Session, owner: str, settings: Settings) -> QuotaLimits:
    """Return the limits of one owner that apply now."""
    row = tx.get(Quota, owner, populate_existing=True)
    return _over(settings, {} if row is None else row.limits)


def own(tx: Session, owner: str) -> dict[str, Any]:
    """Return the limits that were set for one owner."""
    row = tx.get(Quota, owner, populate_existing=True)
    return {} if row is None else dict(row.limits)


def put(tx: Session, owner: str, limits: Mapping[str, Any], *, by: str) -> None:
    """Set an owner's limits. The settings apply to limits that are not named."""
    if not limits:
        tx.execute(delete(Quota).where(Quota.owner == owner))
        return
    values = {"limits": dict(limits), "by": by, "updated_at": now()}
    query = insert_into(tx, Quota).values(owner=owner, **values)
    tx.execute(query.on_conflict_do_update(index_elements=["owner"], set_=values))


def usage(tx: Session, owner: str) -> dict[str, int]:
    """Return an owner's current use of what the database counts."""
    return {
        "queued_jobs": _count_queued(tx, owner),
        "running_jobs": _count_running(tx, owner),
        "devices": _devices_by_owner(tx, owner)[owner],
        "storage_bytes": stored_bytes(tx, owner),
        "uploads": _count_uploads(tx, owner),
    }


def admit_job(
    tx: Session, owner: str, settings: Settings, *, devices: int = 0, field: str = "/devices"
) -> None:
    """Check that one more job may be queued, in the transaction that stores it.

    ``devices``: how many it counts as, at least; ``field``: the pointer of what decides on that.

    Raises:
        InvalidSpec: It asks for more devices than the owner may ever have.
        QuotaExceeded: Too many jobs are queued already, or the owner's storage is full.
    """
    lock(tx, owner)
    limits = of(tx, owner, settings)
    _refuse_endless_wait(devices, field, limits.devices)
    refuse_over("queued_jobs", _count_queued(tx, owner) + 1, limits.queued_jobs)
    _admit_bytes(tx, owner, limits, 1)


def _refuse_endless_wait(devices: int, field: str, limit: int | None) -> None:
    if limit is None or devices <= limit:
        return
    what = "core" if field == "/devices/threads" else "device"
    detail = (
        f"asks for {devices:,} {what}{'s' if devices > 1 else ''}, and the quota of devices is "
        f"{limit:,}: the job would wait for ever; "
    )
    if limit:
        detail += f"ask for {limit:,} at most, "
        detail += "leave it out, or " if field == "/devices/threads" else "or "
    detail += "ask an admin for more"
    raise InvalidSpec(f"{field}: {detail}", problems=[FieldProblem(field, detail, "quota")])


def admit_upload(tx: Session, owner: str, settings: Settings, *, size_bytes: int) -> None:
    """Check that one more dataset of this size may be uploaded.

    Raises:
        QuotaExceeded: Too many are being read already, or the storage quota would be exceeded.
    """
    lock(tx, owner)
    limits = of(tx, owner, settings)
    refuse_over("uploads", _count_uploads(tx, owner) + 1, limits.uploads)
    _admit_bytes(tx, owner, limits, size_bytes)


def admit_weights(tx: Session, owner: str, settings: Settings, *, size_bytes: int) -> None:
    """Check that weights of this size may be uploaded.

    Raises:
        QuotaExceeded: The storage quota would be exceeded.
    """
    lock(tx, owner)
    _admit_bytes(tx, owner, of(tx, owner, settings), size_bytes)


def refuse_over(quota: str, wanted: float, limit: float | None) -> None:
    """Refuse a value above a limit.

    Raises:
        QuotaExceeded: It is above the limit.
    """
    if limit is not None and wanted > limit:
        words = quota.replace("_", " ")
        raise QuotaExceeded(
            f"The quota of {words} is {limit:,}. Wait, free some, or ask an admin for more.",
            quota=quota,
            limit=limit,
            retry_after_s=_RETRY_AFTER_S.get(quota, 1),
        )


@dataclass(slots=True)
class QuotaLeft:
    """What the jobs of an owner may still use. A dispatcher counts it down."""

    jobs: int | None
    devices: int | None
    most_devices: int | None
    """Including the devices that they use now."""

    def has_for(self, num_devices: int) -> bool:
        """Return whether one more job with this many devices fits."""
        fits = self.devices is None or num_devices <= self.devices
        return fits and (self.jobs is None or self.jobs > 0)

    @property
    def is_used_up(self) -> bool:
        """Return whether no job fits."""
        return not self.has_for(1)

    def take(self, num_devices: int) -> None:
        """Count one more job."""
        self.jobs = None if self.jobs is None else self.jobs - 1
        self.devices = None if self.devices is None else self.devices - num_devices


def remaining(
    tx: Session, settings: Settings, surplus: Mapping[str, int] = MappingProxyType({})
) -> dict[str, QuotaLeft]:
    """Return what each owner with queued jobs and a limit may still use.

    ``surplus``: how many devices the running jobs of each owner can do without. These do not count:
    the jobs give them up.
    """
    usual = defaults(settings)
    set_ = {row.owner: row.limits for row in tx.scalars(select(Quota))}
    if usual.running_jobs is None and usual.devices is None and not set_:
        return {}
    waiting = tx.scalars(select(Job.owner).where(Job.state == "queued").distinct())
    running = _by_owner(tx, select(Job.owner, func.count()).where(Job.state.in_(LIVE)))
    held = _devices_by_owner(tx)
    held.subtract(surplus)
    found: dict[str, QuotaLeft] = {}
    for owner in waiting:
        limits = _over(settings, set_.get(owner, {}))
        if limits.running_jobs is None and limits.devices is None:
            continue
        found[owner] = QuotaLeft(
            _left(limits.running_jobs, running.get(owner, 0)),
            _left(limits.devices, held.get(owner, 0)),
            limits.devices,
        )
    return found


def room_for(
    tx: Session, settings: Settings, owners: Collection[str], flexible: Mapping[str, int]
) -> dict[str, int]:
    """Return the most cores that the flexible jobs of each owner may have, all jobs together.

    ``flexible``: how many they have now. An owner without an entry has no limit.
    """
    set_ = {row.owner: row.limits for row in tx.scalars(select(Quota))}
    limits = {owner: _over(settings, set_.get(owner, {})).devices for owner in owners}
    if all(limit is None for limit in limits.values()):
        return {}
    held = _devices_by_owner(tx)
    held.subtract(flexible)
    return {owner: limit - held[owner] for owner, limit in limits.items() if limit is not None}


def stored_bytes(tx: Session, owner: str) -> int:
    """Return the bytes of an owner's data: datasets, checkpoints and what jobs stored."""
    of_jobs = [
        select(func.sum(table.size_bytes))
        .join(Job, Job.id == table.job)
        .where(Job.owner == owner, Job.deleted_at.is_(None))
        for table in (Capture, JobArtifact, ServedRequest)
    ]
    own = [
        select(func.sum(table.size_bytes)).where(table.owner == owner)
        for table in (Dataset, Checkpoint)
    ]
    return sum(int(tx.scalar(query) or 0) for query in (*own, *of_jobs))


def _over(settings: Settings, limits: Mapping[str, Any]) -> QuotaLimits:
    known = {name: value for name, value in limits.items() if name in NAMES}
    return QuotaLimits(**(defaults(settings).as_dict() | known))


def _by_owner(tx: Session, counts: Select[str, int]) -> dict[str, int]:
    rows = tx.execute(counts.group_by(Job.owner))
    return {owner: int(count) for owner, count in rows}


def num_counted(num_devices: int, num_cores: int) -> int:
    """Return how many devices a job counts as that has cores beside its CUDA devices.

    A core for each CUDA device belongs to it; others count.
    """
    return max(num_devices, num_cores)


def _devices_by_owner(tx: Session, owner: str | None = None) -> Counter[str]:
    """Return how many devices the jobs of each owner, or of one, count as."""
    num_devices = func.count().filter(Device.kind != "cpu")
    num_cores = func.count().filter(Device.kind == "cpu")
    held = (
        select(Job.owner, num_devices, num_cores)
        .join(Device, Device.job == Job.id)
        .group_by(Job.id, Job.owner)
    )
    if owner is not None:
        held = held.where(Job.owner == owner)
    found = Counter[str]()
    for name, has_devices, has_cores in tx.execute(held):
        found[name] += num_counted(has_devices, has_cores)
    return found


def _left(limit: int | None, count: int) -> int | None:
    return None if limit is None else max(0, limit - count)


def _admit_bytes(tx: Session, owner: str, limits: QuotaLimits, size_bytes: int) -> None:
    if limits.storage_bytes is not None:
        wanted = stored_bytes(tx, owner) + size_bytes
        refuse_over("storage_bytes", wanted, limits.storage_bytes)


def _count_queued(tx: Session, owner: str) -> int:
    query = select(func.count()).where(Job.owner == owner, Job.state == "queued")
    return int(tx.scalar(query) or 0)


def _count_running(tx: Session, owner: str) -> int:
    query = select(func.count()).where(Job.owner == owner, Job.state.in_(LIVE))
    return int(tx.scalar(query) or 0)


def _count_uploads(tx: Session, owner: str) -> int:
    query = select(func.count()).where(Dataset.owner == owner, Dataset.state == "pending")
    return int(tx.scalar(query) or 0)


def lock(tx: Session, owner: str) -> None:
    """Serialize changes of an owner's use and limits.

    On SQLite the write transaction is the lock.
    """
    if tx.get_bind().dialect.name == "postgresql":
        tx.execute(
            text("SELECT pg_advisory_xact_lock(7241311, hashtext(:owner))"), {"owner": owner}
        )
