"""The desk: one attempt of one job, from its claim to its end.

Claims it, has a rank forked for it, stores what the rank says, passes commands down, and judges
the end. Everything it writes is fenced: one that was given up for dead finds that its writes
match nothing, and stops. It never waits for the ledger with its hands off the rank.
"""

import signal
import time
from typing import Any

import structlog

from engine.spool import SpoolDamaged, read_frames
from glasshouse.errors import EngineFailed, RunFailure, StorageFailed
from models import attempts, captures, checkpoints, jobs, probes
from models.attempts import Beat, Claim
from models.database import Transaction
from models.tables import Job
from worker import processes, verdict, workplace
from worker.draining import NO_SPACE, Drain
from worker.folding import Folding
from worker.logs import Log
from worker.nursery import STREAMS, NurseryLost, log_path
from worker.ranks import Exit, Rank
from worker.shipping import BadRecord, Shipment, Sorter
from worker.station import AWAY, Station
from worker.stopping import Stop
from worker.usage import Usage
from worker.verdict import Again, Ended
from worker.watching import Watching

_log: Any = structlog.get_logger()

SHIP_EVERY_S = 0.05
BEAT_EVERY_S = 1.0
MAX_RECORDS = 1000
_FRESH_S = 0.005  # the first step is what people wait for
_BUSY_S = 0.01
_IDLE_S = 0.04
_IDLE_AFTER_S = 2.0
_RETRY_S = 0.5


class Fenced(Exception):
    """This attempt has lost its job."""


def supervise(station: Station, job_id: str) -> None:
    """Run the attempt that waits for this worker, if there is one; a doorbell's whole work."""
    with station.database.write() as tx:
        claimed = attempts.claim(tx, job_id, station.name)
    if claimed is None:
        return
    with structlog.contextvars.bound_contextvars(attempt=claimed[0].attempt):
        supervisor = Supervisor(station, *claimed)
        supervisor.run()
        station.bells.changed(job_id)
        if supervisor.has_ended_job:
            station.dispatch()  # its devices are free, and the rest can wait
            supervisor.tidy()


