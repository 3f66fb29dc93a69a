"""Rows for the tests, made through the store's own functions."""

from pathlib import Path
from typing import Any

from glasshouse.ids import new_id
from models.database import Database
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import attempts, jobs, shipments
from models.jobs.checkpoints import SCRATCH, StartPoint
from models.jobs.leases import Claim
from models.jobs.shipments import Batch
from models.observations.events import NewEvent
from models.purge import Purge, Purged
from models.settings import Settings
from models.storage.artifacts import LocalArtifacts
from models.tables import Job, now

LEASE_MS = 30_000


def make_job(database: Database, owner: str = "ada", **spec: Any) -> Job:
    with database.write() as tx:
        return jobs.add(tx, owner=owner, spec={"kind": "train", **spec}, resolved={}, plan={})


def make_worker(database: Database, name: str = "w1", cores: int = 2) -> None:
    devices = [FoundDevice(f"cpu:{n}", "cpu", n, "core") for n in range(cores)]
    with database.write() as tx:
        workers.register(tx, worker=name, host=name, pid=1, version="0", info={}, devices=devices)


def start(
    database: Database,
    job: Job,
    worker: str = "w1",
    cores: int = 1,
    lease_ms: int = LEASE_MS,
    origin: StartPoint = SCRATCH,
) -> Claim:
    with database.write() as tx:
        free = [
            device
            for device, _ in workers.all_devices(tx, lease_ms=LEASE_MS)
            if device.worker == worker and device.job is None
        ]
        assert attempts.assign(tx, job.id, worker, free[:cores], lease_ms)
    with database.write() as tx:
        taken = attempts.claim(tx, job.id, worker, origin)
        assert taken is not None
    return taken[0]


def running(
    database: Database,
    job: Job,
    worker: str = "w1",
    lease_ms: int = LEASE_MS,
    origin: StartPoint = SCRATCH,
) -> Claim:
    claim = start(database, job, worker, lease_ms=lease_ms, origin=origin)
    with database.write() as tx:
        assert attempts.run(tx, claim, lease_ms=lease_ms) is not None
    return claim


def losses(*values: tuple[int, float]) -> Batch:
    batch = Batch()
    for step, value in values:
        payload = {"step": step, "epoch": 0, "values": {"loss": value}}
        batch.events.append(NewEvent("metrics", now(), payload, step))
        batch.metrics.append({"step": step, "epoch": 0, "name": "loss", "value": value})
    return batch


def saved(step: int, **values: Any) -> dict[str, Any]:
    """The row of a checkpoint, as the sorter makes it."""
    made: dict[str, Any] = {
        "id": new_id("ckpt"),
        "owner": "ada",
        "step": step,
        "epoch": 0,
        "final": False,
        "files": {},
        "size_bytes": 1,
        "metrics": {},
        "key": f"jobs/j/1/checkpoints/{step}",
        "created_at": now(),
    }
    return made | values


def served_request(job: str, **values: Any) -> dict[str, Any]:
    """The row of a recorded request."""
    made: dict[str, Any] = {
        "id": new_id("rec"),
        "job": job,
        "replica": job,
        "at": now(),
        "model": "m",
        "version": 1,
        "status": 200,
        "code": None,
        "size_bytes": 2,
        "details": "{}",
    }
    return made | values


def next_attempt(database: Database, job: Job, claim: Claim, origin: StartPoint = SCRATCH) -> Claim:
    """Lose an attempt, and claim the next one where it starts."""
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="lease", counted=False)
    return running(database, job, origin=origin)


def purge_deleted(database: Database, home: Path) -> Purged:
    """Delete what deleted jobs have left, as a worker does."""
    settings = Settings(home=home)
    return Purge(settings, database, LocalArtifacts(settings.artifacts)).run_deleted()


def ship(database: Database, claim: Claim, batch: Batch, offsets: tuple[int, int]) -> bool:
    with database.write() as tx:
        beat = shipments.ship(tx, claim, batch, offsets=offsets, lease_ms=LEASE_MS)
    return beat is not None
