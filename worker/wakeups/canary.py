"""Checks that this worker receives wake-ups: it sends one to itself and stores when it arrives.

The wake-up takes the usual way, through the broker and the worker's own queue. The database has
the time of the last one. An unresponsive worker still works, by its sweep, only later.
"""

import time
from typing import Any

import structlog

from models.fleet import heartbeats
from models.fleet.heartbeats import MISSED_CANARIES
from models.fleet.notifier import worker_queue
from worker.context import WorkerContext

_log: Any = structlog.get_logger()


class Canary:
    """Sends a wake-up per call, and warns if none has arrived for too long."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._heard_at = time.monotonic()
        self._is_reported = False

    def __call__(self) -> None:
        """Send a wake-up to this worker."""
        context = self._context
        if not context.notifier.is_full(worker_queue(context.name)):
            context.notifier.canary(context.name)
        silent_s = time.monotonic() - self._heard_at
        if silent_s > MISSED_CANARIES * context.settings.canary_s and not self._is_reported:
            self._is_reported = True
            _log.warning("worker_unresponsive", silent_s=round(silent_s))

    def received(self) -> None:
        """Store that the wake-up has arrived."""
        with self._context.database.write() as tx:
            heartbeats.received_canary(tx, self._context.name, instance=self._context.instance)
        self._heard_at = time.monotonic()
        if self._is_reported:
            self._is_reported = False
            _log.info("worker_responsive")
