"""The sweep: finds what a lost message, a lost worker or a lost process left behind.

It needs no broker. It dispatches queued jobs, ends attempts whose lease has expired, and starts
attempts that are assigned to this worker and whose wake-up has not arrived.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from glasshouse.errors import TransactionConflict
from glasshouse.failpoints import failpoint
from models import marks
from models.database import lock_at_most
from models.fleet import heartbeats, workers
from models.jobs import attempts, leases
from models.jobs.endings import FATES, ExitKind
from models.jobs.leases import Claim
from worker.attempt.supervisor import supervise
from worker.context import AWAY, WorkerContext
from worker.wakeups import tasks

_log: Any = structlog.get_logger()

_SLOW_S = 1.0
"""A write that takes longer had to wait for the database."""


class ClockWatch:
    """Detects, by the monotonic clock, that the database's clock was set."""

    def __init__(self, tolerance_s: float) -> None:
        self._tolerance_s = tolerance_s
        self._began_s: float | None = None

    def was_set(self, time_ms: int) -> bool:
        """Return whether it was set since `trust`; ``time_ms`` is its time now."""
        if self._began_s is None:
            return False
        return abs(_beginning_s(time_ms) - self._began_s) > self._tolerance_s

    def trust(self, time_ms: int) -> None:
        """Take its time now as the reference, so that clocks may drift apart slowly."""
        self._began_s = _beginning_s(time_ms)


class Sweep:
    """Sweeps once per call. If one part fails, the others still run."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._healthy_since: float | None = None
        self._looked_at = self._ended_at = 0.0
        self._long_s = 3 * context.settings.sweep_s + _SLOW_S
        """If a sweep or the pause between two takes longer, this process was suspended."""
        self._clock = ClockWatch(min(_SLOW_S, context.settings.lease_s / 2))

    def __call__(self) -> None:
        """Sweep once."""
        self._note_health()
        for part in (self._serve_queue, self._begin_waiting, self._end_lost):
            try:
                part()
            except AWAY as error:
                self._healthy_since = None
                _log.warning("database_unavailable", error=str(error))
            except Exception:
                _log.exception("sweep_failed", part=part.__name__)
        self._ended_at = time.monotonic()

    def _note_health(self) -> None:
        """Note since when this worker runs and can write; only then does it end expired attempts.

        While no worker can write, all leases expire although no supervisor is lost. The same holds
        when the database's clock is set forward: supervisors renew their leases a moment later.
        """
        began = self._looked_at = time.monotonic()
        try:
            with self._context.database.write() as tx:
                time_ms = heartbeats.swept(tx, self._context.name, instance=self._context.instance)
        except AWAY:
            self._healthy_since = None
            return
        slow = time.monotonic() - began > _SLOW_S
        slept = began - self._ended_at > self._long_s
        if self._clock.was_set(time_ms):
            _log.warning("clock_set")
            self._healthy_since = None
        self._clock.trust(time_ms)
        if self._healthy_since is None or slow or slept:
            self._healthy_since = time.monotonic()

    def _serve_queue(self) -> None:
        """Dispatch queued jobs for all workers: one worker does so in each interval."""
        context = self._context
        with context.database.read() as tx:
            if not workers.any_waits(tx):
                return
        every_ms = round(context.settings.sweep_s * 1000)
        with context.database.write() as tx:
            if not marks.take(tx, "queue", context.instance, every_ms=every_ms):
                return
        context.dispatch()

    def _begin_waiting(self) -> None:
        context = self._context
        if context.stopping.is_set():
            return
        with context.database.read() as tx:
            waiting = [job for job in attempts.waiting(tx, context.name) if not context.runs(job)]
        for job_id in waiting:
            _log.info("begun_by_sweep", job=job_id)
            threading.Thread(
                target=tasks.handle,
                args=("sweep", lambda job=job_id: context.supervise(job, supervise)),
                name=f"supervise-{job_id}",
                daemon=True,
            ).start()

    def _end_lost(self) -> None:
        context = self._context
        if time.monotonic() - self._looked_at > self._long_s:
            self._healthy_since = None
        since = self._healthy_since
        if since is None or time.monotonic() - since < context.settings.lease_s:
            return
        with context.database.read() as tx:
            lost = leases.expired(tx)
        ended = [claim for claim in lost if self._end_one(claim)]
        if ended:
            context.dispatch()

    def _end_one(self, claim: Claim) -> bool:
        """End an attempt, unless its rows are being written; then the next sweep tries again."""
        context, began, ended = self._context, time.monotonic(), False
        with contextlib.suppress(TransactionConflict), context.database.write() as tx:
            lock_at_most(tx, _SLOW_S / 2)
            time_ms = leases.still_expired(tx, claim)
            waited = time.monotonic() - began > _SLOW_S  # its supervisor had to wait as well
            expired = time_ms is not None and not self._clock.was_set(time_ms)
            ended = (expired and not waited) and attempts.give_up(
                tx,
                claim,
                exit_kind="lease_lost",
                reason="its worker was silent for too long",
                backoff=context.backoff,
            )
            if ended:
                failpoint("sweep.commit")
        if ended:
            failpoint("sweep.committed")
            _log.warning("lease_expired", job=claim.job, attempt=claim.attempt)
            context.notifier.job_changed(claim.job)
        return ended


def return_attempts(
    context: WorkerContext, claims: list[Claim], *, exit_kind: ExitKind, reason: str
) -> None:
    """Queue jobs again that this worker will not run; `FATES` says whether that is a failure."""
    for claim in claims:
        with context.database.write() as tx:
            attempts.give_up(
                tx,
                claim,
                exit_kind=exit_kind,
                reason=reason,
                backoff=context.backoff,
                counted=FATES[exit_kind] == "retries",
            )
            failpoint("return.commit")
        failpoint("return.committed")
        context.notifier.job_changed(claim.job)


def _beginning_s(time_ms: int) -> float:
    """Return the time of a clock when the monotonic clock was at 0, seconds."""
    return time_ms / 1000 - time.monotonic()


class Every:
    """A thread that repeats an action; a failure is logged, and the next turn tries again."""

    def __init__(
        self, period_s: float, act: Callable[[], None], name: str, *, at_once: bool = True
    ) -> None:
        self._period_s = period_s
        self._at_once = at_once
        self._act = act
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self, timeout_s: float = 5.0) -> None:
        """End after the turn that is running."""
        self._ended.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        if not self._at_once:
            self._ended.wait(self._period_s)
        while not self._ended.is_set():
            tasks.handle(self._thread.name, self._act)
            self._ended.wait(self._period_s)
