"""How an attempt may end: a closed list, and what each end means for its job. No SQL."""

from dataclasses import dataclass
from typing import Any, Literal

ExitKind = Literal[
    "succeeded",
    "cancelled",
    "killed",
    "paused",
    "interrupted",
    "checkpoint_refused",
    "user_error",
    "nonfinite",
    "oom_device",
    "oom_host",
    "oom_halved",
    "device",
    "storage",
    "disk_full",
    "crash",
    "killed_from_outside",
    "fork_server_lost",
    "lifeline_cut",
    "worker_lost",
    "lease_lost",
    "stalled",
    "timeout",
    "unkillable",
    "supervisor_failed",
    "internal",
]
Fate = Literal["ends", "waits", "returns", "retries"]
"""``ends``: the job ends too. ``waits``: the job is paused. ``returns``: it is queued again at
once, without counting a failure. ``retries``: it is queued again after a delay, and the failure
counts."""

FATES: dict[ExitKind, Fate] = {
    "succeeded": "ends",
    "cancelled": "ends",
    "killed": "ends",
    "paused": "waits",
    "interrupted": "returns",
    "checkpoint_refused": "returns",
    "user_error": "ends",
    "nonfinite": "ends",
    "oom_device": "ends",
    "oom_host": "ends",
    "oom_halved": "returns",
    "device": "retries",
    "storage": "retries",
    "disk_full": "retries",
    "crash": "retries",
    "killed_from_outside": "retries",
    "fork_server_lost": "retries",
    "lifeline_cut": "retries",
    "worker_lost": "retries",
    "lease_lost": "retries",
    "stalled": "retries",
    "timeout": "ends",
    "unkillable": "ends",
    "supervisor_failed": "retries",
    "internal": "ends",
}

CRASH_LOOP = 3
"""Consecutive crashes without progress that end a job, whatever its spec allows."""
MAX_RESTARTS = 3
"""Default for a job whose spec sets no limit."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before a retry. It doubles each time, up to a limit."""

    first_s: float = 1.0
    max_s: float = 300.0

    def after_s(self, failures: int) -> float:
        """Return the delay after this many consecutive failures, at least one."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 60))


def max_restarts(resolved: dict[str, Any]) -> int:
    """Return the restarts without progress that a resolved spec allows."""
    retry: dict[str, int] = resolved.get("retry") or {}
    return retry.get("max_restarts", MAX_RESTARTS)


def is_over(kind: ExitKind, *, failures: int, crashes: int, restarts: int) -> bool:
    """Return whether a job that failed like this is not retried.

    ``failures``: failures without progress, including this one. ``crashes``: consecutive crashes at
    the end of them. ``restarts``: allowed restarts without progress.
    """
    return failures > restarts or (kind == "crash" and crashes >= CRASH_LOOP)
