"""One attempt of a job: assign, claim, end or lose it. Every write is fenced."""

from collections.abc import Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any

from sqlalchemy import case, func, select, update
from sqlalchemy.orm import Session, undefer_group

from glasshouse.errors import CrashLoop, WorkerLost
from glasshouse.spec.jobs.serve_job import IDLE
from models.database import database_time, now_ms
from models.jobs import checkpoints, commands, endings, leases, pausing, replicas
from models.jobs.checkpoints import SCRATCH, RefusedCheckpoint, StartPoint
from models.jobs.endings import CRASH_LOOP, Backoff, ExitKind
from models.jobs.leases import Claim, LeaseState
from models.observations import events, outputs, probes
from models.observations.events import NewEvent
from models.state import ENDED, LIVE, sources
from models.tables import Attempt, Checkpoint, Command, Device, Job, now

_IN_ORDER = ("paused", "interrupted")
"""Exit kinds of attempts that ended on request while their jobs continue."""


def assign(
    tx: Session,
    job_id: str,
    worker: str,
    devices: Sequence[Device],
    lease_ms: int,
    *,
    shared: bool = False,
) -> bool:
    """Give a queued job all its devices, or none. False: another dispatcher was faster.

    ``shared``: the devices stay with the jobs that have them.
    """
    time = now()
    held = [{"worker": worker, "kind": device.kind, "id": device.id} for device in devices]
    row = tx.execute(
        update(Job)
        .where(Job.id == job_id, Job.state == "queued")
        .values(
            state="starting",
            state_reason=None,
            worker=worker,
            devices=held,
            attempt=Job.attempt + 1,
            fence=Job.fence + 1,
            not_before_ms=None,
            lease_expires_ms=now_ms() + lease_ms,
        )
        .returning(Job.attempt, Job.fence)
    ).one_or_none()
    if row is None:
        return False
    attempt, fence = row
    if not shared:
        _take(tx, job_id, fence, worker, devices)
    tx.add(
        Attempt(
            job=job_id,
            n=attempt,
            fence=fence,
            worker=worker,
            state="assigned",
            devices=held,
            created_at=time,
            spool_offset=0,
        )
    )
    tx.flush()
    events.append(tx, job_id, events.moved(time, "queued", "starting"))
    return True


def _take(tx: Session, job_id: str, fence: int, worker: str, devices: Sequence[Device]) -> None:
    taken = tx.scalars(
        update(Device)
        .where(
            Device.worker == worker,
            Device.id.in_([device.id for device in devices]),
            Device.job.is_(None),
            Device.healthy,
        )
        .values(job=job_id, fence=fence)
        .returning(Device.id)
    ).all()
    if len(taken) != len(devices):
        raise RuntimeError("a device was taken while the dispatcher held its lock")


def claim(
    tx: Session, job_id: str, worker: str, start: StartPoint = SCRATCH
) -> tuple[Claim, Job] | None:
    """Claim the attempt that waits for this worker. None: another wake-up was first, or it is gone.

    From here on, rows of earlier attempts are hidden from this attempt's first step on. The job's
    progress and summary are reset to that step.

    Raises:
        CheckpointNotFound: The checkpoint to start from is gone.
    """
    checkpoints.take(tx, job_id, start)
    time = now()
    first_step = case((Attempt.n > 1, start.step), else_=None)
    row = tx.execute(
        update(Attempt)
        .where(
            Attempt.job == job_id,
            Attempt.worker == worker,
            Attempt.state == "assigned",
            select(Job.fence).where(Job.id == job_id).scalar_subquery() == Attempt.fence,
        )
        .values(
            state="claimed",
            claimed_at=database_time(tx),
            resumed_from_step=first_step,
            checkpoint=start.checkpoint,
        )
        .returning(Attempt.n, Attempt.fence, Attempt.resumed_from_step)
    ).one_or_none()
    if row is None:
        return None
    n, fence, resumed = row
    begun: dict[str, Any] = {"n": n, "resumed_from_step": resumed}
    new = [NewEvent("attempt", time, begun)]
    new += [checkpoints.refuse(tx, refused) for refused in start.refused]
    then = {"progress": start.progress, "summary": start.summary} if n > 1 else {}
    events.append(tx, job_id, new, **then)
    job = tx.get(Job, job_id, populate_existing=True, options=[undefer_group("spec")])
    return None if job is None else (Claim(job_id, n, fence), job)