class Supervisor:
    """Runs one attempt."""

    def __init__(self, station: Station, claim: Claim, job: Job) -> None:
        self._station = station
        self._claim = claim
        self._job = job
        self._dir = station.work / claim.job / str(claim.attempt)
        self._logs = [Log(log_path(self._dir, name), name) for name in STREAMS]
        self._sorter = Sorter(claim, job.owner, self._dir)
        buffered = station.settings.capture_buffer_bytes
        self._drain = Drain.of(claim, station.artifacts, buffered, station.space)
        self._register = workplace.Register(station.work)
        self._rank: Rank | None = None
        self._stop: Stop | None = None
        self._usage: Usage | None = None
        self._began = False
        self._offset = 0
        self._pending: Shipment | None = None
        self._tried = self._behind = False
        self._end: dict[str, Any] | None = None
        self._beat: Beat | None = None
        self._num_commands = 0
        self._commands: list[str] = []
        self._probes = Watching(self._dir)
        self._folding = Folding(station.database, claim)
        self.has_ended_job = False
        self._force = False
        self._wrote_at = self._shipped_at = self._retry_at = 0.0
        saving: dict[str, int] = job.resolved.get("checkpoint", {}) if job.kind == "train" else {}
        self._keep_last = saving.get("keep_last", 3)

    def run(self) -> None:
        """Run it to its end, whatever happens."""
        try:
            self._close(self._work())
        except Fenced:
            _log.warning("fenced_out")
            self._end_rank(gently=True)
        except AWAY:
            _log.exception("ledger_away_at_the_end")  # the lease runs out, another worker takes it
        except Exception:
            _log.exception("supervisor_failed")
            self._end_rank()
            failure = EngineFailed("The worker failed in a way it did not expect.")
            self._close(Ended("failed", "supervisor_failed", failure.as_dict()))
        finally:
            self._end_rank()
            self._drain.close()
            workplace.remove(self._dir)

    def tidy(self) -> None:
        """Fold what is left of the statistics of a job that has ended."""
        self._folding.finish()

    def _work(self) -> Ended | Again:
        oom_kills = processes.oom_kills()
        try:
            exit_ = self._watch(*self._start())
        except NurseryLost as error:
            stopping = self._station.stopping.is_set()
            return Again("nursery_lost", str(error), counted=not stopping)
        except RunFailure as failure:
            self._end_rank()
            return Ended("failed", failure.category, failure.as_dict())
        except (SpoolDamaged, BadRecord) as error:
            self._end_rank()
            failure = EngineFailed(f"What the training process wrote cannot be read: {error}")
            return Ended("failed", "spool_damaged", failure.as_dict())
        if exit_ is None:
            return verdict.unkillable(cancelled=self._cancelled)
        return verdict.judge(
            self._end,
            exit_,
            cancelled=self._cancelled,
            stopping=self._station.stopping.is_set(),
            out_of_memory=processes.oom_kills() != oom_kills,
        )

    def _start(self) -> tuple[Rank, Stop]:
        station, settings = self._station, self._station.settings
        env = station.insist(self._prepare)
        while not station.nursery.wait_ready(BEAT_EVERY_S):
            self._beat_if_due()
            if station.stopping.is_set():
                raise NurseryLost("the worker stops")
        self._rank = rank = station.nursery.fork(self._dir, env)
        self._register.note(rank.identity)
        gpus = [uuid for uuid in env["CUDA_VISIBLE_DEVICES"].split(",") if uuid]
        self._usage = Usage(rank.identity.pid, gpus)
        self._stop = stop = Stop(rank, grace_s=settings.grace_s, kill_s=settings.kill_s)
        _log.info("rank_started", pid=rank.identity.pid)
        return rank, stop

    def _prepare(self) -> dict[str, str]:
        with self._station.database.read() as tx:
            described, env = workplace.describe(tx, self._station.artifacts, self._claim, self._job)
        workplace.prepare(self._dir, described | {"ring": self._drain.name})
        self._probes.told(described["probes"])
        return env

    def _watch(self, rank: Rank, stop: Stop) -> Exit | None:
        """Watch the rank until it has ended and all that it said is stored."""
        while True:
            exit_ = rank.wait(self._pause())
            self._look(final=exit_ is not None)
            self._beat_if_due()
            self._folding.turn()
            if self._cancelled or self._station.stopping.is_set():
                stop.ask(force=self._force)
            self._probes.tell(rank)
            stop.press()
            if exit_ is not None and self._pending is None and self._drain.idle:
                return exit_
            if exit_ is not None:
                self._hurry()
                time.sleep(_BUSY_S)  # the ledger is away; the spool keeps what was said
            if stop.hopeless:
                return None

    def _hurry(self) -> None:
        """After the end of the rank, a disk that hangs may not keep the job for ever."""
        settings = self._station.settings
        ends_now = self._cancelled or self._station.stopping.is_set()
        if self._drain.stuck_for_s() > (settings.kill_s if ends_now else settings.grace_s):
            self._drain.abandon()

    def _pause(self) -> float:
        if not self._began:
            return _FRESH_S
        idle = time.monotonic() - self._shipped_at > _IDLE_AFTER_S
        return _IDLE_S if idle else _BUSY_S

    def _look(self, *, final: bool) -> None:
        """Read what is new and store it; with ``final``, all there is."""
        while True:
            if self._pending is None and (final or self._ship_due):
                self._pending = self._read(final=final)
            if self._pending is None or not self._ship(self._pending):
                return
            self._pending = None

    @property
    def _ship_due(self) -> bool:
        return self._behind or time.monotonic() - self._shipped_at >= SHIP_EVERY_S

    def _read(self, *, final: bool) -> Shipment | None:
        records, offset = read_frames(self._dir / "spool", self._offset, MAX_RECORDS)
        printed = [event for log in self._logs for event in log.read(final=final)]
        used = self._usage.figures() if self._usage is not None and not final else {}
        lots = self._drain.finished()
        if not (records or printed or used or lots):
            return None
        shipment = self._sorter.sort(records, (self._offset, offset))
        self._sorter.add_usage(used, shipment)
        shipment.batch.events += printed
        shipment.take(lots)
        for record in shipment.tensors:
            self._drain.take(record)
        self._tried = False
        self._behind = len(records) == MAX_RECORDS
        return shipment

    def _ship(self, shipment: Shipment) -> bool:
        """Store a shipment. False: the ledger or the disk is away; it stays pending."""
        if time.monotonic() < self._retry_at:
            return False
        if shipment.batch.checkpoints and not self._tried:
            # who resumes from it does not come by these steps again: their tensors go first
            shipment.take(self._drain.finished())
            if not self._drain.idle:
                return False
        try:
            shipment.move_files(self._station.artifacts)
            self._store(shipment)
        except AWAY as error:
            _log.warning("ledger_away", error=str(error))
            return self._later()
        except OSError as error:
            if error.errno in NO_SPACE:
                _log.warning("disk_full")
                return self._later()
            raise StorageFailed(f"A file of the job could not be stored: {error}") from error
        self._station.tally.shipped(shipment.batch.events)
        self._offset = shipment.offsets[1]
        self._drain.release(shipment.lots)
        self._end = shipment.end or self._end
        self._shipped_at = time.monotonic()
        self._station.bells.changed(self._claim.job)
        return True

    def _later(self) -> bool:
        self._tried = True
        self._retry_at = time.monotonic() + _RETRY_S
        if self._station.stopping.is_set() and self._stop is not None and self._stop.signalled:
            raise Fenced  # no time left: the lease will run out
        return False

    def _store(self, shipment: Shipment) -> None:
        claim, lease_ms = self._claim, self._station.lease_ms
        gone: list[str] = []
        attempts.prepare(shipment.batch)
        with self._station.database.write() as tx:
            before, after = shipment.offsets
            if before != after and not self._began:
                attempts.run(tx, claim, lease_ms=lease_ms)
            if self._tried and self._is_stored(tx, shipment):
                beat = attempts.beat(tx, claim, lease_ms=lease_ms)  # only its answer was lost
            else:
                beat = attempts.ship(
                    tx, claim, shipment.batch, offsets=shipment.offsets, lease_ms=lease_ms
                )
            if beat is not None and shipment.batch.checkpoints:
                old = checkpoints.superseded(tx, claim.job, self._keep_last)
                gone = [row.key for row in old]
        self._began = self._began or before != after
        self._heard(beat)
        for key in gone:
            self._station.artifacts.delete(key)

    def _is_stored(self, tx: Transaction, shipment: Shipment) -> bool:
        """Whether an earlier try was committed and only the answer was lost."""
        before, after = shipment.offsets
        if before != after:
            return attempts.shipped_up_to(tx, self._claim) == after
        kept = shipment.batch.captures
        return bool(kept) and captures.is_there(tx, kept[0]["id"])

    def _beat_if_due(self) -> None:
        every = min(BEAT_EVERY_S, self._station.settings.lease_s / 3)
        if time.monotonic() - max(self._wrote_at, self._retry_at - _RETRY_S) < every:
            return
        try:
            with self._station.database.write() as tx:
                beat = attempts.beat(tx, self._claim, lease_ms=self._station.lease_ms)
            self._heard(beat)
        except AWAY as error:
            _log.warning("ledger_away", error=str(error))
            self._later()

    def _heard(self, beat: Beat | None) -> None:
        if beat is None:
            raise Fenced
        self._wrote_at = time.monotonic()
        self._beat = beat
        if beat.num_commands != self._num_commands:
            with self._station.database.read() as tx:
                pending = jobs.commands_pending(tx, self._claim.job)
                if any(command.body["do"] == "probes" for command in pending):
                    self._probes.wanted = probes.wanted(tx, self._claim.job)
            stops = [command for command in pending if command.body["do"] == "cancel"]
            self._commands = [command.id for command in stops]
            self._force = any(command.body.get("force") for command in stops)
            self._num_commands = beat.num_commands

    @property
    def _cancelled(self) -> bool:
        return self._beat is not None and self._beat.cancel_requested

    def _close(self, end: Ended | Again) -> None:
        """Write the end into the ledger."""
        stored = self._station.insist(lambda: self._write_end(end))
        self.has_ended_job = stored and isinstance(end, Ended)
        _log.info("attempt_ended", exit_kind=end.exit_kind, stored=stored)

    def _write_end(self, end: Ended | Again) -> bool:
        with self._station.database.write() as tx:
            if isinstance(end, Again):
                return attempts.give_up(
                    tx,
                    self._claim,
                    exit_kind=end.exit_kind,
                    reason=end.reason,
                    max_failures=self._station.settings.max_infra_failures,
                    counted=end.counted,
                )
            attempts.applied(tx, self._claim, self._commands, self._sorter.step)
            error = end.error and {"log_tail": self._logs[1].tail(), **end.error}
            return attempts.finish(tx, self._claim, end.state, exit_kind=end.exit_kind, error=error)

    def _end_rank(self, *, gently: bool = False) -> None:
        """See to it that nothing of the attempt runs any more."""
        rank, self._rank = self._rank, None
        if self._usage is not None:
            self._usage.close()
        if rank is None:
            return
        if gently and rank.wait(0) is None:
            rank.signal(signal.SIGTERM)
            rank.wait(self._station.settings.kill_s)
        rank.signal(signal.SIGKILL)
        rank.wait(self._station.settings.kill_s)
        rank.close()
        processes.wait_gone(rank.identity, self._station.settings.kill_s)
        processes.kill_orphans(rank.identity)
        self._register.forget(rank.identity)
