"""The Celery application of a worker, and the signals that end it.

A message is a wake-up: JSON, delivered at most once, without a result.
Everything that must survive is in the database, so Celery's own means are switched off: late
acknowledgement would run a long job twice, and results and time limits are in SQL.
"""

import signal
from collections.abc import Callable
from typing import Any

from celery import Celery  # pyright: ignore[reportMissingTypeStubs]
from celery.worker import state  # pyright: ignore[reportMissingTypeStubs]
from kombu.entity import Queue  # pyright: ignore[reportMissingTypeStubs]

from models.fleet.notifier import DISPATCH_QUEUE, worker_queue
from models.settings import Settings

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""SIGTERM, SIGINT, SIGHUP: shut down. SIGQUIT or a second SIGINT: signal the ranks at once."""

NUM_WAKEUP_THREADS = 2
"""Threads beyond one per device: supervisors never occupy all, so a wake-up always gets one."""


def make_app(settings: Settings) -> Any:
    """Create the Celery application with every relevant setting set explicitly."""
    app: Any = Celery("glasshouse", broker=settings.celery_broker, set_as_current=False)
    app.conf.update(configuration(settings))
    return app


def configuration(settings: Settings) -> dict[str, Any]:
    """Return Celery's settings, pinned so that a new release of Celery does not change them."""
    return {
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "result_backend": None,
        "task_ignore_result": True,
        "task_acks_late": False,
        "task_reject_on_worker_lost": False,
        "task_time_limit": None,
        "task_soft_time_limit": None,
        "task_default_queue": DISPATCH_QUEUE,
        "task_queues": [Queue(DISPATCH_QUEUE), Queue(worker_queue(settings.worker_name))],
        "task_create_missing_queues": True,
        "task_send_sent_event": False,
        "worker_send_task_events": False,
        "worker_enable_remote_control": False,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "visibility_timeout": 3600,  # equal in every process; nothing stays unacknowledged
            "socket_timeout": 5.0,
            "socket_connect_timeout": 2.0,
            "health_check_interval": 10,
        },
        "timezone": "UTC",
        "enable_utc": True,
    }


class ShutdownSignals:
    """Handles the signals that end a worker, in its main thread.

    No handler raises: an exception between any two instructions could leave a lock of the
    interpreter held forever, for example the import lock.
    """

    def __init__(self) -> None:
        """Keep the signals that arrive before ``listen``."""
        self._early: list[int] = []
        self._handle_with(lambda number, _frame: self._early.append(number))

    def listen(self, stop: Callable[[], None], hurry: Callable[[], None]) -> None:
        """Call ``stop`` or ``hurry`` on signals from now on; both must return at once."""
        interrupted = False

        def handle(number: int, _frame: Any) -> None:
            nonlocal interrupted
            if number == signal.SIGQUIT or (number == signal.SIGINT and interrupted):
                hurry()
            else:
                stop()
            interrupted = interrupted or number == signal.SIGINT
            celery_state: Any = state
            celery_state.should_stop = 0  # Celery's main loop ends, with this status

        self._handle_with(handle)
        for number in self._early:
            handle(number, None)

    def _handle_with(self, handle: Callable[[int, Any], None]) -> None:
        for number in ENDING:
            signal.signal(number, handle)