def run(tx: Session, claim: Claim, *, lease_ms: int) -> LeaseState | None:
    """Note that the rank has started. None: this attempt has lost its job."""
    time = now()
    started = tx.scalar(
        update(Job)
        .where(Job.id == claim.job, Job.fence == claim.fence, Job.state == "starting")
        .values(state="running")
        .returning(Job.id)
    )
    new = [] if started is None else events.moved(time, "starting", "running")
    found = leases.beat(tx, claim, lease_ms=lease_ms, num_events=len(new))
    if found is None:
        return None
    tx.execute(
        update(Job).where(Job.id == claim.job, Job.started_at.is_(None)).values(started_at=time)
    )
    events.write(tx, claim.job, claim.attempt, found.last_seq - len(new), new)
    return found


def applied(tx: Session, claim: Claim, commands: Sequence[str], step: int | None) -> bool:
    """Record that commands took effect. False: this attempt has lost its job."""
    if not leases.holds(tx, claim):
        return False
    tx.execute(
        update(Command)
        .where(Command.id.in_(commands), Command.job == claim.job)
        .values(state="applied", step=step)
    )
    return True


def refuse_checkpoint(tx: Session, claim: Claim, detail: str) -> bool:
    """Note that the checkpoint of this attempt is unreadable.

    False: the attempt has lost its job.
    """
    if not leases.holds(tx, claim):
        return False
    query = select(Attempt.checkpoint).where(Attempt.job == claim.job, Attempt.n == claim.attempt)
    checkpoint = tx.scalar(query)
    if checkpoint is not None:
        refused = RefusedCheckpoint(checkpoint, detail)
        events.append(tx, claim.job, [checkpoints.refuse(tx, refused)])
    return True


def start_of(tx: Session, claim: Claim) -> Checkpoint | None:
    """Return the checkpoint that an attempt resumes from; None: it starts from scratch."""
    query = (
        select(Checkpoint)
        .join(Attempt, Attempt.checkpoint == Checkpoint.id)
        .where(Attempt.job == claim.job, Attempt.n == claim.attempt)
    )
    return tx.scalar(query)


def num_halved(tx: Session, job_id: str) -> int:
    """Return how many attempts of a job ended to continue with smaller batches."""
    query = select(func.count()).where(Attempt.job == job_id, Attempt.exit_kind == "oom_halved")
    return tx.scalar(query) or 0


def finish(
    tx: Session,
    claim: Claim,
    state: str,
    *,
    exit_kind: ExitKind,
    error: dict[str, Any] | None = None,
    reason: str | None = None,
) -> bool:
    """End the job: store its last events and free its devices. False: this attempt has lost it.

    ``reason``: why it ended. Default: the code of its error, or why it was asked to end.
    """
    if state not in ENDED:
        raise ValueError(f"{state} is not an end")
    row = tx.execute(
        select(Job.state, Job.state_reason)
        .where(Job.id == claim.job, Job.fence == claim.fence, Job.state.in_(LIVE))
        .with_for_update()
    ).one_or_none()
    if row is None:
        return False
    before, asked = row
    if before not in sources(state):
        raise ValueError(f"a {before} job cannot become {state}")
    time = now()
    if reason is None:
        reason = asked if error is None else str(error["code"])
    events.append(
        tx,
        claim.job,
        events.moved(time, before, state, reason),
        state=state,
        state_reason=reason,
        error=error,
        ended_at=time,
        lease_expires_ms=None,
    )
    _close(tx, claim.job, claim.fence, "ended", exit_kind)
    return True


