"""What the end of a rank means for its job. Pure."""

import signal
from dataclasses import dataclass
from typing import Any

from glasshouse.errors import DeviceFailed, OutOfMemory, RankDied
from worker.ranks import Exit

LIFELINE_CUT = 75
"""The status with which a rank ends when its supervisor is gone."""
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

PAUSED = "paused by its owner"
INTERRUPTED = "its worker was stopped"


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended."""

    state: str
    exit_kind: str
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """The attempt is over and its job is not: lost, interrupted, or paused."""

    exit_kind: str
    reason: str
    counted: bool = True


def judge(  # noqa: C901, PLR0911 (a table of cases, read from the top)
    end: dict[str, Any] | None,
    exit_: Exit,
    *,
    cancelled: bool,
    stopping: bool,
    out_of_memory: bool,
    pausing: bool = False,
) -> Ended | Again:
    """Judge by the rank's own last word; without one, by how the process ended.

    ``cancelled``, ``pausing``: its owner asked. ``stopping``: this worker ends and asked.
    ``out_of_memory``: the kernel has killed for memory while it ran.
    """
    if end is not None:
        if cancelled and end["state"] in ("paused", "interrupted"):
            return Ended("cancelled", "cancelled")
        if end["state"] == "paused":
            return Again("paused", PAUSED, counted=False)
        if end["state"] == "interrupted" or (end["state"] == "cancelled" and not cancelled):
            return Again("interrupted", INTERRUPTED, counted=False)
        return Ended(end["state"], end["state"], end.get("error"))
    if cancelled:
        return Ended("cancelled", "killed")
    if pausing and exit_.signal in _FROM_OUTSIDE:
        return Again("paused", f"{PAUSED}; it reached no step boundary in time", counted=False)
    if stopping:
        return Again("interrupted", INTERRUPTED, counted=False)
    if exit_.lost:
        return Again("nursery_lost", "the process that starts ranks died")
    if exit_.code == LIFELINE_CUT:
        return Again("lifeline_cut", "its supervisor was gone")
    if exit_.signal == signal.SIGKILL and out_of_memory:
        error = OutOfMemory("The host's memory ran out: the kernel killed the process.", rank=0)
        return Ended("failed", "out_of_memory", error.as_dict())
    if exit_.signal in _FROM_OUTSIDE:
        return Again("killed_from_outside", f"rank 0 ended without a word: {exit_}")
    error = RankDied(f"The training process ended without saying why: {exit_}.", rank=0)
    return Ended("failed", "signal" if exit_.signal else "status", error.as_dict())


def unkillable(*, cancelled: bool) -> Ended:
    """The end of a job whose process stays in the kernel for good."""
    error = DeviceFailed("The process did not end even when it was killed.", rank=0)
    return Ended("cancelled" if cancelled else "failed", "unkillable", error.as_dict())
