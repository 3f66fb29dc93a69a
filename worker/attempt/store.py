"""Stores what a rank writes, and renews the lease of its attempt.

Every write is fenced: writes of an attempt that has lost its job match no row. While the database
is unavailable, the spool keeps what the rank wrote.
"""

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from engine.core.spool import read_frames
from glasshouse.errors import StorageFailed
from glasshouse.failpoints import failpoint
from glasshouse.spec.parallel import num_processes
from models.jobs import attempts, checkpoint_retention, leases, shipments
from models.jobs.checkpoint_retention import RetentionRule
from models.jobs.leases import LeaseState
from models.observations import outputs
from models.observations.events import NewEvent
from worker.attempt.captures import NO_SPACE, Drain, open_ring
from worker.attempt.control import CommandDelivery
from worker.attempt.logs import Log, Logs
from worker.attempt.records import Shipment, Sorter
from worker.attempt.resume import Attempt
from worker.context import AWAY
from worker.devices.usage import Usage
from worker.processes.fork_server import STREAMS, log_path, rank_directory
from worker.processes.ranks import Ranks

_log: Any = structlog.get_logger()

SHIP_EVERY_S = 0.05
BEAT_EVERY_S = 1.0
MAX_RECORDS = 1000
TRIM_BYTES = 16 * 1024**2
"""The disk space of stored records is freed in pieces of at least this size."""
_MIN_RECORDS = 20
_FRESH_S = 0.005  # users wait for the first step
_BUSY_S = 0.01
_IDLE_S = 0.04
_IDLE_AFTER_S = 2.0
_RETRY_S = 0.5
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


class Fenced(Exception):
    """This attempt has lost its job."""


