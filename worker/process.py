"""The process of a worker, from the check of its database to its graceful end.

Celery runs in the main thread with a pool of threads. A supervisor occupies one thread while its
attempt runs; there is one for each device, and some more so that wake-ups are always received.
"""

import contextlib
import gc
import os
import platform
import signal
import sys
import threading
from typing import IO, Any

import structlog
from celery import signals  # pyright: ignore[reportMissingTypeStubs]

from glasshouse.errors import WorkerNotFound
from glasshouse.lifeline import await_start, end_within, follow_lifeline
from models import startup
from models.database import Database, Transaction
from models.fleet import heartbeats, workers
from models.fleet.notifier import DISPATCH_QUEUE, Notifier, worker_queue
from models.fleet.workers import FoundDevice, OtherProcess
from models.jobs import attempts
from models.settings import Settings
from models.storage.artifacts import open_artifacts
from worker import cleanup
from worker.app import NUM_WAKEUP_THREADS, ShutdownSignals, make_app
from worker.context import Every, WorkerContext, attempt_to, idle_s
from worker.delivery.webhooks import LOOK_EVERY_S, Delivering
from worker.devices import inventory
from worker.ingest import Readers
from worker.processes.fork_server import ForkServerClient, wait_for
from worker.processes.rank import RankRegistry
from worker.wakeups import Canary, Sweep, add_tasks, return_attempts

_log: Any = structlog.get_logger()

_FORK_SERVER_START_S = 120.0
_LATE_S = 5.0
_LOOK_AGAIN_S = 0.5


