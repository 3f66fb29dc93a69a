"""Where an attempt starts from: the newest checkpoint of its job whose files are whole.

Files are looked at before the claim, outside any transaction; the claim makes sure that the row is
still there. A checkpoint that is no good is said to be so in the job's log, and the one before it
is taken; without any the job begins anew.
"""

import hashlib
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
"""Files up to this size are read and their digests compared; the engine, which reads the others
anyway, compares theirs with the manifest, which is one of the small ones."""
_DAMAGED = "checkpoint_damaged"


def claim(context: WorkerContext, job_id: str) -> tuple[Claim, Job] | None:
    """Take the attempt that waits for this worker, and decide where it starts from.

    None: another bell was faster, or it is gone.
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
        return claimed


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
    """What a rank says is wrong with the checkpoint it was handed; None: nothing."""
    error: dict[str, Any] = (end or {}).get("error") or {}
    return str(error["message"]) if error.get("code") == _DAMAGED else None


def defect(artifacts: Artifacts, row: Checkpoint) -> RefusedCheckpoint | None:
    """What is wrong with the files of a checkpoint, as far as is seen without reading them all."""
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
