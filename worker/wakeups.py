"""What makes a worker check for work: wake-ups, the sweep, and the canary.

A wake-up is a Celery message, which says only that there is work in the database. The sweep finds
what a lost message, a lost worker or a lost process left behind. It needs no broker: it dispatches
queued jobs, ends attempts whose lease has expired, and starts attempts that are assigned to this
worker and whose wake-up has not arrived.
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
from models.fleet import heartbeats
from models.fleet.heartbeats import MISSED_CANARIES
from models.fleet.notifier import worker_queue
from models.jobs import attempts, leases, scaling
from models.jobs.endings import FATES, ExitKind
from models.jobs.leases import Claim
from worker import dispatch as dispatching
from worker.attempt.supervisor import supervise
from worker.context import AWAY, WorkerContext, attempt_to
from worker.ingest import Readers

_log: Any = structlog.get_logger()

_SLOW_S = 1.0
"""A write that takes longer had to wait for the database."""


def add_tasks(app: Any, context: WorkerContext, canary: "Canary", readers: Readers) -> None:
    """Register the tasks of a worker. If one fails, the sweep tries again."""

    def on_supervise(job_id: str, *_: object) -> None:
        context.supervise(job_id, supervise)

    def add(name: str, act: Callable[..., object]) -> None:
        def on_message(*arguments: Any, **_: Any) -> None:
            attempt_to(name, lambda: act(*arguments))

        app.task(on_message, name=f"glasshouse.{name}", shared=False)

    add("canary", canary.received)
    add("dispatch", context.dispatch)
    add("read", readers.wake)
    add("supervise", on_supervise)


class Canary:
    """Checks that this worker receives wake-ups: it sends one to itself and stores when it arrives.

    The wake-up takes the usual way, through the broker and the worker's own queue. The database has
    the time of the last one. An unresponsive worker still works, by its sweep, only later.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._heard_at = time.monotonic()
        self._is_reported = False

    def __call__(self) -> None:
        """Send a wake-up to this worker."""
        context = self._context
        if not context.notifier.is_full(worker_queue(context.name)):
            context.notifier.canary(context.name)
        silent_s = time.monotonic() - self._heard_at
        if silent_s > MISSED_CANARIES * context.settings.canary_s and not self._is_reported:
            self._is_reported = True
            _log.warning("worker_unresponsive", silent_s=round(silent_s))

    def received(self, *_: object) -> None:
        """Store that the wake-up has arrived."""
        with self._context.database.write() as tx:
            heartbeats.received_canary(tx, self._context.name, instance=self._context.instance)
        self._heard_at = time.monotonic()
        if self._is_reported:
            self._is_reported = False
            _log.info("worker_responsive")


class Sweep:
    """Sweeps once per call. If one part fails, the others still run."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._healthy_since: float | None = None
        self._looked_at = self._ended_at = 0.0
        self._long_s = 3 * context.settings.sweep_s + _SLOW_S
        """If a sweep or the pause between two takes longer, this process was suspended."""
        self._clock_began_s: float | None = None
        """The database's time when the monotonic clock was at 0, at the last sweep, seconds."""

    def __call__(self) -> None:
        """Sweep once."""
        self._note_health()
        for part in (self._scale, self._serve_queue, self._begin_waiting, self._end_lost):
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
        if self._clock_was_set(time_ms):
            _log.warning("clock_set")
            self._healthy_since = None
        self._clock_began_s = _beginning_s(time_ms)  # clocks may drift apart slowly
        if self._healthy_since is None or slow or slept:
            self._healthy_since = time.monotonic()

    def _clock_was_set(self, time_ms: int) -> bool:
        """Return whether the database's clock was set since the last sweep; it says ``time_ms``."""
        if self._clock_began_s is None:
            return False
        tolerance_s = min(_SLOW_S, self._context.settings.lease_s / 2)
        return abs(_beginning_s(time_ms) - self._clock_began_s) > tolerance_s

    def _scale(self) -> None:
        """Create and cancel replicas of serve jobs."""
        context = self._context
        with context.database.read() as tx:
            due = scaling.due(tx)
        for job_id in due:
            decision = None
            with contextlib.suppress(TransactionConflict), context.database.write() as tx:
                lock_at_most(tx, _SLOW_S / 2)
                decision = scaling.scale(tx, job_id, context.settings)
            if decision is None or not decision.acts:
                continue
            _log.info("scaled", job=job_id, created=decision.create, cancelled=decision.cancel)
            for changed in (job_id, *decision.cancel):
                context.notifier.job_changed(changed)
            if decision.create:
                context.dispatch()

    def _serve_queue(self) -> None:
        """Dispatch queued jobs for all workers: one worker does so in each interval."""
        context = self._context
        if not dispatching.is_due(context.database, context.settings):
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
                target=attempt_to,
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
            expired = time_ms is not None and not self._clock_was_set(time_ms)
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