class Worker:
    """Starts the parts of a worker, and stops them."""

    def __init__(
        self,
        settings: Settings,
        ending: ShutdownSignals,
        lock: IO[str],
        fork_server: ForkServerClient,
    ) -> None:
        """Connect the parts. ``lock`` is the locked file of the worker's name."""
        self._settings = settings
        self._ending = ending
        self._lock = lock
        before = lock.read()
        self._app = make_app(settings)
        database = Database(
            settings.database,
            pool_size=settings.database_connections,
            idle_s=idle_s(settings.lease_s),
        )
        self.context = WorkerContext(
            settings, database, open_artifacts(settings), Notifier(settings), fork_server
        )
        self._known = tuple(filter(None, (self.context.instance, before)))
        """Not others: this process, and the one that held the lock before it and has ended."""
        lock.truncate(0)
        lock.write(self.context.instance)
        lock.flush()
        self._register = RankRegistry(self.context.work)
        self._devices: list[FoundDevice] = []
        self._info: dict[str, Any] = {}
        self._threads: list[Every] = []
        self._canary = Canary(self.context)
        self._readers = Readers(self.context)
        add_tasks(self._app, self.context, self._canary, self._readers)

    def run(self) -> int:
        """Work until a signal stops it; return 0, or 1 if it could not start."""
        stopping = self.context.stopping
        self._ending.listen(self.stop, self.hurry)
        try:
            if not (self._prepare() or stopping.is_set()):
                return 1
            if not stopping.is_set():
                if not self._enter():
                    return 1
                self._start()
                self._celery.start()
        finally:
            self._leave()
        return 0

    def _prepare(self) -> bool:
        context = self.context
        if not self._has_name():
            return False
        self._register.clear()
        self._take_inventory(measure=True)
        self._celery = self._make_celery()  # while the fork server starts
        ready = wait_for(context.fork_server, _FORK_SERVER_START_S, context.stopping)
        if not (ready or context.stopping.is_set()):
            _log.error("fork_server_does_not_start", log=str(context.work / "fork-server.log"))
        return ready

    def _has_name(self) -> bool:
        """Wait until no other process can be using this name; return False if one is.

        A process that was killed leaves a heartbeat, which counts for the time of a lease. A
        process that runs sends another one meanwhile.
        """
        context, first = self.context, None
        while not context.stopping.is_set():
            with context.database.write() as tx:
                found = self._other_process(tx)
            if found is None:
                return True
            first = first or found
            if found.beat_ms != first.beat_ms:
                _log.error("name_taken", worker=context.name, host=found.host, pid=found.pid)
                self._refuse(found)
                return False
            if found == first:
                _log.info("name_awaited", worker=context.name, host=found.host, pid=found.pid)
            context.stopping.wait(_LOOK_AGAIN_S)
        return False

    def _other_process(self, tx: Transaction) -> OtherProcess | None:
        context = self.context
        return workers.other_process(tx, context.name, known=self._known, lease_ms=context.lease_ms)

    def _start(self) -> None:
        context, settings = self.context, self._settings
        threading.Thread(target=self._drain, name="drain", daemon=True).start()
        self._readers.start()
        for period_s, act, name, at_once in (
            (settings.heartbeat_s, self._beat, "heartbeat", True),
            (settings.sweep_s, Sweep(context), "sweep", True),
            (settings.inventory_s, self._refresh_inventory, "inventory", False),
            (cleanup.LEFTOVERS_EVERY_S, cleanup.Leftovers(context), "leftovers", False),
            (settings.canary_s, self._canary, "canary", True),
            (LOOK_EVERY_S, Delivering(context), "webhooks", True),
            (settings.purge_every_s, lambda: cleanup.purge(context), "purge", False),
            (
                cleanup.DELETED_EVERY_S,
                lambda: cleanup.purge_deleted(context),
                "purge_deleted",
                True,
            ),
        ):
            self._threads.append(Every(period_s, act, name, at_once=at_once))

    def stop(self) -> None:
        """Take no more jobs and ask the running ones to stop. Return at once."""
        if self.context.stopping.is_set():
            return
        end_within(_longest_end_s(self._settings))
        self.context.stopping.set()

    def hurry(self) -> None:
        """Stop, and signal the ranks without asking them first."""
        self.context.hurries = True
        self.stop()

    def _enter(self) -> bool:
        """Register, and give back the attempts that an earlier process of this worker still holds.

        Return False if another process has taken the name since `_has_name`.
        """
        context = self.context
        with context.database.write() as tx:
            if (found := self._other_process(tx)) is not None:
                self._refuse(found)
                return False
            context.register(tx, self._devices, self._facts)
            held = attempts.held(tx, context.name)
        return_attempts(
            context, held, exit_kind="worker_lost", reason="its worker ended unexpectedly"
        )
        for claim in held:
            cleanup.remove_unnamed(context, claim, 0.0)
        attempt_to("start", context.dispatch)
        return True

    def _refuse(self, other: OtherProcess) -> None:
        sys.stderr.write(
            f"A worker named {self.context.name!r} already runs on the host {other.host!r} "
            f"(process {other.pid}, last heartbeat {other.silent_s:.1f} s ago). Start this one "
            "under another name, with --name or GLASSHOUSE_WORKER_NAME, or stop the other one "
            "first.\n"
        )

    def _make_celery(self) -> Any:
        celery: Any = self._app.Worker(
            hostname=f"{self.context.name}@{platform.node()}",
            pool="threads",
            concurrency=len(self._devices) + self._settings.infer_overcommit + NUM_WAKEUP_THREADS,
            queues=[DISPATCH_QUEUE, worker_queue(self.context.name)],
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
            loglevel="INFO",
            quiet=True,
        )
        # Celery's own handlers would restart the process on SIGHUP and end it abruptly on SIGQUIT;
        # `ShutdownSignals` handles both
        celery.install_platform_tweaks = _leave_signals_alone
        return celery

    def _leave(self) -> None:
        """Shut down gracefully: queue interrupted jobs again and retire the worker."""
        self.stop()
        context = self.context
        self._readers.close()
        context.wait_idle(self._settings.grace_s + self._settings.kill_s + _LATE_S / 2)
        for thread in self._threads:
            thread.end()
        attempt_to("leave", self._retire)
        context.fork_server.close()
        context.notifier.close()
        context.database.close()
        context.tracing.close()
        self._lock.close()
        _log.info("worker_stopped")

    def _retire(self) -> None:
        context = self.context
        with context.database.write() as tx:
            if not workers.beat(tx, context.name, instance=context.instance):
                return  # it never registered, or another process has the name
            workers.retire(tx, context.name, instance=context.instance)
            left = attempts.assigned(tx, context.name)
        return_attempts(context, left, exit_kind="interrupted", reason="its worker was stopped")

    def _drain(self) -> None:
        """Log and store that it stops, but not in a signal handler: locks may be held there."""

        def store() -> None:
            with contextlib.suppress(WorkerNotFound), self.context.database.write() as tx:
                workers.drain(tx, self.context.name, instance=self.context.instance)

        self.context.stopping.wait()
        _log.info("worker_stopping")
        attempt_to("drain", store)

    def _beat(self) -> None:
        context = self.context
        figures = context.counters.figures()
        figures |= {"running": context.num_running, "free_bytes": context.space.free()}
        with context.database.write() as tx:
            if workers.beat(tx, context.name, instance=context.instance):
                heartbeats.note(tx, context.name, figures, instance=context.instance)
            elif (found := self._other_process(tx)) is None:
                _log.warning("registered_again")  # removed while it sent no heartbeat
                context.register(tx, self._devices, self._facts)
            else:
                _log.error("name_taken", worker=context.name, host=found.host, pid=found.pid)
                os.kill(os.getpid(), signal.SIGTERM)

    @property
    def _facts(self) -> dict[str, Any]:
        """What is known of this host: the inventory, and the versions that torch reports."""
        reported = {name: of for name, of in self._info.get("versions", {}).items() if of}
        return {**self._info, "versions": {**self.context.fork_server.versions, **reported}}

    def _refresh_inventory(self) -> None:
        context = self.context
        self._take_inventory()
        with context.database.write() as tx:
            workers.refresh_devices(
                tx, context.name, self._devices, info=self._facts, instance=context.instance
            )

    def _take_inventory(self, *, measure: bool = False) -> None:
        try:
            found, info = inventory.ask(self._settings, measure=measure)
            self._info |= info  # the speed of a core is measured only once
        except (OSError, ValueError, inventory.subprocess.SubprocessError) as error:
            _log.exception("inventory_failed")
            known = self._devices or inventory.cpu_devices(inventory.num_cores(self._settings))
            found = inventory.mark_unhealthy(known, str(error))
            self._info.pop("devices", None)
        self._devices = inventory.mark_withheld(found, self._register.withheld())


def _leave_signals_alone(_worker: Any) -> None: ...


def _longest_end_s(settings: Settings) -> float:
    """Return when to end a worker that cannot shut down, in s; its lifelines end its ranks."""
    return settings.grace_s + settings.kill_s + _LATE_S


def run(settings: Settings, lock: IO[str], fork_server: ForkServerClient) -> int:
    """Run a worker until a signal ends it or its lifeline closes; return its exit status.

    ``lock`` is the locked file of its name; ``fork_server`` is starting.
    """
    await_start()
    ending = ShutdownSignals()
    follow_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM), within_s=_longest_end_s(settings))
    worker = Worker(settings, ending, lock, fork_server)
    if problem := startup.refusal(settings, worker.context.database):
        sys.stderr.write(problem + "\n")
        fork_server.close()
        return 2

    def keep_logging(**_: Any) -> None:
        """Keep Celery from configuring its own logging: a connected receiver is enough."""

    def on_ready(**_: Any) -> None:
        _log.info("worker_ready", worker=worker.context.name)

    signals_: Any = signals
    signals_.setup_logging.connect(keep_logging, weak=False)
    signals_.worker_ready.connect(on_ready, weak=False)
    gc.freeze()
    gc.enable()
    return worker.run()
