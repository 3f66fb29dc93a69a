"""Controls a running rank: delivers users' commands, detects stalls and timeouts, holds it back.

Every write of an attempt returns a `LeaseState`, which says whether there are new commands or
changes of probes. The rank gets them as a file, whose name is sent through its lifeline. They apply
at the next step boundary, and so does another number of threads.

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

from glasshouse import jsonio
from models.database import Database
from models.jobs import commands, jobs
from models.jobs.leases import LeaseState
from models.observations import probes
from models.observations.events import NewEvent
from models.settings import Settings
from models.tables import Job, now
from worker.attempt.cores import Cores
from worker.processes.ranks import Ranks

_log: Any = structlog.get_logger()
_RETRY_S = 1.0
_CHECK_EVERY_S = 0.5


class CommandDelivery:
    """The commands, the list of probes and the number of threads of one attempt."""

    def __init__(self, database: Database, job: Job, directory: Path) -> None:
        """``directory``: the attempt's directory."""
        self.cores = Cores(job)
        """The CPU cores that the attempt has now."""
        self._database = database
        self._job = job.id
        self._directory = directory
        self.cancelled = False
        """Whether the user asked to cancel the job."""
        self.pausing = False
        """Whether the user asked to pause the job."""
        self.force = False
        """Whether to signal the rank at once."""
        self.stops: list[str] = []
        """The ids of the pending commands that cancel the job."""
        self.num_commands: int = 0
        """The number of commands to the job, of which each has been read."""
        self._commands: list[dict[str, Any]] = []
        self._delivered: set[str] = set()
        self._num_files = 0
        self._probes: dict[str, Any] | None = None
        self._revision = 0
        self._retry_at = 0.0

    def receive(self, beat: LeaseState) -> None:
        """Handle what a write of this attempt returned; read the commands if there are new ones."""
        self.cancelled = beat.cancel_requested
        self.pausing = beat.state == "pausing"
        self.cores.receive(beat)
        if beat.num_commands == self.num_commands:
            return
        with self._database.read() as tx:
            pending = jobs.commands_pending(tx, self._job)
            if any(command.body.get("do") == "probes" for command in pending):
                self._probes = probes.wanted(tx, self._job)
        new = [one for one in commands.orders(pending) if one["id"] not in self._delivered]
        self._commands = new
        stops = [command for command in pending if command.body.get("do") == "cancel"]
        self.stops = [command.id for command in stops]
        self.force = any(command.body.get("force") for command in stops)
        self.num_commands = beat.num_commands

    def delivered(self, description: dict[str, Any]) -> None:
        """Mark what is in the rank's ``job.json`` as delivered: commands, probes, threads."""
        self.cores.started(description["device"]["threads"])
        wanted: dict[str, Any] | None = description["probes"]
        self._revision = 0 if wanted is None else wanted["revision"]
        self._delivered |= {command["id"] for command in description["commands"]}

    def deliver(self, rank: Ranks) -> None:
        """Send news to the rank, once. Retry later if the file write fails."""
        self.cores.deliver(rank)
        wanted = self._probes
        revision = 0 if wanted is None else wanted["revision"]
        if revision > self._revision and self._send(rank, "probes", revision, wanted):
            self._revision = revision
        if self._commands and self._send(rank, "commands", self._num_files, self._commands):
            self._delivered |= {command["id"] for command in self._commands}
            self._num_files += 1
            self._commands = []

    def send(self, rank: Ranks, what: str, document: Any) -> bool:
        """Send a document to the rank; return False if it cannot be written now."""
        self._num_files += 1
        return self._send(rank, what, self._num_files, document)

    def _send(self, rank: Ranks, what: str, number: int, document: Any) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        name = f"{what}-{number}.json"
        try:
            (self._directory / name).write_text(jsonio.dumps(document))
        except OSError as error:  # a full disk is no reason to stop training
            _log.warning("not_delivered", what=what, error=str(error))
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        rank.tell({"do": what, "file": name})
        return True


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
        loads_first = resolved.get("kind") == "serve"  # large models, before its first record
        longest_s = max(self._stall_s, settings.stall_timeout_s)
        self._first_stall_s = longest_s if loads_first else self._stall_s
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
        if at - self._checked_at < min(_CHECK_EVERY_S, self._stall_s / 4):
            return None
        self._checked_at = at
        with contextlib.suppress(OSError):
            size = self._spool.stat().st_size
            if size != self.spool_bytes:
                self.spool_bytes = size
                self.reset()
        silent_s = self._clock() - self._progress_at
        limit_s = self._stall_s if self.spool_bytes else self._first_stall_s
        if self._is_reported or silent_s < limit_s:
            return None
        self._is_reported = True
        _log.warning("job_stalled", step=step, seconds=silent_s, action=self.on_stall)
        if self.on_stall != "warn":
            self.stalled_s = silent_s
        payload = {"step": step, "seconds": round(silent_s, 1), "action": self.on_stall}
        return NewEvent("stalled", now(), payload)


class Backpressure:
    """Stops a rank while too much of its spool is not stored.

    Losses and events are never dropped, and disks are finite. If the database is unavailable for
    long, the rank's process group is stopped. It continues once at most half the limit is left.
    """

    def __init__(self, rank: Ranks, max_bytes: int) -> None:
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
