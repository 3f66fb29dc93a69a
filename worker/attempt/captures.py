"""Moves captured tensors from a rank's ring to files, in a thread of its own.

A slow disk delays only the tensors, not losses, heartbeats and commands. The rank may reuse the
space in the ring only after the rows that name the file are in the database.
"""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import structlog

from engine.probes.tensors.drain import dropped, stored, write_file
from engine.probes.tensors.ring import Ring, default_num_bytes
from glasshouse.failpoints import failpoint
from glasshouse.ids import new_id
from models.jobs.leases import Claim
from models.observations.events import NewEvent
from models.storage.artifacts import Artifacts
from models.storage.disk_space import Space

_log: Any = structlog.get_logger()
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_RETRY_S = 0.5


class BadRecord(Exception):
    """A rank wrote something that is not a valid record."""


@dataclass(slots=True)
class CapturedTensors:
    """The tensors of one record, in a file or dropped; their rows are not stored yet."""

    end: int
    """The position up to which the ring is free once the rows are stored."""
    captures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    events: list[NewEvent] = field(default_factory=list[NewEvent])


class Drain:
    """Empties the ring of one attempt."""

    def __init__(
        self, claim: Claim, artifacts: Artifacts, ring: Ring | None, space: Space | None = None
    ) -> None:
        self._claim = claim
        self._artifacts = artifacts
        self._ring = ring
        self._space = space
        self._changed = threading.Condition()
        self._waiting: deque[dict[str, Any]] = deque()
        self._finished: list[CapturedTensors] = []
        self._progress_at = time.monotonic()
        self._error: Exception | None = None
        self._closing = False
        self._hurry = False
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str | None:
        """The name by which the rank opens the ring; None: the rank writes the files itself."""
        return None if self._ring is None else self._ring.name

    @property
    def idle(self) -> bool:
        """Whether nothing is left to write to files or to store in the database."""
        with self._changed:
            return not self._waiting and not self._finished

    def take(self, record: dict[str, Any]) -> None:
        """Take a ``captures`` record whose tensors are in the ring."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
            self._thread.start()
        with self._changed:
            if not self._waiting:
                self._progress_at = time.monotonic()
            self._waiting.append(record)
            self._changed.notify_all()

    def finished(self) -> list[CapturedTensors]:
        """Return what has become ready to be stored since the last call.

        Raises:
            BadRecord: a record was invalid.
        """
        with self._changed:
            if self._error is not None:
                raise BadRecord(f"captures: {self._error}") from self._error
            lots, self._finished = self._finished, []
            return lots

    def release(self, lots: list[CapturedTensors]) -> None:
        """Free the ring space of tensors whose rows are stored, for the rank."""
        if self._ring is not None:
            for lot in lots:
                self._ring.release(lot.end)

    def stuck_for_s(self) -> float:
        """Return for how long the first waiting record has made no progress, seconds."""
        with self._changed:
            return time.monotonic() - self._progress_at if self._waiting else 0.0

    def abandon(self) -> None:
        """Write nothing more: drop and count the waiting records."""
        with self._changed:
            self._hurry = True
            while self._waiting:
                record = self._waiting.popleft()
                self._finished.append(_lost(record, TimeoutError("there was no time to store it")))
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and discard the waiting records without counting them."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_RETRY_S)  # a disk that hangs keeps only this thread
        if self._ring is not None:
            self._ring.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                record = self._waiting[0]
            lot, problem = None, None
            try:
                lot = self._store(record)
            except Exception as error:  # the supervisor reports it; a dead thread would hang it
                problem = error
            with self._changed:
                if not self._waiting or self._waiting[0] is not record:
                    continue  # abandoned, and counted
                if problem is not None:
                    self._error = problem
                    return
                if lot is None:
                    self._changed.wait(_RETRY_S)
                    continue
                self._waiting.popleft()
                self._finished.append(lot)
                self._progress_at = time.monotonic()

    def _store(self, record: dict[str, Any]) -> CapturedTensors | None:
        """Store the tensors of a record. Return None if the disk is full now."""
        if self._space is not None and self._space.short("artifacts"):
            # what is left is for losses and checkpoints
            return _lost(record, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        if self._ring is None:
            raise ValueError("the rank has no ring")
        key = new_key(self._claim)
        try:
            failpoint("capture.write")
            with self._artifacts.receive(key) as path:
                write_file(path, record, self._ring)
            failpoint("capture.stored")
        except OSError as error:
            if error.errno in NO_SPACE and not self._hurry:
                _log.warning("disk_full")
                return None
            _log.warning("captures_dropped", error=str(error))
            return _lost(record, error)
        return in_file(self._claim, stored(record, key), key, end=int(record["end"]))


def open_ring(num_bytes: int) -> Ring | None:
    """Open a ring of that size or what memory allows. Return None if the rank writes the files."""
    with contextlib.suppress(OSError):
        return Ring.shared(default_num_bytes(num_bytes))
    return None


def new_key(claim: Claim) -> str:
    """Return the key of a new file of tensors."""
    return f"jobs/{claim.job}/{claim.attempt}/captures/{new_id('cap')}.safetensors"


def in_file(claim: Claim, record: dict[str, Any], key: str, *, end: int = 0) -> CapturedTensors:
    """Return the rows and events of the tensors in the file ``key``."""
    lot = CapturedTensors(end)
    at = datetime.fromisoformat(record["at"]).astimezone(UTC)
    for tensor in record["tensors"]:
        capture = new_id("cap")
        row = {"step": record["step"], "phase": record["phase"], **tensor}
        lot.captures.append({"id": capture, "key": key, **row})
        where = f"{quote(row['layer'], safe='')}/{quote(row['kind'], safe='')}"
        href = f"/api/v1/jobs/{claim.job}/layers/{where}?step={row['step']}"
        if row["phase"] != "train":
            href += f"&phase={row['phase']}"
        if "rank" in row:
            href += f"&rank={row['rank']}"
        told = {name: value for name, value in row.items() if name != "tensor"}
        event = {"capture": capture, **told, "href": href}
        lot.events.append(NewEvent("capture", at, event, row["step"]))
    return lot


def _lost(record: dict[str, Any], error: Exception) -> CapturedTensors:
    told = dropped(record, error)
    at = datetime.fromisoformat(told["at"]).astimezone(UTC)
    if isinstance(error, OSError) and error.errno:  # do not reveal the path
        told["what"] = f"captures: {os.strerror(error.errno)}"
    event = NewEvent("dropped", at, {"what": told["what"], "count": told["count"]}, record["step"])
    return CapturedTensors(int(record["end"]), events=[event])
