"""Detects a rank that stalls, exceeds its timeout, or writes faster than the database stores.

The lease of an attempt says only that its worker is running. A rank that hangs in native code or
in a system call writes nothing more, while its worker keeps renewing the lease.
"""

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import structlog

from models.observations.events import NewEvent
from models.settings import Settings
from models.tables import now
from worker.processes.rank import Rank

_log: Any = structlog.get_logger()
_EVERY_S = 0.5


class Watchdog:
    """Detects that a rank has stalled, and that a job has exceeded its timeout.

    A rank writes everything it does to its spool, so a growing spool is progress.
    """

    def __init__(
        self,
        resolved: dict[str, Any],
        settings: Settings,
        spool: Path,
        *,
        spent_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``resolved``: the spec. ``spent_s``: the time that earlier attempts of the job took."""
        self.on_stall: Literal["warn", "restart", "fail"] = resolved.get("on_stall", "warn")
        self.stalled_s: float | None = None
        """For how long the rank made no progress; set if ``on_stall`` says to stop it for that."""
        self.exceeded_s: float | None = None
        """The job's ``timeout_s``; set once the job has taken longer."""
        self.spool_bytes = 0
        """Size of the spool at the last check."""
        self._timeout_s: float | None = resolved.get("timeout_s")
        self._stall_s: float = resolved.get("stall_timeout_s") or settings.stall_timeout_s
        self._spool = spool
        self._spent_s = spent_s
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Start both clocks, when the rank starts."""
        self._started_at = self._checked_at = self._clock()
        self.reset()

    def reset(self) -> None:
        """Restart the stall clock: the rank made progress, or it was stopped from outside."""
        self._progress_at = self._clock()
        self._is_reported = False

    def check(self, step: int | None) -> NewEvent | None:
        """Check both clocks. Return an event when a stall is detected, once per stall."""
        at = self._clock()
        taken_s = self._spent_s + at - self._started_at
        if self._timeout_s is not None and taken_s > self._timeout_s:
            self.exceeded_s = self._timeout_s
        if at - self._checked_at < min(_EVERY_S, self._stall_s / 4):
            return None
        self._checked_at = at
        self._measure()
        silent_s = self._clock() - self._progress_at
        if self._is_reported or silent_s < self._stall_s:
            return None
        self._is_reported = True
        _log.warning("job_stalled", step=step, seconds=silent_s, action=self.on_stall)
        if self.on_stall != "warn":
            self.stalled_s = silent_s
        payload = {"step": step, "seconds": round(silent_s, 1), "action": self.on_stall}
        return NewEvent("stalled", now(), payload)

    def _measure(self) -> None:
        with contextlib.suppress(OSError):
            size = self._spool.stat().st_size
            if size != self.spool_bytes:
                self.spool_bytes = size
                self.reset()


class Backpressure:
    """Stops a rank while too much of its spool is not stored.

    Losses and events are never dropped, and disks are finite. If the database is unavailable for
    long, the rank's process group is stopped. It continues once at most half the limit is left.
    """

    def __init__(self, rank: Rank, max_bytes: int) -> None:
        self._rank = rank
        self._max_bytes = max_bytes
        self.is_stopped = False
        """Whether the rank is stopped."""

    def check(self, waiting_bytes: int) -> None:
        """Stop or continue the rank, depending on how many bytes are not stored."""
        if not self.is_stopped and waiting_bytes > self._max_bytes:
            self.is_stopped = self._rank.signal(signal.SIGSTOP)
            _log.warning("rank_held", waiting_bytes=waiting_bytes)
        elif self.is_stopped and waiting_bytes <= self._max_bytes // 2:
            self.release()

    def release(self) -> None:
        """Continue the rank in any case."""
        if self.is_stopped:
            self.is_stopped = False
            self._rank.signal(signal.SIGCONT)
            _log.info("rank_continues")