class BatchSize:
    """How many records are stored at once: fewer while a transaction takes over 1/5 of a lease."""

    def __init__(self, lease_s: float) -> None:
        self._long_s = lease_s / 5
        self.most = MAX_RECORDS

    def is_long(self, took_s: float) -> bool:
        """Return whether a transaction took so long that it must renew the lease at its end."""
        return took_s > self._long_s

    def took(self, took_s: float) -> None:
        """Adapt to the duration of a transaction that has ended."""
        if self.is_long(took_s):
            self.most = max(_MIN_RECORDS, self.most // 2)
        elif took_s < self._long_s / 4:
            self.most = min(MAX_RECORDS, 2 * self.most)


class AttemptStore:
    """Reads what one attempt's rank writes and stores it."""

    def __init__(self, attempt: Attempt, control: CommandDelivery) -> None:
        self._context = context = attempt.context
        self._claim = claim = attempt.claim
        job, directory = attempt.job, attempt.directory
        self._directory = directory
        self._spool = directory / "spool"
        self._control = control
        self._logs = Logs(
            [
                Log(log_path(directory, name, rank), name, rank)
                for rank in range(num_processes(job.resolved))
                for name in STREAMS
            ]
        )
        self.sorter = Sorter(claim, job.owner, directory, job.summary)
        ring = open_ring(context.settings.capture_buffer_bytes)
        self.drain = Drain(claim, context.artifacts, ring, context.space)
        self.end: dict[str, Any] | None = None
        """The rank's ``end`` record."""
        self.offset = 0
        """The spool is stored up to this byte."""
        self._rank: Ranks | None = None
        self._usage: Usage | None = None
        self._began = False
        self._notes: list[NewEvent] = []
        self._own: list[dict[str, Any]] = []
        self._trimmed = 0
        self._pending: Shipment | None = None
        self._tried = self._behind = False
        self._num_shipped = 0
        self._batch_size = BatchSize(context.settings.lease_s)
        self._wrote_at = self._shipped_at = self._retry_at = 0.0
        self._keeping = RetentionRule.of(job.resolved)

    @property
    def idle(self) -> bool:
        """Whether everything read is stored."""
        return self._pending is None and self.drain.idle

    def attach(self, rank: Ranks, usage: Usage | None) -> None:
        """Set what is known once the rank has been started."""
        self._rank, self._usage = rank, usage

    def note(self, event: NewEvent) -> None:
        """Store an event of the worker with the next records."""
        self._notes.append(event)

    def report(self, records: Sequence[dict[str, Any]]) -> None:
        """Store records of the worker, in the rank's form, with the next ones of the rank."""
        self._own += records

    def log_tail(self, rank: int | None = None) -> str | None:
        """Return the last lines of a rank's standard error; see `Logs.tail`."""
        return self._logs.tail(rank)

    def read_end(self, rank: int) -> dict[str, Any] | None:
        """Return the ``end`` record that a rank has written, also if it is not stored yet."""
        spool, offset = rank_directory(self._directory, rank) / "spool", 0
        if rank == 0:
            offset = self.offset
        newest: dict[str, Any] = self.end or {} if rank == 0 else {}
        while (found := read_frames(spool, offset))[0]:
            newest, offset = found[0][-1], found[1]
        return newest if newest.get("type", "end") == "end" and newest else None

    def pause_s(self) -> float:
        """Return how long to wait before the next `look`, seconds."""
        if not self._began:
            return _FRESH_S
        if self._behind and self._pending is None:
            return 0
        idle = time.monotonic() - self._shipped_at > _IDLE_AFTER_S
        return _IDLE_S if idle else _BUSY_S

    def look(self, *, final: bool) -> None:
        """Read new records and store them; with ``final``, all of them.

        Without ``final`` it returns after one batch, so that commands reach a rank that writes
        faster than the database stores.

        Raises:
            Fenced: this attempt has lost its job.
            SpoolDamaged, BadRecord: what the rank wrote cannot be read.
            StorageFailed: a file of the job cannot be stored.
        """
        if self._pending is not None:
            self._logs.cut()  # the database is unavailable; the rank may still print
        while True:
            due = self._behind or time.monotonic() - self._shipped_at >= SHIP_EVERY_S
            if self._pending is None and (final or due):
                self._pending = self._read(final=final)
            if self._pending is None or not self._ship(self._pending):
                return
            self._pending = None
            if not final:
                return

    def beat_if_due(self) -> None:
        """Renew the lease when it is due, and receive the users' commands.

        Raises:
            Fenced: this attempt has lost its job.
        """
        every = min(BEAT_EVERY_S, self._context.settings.lease_s / 3)
        changes, at = self._control.cores.changes, time.monotonic()
        if changes:  # show them at once
            is_due = at >= self._retry_at
        else:
            is_due = at - max(self._wrote_at, self._retry_at - _RETRY_S) >= every
        if not is_due:
            return
        try:
            with self._context.database.write() as tx:
                beat = leases.beat(
                    tx, self._claim, lease_ms=self._context.lease_ms, changes=changes
                )
                failpoint("beat.commit")
            self._control.cores.stored(changes)
            self._heard(beat)
            if changes:
                self._context.notifier.job_changed(self._claim.job)
        except AWAY as error:
            _log.warning("database_unavailable", error=str(error))
            self._wait()

    def _read(self, *, final: bool) -> Shipment | None:
        records, offset = read_frames(self._spool, self.offset, self._batch_size.most)
        self._behind = len(records) == self._batch_size.most
        printed = self._logs.read(final=final)
        used = self._usage.figures() if self._usage is not None and not final else {}
        lots = self.drain.finished()
        noted, self._notes = self._notes, []
        own, self._own = self._own, []
        if not (records or printed or used or lots or noted or own):
            return None
        shipment = self.sorter.sort([*own, *records], (self.offset, offset))
        self.sorter.add_usage(used, shipment)
        shipment.batch.events += printed + noted
        shipment.take(lots)
        for record in shipment.tensors:
            self.drain.take(record)
        self._tried = False
        return shipment

    def _ship(self, shipment: Shipment) -> bool:
        """Store a shipment. Return False if it stays pending: it cannot be stored now."""
        if time.monotonic() < self._retry_at:
            return False
        if shipment.batch.checkpoints and not self._tried:
            # an attempt that resumes from it does not repeat these steps: store their tensors first
            shipment.take(self.drain.finished())
            if not self.drain.idle:
                return False
        failpoint("ship.begin")
        try:
            shipment.move_files(self._context.artifacts)
            self._store(shipment)
        except AWAY as error:
            _log.warning("database_unavailable", error=str(error))
            return self._later()
        except OSError as error:
            if error.errno in NO_SPACE:
                _log.warning("disk_full")
                return self._later()
            raise StorageFailed(f"A file of the job could not be stored: {error}") from error
        self._context.counters.shipped(shipment.batch.events)
        self._num_shipped += 1
        failpoint("ship.committed")
        self.offset = shipment.offsets[1]
        if self.offset - self._trimmed >= TRIM_BYTES and punch_hole(self._spool, self.offset):
            self._trimmed = self.offset
        self.drain.release(shipment.lots)
        for path in shipment.read_files:
            path.unlink(missing_ok=True)
        failpoint("ship.released")
        self.end = shipment.end or self.end
        self._shipped_at = time.monotonic()
        self._context.notifier.job_changed(self._claim.job)
        return True

    def _later(self) -> bool:
        self._tried = True
        self._wait()
        return False

    def _wait(self) -> None:
        self._retry_at = time.monotonic() + _RETRY_S
        is_signalled = self._rank is not None and self._rank.is_signalled
        if is_signalled and self._context.stopping.is_set():
            raise Fenced  # no time left: let the lease expire

    def _store(self, shipment: Shipment) -> None:
        claim, lease_ms = self._claim, self._context.lease_ms
        gone: list[str] = []
        shipments.prepare(shipment.batch)
        began = time.monotonic()
        with self._context.database.write() as tx:
            before, after = shipment.offsets
            if before != after and not self._began:
                attempts.run(tx, claim, lease_ms=lease_ms)
            if self._tried and shipments.num_shipments(tx, claim) > self._num_shipped:
                beat = leases.beat(tx, claim, lease_ms=lease_ms)  # stored; the answer was lost
            else:
                beat = shipments.ship(
                    tx, claim, shipment.batch, offsets=shipment.offsets, lease_ms=lease_ms
                )
            if beat is not None and shipment.batch.checkpoints:
                gone = checkpoint_retention.supersede(tx, claim.job, self._keeping)
                failpoint("keep.commit")
            if beat is not None:
                gone += outputs.remove(tx, claim.job, shipment.batch.removed_artifacts)
            if beat is not None and self._batch_size.is_long(time.monotonic() - began):
                leases.renew(tx, claim, lease_ms=lease_ms)
            failpoint("ship.commit")
        self._batch_size.took(time.monotonic() - began)
        self._began = self._began or before != after
        self._heard(beat)
        for key in gone:
            self._context.artifacts.delete(key)

    def _heard(self, beat: LeaseState | None) -> None:
        if beat is None:
            raise Fenced
        self._wrote_at = time.monotonic()
        self._control.receive(beat)


def punch_hole(path: Path, size: int) -> bool:
    """Free the disk space of the first ``size`` bytes of a file without changing its length.

    Return whether the system can do so: Linux can, on most file systems.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return libc.fallocate(handle, _KEEP_SIZE | _PUNCH_HOLE, 0, size) == 0
    finally:
        os.close(handle)
