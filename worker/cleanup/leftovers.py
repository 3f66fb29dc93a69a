"""Deletes files that no row names, which a crash leaves between a move and its commit.

It checks only names that the service creates, and only attempts that no longer write. Files left
by an earlier process of this worker are deleted when it starts; others once they are a day old.
"""

import time
from collections.abc import Iterable

import structlog

from glasshouse.ids import is_id
from models.jobs import attempts
from models.jobs.leases import Claim
from models.observations import referenced_files
from models.storage.artifacts import Artifacts, Entry
from worker.context import WorkerContext

_log = structlog.get_logger(__name__)

OLD_S = 24 * 3600.0
EVERY_S = 3600.0
_FOLDERS = ("checkpoints", "captures", "artifacts")


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
                _delete(context.artifacts, [job.key])
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
    _delete(context.artifacts, [entry.key for entry in old])
    return len(unnamed) - len(old)


def _is_ours(folder: str, entry: Entry) -> bool:
    """Return whether the service created this name. Artifacts have names given by the engine."""
    name = entry.name.removeprefix(".").removesuffix(".incoming")
    if folder == "checkpoints":
        return is_id(name, "ckpt")
    return folder == "artifacts" or is_id(name.removesuffix(".safetensors"), "cap")


def _is_old(entry: Entry, min_age_s: float = OLD_S) -> bool:
    return time.time() - entry.changed_at >= min_age_s


def _delete(artifacts: Artifacts, keys: Iterable[str]) -> None:
    for key in keys:
        _log.info("leftover_removed", key=key)
        artifacts.delete(key)
