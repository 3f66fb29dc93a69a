"""The Celery application. A message is a wake-up: JSON, delivered at most once, without a result.

Everything that must survive is in the database, so Celery's own means are switched off: late
acknowledgement would run a long job twice, and results and time limits are in SQL.
"""

from typing import Any

from celery import Celery  # pyright: ignore[reportMissingTypeStubs]
from kombu.entity import Queue  # pyright: ignore[reportMissingTypeStubs]

from models.fleet.notifier import DISPATCH_QUEUE, worker_queue
from models.settings import Settings

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
