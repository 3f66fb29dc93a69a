"""Starts the rank of one attempt through the fork server, and ends all its processes."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from glasshouse import processes
from glasshouse.failpoints import failpoint
from models.jobs.leases import Claim
from models.tables import Job
from worker.attempt import workplace
from worker.attempt.control import CommandDelivery
from worker.context import WorkerContext
from worker.devices.usage import Usage
from worker.processes.fork_server import ForkServerLost
from worker.processes.rank import Rank, RankStop
from worker.processes.rank_registry import RankRegistry

_log: Any = structlog.get_logger()
_WAIT_S = 1.0


class Launch:
    """Starts the rank of one attempt and ends it."""

    def __init__(
        self,
        context: WorkerContext,
        claim: Claim,
        job: Job,
        directory: Path,
        control: CommandDelivery,
    ) -> None:
        self._context = context
        self._claim = claim
        self._job = job
        self._dir = directory
        self._control = control
        self._register = RankRegistry(context.work)
        self._devices = [str(device["id"]) for device in job.devices]
        self._rank: Rank | None = None
        self.resumes = False
        """Whether the rank resumes from a checkpoint."""
        self.parts = 1
        """Into how many micro-batches the memory guard splits each batch."""
        self.usage: Usage | None = None
        """Measures what the rank uses of its machine."""
        self.is_stuck = False
        """Whether a process of the attempt cannot be ended; then no job gets its devices."""

    def start(self, ring: str | None, meanwhile: Callable[[], None]) -> tuple[Rank, RankStop]:
        """Fork the rank; call ``meanwhile`` repeatedly while the fork server is not ready.

        ``ring``: the name of the shared memory for whole tensors.

        Raises:
            ForkServerLost: the fork server died, or the worker stops.
            RunFailure: data of the job is gone, or the work directory cannot be written.
        """
        context, settings = self._context, self._context.settings
        env = context.with_retries(lambda: self._prepare(ring))
        while not context.fork_server.wait_ready(_WAIT_S):
            meanwhile()
            if context.stopping.is_set():
                raise ForkServerLost("the worker stops")
        failpoint("rank.fork")
        self._rank = rank = context.fork_server.fork(self._dir, env)
        failpoint("rank.forked")
        try:
            self._register.note(rank.identity, self._devices)
        except OSError as error:
            raise workplace.unwritable(error) from error
        gpus = [uuid for uuid in env["CUDA_VISIBLE_DEVICES"].split(",") if uuid]
        self.usage = Usage(rank.identity.pid, gpus)
        failpoint("rank.noted")
        _log.info("rank_started", pid=rank.identity.pid)
        return rank, RankStop(
            rank,
            grace_s=settings.grace_s,
            kill_s=settings.kill_s,
            unkillable_s=settings.unkillable_s,
        )

    def abandon(self) -> None:
        """Give up on a rank that SIGKILL has not ended; its devices stay withheld."""
        rank, self._rank = self._rank, None
        if rank is not None:
            self._give_up(rank)
            rank.close()

    def end(self, *, gently: bool = False) -> None:
        """End all processes of the attempt; ``gently``: send SIGTERM before SIGKILL."""
        rank, self._rank = self._rank, None
        if self.usage is not None:
            self.usage.close()
        if rank is None:
            return
        kill_s = self._context.settings.kill_s
        if gently and rank.wait(0) is None:
            rank.signal(signal.SIGTERM)
            rank.wait(kill_s)
        rank.signal(signal.SIGKILL)
        rank.wait(kill_s)
        rank.close()
        gone = processes.wait_gone(rank.identity, kill_s)
        if gone and processes.kill_orphans(rank.identity, kill_s):
            self._register.forget(rank.identity)
        else:
            self._give_up(rank)

    def _give_up(self, rank: Rank) -> None:
        self.is_stuck = True
        self._register.give_up(rank.identity)

    def _prepare(self, ring: str | None) -> dict[str, str]:
        with self._context.database.read() as tx:
            described, env = workplace.describe(tx, self._context.artifacts, self._claim, self._job)
        workplace.prepare(self._dir, described | {"ring": ring})
        self._control.delivered(described)
        self.resumes = described["resume"] is not None
        self.parts = described["parts"]
        return env
