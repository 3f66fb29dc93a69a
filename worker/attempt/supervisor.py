"""The supervisor: runs one attempt of one job, from its claim to its end.

It claims the attempt (`resume`), forks a rank (`launch`), stores what the rank writes (`store`),
delivers the users' commands and checks the rank's progress (`control`), and decides what its end
means (`outcome`). While the database is unavailable, it keeps watching the rank.
"""

import time
from collections.abc import Callable
from typing import Any

import structlog

from engine.core.spool import SpoolDamaged
from glasshouse.errors import EngineFailed, RunFailure
from glasshouse.failpoints import failpoint
from models.fleet import workers
from models.jobs import attempts
from models.observations.events import NewEvent
from models.telemetry.tracing import Span, log_fields
from worker.attempt import launch, memory, outcome, resume
from worker.attempt.captures import BadRecord
from worker.attempt.control import Backpressure, CommandDelivery, Watchdog
from worker.attempt.folding import Folding
from worker.attempt.launch import Launch
from worker.attempt.outcome import AttemptEnded, JobEnded, StopReason
from worker.attempt.resume import Attempt
from worker.attempt.serving import ModelDelivery, PredictionDelivery
from worker.attempt.stalls import Stall, investigate
from worker.attempt.store import AttemptStore, Fenced
from worker.context import AWAY, WorkerContext
from worker.processes.fork_server import ForkServerLost
from worker.processes.ranks import Ended, Ranks

_log: Any = structlog.get_logger()

_BUSY_S = 0.01
Launcher = Callable[[Attempt, CommandDelivery], Launch]


def supervise(context: WorkerContext, job_id: str) -> None:
    """Run the job's attempt that is assigned to this worker, if there is one."""
    attempt = resume.claim(context, job_id)
    if attempt is None:
        return
    claim, job = attempt.claim, attempt.job
    with structlog.contextvars.bound_contextvars(attempt=claim.attempt):
        supervisor = Supervisor(attempt)
        with (
            context.tracing.span(
                f"attempt {job.kind}",
                parent=job.traceparent or "",
                devices=len(job.devices),
                job=claim.job,
                attempt=claim.attempt,
                worker=context.name,
            ) as span,
            structlog.contextvars.bound_contextvars(**log_fields()),
        ):
            supervisor.run(span)
        context.notifier.job_changed(job_id)
        if supervisor.has_ended_job:
            context.dispatch()  # its devices are free; folding can wait
            supervisor.tidy()