def give_up(  # noqa: PLR0913 (how an attempt ended, and what then)
    tx: Session,
    claim: Claim,
    *,
    exit_kind: ExitKind,
    reason: str,
    error: dict[str, Any] | None = None,
    backoff: Backoff = Backoff(),  # noqa: B008 (frozen)
    counted: bool = True,
) -> bool:
    """End an attempt but not its job, which is queued again, or paused if requested.

    If the failure is ``counted``, the job is retried after the back-off, else at once. A pause and
    a worker's graceful shutdown are not failures. Failures are counted since the last progress,
    which is a newer checkpoint, another stored part of an inference, or a replica that listened.
    After too many, the job fails with ``error``, or with WorkerLost or CrashLoop. Return False if
    this attempt had already lost its job.
    """
    row = tx.execute(
        select(Job.state, Job.infra_failures, Job.failed_at_step, Job.cancel_requested_at)
        .add_columns(Job.resolved, Job.state_reason)
        .where(Job.id == claim.job, Job.fence == claim.fence, Job.state.in_(LIVE))
        .with_for_update()
    ).one_or_none()
    if row is None:
        return False
    before, failures, failed_at, cancelled_at, resolved, asked = row
    saved = max(
        checkpoints.newest_step(tx, claim.job),
        outputs.num_parts(tx, claim.job),
        replicas.num_starts(tx, claim.job),
    )
    failures = (0 if saved > (failed_at or 0) else failures) + counted
    crashes = _crashes(tx, claim, failures) if exit_kind == "crash" else 0
    allowed = endings.max_restarts(resolved)
    is_over = endings.is_over(exit_kind, failures=failures, crashes=crashes, restarts=allowed)
    pauses = before == "pausing" or exit_kind == "paused"
    fails = counted and is_over
    target = _target(pauses=pauses, is_cancelled=cancelled_at is not None, fails=fails)
    changes: dict[str, Any] = {"infra_failures": failures, "failed_at_step": saved}
    error = _given_up(failures, crashes, reason, error) if target == "failed" else None
    if error is not None:
        reason = error["code"]
    elif target == "queued" and counted:
        reason = f"{reason}; failure {failures} of {allowed + 1} without progress"
        changes["not_before_ms"] = now_ms() + round(backoff.after_s(failures) * 1000)
    if target == "paused" and before == "pausing" and IDLE in (asked, reason):
        reason = asked or reason  # whether a request may resume it depends on who asked
    time = now()
    changes |= {"state": target, "state_reason": reason, "lease_expires_ms": None, "error": error}
    changes |= _left(tx, claim, target, time)
    events.append(tx, claim.job, events.moved(time, before, target, reason), **changes)
    state = "ended" if exit_kind in _IN_ORDER else "lost"
    _close(tx, claim.job, claim.fence, state, exit_kind)
    if target == "paused":
        pausing.settle(tx, claim.job)
    return True


def _target(*, pauses: bool, is_cancelled: bool, fails: bool) -> str:
    """Return the next state of a job whose attempt is given up."""
    if is_cancelled:
        return "cancelled"
    if pauses:
        return "paused"
    return "failed" if fails else "queued"


def _left(tx: Session, claim: Claim, target: str, time: datetime) -> dict[str, Any]:
    """Return the other columns that change when an attempt leaves its job."""
    if target == "paused":
        return _released(claim) | {"paused_at": database_time(tx)}
    if target == "queued":
        # progress and summary stay until the next attempt reports where it resumes
        return _released(claim) | {"queued_at": time, "probe_overhead": None}
    return {"ended_at": time}


def _released(claim: Claim) -> dict[str, Any]:
    """Return the columns of a job without an attempt.

    The new fence keeps the old attempt from writing before the next one starts.
    """
    return {"fence": claim.fence + 1, "devices": [], "worker": None}


def waiting(tx: Session, worker: str) -> list[str]:
    """Return jobs that were assigned to a worker and not claimed: their wake-up may be lost."""
    query = select(Attempt.job).where(Attempt.worker == worker, Attempt.state == "assigned")
    return list(tx.scalars(query))


def held(tx: Session, worker: str) -> list[Claim]:
    """Return attempts that a worker claimed and did not end; at its start, of its last run."""
    return _claims(tx, worker, "claimed")


