"""What the end of a rank means for its job. Pure."""

import signal
from dataclasses import dataclass, replace
from typing import Any, Literal

from glasshouse.errors import RankDied, Stalled, Timeout, Unkillable
from models.jobs.endings import FATES, ExitKind
from worker.attempt import memory
from worker.processes.rank import Exit

LIFELINE_CUT = 75
"""The status with which a rank ends when its supervisor is gone."""
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_KINDS: dict[str, ExitKind] = {
    "spec": "user_error",
    "data": "user_error",
    "user_code": "user_error",
    "nonfinite": "nonfinite",
    "device": "device",
    "storage": "storage",
    "timeout": "timeout",
}
"""By the category of a failure; any other is ``internal``."""

PAUSED = "paused by its owner"
INTERRUPTED = "its worker was stopped"


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job has ended."""

    state: str
    exit_kind: ExitKind
    error: dict[str, Any] | None = None
    reason: str | None = None
    """Why it ended before its time, where that was by its own spec."""


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The attempt is over and its job is not: lost, interrupted, or paused."""

    exit_kind: ExitKind
    reason: str
    error: dict[str, Any] | None = None
    """What the job fails with if it is not tried again."""

    @property
    def counted(self) -> bool:
        """Whether this is a failure; a pause and a worker that ends in good order are none."""
        return FATES[self.exit_kind] == "retries"


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why this worker pressed the rank to end, if it did."""

    cancelled: bool = False
    """Its owner asked."""
    stopping: bool = False
    """This worker ends."""
    pausing: bool = False
    """Its owner asked for a pause."""
    timeout_s: float | None = None
    """It took longer than this, which it may not."""
    stalled_s: float | None = None
    """It made no progress for this long, and its spec says what happens then."""
    on_stall: Literal["restart", "fail"] = "restart"

    @property
    def how(self) -> Literal["cancelled", "paused", "interrupted"] | None:
        """How the rank is to end; None: it is not to. All but the first save a checkpoint."""
        if self.cancelled:
            return "cancelled"
        if self.pausing:
            return "paused"
        at_all = self.stopping or self.timeout_s is not None or self.stalled_s is not None
        return "interrupted" if at_all else None


def judge(
    end: dict[str, Any] | None, exit_: Exit, pressed: StopReason, *, out_of_memory: bool
) -> JobEnded | AttemptEnded:
    """Judge by the rank's own last word; without one, by how the process ended.

    ``out_of_memory``: the kernel has killed for memory while it ran.
    """
    if end is not None:
        return _by_its_word(end, pressed)
    own_fault = pressed.how == "paused" and exit_.signal not in _FROM_OUTSIDE
    if pressed.how is not None and not own_fault:
        return _by_pressure(pressed, "killed")
    return _by_exit(exit_, out_of_memory=out_of_memory)


def halved(
    end: JobEnded | AttemptEnded, spec: dict[str, Any], parts: int, *, killed: bool
) -> JobEnded | AttemptEnded:
    """The same end, or another try with batches in twice as many parts.

    That is where memory ran out in a step, the spec wants it, and a part has more than one row. A
    rank that was killed cannot say whether it was in a step; one that can and was not, was loading.
    """
    if not isinstance(end, JobEnded) or end.exit_kind not in ("oom_device", "oom_host"):
        return end
    guards: dict[str, Any] = spec.get("guards") or {}
    guard: dict[str, Any] = guards.get("memory") or {}
    was_loading = not killed and (end.error or {}).get("step") is None
    if guard.get("on_oom") != "halve_batch" or not end.error or was_loading:
        return end
    if parts >= spec["data"]["batch_size"]:
        message = f"{end.error['message']} It was one row at a time already."
        return replace(end, error={**end.error, "message": message})
    reason = f"{end.error['message'].rstrip('.')}; each batch is run in {2 * parts} parts now"
    return AttemptEnded("oom_halved", reason, end.error)


def failed(error: dict[str, Any]) -> JobEnded | AttemptEnded:
    """What a named failure means: the end, or another try."""
    kind = kind_of(error)
    if FATES[kind] == "retries":
        return AttemptEnded(kind, str(error["message"]), error)
    return JobEnded("failed", kind, error)


def kind_of(error: dict[str, Any]) -> ExitKind:
    """Which of the ends a named failure is."""
    if error["category"] == "out_of_memory":
        known: dict[str, Any] = error.get("memory") or {}
        return "oom_device" if known.get("where") == "device" else "oom_host"
    if error["code"] == "disk_full":
        return "disk_full"
    return _KINDS.get(error["category"], "internal")


def unkillable(*, cancelled: bool) -> JobEnded:
    """The end of a job whose process stays in the kernel for good."""
    error = Unkillable(rank=0)
    return JobEnded("cancelled" if cancelled else "failed", "unkillable", error.as_dict())


def _by_its_word(end: dict[str, Any], pressed: StopReason) -> JobEnded | AttemptEnded:
    if end["state"] == "succeeded":
        return JobEnded("succeeded", "succeeded", reason=end.get("reason"))
    if end["state"] == "failed":
        return failed(end["error"])
    if end["state"] == "paused" and not pressed.cancelled:
        return AttemptEnded("paused", PAUSED)
    return _by_pressure(pressed, "cancelled")


def _by_pressure(
    pressed: StopReason, how: Literal["cancelled", "killed"]
) -> JobEnded | AttemptEnded:
    """It ended because it was pressed to: by its own word, or killed."""
    if pressed.cancelled:
        return JobEnded("cancelled", how)
    if pressed.pausing and how == "killed":
        return AttemptEnded("paused", f"{PAUSED}; it reached no step boundary in time")
    if pressed.timeout_s is not None:
        error = Timeout(f"The job took longer than its timeout_s of {pressed.timeout_s:g} s.")
        return JobEnded("failed", "timeout", error.as_dict())
    if pressed.stalled_s is not None:
        reason = f"it made no progress for {pressed.stalled_s:.0f} s"
        error = Stalled(f"The job was stopped: {reason}.").as_dict()
        if pressed.on_stall == "fail":
            return JobEnded("failed", "stalled", error)
        return AttemptEnded("stalled", reason, error)
    return AttemptEnded("interrupted", INTERRUPTED)


def _by_exit(exit_: Exit, *, out_of_memory: bool) -> JobEnded | AttemptEnded:
    """It ended by itself, and without a word."""
    if exit_.lost:
        return AttemptEnded("fork_server_lost", "the process that starts ranks died")
    if exit_.code == LIFELINE_CUT:
        return AttemptEnded("lifeline_cut", "its supervisor was gone")
    if exit_.signal == signal.SIGKILL and out_of_memory:
        return JobEnded("failed", "oom_host", memory.killed_by_kernel(exit_))
    if exit_.signal in _FROM_OUTSIDE:
        return AttemptEnded("killed_from_outside", f"rank 0 ended without a word: {exit_}")
    error = RankDied(f"The training process ended without saying why: {exit_}.", rank=0)
    return AttemptEnded("crash", f"rank 0 crashed: {exit_}", error.as_dict())