class Supervisor:
    """Runs one attempt."""

    def __init__(self, attempt: Attempt, *, launcher: Launcher = Launch) -> None:
        """``launcher``: how ranks are started."""
        self._context = context = attempt.context
        self._claim = claim = attempt.claim
        self._attempt = attempt

        def spent_s() -> float:
            with context.database.read() as tx:
                return attempts.spent_s(tx, claim)

        self._watchdog = Watchdog(
            attempt.job.resolved,
            context.settings,
            attempt.directory / "spool",
            spent_s=context.with_retries(spent_s),
        )
        self._control = CommandDelivery(context.database, attempt.job, attempt.directory)
        self._store = AttemptStore(attempt, self._control)
        self._launch = launcher(attempt, self._control)
        self._models = ModelDelivery(attempt, self._control)
        self._predictions = PredictionDelivery(attempt, self._control)
        self._folding = Folding(context.database, claim)
        self._span = Span(None)
        self.has_ended_job = False
        self._stall = Stall()
        """What is known of the newest stall."""
        self._stalled_step: int | None = None
        self._reported_at: float | None = None
        """When the end that process 0 has reported was stored."""
        self._cause = 0
        """The rank that decided how the attempt ended."""
        self._unreadable: str | None = None
        """What is wrong with the checkpoint that this attempt resumes from."""

    def run(self, span: Span | None = None) -> None:
        """Run the attempt to its end, whatever happens, and record the end in ``span``."""
        self._span = span or self._span
        try:
            end = self._work()
            self._launch.end()
            self._close(end)
        except Fenced:
            _log.warning("fenced_out")
            self._span.failed("fenced_out")
            self._launch.end(gently=True)
        except AWAY:
            # the lease expires, and another worker takes the job
            _log.exception("database_unavailable_at_the_end")
        except Exception:
            _log.exception("supervisor_failed")
            self._launch.end()
            failure = EngineFailed("The worker failed in a way it did not expect.")
            self._close(AttemptEnded("supervisor_failed", failure.detail, failure.as_dict()))
        finally:
            self._launch.end()
            self._store.drain.close()
            launch.remove(self._attempt.directory)

    def tidy(self) -> None:
        """Fold the remaining statistics of a job that has ended."""
        self._folding.finish()

    def _work(self) -> JobEnded | AttemptEnded:
        oom_kills = memory.oom_kills()
        store, tracing = self._store, self._context.tracing
        try:
            with tracing.span("launch"):
                ranks = self._launch.start(store.drain.name, store.beat_if_due, store.read_end)
                store.attach(ranks, self._launch.usage)
                self._models.started(self._launch.models)
            with tracing.span("run"):
                cause = self._watch(ranks)
        except ForkServerLost as error:
            stopping = self._context.stopping.is_set()
            return AttemptEnded("interrupted" if stopping else "fork_server_lost", str(error))
        except RunFailure as failure:
            return outcome.failed(failure.as_dict())
        except (SpoolDamaged, BadRecord) as error:
            failure = EngineFailed(f"What the training process wrote cannot be read: {error}")
            return JobEnded("failed", "internal", failure.as_dict())
        ended = None if cause is None else store.end if cause.rank == 0 else cause.end
        if self._launch.resumes:
            self._unreadable = resume.unreadable(ended)
        if self._unreadable is not None:
            return AttemptEnded("checkpoint_refused", self._unreadable)
        if cause is None:
            self._launch.abandon()
            return outcome.unkillable(cancelled=self._control.cancelled)
        stalled = self._watchdog.stalled_s is not None
        self._cause = self._stall.cause if stalled and self._stall.cause else cause.rank
        oom = memory.oom_kills() != oom_kills
        pressed, exit_ = self._pressed, cause.exit
        end = outcome.judge(ended, exit_, pressed, out_of_memory=oom, rank=cause.rank)
        killed = ended is None
        return outcome.halved(end, self._attempt.job.resolved, self._launch.parts, killed=killed)

    def _watch(self, rank: Ranks) -> Ended | None:
        """Watch the ranks until they end and their records are stored.

        Return how the one that decides has ended; None: one cannot be killed.
        """
        store, settings = self._store, self._context.settings
        backpressure = Backpressure(rank, settings.max_backlog_bytes)
        self._watchdog.start()
        while True:
            exit_ = rank.wait(store.pause_s())
            store.look(final=exit_ is not None)
            store.beat_if_due()
            self._folding.turn()
            if backpressure.is_stopped or rank.are_ending:
                self._watchdog.reset()
            if (stalled := self._watchdog.check(store.sorter.step)) is not None:
                self._investigate(rank, stalled)
            how = self._pressed.how
            if how is None:
                backpressure.check(self._watchdog.spool_bytes - store.offset)
            else:
                backpressure.release()
                hurries = self._control.force or self._context.hurries
                rank.ask(how, force=hurries or self._has_no_hope)
            self._control.deliver(rank)
            self._models.deliver(rank)
            self._predictions.deliver(rank)
            if store.end is not None:
                self._end_late(rank)
            rank.press(grace_s=settings.grace_s, kill_s=settings.kill_s)
            if exit_ is not None:
                if store.idle:
                    return rank.cause
                # do not wait long for a disk that hangs: drop the waiting tensors
                if store.drain.stuck_for_s() > (
                    settings.grace_s if how is None else settings.kill_s
                ):
                    store.drain.abandon()
                time.sleep(_BUSY_S)  # not all is stored yet; the spool keeps the rest
            if rank.has_survived(settings.unkillable_s):
                return None

    def _investigate(self, ranks: Ranks, stalled: NewEvent) -> None:
        """Find out why the job has stalled, and report it."""
        self._stall = stall = investigate(ranks, self._attempt.directory, self._store.beat_if_due)
        self._stalled_step = stalled.payload["step"]
        found: dict[str, Any] = {"cause": stall.cause, "reason": stall.reason}
        found["ranks"] = [one.as_dict() for one in stall.ranks]
        self._store.note(stalled._replace(payload={**stalled.payload, **found}))
        self._store.report(stall.artifacts)

    def _end_late(self, ranks: Ranks) -> None:
        """End processes that are still running some time after process 0 has reported its end."""
        self._reported_at = self._reported_at or time.monotonic()
        if time.monotonic() > self._reported_at + self._context.settings.grace_s:
            ranks.ask(force=True)

    @property
    def _has_no_hope(self) -> bool:
        """Whether the job is ended for a stall from which no process can stop by itself."""
        return self._watchdog.stalled_s is not None and self._stall.is_hopeless

    @property
    def _pressed(self) -> StopReason:
        """Why the rank must end, if it must."""
        return StopReason(
            cancelled=self._control.cancelled,
            stopping=self._context.stopping.is_set(),
            pausing=self._control.pausing,
            timeout_s=self._watchdog.exceeded_s,
            stalled_s=self._watchdog.stalled_s,
            on_stall="fail" if self._watchdog.on_stall == "fail" else "restart",
            stalled_rank=self._stall.cause,
            stalled_why=self._stall.reason,
            stalled_step=self._stalled_step,
        )

    def _close(self, end: JobEnded | AttemptEnded) -> None:
        failpoint("end.begin")
        with self._context.tracing.span("store the end"):
            stored = self._context.with_retries(lambda: self._write_end(end))
        self._span.tell(exit_kind=end.exit_kind)
        if end.counted if isinstance(end, AttemptEnded) else end.state == "failed":
            self._span.failed(end.exit_kind)
        failpoint("end.committed")
        self.has_ended_job = stored and isinstance(end, JobEnded)
        _log.info("attempt_ended", exit_kind=end.exit_kind, stored=stored)

    def _write_end(self, end: JobEnded | AttemptEnded) -> bool:
        error = end.error and self._explain(end.error)
        with self._context.database.write() as tx:
            failpoint("end.commit")
            if self._launch.is_stuck:
                workers.quarantine(tx, self._claim, "a process of a job does not end")
            if isinstance(end, AttemptEnded):
                if self._unreadable is not None:
                    attempts.refuse_checkpoint(tx, self._claim, self._unreadable)
                return attempts.give_up(
                    tx,
                    self._claim,
                    exit_kind=end.exit_kind,
                    reason=end.reason,
                    error=error,
                    backoff=self._context.backoff,
                    counted=end.counted,
                )
            attempts.applied(tx, self._claim, self._control.stops, self._store.sorter.step)
            return attempts.finish(
                tx,
                self._claim,
                end.state,
                exit_kind=end.exit_kind,
                error=error,
                reason=end.reason,
            )

    def _explain(self, error: dict[str, Any]) -> dict[str, Any]:
        """Add to an error the plan (if memory ran out), the first NaN or Inf, and the log's end."""
        with_plan = memory.with_plan_estimates(error, self._attempt.job.plan)
        explained = self._store.sorter.nonfinite.explain(with_plan)
        return {"log_tail": self._store.log_tail(self._cause), **explained}