def assigned(tx: Session, worker: str) -> list[Claim]:
    """Return attempts that were assigned to a worker and not claimed."""
    return _claims(tx, worker, "assigned")


def spent_s(tx: Session, claim: Claim) -> float:
    """Return the total seconds of the job's earlier attempts, from claim to end.

    Other workers may have claimed and ended them, so both times are from the database's clock.
    """
    query = select(Attempt.claimed_at, Attempt.ended_at).where(
        Attempt.job == claim.job, Attempt.n < claim.attempt
    )
    return sum(
        (ended - claimed).total_seconds()
        for claimed, ended in tx.execute(query)
        if claimed is not None and ended is not None
    )


def open_attempt(tx: Session, job_id: str) -> int | None:
    """Return the number of the attempt that writes; 0: none now. None: there is no such job."""
    query = select(Job.attempt, Job.state).where(Job.id == job_id, Job.deleted_at.is_(None))
    row = tx.execute(query).one_or_none()
    if row is None:
        return None
    return row.attempt if row.state in LIVE else 0


def of_job(tx: Session, job_id: str) -> list[Attempt]:
    """Return the attempts of a job, first to last."""
    return list(tx.scalars(select(Attempt).where(Attempt.job == job_id).order_by(Attempt.n)))


def _claims(tx: Session, worker: str, state: str) -> list[Claim]:
    rows = tx.execute(
        select(Job.id, Job.attempt, Job.fence)
        .join(Attempt, (Attempt.job == Job.id) & (Attempt.n == Job.attempt))
        .where(
            Job.state.in_(LIVE),
            Attempt.fence == Job.fence,
            Attempt.worker == worker,
            Attempt.state == state,
        )
    )
    return [Claim(*row) for row in rows]


def _close(tx: Session, job_id: str, fence: int, state: str, exit_kind: ExitKind) -> None:
    tx.execute(
        update(Attempt)
        .where(Attempt.job == job_id, Attempt.fence == fence)
        .values(state=state, exit_kind=exit_kind, ended_at=database_time(tx))
    )
    held = (Device.job == job_id, Device.fence == fence)
    # Wait for a dispatcher that is giving it a core, in the order in which dispatchers lock; then
    # this core is freed as well.
    tx.execute(
        select(Device.id).where(*held).order_by(Device.worker, Device.id).with_for_update()
    ).all()
    tx.execute(update(Device).where(*held).values(job=None, fence=None))
    probes.close(tx, job_id)
    if tx.scalar(select(Job.state).where(Job.id == job_id)) in ENDED:
        commands.reject_pending(tx, job_id)
    ended = select(Job.id).where(Job.id == job_id, Job.state.in_(ENDED)).exists()
    tx.execute(
        update(Command)
        .where(Command.job == job_id, Command.state == "pending", ended)
        .values(state="applied")
    )


def _crashes(tx: Session, claim: Claim, failures: int) -> int:
    """Return the number of consecutive crashes including this one, since the last progress."""
    earlier = tx.scalars(
        select(Attempt.exit_kind)
        .where(Attempt.job == claim.job, Attempt.n < claim.attempt)
        .order_by(Attempt.n.desc())
        .limit(max(0, failures - 1))
    )
    return 1 + sum(1 for _ in takewhile(lambda kind: kind == "crash", earlier))


def _given_up(
    failures: int, crashes: int, reason: str, error: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the error of a job that is not retried."""
    if crashes >= CRASH_LOOP:
        failure = CrashLoop(f"The training process crashed {crashes} times in a row: {reason}.")
        where = {key: (error or {}).get(key) for key in ("rank", "layer", "step", "log_tail")}
        return {**failure.as_dict(), **where}
    if error is None:
        failure = WorkerLost(
            f"The job lost its worker or process {failures} times without progress; last: {reason}."
        )
        return {**failure.as_dict(), "log_tail": None}
    times = f" (failure {failures} without progress)" if failures > 1 else ""
    return {"log_tail": None, **error, "message": f"{error['message']}{times}"}
