"""Decides what the end of a rank means for its job. Pure."""

import signal
from dataclasses import dataclass, replace
from typing import Any, Literal

from glasshouse.errors import RankDied, Stalled, Timeout, Unkillable
from models.jobs.endings import FATES, ExitKind
from worker.attempt import memory
from worker.processes.rank import Exit
from worker.processes.ranks import PEER_LOST

LIFELINE_CUT = 75
"""The exit status of a rank whose supervisor is gone."""
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
"""Exit kinds by the category of a failure; any other category is ``internal``."""

PAUSED = "paused by its owner"
INTERRUPTED = "its worker was stopped"


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job has ended."""

    state: str
    exit_kind: ExitKind
    error: dict[str, Any] | None = None
    reason: str | None = None
    """Why it ended early, if its own spec said so."""


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The attempt has ended and its job has not: the attempt was lost, interrupted or paused."""

    exit_kind: ExitKind
    reason: str
    error: dict[str, Any] | None = None
    """The job's error if it is not retried."""

    @property
    def counted(self) -> bool:
        """Whether this counts as a failure; a pause and a graceful shutdown do not."""
        return FATES[self.exit_kind] == "retries"


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why this worker asked the rank to end, if it did."""

    cancelled: bool = False
    """The owner cancelled the job."""
    stopping: bool = False
    """This worker is shutting down."""
    pausing: bool = False
    """The owner paused the job."""
    timeout_s: float | None = None
    """The timeout that the job exceeded."""
    stalled_s: float | None = None
    """For how long it made no progress, if its spec says to stop it for that."""
    on_stall: Literal["restart", "fail"] = "restart"
    stalled_rank: int | None = None
    """The process that kept the others waiting, if it is known."""
    stalled_why: str | None = None
    """What that process does or has not done."""
    stalled_step: int | None = None
    """The last step that was reported before."""

    @property
    def how(self) -> Literal["cancelled", "paused", "interrupted"] | None:
        """How the rank must end; None: it continues. All but ``cancelled`` save a checkpoint."""
        if self.cancelled:
            return "cancelled"
        if self.pausing:
            return "paused"
        at_all = self.stopping or self.timeout_s is not None or self.stalled_s is not None
        return "interrupted" if at_all else None


def judge(
    end: dict[str, Any] | None,
    exit_: Exit,
    pressed: StopReason,
    *,
    out_of_memory: bool,
    rank: int = 0,
) -> JobEnded | AttemptEnded:
    """Decide by the rank's ``end`` record; without one, by how the process ended.

    ``out_of_memory``: the OOM killer acted while the rank was running. ``rank``: its number.
    """
    if end is not None and not (pressed.how is not None and _is_of_peer(end)):
        return _by_reported_end(end, pressed)
    own_fault = pressed.how == "paused" and exit_.signal not in _FROM_OUTSIDE
    if pressed.how is not None and not own_fault:
        return _by_pressure(pressed, "killed")
    return _by_exit(exit_, rank, out_of_memory=out_of_memory)


def halved(
    end: JobEnded | AttemptEnded, spec: dict[str, Any], parts: int, *, killed: bool
) -> JobEnded | AttemptEnded:
    """Return the same end, or a retry with each batch in twice as many micro-batches.

    It is a retry if memory ran out in a step, the spec asks for it, and a micro-batch has more
    than one row. A rank that reported its failure without a step was loading. A killed rank reports
    nothing and is retried.
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
    """Return what a named failure means: the end of the job, or a retry."""
    kind = kind_of(error)
    if FATES[kind] == "retries":
        return AttemptEnded(kind, str(error["message"]), error)
    return JobEnded("failed", kind, error)


def kind_of(error: dict[str, Any]) -> ExitKind:
    """Return the exit kind of a named failure."""
    if error["category"] == "out_of_memory":
        known: dict[str, Any] = error.get("memory") or {}
        return "oom_device" if known.get("where") == "device" else "oom_host"
    if error["code"] == "disk_full":
        return "disk_full"
    if error["code"] == PEER_LOST:
        return "crash"
    return _KINDS.get(error["category"], "internal")


def unkillable(*, cancelled: bool) -> JobEnded:
    """Return the end of a job whose process hangs in a system call and cannot be killed."""
    error = Unkillable(rank=0)
    return JobEnded("cancelled" if cancelled else "failed", "unkillable", error.as_dict())


def _is_of_peer(end: dict[str, Any]) -> bool:
    """Whether a rank failed because another ended, which this worker may have done."""
    error: dict[str, Any] = end.get("error") or {}
    return error.get("code") == PEER_LOST


def _by_reported_end(end: dict[str, Any], pressed: StopReason) -> JobEnded | AttemptEnded:
    if end["state"] == "succeeded":
        return JobEnded("succeeded", "succeeded", reason=end.get("reason"))
    if end["state"] == "failed":
        return failed(end["error"])
    if end["state"] == "paused" and not pressed.cancelled:
        return AttemptEnded("paused", end.get("reason") or PAUSED)
    return _by_pressure(pressed, "cancelled")


def _by_pressure(
    pressed: StopReason, how: Literal["cancelled", "killed"]
) -> JobEnded | AttemptEnded:
    """Return the end of a rank that was asked to stop: it stopped itself, or was killed."""
    if pressed.cancelled:
        return JobEnded("cancelled", how)
    if pressed.pausing and how == "killed":
        return AttemptEnded("paused", f"{PAUSED}; it reached no step boundary in time")
    if pressed.timeout_s is not None:
        error = Timeout(f"The job took longer than its timeout_s of {pressed.timeout_s:g} s.")
        return JobEnded("failed", "timeout", error.as_dict())
    if pressed.stalled_s is not None:
        reason = f"it made no progress for {pressed.stalled_s:.0f} s"
        if pressed.stalled_why is not None:
            reason = f"{reason}: {pressed.stalled_why}"
        rank, step = pressed.stalled_rank, pressed.stalled_step
        error = Stalled(f"The job was stopped: {reason}.", rank=rank, step=step).as_dict()
        if pressed.on_stall == "fail":
            return JobEnded("failed", "stalled", error)
        return AttemptEnded("stalled", reason, error)
    return AttemptEnded("interrupted", INTERRUPTED)


def _by_exit(exit_: Exit, rank: int, *, out_of_memory: bool) -> JobEnded | AttemptEnded:
    """Return the end of a rank that ended by itself and wrote no ``end`` record."""
    if exit_.lost:
        return AttemptEnded("fork_server_lost", "the process that starts ranks died")
    if exit_.code == LIFELINE_CUT:
        return AttemptEnded("lifeline_cut", "its supervisor was gone")
    if exit_.signal == signal.SIGKILL and out_of_memory:
        return JobEnded("failed", "oom_host", memory.killed_by_kernel(exit_))
    if exit_.signal in _FROM_OUTSIDE:
        return AttemptEnded("killed_from_outside", f"rank {rank} ended without a word: {exit_}")
    error = RankDied(f"The training process ended without saying why: {exit_}.", rank=rank)
    return AttemptEnded("crash", f"rank {rank} crashed: {exit_}", error.as_dict())
