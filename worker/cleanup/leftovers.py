"""Files that no row names: what a crash left between a move into the artifacts and its commit.

Only names that the service makes are looked at, and only of attempts that write nothing any more.
What this worker's last life left goes when it starts again; of the others, what is a day old.
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
    """Looks through the artifacts of jobs; an attempt found in order is not looked at again."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._in_order: set[str] = set()

    def __call__(self) -> None:
        """Look through all jobs once."""
        for job in self._context.artifacts.entries("jobs"):
            if is_id(job.name, "job"):
                self._look_at_job(job)

    def _look_at_job(self, job: Entry) -> None:
        context = self._context
        with context.database.read() as tx:
            written_to = attempts.open_attempt(tx, job.name)
        if written_to is None:  # deleted, and not its files
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
    """Remove what no row names of an attempt that is over; how many such files are too young."""
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
    """Whether the service made this name; artifacts have names of the engine's."""
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
