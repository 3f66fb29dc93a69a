"""The state that all threads of a worker share; its two actions; threads that repeat one."""

import bisect
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import structlog

from glasshouse import __version__
from glasshouse.errors import DatabaseUnavailable, StorageFull, TransactionConflict
from glasshouse.failpoints import failpoint
from models.database import IDLE_IN_TRANSACTION_S, Database, Transaction
from models.fleet import workers
from models.fleet.notifier import Notifier
from models.fleet.workers import FoundDevice
from models.jobs.endings import Backoff
from models.observations.events import NewEvent
from models.settings import Settings
from models.storage.artifacts import Artifacts
from models.storage.disk_space import Space
from models.tables import now
from models.telemetry.tracing import Tracing
from worker import dispatch as dispatching
from worker.processes.fork_server import ForkServerClient

_log: Any = structlog.get_logger()
T = TypeVar("T")

AWAY = (DatabaseUnavailable, StorageFull, TransactionConflict)
"""The database cannot be written now and may be soon: wait, and do not stop training for it."""

BOUNDS_S = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Upper bounds of the buckets of the time from a record to its commit, seconds; one more bucket
has no bound."""


def idle_s(lease_s: float) -> float:
    """Return how long PostgreSQL keeps an idle transaction of a worker, seconds.

    A worker whose connection is cut inside a transaction must not lock the rows of its jobs for
    longer than a lease: until then no other worker could take the jobs.
    """
    return max(2.0, min(float(IDLE_IN_TRANSACTION_S), lease_s / 3))


def attempt_to(what: str, act: Callable[[], object]) -> bool:
    """Do something that is tried again later; log a failure. Return whether it succeeded."""
    try:
        act()
    except AWAY as error:
        _log.warning("database_unavailable", wakeup=what, error=str(error))
    except Exception:
        _log.exception("wakeup_failed", wakeup=what)
    else:
        return True
    return False


class Every:
    """A thread that repeats an action; a failure is logged, and the next turn tries again."""

    def __init__(
        self, period_s: float, act: Callable[[], object], name: str, *, at_once: bool = True
    ) -> None:
        self._period_s = period_s
        self._at_once = at_once
        self._act = act
        self._ended = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Begin the next turn now, or right after the one that is running."""
        self._woken.set()

    def end(self, timeout_s: float | None = 5.0) -> None:
        """End after the turn that is running."""
        self._ended = True
        self.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        if not self._at_once:
            self._woken.wait(self._period_s)
        while not self._ended:
            self._woken.clear()
            attempt_to(self._thread.name, self._act)
            if not self._ended:
                self._woken.wait(self._period_s)


class Counters:
    """Counts since the worker started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events = 0
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._process = psutil.Process()

    def shipped(self, events: Sequence[NewEvent]) -> None:
        """Count events that were committed now, and the time since the oldest of them happened."""
        if not events:
            return
        waited_s = max(0.0, (now() - min(event.at for event in events)).total_seconds())
        place = bisect.bisect_left(BOUNDS_S, waited_s)
        with self._lock:
            self._events += len(events)
            self._seconds += waited_s
            self._buckets[place] += 1

    def figures(self) -> dict[str, Any]:
        """Return all counts, for the database."""
        with self._lock:
            return {
                "events": self._events,
                "ship_seconds": round(self._seconds, 3),
                "ship_buckets": list(self._buckets),
                "memory_bytes": self._process.memory_info().rss,
                "open_files": self._process.num_fds(),
            }


class WorkerContext:
    """One worker: its name, its database, its notifier, its fork server."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        artifacts: Artifacts,
        notifier: Notifier,
        fork_server: ForkServerClient,
    ) -> None:
        self.settings = settings
        self.database = database
        self.artifacts = artifacts
        self.notifier = notifier
        self.fork_server = fork_server
        self.name = settings.worker_name
        self.instance = uuid.uuid4().hex
        """Identifies this process among those that use the name one after the other."""
        self.lease_ms = int(settings.lease_s * 1000)
        self.backoff = Backoff(settings.retry_s, settings.retry_max_s)
        self.stopping = threading.Event()
        self.hurries = False
        """Whether ranks that must stop are signalled at once."""
        self.counters = Counters()
        self.space = Space(settings)
        self.tracing = Tracing("glasshouse-worker")
        self._dispatching = threading.Lock()
        self._dispatch_wanted = threading.Event()
        self._running: set[str] = set()
        self._running_changed = threading.Condition()

    @property
    def work(self) -> Path:
        """The scratch directory of this worker."""
        return self.settings.work / self.name

    def register(
        self, tx: Transaction, devices: Sequence[FoundDevice], info: dict[str, Any]
    ) -> None:
        """Create or update this worker and its devices in the database."""
        workers.register(
            tx,
            worker=self.name,
            host=platform.node(),
            pid=os.getpid(),
            version=__version__,
            info=info,
            devices=devices,
            instance=self.instance,
        )

    def dispatch(self) -> None:
        """Dispatch queued jobs, and send a wake-up to each worker that got one.

        Of many concurrent calls one dispatches, and does so once more; the others return.
        """
        self._dispatch_wanted.set()
        while self._dispatch_wanted.is_set() and self._dispatching.acquire(blocking=False):
            try:
                self._dispatch_wanted.clear()
                given = dispatching.dispatch(self.database, self.settings)
            finally:
                self._dispatching.release()
            if len(given) == dispatching.MOST_AT_ONCE:
                self._dispatch_wanted.set()
            for choice in given:
                _log.info(
                    "assigned",
                    job=choice.job,
                    worker=choice.worker,
                    devices=(*choice.devices, *choice.cores),
                )
                failpoint("dispatch.committed")
                self.notifier.job_assigned(choice.worker, choice.job)
                failpoint("notify.sent")
                self.notifier.job_changed(choice.job)

    def supervise(self, job_id: str, run: Callable[["WorkerContext", str], None]) -> None:
        """Run an attempt of a job to its end, unless one is running here already."""
        with self._running_changed:
            if job_id in self._running or self.stopping.is_set():
                return
            self._running.add(job_id)
        try:
            with structlog.contextvars.bound_contextvars(job=job_id):
                run(self, job_id)
        finally:
            with self._running_changed:
                self._running.discard(job_id)
                self._running_changed.notify_all()
        self.dispatch()  # its devices are free, or it is queued again

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no attempt is running here; return whether that is so."""
        with self._running_changed:
            return self._running_changed.wait_for(lambda: not self._running, timeout_s)

    @property
    def num_running(self) -> int:
        """How many attempts are running here."""
        with self._running_changed:
            return len(self._running)

    def runs(self, job_id: str) -> bool:
        """Return whether an attempt of the job is running here."""
        with self._running_changed:
            return job_id in self._running

    def with_retries(self, act: Callable[[], T], *, patience_s: float | None = None) -> T:
        """Do something with the database, and retry while it is unavailable.

        ``patience_s``: once the worker stops, how long it may have been retried, in seconds;
        ``kill_s`` by default.

        Raises:
            DatabaseUnavailable, StorageFull, TransactionConflict: the worker stops, and the
                database could not be written for longer than that.
        """
        patience_s = self.settings.kill_s if patience_s is None else patience_s
        began, delay = time.monotonic(), 0.05
        while True:
            try:
                return act()
            except AWAY as error:
                _log.warning("database_unavailable", error=str(error))
                waited = time.monotonic() - began
                if self.stopping.is_set() and waited > patience_s:
                    raise
                time.sleep(delay)
                delay = min(2.0, delay * 2)
