"""What is deleted in the background: expired rows and files, and files that no row names.

A crash between a move and its commit leaves files that no row names. Only names that the service
creates are checked, and only attempts that no longer write. Files left by an earlier process of
this worker are deleted when it starts; others once they are a day old.
"""

import time
from typing import Any

import structlog

from glasshouse.ids import is_id
from models import marks
from models.database import Transaction
from models.jobs import attempts
from models.jobs.leases import Claim
from models.observations import referenced_files
from models.purge import Purge
from models.storage import integrity, retention
from models.storage.artifacts import Entry
from worker.context import WorkerContext

_log: Any = structlog.get_logger()

DELETED_EVERY_S = 5.0
"""How often a worker checks for deleted jobs: one query of an index that is usually empty."""
TURN_MS = 60_000
"""After this time without a deletion another worker may take over."""
OLD_S = 24 * 3600.0
LEFTOVERS_EVERY_S = 3600.0
_FOLDERS = ("checkpoints", "captures", "artifacts")


def purge(context: WorkerContext) -> None:
    """Delete what retention no longer keeps, after the integrity check if it is due."""
    damage = integrity.check_if_due(context.database)
    if damage not in (None, integrity.WHOLE):
        _log.error("database_damaged", said=damage)
    turn = _take_turn(context, "purge")
    if turn is not None:
        done = turn.run().as_dict()
        if done["rows"] or done["files"] or done["orphans"]:
            _log.info("purged", **done)


def purge_deleted(context: WorkerContext) -> None:
    """Delete the rows and files of deleted jobs, soon, because the space may be needed."""
    with context.database.read() as tx:
        if not retention.deleted_jobs(tx, limit=1):
            return
    turn = _take_turn(context, "purge.deleted")
    if turn is not None:
        _log.info("deleted_jobs_purged", **turn.run_deleted().as_dict())


def _take_turn(context: WorkerContext, name: str) -> Purge | None:
    """Return the purge of this turn; None if it is another worker's."""

    def stays_mine(tx: Transaction) -> bool:
        return marks.take(tx, name, context.name, every_ms=TURN_MS)

    with context.database.write() as tx:
        if not stays_mine(tx):
            return None
    return Purge(
        context.settings,
        context.database,
        context.artifacts,
        stop=context.stopping,
        stays_mine=stays_mine,
    )


class Leftovers:
    """Checks the artifacts of jobs; an attempt without unnamed files is not checked again."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._in_order: set[str] = set()

    def __call__(self) -> None:
        """Check all jobs once."""
        for job in self._context.artifacts.entries("jobs"):
            if is_id(job.name, "job"):
                self._look_at_job(job)

    def _look_at_job(self, job: Entry) -> None:
        context = self._context
        with context.database.read() as tx:
            written_to = attempts.open_attempt(tx, job.name)
        if written_to is None:  # the job was deleted, its files were not
            if _is_old(job):
                _delete(context, job)
            return
        for attempt in context.artifacts.entries(job.key):
            is_closed = attempt.name.isdecimal() and int(attempt.name) != written_to
            if is_closed and attempt.key not in self._in_order:
                young = remove_unnamed(context, Claim(job.name, int(attempt.name), 0), OLD_S)
                if not young:
                    self._in_order.add(attempt.key)


def remove_unnamed(context: WorkerContext, claim: Claim, min_age_s: float) -> int:
    """Remove unnamed files of an attempt that is over; return how many were too young to remove."""
    prefix = f"jobs/{claim.job}/{claim.attempt}"
    found = [
        entry
        for folder in _FOLDERS
        for entry in context.artifacts.entries(f"{prefix}/{folder}")
        if _is_ours(folder, entry)
    ]
    if not found:
        return 0
    with context.database.read() as tx:
        known = referenced_files.keys(tx, claim.job, claim.attempt)
    unnamed = [entry for entry in found if entry.key not in known]
    old = [entry for entry in unnamed if _is_old(entry, min_age_s)]
    for entry in old:
        _delete(context, entry)
    return len(unnamed) - len(old)


def _is_ours(folder: str, entry: Entry) -> bool:
    """Return whether the service created this name. Artifacts have names given by the engine."""
    name = entry.name.removeprefix(".").removesuffix(".incoming")
    if folder == "checkpoints":
        return is_id(name, "ckpt")
    return folder == "artifacts" or is_id(name.removesuffix(".safetensors"), "cap")


def _is_old(entry: Entry, min_age_s: float = OLD_S) -> bool:
    return time.time() - entry.changed_at >= min_age_s


def _delete(context: WorkerContext, entry: Entry) -> None:
    _log.info("leftover_removed", key=entry.key)
    context.artifacts.delete(entry.key)
