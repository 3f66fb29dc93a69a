"""Delivers users' commands and changes of probes to the rank of a running attempt.

Every write of an attempt returns a `LeaseState`, which says whether there are new ones. The rank
gets them as a file, whose name is sent through its lifeline. They apply at the next step boundary.
"""

import time
from pathlib import Path
from typing import Any

import structlog

from glasshouse import jsonio
from models.database import Database
from models.jobs import commands, jobs
from models.jobs.leases import LeaseState
from models.observations import probes
from worker.processes.rank import Rank

_log: Any = structlog.get_logger()
_RETRY_S = 1.0


class CommandDelivery:
    """The commands and the list of probes of one attempt."""

    def __init__(self, database: Database, job_id: str, directory: Path) -> None:
        """``directory``: the attempt's directory."""
        self._database = database
        self._job = job_id
        self._directory = directory
        self.cancelled = False
        """Whether the user asked to cancel the job."""
        self.pausing = False
        """Whether the user asked to pause the job."""
        self.force = False
        """Whether to signal the rank at once."""
        self.stops: list[str] = []
        """The ids of the pending commands that cancel the job."""
        self._num_commands = 0
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
        if beat.num_commands == self._num_commands:
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
        self._num_commands = beat.num_commands

    def delivered(self, description: dict[str, Any]) -> None:
        """Mark the commands and probes in the rank's ``job.json`` as delivered."""
        wanted: dict[str, Any] | None = description["probes"]
        self._revision = 0 if wanted is None else wanted["revision"]
        self._delivered |= {command["id"] for command in description["commands"]}

    def deliver(self, rank: Rank) -> None:
        """Send new commands and probes to the rank, once. Retry later if the file write fails."""
        wanted = self._probes
        revision = 0 if wanted is None else wanted["revision"]
        if revision > self._revision and self._send(rank, "probes", revision, wanted):
            self._revision = revision
        if self._commands and self._send(rank, "commands", self._num_files, self._commands):
            self._delivered |= {command["id"] for command in self._commands}
            self._num_files += 1
            self._commands = []

    def _send(self, rank: Rank, what: str, number: int, document: Any) -> bool:
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
