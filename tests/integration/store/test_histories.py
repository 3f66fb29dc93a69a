"""Random histories of jobs, checked against rules that are implemented a second time.

A hypothesis state machine runs every operation of the store in any order: supervisors keep writing
after their lease expired, leases expire, wake-ups arrive twice. The model beside it uses no SQL. It
states the expected rows, and after each step the database must match it. A lease expires because
the test sets its time back, not by waiting.

``HISTORIES=1000`` generates more and longer histories.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import delete, select, update

from glasshouse import jsonio
from glasshouse.errors import CannotPause, JobEnded, JobNotEnded, JobNotFound, JobNotPaused
from models.database import Database
from models.jobs import attempts, jobs, leases, pausing, shipments
from models.jobs.checkpoints import StartPoint
from models.jobs.endings import Backoff, ExitKind
from models.jobs.leases import Claim
from models.observations import events, metrics
from models.tables import Attempt, Device, Job

from .factories import losses, make_job, make_worker

LEASE_MS = 3_600_000
"""So long that none runs out by itself while the test is slow."""
NUM_CORES = 2
MAX_RESTARTS, MAX_CRASHES = 3, 3
AT_ONCE = Backoff(0.0, 0.0)
NUM_HISTORIES = int(os.environ.get("HISTORIES", "0"))
JOB = st.sampled_from([0, 0, 0, 1, 1, 2, 3])
WHO = st.sampled_from([0, 0, 0, 1, 2])
"""Which of the claims on a job: the newest is 0, and the others are of the dead."""


@dataclass
class Told:
    """What must be true of one job."""

    state: str = "queued"
    cancelled: bool = False
    resumes: bool = False
    """As soon as it is paused."""
    failures: int = 0
    crashes: int = 0
    """One after the other, until now."""
    moves: list[tuple[str | None, str]] = field(default_factory=lambda: [(None, "queued")])
    log: list[Any] = field(default_factory=lambda: ["state"])
    """The types of its events; of metrics, the step."""
    num_attempts: int = 0
    waits_for_claim: bool = False
    claims: list[Claim] = field(default_factory=list[Claim])
    """All that were ever given, the newest last."""
    holds: Claim | None = None
    has_device: bool = False
    lease_ms: int | None = None
    offset: int = 0
    next_step: int = 0
    shown: list[int] = field(default_factory=list[int])
    """The steps that a reader sees."""

    def move(self, to: str) -> None:
        self.moves.append((self.state, to))
        self.log.append("state")
        self.state = to

    def let_go(self) -> None:
        self.holds, self.has_device, self.lease_ms, self.waits_for_claim = None, False, None, False

    def end(self, state: str) -> None:
        self.move(state)
        self.log.append("end")
        self.let_go()

    @property
    def has_ended(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")

    def give_up(self, kind: ExitKind) -> None:
        """Nobody works on it any more: it is cancelled if that was asked, else tried again."""
        counted = kind != "interrupted"
        self.failures += counted
        self.crashes = self.crashes + 1 if kind == "crash" else 0
        if self.cancelled:
            self.end("cancelled")
        elif self.state == "pausing":
            self.move("paused")
            self.let_go()
            if self.resumes:
                self.resume()
        elif counted and (self.failures > MAX_RESTARTS or self.crashes >= MAX_CRASHES):
            self.end("failed")
        else:
            self.move("queued")
            self.let_go()

    def resume(self) -> None:
        self.move("queued")
        self.resumes = False


class Histories(RuleBasedStateMachine):
    """Everything that may happen to some jobs and two cores."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.told: dict[str, Told] = {}
        self.made: list[str] = []
        self.ended: dict[str, Any] = {}
        """Rows of ended jobs, as they were at their end."""

    @initialize()
    def start_over(self) -> None:
        with self.database.write() as tx:
            tx.execute(delete(Job))
            tx.execute(update(Device).values(job=None, fence=None))

    # --- what people do ---------------------------------------------------------------------

    @precondition(lambda self: self._num_open() <= NUM_CORES)
    @rule()
    def submit(self) -> None:
        job = make_job(self.database)
        self.told[job.id] = Told()
        self.made.append(job.id)

    @rule(number=JOB)
    def cancel(self, number: int) -> None:
        job_id, told = self._job(number)
        with self.database.write() as tx:
            if told is None:
                with pytest.raises(JobNotFound):
                    jobs.get(tx, job_id, None)
                return
            job = jobs.get(tx, job_id, None)
            if told.has_ended:
                with pytest.raises(JobEnded):
                    jobs.request_cancel(tx, job, by="ada", force=False)
                return
            jobs.request_cancel(tx, job, by="ada", force=False)
        told.cancelled = True
        if told.state in ("queued", "paused"):
            told.end("cancelled")
        elif told.state != "cancelling":
            told.move("cancelling")

    @rule(number=JOB)
    def pause(self, number: int) -> None:
        job_id, told = self._job(number)
        if told is None:
            return
        with self.database.write() as tx:
            job = jobs.get(tx, job_id, None)
            if told.has_ended or told.state == "cancelling":
                with pytest.raises(JobEnded if told.has_ended else CannotPause):
                    pausing.request_pause(tx, job)
                return
            pausing.request_pause(tx, job)
        if told.state == "queued":
            told.move("paused")
        elif told.state == "pausing":
            told.resumes = False
        elif told.state != "paused":
            told.move("pausing")

    @rule(number=JOB)
    def resume(self, number: int) -> None:
        job_id, told = self._job(number)
        if told is None:
            return
        with self.database.write() as tx:
            job = jobs.get(tx, job_id, None)
            if told.state not in ("paused", "pausing"):
                with pytest.raises(JobEnded if told.has_ended else JobNotPaused):
                    pausing.request_resume(tx, job)
                return
            pausing.request_resume(tx, job)
        if told.state == "paused":
            told.resume()
        else:
            told.resumes = True

    @rule(number=JOB)
    def forget(self, number: int) -> None:
        job_id, told = self._job(number)
        if told is None:
            return
        with self.database.write() as tx:
            job = jobs.get(tx, job_id, None)
            if not told.has_ended:
                with pytest.raises(JobNotEnded):
                    jobs.delete(tx, job)
                return
            jobs.delete(tx, job)
        del self.told[job_id]
        self.ended.pop(job_id)

    # --- what workers do --------------------------------------------------------------------

    @rule(number=JOB)
    def assign(self, number: int) -> None:
        job_id, found = self._job(number)
        told = found or Told(state="gone")
        in_use = sum(other.has_device for other in self.told.values())
        with self.database.write() as tx:
            free = [device for device in tx.scalars(select(Device)) if device.job is None]
            assert len(free) == NUM_CORES - in_use
            if not free:
                return
            done = attempts.assign(tx, job_id, "w1", free[:1], LEASE_MS)
        assert done == (told.state == "queued")
        if done:
            told.move("starting")
            told.num_attempts += 1
            told.waits_for_claim = told.has_device = True
            told.lease_ms, told.offset = LEASE_MS, 0

    @rule(number=JOB, times=st.integers(1, 3), back_to=st.integers(0, 6))
    def ring(self, number: int, times: int, back_to: int = 0) -> None:
        """A bell may ring more than once, and late. A later attempt starts at a step."""
        job_id, found = self._job(number)
        told = found or Told()
        first = min(back_to, told.next_step) if told.num_attempts > 1 else 0
        for _ in range(times):
            with self.database.write() as tx:
                taken = attempts.claim(tx, job_id, "w1", StartPoint(step=first))
            assert (taken is not None) == told.waits_for_claim
            if taken is not None:
                told.waits_for_claim = False
                told.holds = taken[0]
                told.claims.append(taken[0])
                told.log.append("attempt")
                told.shown = [step for step in told.shown if step < first]
                told.next_step = first

    @rule(number=JOB)
    def start(self, number: int) -> None:
        """The usual way, at once: else few histories would come far."""
        self.assign(number)
        self.ring(number, 1)
        self.begin(number, 0)

    @rule()
    def fall_silent(self) -> None:
        """Every lease expires, and the old supervisors keep writing beside their successors."""
        self.pass_time(2 * LEASE_MS)
        self._sweep()
        for number in range(min(NUM_CORES, self._num_open())):
            self.start(number)

    @rule(number=JOB, which=WHO)
    def begin(self, number: int, which: int) -> None:
        if (found := self._claim(number, which)) is None:
            return
        told, claim, is_holder = found
        with self.database.write() as tx:
            beat = attempts.run(tx, claim, lease_ms=LEASE_MS)
        assert (beat is not None) == is_holder
        if is_holder:
            told.lease_ms = LEASE_MS
            if told.state == "starting":
                told.move("running")

    @rule(number=JOB, which=WHO, num=st.integers(0, 3))
    def ship(self, number: int, which: int, num: int) -> None:
        if (found := self._claim(number, which)) is None:
            return
        told, claim, is_holder = found
        steps = range(told.next_step, told.next_step + num)
        offsets = (told.offset, told.offset + 10 * num)
        with self.database.write() as tx:
            batch = losses(*((step, 0.5) for step in steps))
            beat = shipments.ship(tx, claim, batch, offsets=offsets, lease_ms=LEASE_MS)
        assert (beat is not None) == is_holder
        if beat is not None:
            assert (beat.state, beat.cancel_requested) == (told.state, told.cancelled)
            told.log += steps
            told.shown += steps
            told.next_step += num
            told.offset, told.lease_ms = offsets[1], LEASE_MS

    @rule(number=JOB, which=WHO)
    def beat(self, number: int, which: int) -> None:
        if (found := self._claim(number, which)) is None:
            return
        told, claim, is_holder = found
        with self.database.write() as tx:
            beat = leases.beat(tx, claim, lease_ms=LEASE_MS)
        assert (beat is not None) == is_holder
        if is_holder:
            told.lease_ms = LEASE_MS

    @rule(number=JOB, which=WHO, state=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def finish(self, number: int, which: int, state: str) -> None:
        if (found := self._claim(number, which)) is None:
            return
        told, claim, is_holder = found
        may = {
            "starting": ["failed"],
            "running": ["succeeded", "failed"],
            "pausing": ["succeeded", "failed"],
            "cancelling": ["succeeded", "failed", "cancelled"],
        }
        if is_holder and state not in may[told.state]:
            return
        with self.database.write() as tx:
            done = attempts.finish(tx, claim, state, exit_kind="internal")
        assert done == is_holder
        if done:
            told.end(state)

    @rule(number=JOB, which=WHO, kind=st.sampled_from(["lease_lost", "crash", "interrupted"]))
    def give_up(self, number: int, which: int, kind: ExitKind) -> None:
        if (found := self._claim(number, which)) is None:
            return
        told, claim, is_holder = found
        with self.database.write() as tx:
            done = attempts.give_up(
                tx,
                claim,
                exit_kind=kind,
                reason="a test",
                backoff=AT_ONCE,
                counted=kind != "interrupted",
            )
        assert done == is_holder
        if done:
            told.give_up(kind)

    # --- what time does ---------------------------------------------------------------------

    @rule(ms=st.sampled_from([LEASE_MS * 2 // 5, LEASE_MS * 6 // 5]))
    def pass_time(self, ms: int) -> None:
        """No sum of these is just a lease: whether that has run out would be a matter of luck."""
        with self.database.write() as tx:
            tx.execute(update(Job).values(lease_expires_ms=Job.lease_expires_ms - ms))
        for told in self.told.values():
            if told.lease_ms is not None:
                told.lease_ms -= ms

    @rule()
    def sweep(self) -> None:
        self._sweep()

    def _sweep(self) -> None:
        with self.database.read() as tx:
            lost = leases.expired(tx)
        silent = {
            job_id
            for job_id, told in self.told.items()
            if told.lease_ms is not None and told.lease_ms <= 0
        }
        assert {claim.job for claim in lost} == silent
        for claim in lost:
            with self.database.write() as tx:
                assert leases.still_expired(tx, claim)
                assert attempts.give_up(
                    tx, claim, exit_kind="lease_lost", reason="silent", backoff=AT_ONCE
                )
            self.told[claim.job].give_up("lease_lost")

    # --- what must hold ---------------------------------------------------------------------

    @invariant()
    def all_is_as_told(self) -> None:
        with self.database.read() as tx:
            for job_id, told in self.told.items():
                job = jobs.get(tx, job_id, None)
                log = [jsonio.loads(entry.as_json()) for entry in events.after(tx, job_id, 0)]
                assert job.state == told.state
                assert (job.paused_at is not None) == (told.state == "paused")
                assert job.last_seq == len(log)
                assert [entry["seq"] for entry in log] == list(range(1, len(log) + 1))
                shown = [entry.get("step", entry["type"]) for entry in log]
                assert shown == told.log
                self._readers_see(tx, job_id, told, [entry for entry in shown if entry == "state"])
                moved = [(item["from"], item["to"]) for item in log if item["type"] == "state"]
                assert moved == told.moves
                assert (log[-1]["type"] == "end") == told.has_ended
                self._attempts_are_as_told(tx, job, told)
            held = [device.job for device in tx.scalars(select(Device)) if device.job is not None]
        assert sorted(held) == sorted(name for name, told in self.told.items() if told.has_device)

    def _readers_see(self, tx: Any, job_id: str, told: Told, states: list[Any]) -> None:
        page = events.read(tx, job_id, 0)
        log = [jsonio.loads(entry.as_json()) for entry in page.events]
        assert [entry["step"] for entry in log if "step" in entry] == told.shown
        assert [entry["type"] for entry in log if entry["type"] == "state"] == states
        points = metrics.query(tx, job_id, "loss")
        assert [point.step for point in points] == told.shown
        whole = metrics.query(tx, job_id, "loss", attempt_filter="all")
        assert len(whole) == len([entry for entry in told.log if isinstance(entry, int)])

    def _attempts_are_as_told(self, tx: Any, job: Job, told: Told) -> None:
        made = attempts.of_job(tx, job.id)
        assert len(made) == told.num_attempts
        fences = [attempt.fence for attempt in made]
        assert fences == sorted(set(fences))
        still = [attempt for attempt in made if attempt.state in ("assigned", "claimed")]
        assert len(still) == (told.has_device and not told.has_ended)
        if told.has_ended:
            row = {column.name: getattr(job, column.name) for column in Job.__table__.columns}
            assert self.ended.setdefault(job.id, row) == row

    def teardown(self) -> None:
        """From wherever it stands, every job can be brought to an end, and leaves nothing."""
        while self._num_open():
            for number in range(self._num_open()):
                self.cancel(number)
            self.pass_time(2 * LEASE_MS)
            self._sweep()
        assert all(told.has_ended for told in self.told.values())
        self.all_is_as_told()
        with self.database.read() as tx:
            open_ones = select(Attempt).where(Attempt.state.in_(["assigned", "claimed"]))
            assert not tx.scalars(open_ones).all()

    def _num_open(self) -> int:
        return sum(not told.has_ended for told in self.told.values())

    def _job(self, number: int) -> tuple[str, Told | None]:
        """A job: active ones first, then ended ones, then deleted ones."""
        ranked = sorted(self.made, key=lambda name: name not in self.told)
        ranked.sort(key=lambda name: name not in self.told or self.told[name].has_ended)
        name = ranked[number] if number < len(ranked) else "job_unheard_of"
        return name, self.told.get(name)

    def _claim(self, number: int, which: int) -> tuple[Told, Claim, bool] | None:
        """One of the claims that were ever given on a job, and whether it is the one in force."""
        _, told = self._job(number)
        if told is None or which >= len(told.claims):
            return None
        claim = told.claims[-1 - which]
        return told, claim, claim == told.holds


def test_no_history_breaks_a_promise(database: Database):
    make_worker(database, cores=NUM_CORES)
    run_state_machine_as_test(
        lambda: Histories(database),
        settings=settings(
            max_examples=NUM_HISTORIES or (30 if database.is_sqlite else 15),
            stateful_step_count=100 if NUM_HISTORIES else 40,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
