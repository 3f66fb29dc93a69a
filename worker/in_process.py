"""Runs queued jobs in this process one after the other, for a debugger.

There is no broker, no fork server and no rank process: a job runs to its end in the calling
thread, and its records are stored afterwards as usual.
"""

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glasshouse.errors import SpecFailed
from glasshouse.processes import Identity
from glasshouse.spec.parallel import num_processes
from models.database import Database
from models.fleet import workers
from models.fleet.notifier import Notifier
from models.settings import Settings
from models.storage.artifacts import open_artifacts
from worker import dispatch
from worker.attempt import resume
from worker.attempt.control import CommandDelivery
from worker.attempt.launch import Launch
from worker.attempt.resume import Attempt
from worker.attempt.supervisor import Supervisor
from worker.context import WorkerContext
from worker.devices.inventory import cpu_devices, num_cores
from worker.ingest import Readers
from worker.processes.rank import Exit, Rank
from worker.processes.ranks import Ranks

CarryOut = Callable[[Path], None]
"""Runs the ``job.json`` of a directory to its end. Passed in: a worker does not import torch."""
_HINT = "Start the service with glasshouse up."


class InProcessWorker:
    """A worker without threads: `work` runs what is queued, and returns when nothing is."""

    def __init__(self, settings: Settings, carry_out: CarryOut) -> None:
        self._settings = settings
        self._database = Database(settings.database)
        artifacts = open_artifacts(settings)
        fork_server: Any = None  # nothing is forked
        notifier = Notifier(settings, enabled=False)
        self._context = WorkerContext(settings, self._database, artifacts, notifier, fork_server)
        self._launcher = functools.partial(_InProcessLaunch, carry_out)
        self._readers = Readers(self._context)
        with self._database.write() as tx:
            self._context.register(tx, cpu_devices(num_cores(settings)), {})

    def work(self) -> None:
        """Read pending datasets, then run to their ends the queued jobs that can run now."""
        while self._readers.read_one():
            pass
        while True:
            with self._database.write() as tx:
                workers.beat(tx, self._settings.worker_name, instance=self._context.instance)
            given = dispatch.dispatch(self._database, self._settings)
            if not given:
                return
            for choice in given:
                attempt = resume.claim(self._context, choice.job)
                if attempt is not None:
                    supervisor = Supervisor(attempt, launcher=self._launcher)
                    supervisor.run()
                    if supervisor.has_ended_job:
                        supervisor.tidy()

    def close(self) -> None:
        """Close the database."""
        self._database.close()


class _InProcessLaunch(Launch):
    """Runs the job in this process instead of starting a rank."""

    def __init__(self, carry_out: CarryOut, attempt: Attempt, control: CommandDelivery) -> None:
        super().__init__(attempt, control)
        self._carry_out = carry_out

    def start(
        self,
        ring: str | None,
        meanwhile: Callable[[], None],
        read_end: Callable[[int], dict[str, Any] | None],
    ) -> Ranks:
        if (asked := num_processes(self._attempt.job.resolved)) > 1:
            detail = f"A job of {asked} processes cannot run inside the caller's process."
            raise SpecFailed(detail, hint=_HINT)
        if self._attempt.job.kind == "serve":
            detail = "A serve job never ends, so it cannot run inside the caller's process."
            raise SpecFailed(detail, hint=_HINT)
        # a ring would have to be emptied meanwhile: without one the engine writes the files
        self._attempt.context.with_retries(lambda: self._prepare(None))
        self._carry_out(self._attempt.directory)
        return Ranks([_EndedRank()], read_end)

    def end(self, *, gently: bool = False) -> None:
        """Do nothing: no process of the job is left."""


class _EndedRank(Rank):
    """A rank that has ended already: it receives no commands and no signals."""

    def __init__(self) -> None:
        super().__init__(Identity(0, ""), -1)
        self._lifeline = None
        self.ended(Exit(code=0))

    def signal(self, number: signal.Signals) -> bool:
        return False

    def has_survived(self, unkillable_s: float) -> bool:
        return False
