"""Claims an attempt and finds where it starts: the newest checkpoint whose files are intact.

Files are checked before the claim, outside any transaction; the claim checks that the row still
exists. A bad checkpoint is reported in the job's log, and the previous one is used. Without any,
the job starts from scratch.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from glasshouse.errors import CheckpointNotFound
from glasshouse.failpoints import failpoint
from models.jobs import attempts, checkpoints, jobs
from models.jobs.checkpoints import SCRATCH, RefusedCheckpoint, StartPoint
from models.jobs.leases import Claim
from models.observations import lineage
from models.storage.artifacts import Artifacts
from models.tables import Checkpoint, Job
from worker.context import WorkerContext

_log: Any = structlog.get_logger()

DIGEST_BYTES = 1024**2
"""Files up to this size are read and their digests checked, the manifest among them. The engine
reads the others anyway and checks their digests against the manifest."""
_DAMAGED = "checkpoint_damaged"


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that this worker has claimed."""

    context: WorkerContext
    claim: Claim
    job: Job

    @property
    def directory(self) -> Path:
        """The directory in which its rank works."""
        return self.context.work / self.claim.job / str(self.claim.attempt)


def claim(context: WorkerContext, job_id: str) -> Attempt | None:
    """Claim the attempt assigned to this worker, and decide where it starts.

    Return None if another wake-up was faster, or the attempt is gone.
    """
    while True:
        start = _choose(context, job_id)
        if start is None:
            return None
        failpoint("claim.chosen")
        try:
            with context.database.write() as tx:
                claimed = attempts.claim(tx, job_id, context.name, start)
                failpoint("claim.commit")
        except CheckpointNotFound:
            _log.warning("checkpoint_gone", checkpoint=start.checkpoint)
            continue
        failpoint("claim.committed")
        return claimed and Attempt(context, *claimed)


def _choose(context: WorkerContext, job_id: str) -> StartPoint | None:
    with context.database.read() as tx:
        if job_id not in attempts.waiting(tx, context.name):
            return None
        found = checkpoints.resumable(tx, job_id)
    refused: list[RefusedCheckpoint] = []
    for row in found:
        wrong = defect(context.artifacts, row)
        if wrong is None:
            return _start(context, job_id, row, tuple(refused))
        _log.warning("checkpoint_refused", checkpoint=row.id, step=row.step, detail=wrong.detail)
        refused.append(wrong)
    return StartPoint(refused=tuple(refused)) if refused else SCRATCH


def _start(
    context: WorkerContext, job_id: str, row: Checkpoint, refused: tuple[RefusedCheckpoint, ...]
) -> StartPoint:
    with context.database.read() as tx:
        before: dict[str, Any] = jobs.get(tx, job_id, None).progress or {}
        summary = lineage.summary_before(tx, job_id, row.step)
    progress = dict.fromkeys(before) | {"num_steps": before.get("num_steps")}
    progress |= {"step": row.step, "epoch": row.epoch}
    return StartPoint(row.id, row.step, progress, summary, refused)


def unreadable(end: dict[str, Any] | None) -> str | None:
    """Return what the rank says is wrong with its checkpoint; None if nothing."""
    error: dict[str, Any] = (end or {}).get("error") or {}
    return str(error["message"]) if error.get("code") == _DAMAGED else None


def defect(artifacts: Artifacts, row: Checkpoint) -> RefusedCheckpoint | None:
    """Return what is wrong with a checkpoint's files, without reading the large ones, or None."""
    try:
        directory = artifacts.local(row.key)
        for name, file in row.files.items():
            wrong = _differs(directory / name, file)
            if wrong is not None:
                return RefusedCheckpoint(row.id, f"{name} {wrong}")
    except FileNotFoundError as error:
        missing = Path(error.filename).name if error.filename else "its directory"
        return RefusedCheckpoint(row.id, f"{missing} is not there", is_damaged=False)
    except OSError as error:
        return RefusedCheckpoint(row.id, f"it cannot be read: {error.strerror}", is_damaged=False)
    return None


def _differs(path: Path, said: dict[str, Any]) -> str | None:
    size = path.stat().st_size
    if size != said["size_bytes"]:
        return f"has {size} bytes and not {said['size_bytes']}"
    if size <= DIGEST_BYTES and said.get("sha256"):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != said["sha256"]:
                return "is not what was written: its digest differs"
    return None
