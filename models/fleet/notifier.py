"""Notifications through the broker, from the API and the workers.

Every message may be lost: a worker's sweep finds in the database what the message announced. Send
only after the commit.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
from celery import Celery  # pyright: ignore[reportMissingTypeStubs]
from kombu.exceptions import OperationalError  # pyright: ignore[reportMissingTypeStubs]
from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

from models.settings import Settings

DISPATCH_QUEUE = "glasshouse.dispatch"
"""The Celery queue that all workers read."""
CHANNEL = "glasshouse:jobs"
"""The channel on which the ids of changed jobs are published."""
_TIMEOUT_S = 0.5
_QUIET_S = 3.0
"""After an error of the broker, nothing is sent for this long."""
_EXPIRES_S = 30.0
"""A worker that was unavailable for longer finds its jobs with its sweep."""
_FULL = 10
_log: Any = structlog.get_logger()


def worker_queue(worker: str) -> str:
    """Return the Celery queue of one worker."""
    return f"glasshouse.worker.{worker}"


class Notifier:
    """Sends notifications. Never raises, and waits at most half a second for the broker.

    Methods that send return whether the broker accepted the message. Callable from any thread.

    Args:
        settings: The settings with the broker's URL.
        enabled: If False, send nothing.
    """

    def __init__(self, settings: Settings, *, enabled: bool = True) -> None:
        self._lock = threading.Lock()
        self._quiet_until = 0.0 if enabled else float("inf")
        self._app = _producer(settings)
        self._redis: Any = Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            settings.redis,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    def job_queued(self) -> bool:
        """Make a worker dispatch queued jobs."""
        return self._send("glasshouse.dispatch", DISPATCH_QUEUE)

    def upload_stored(self) -> bool:
        """Make a worker read uploaded datasets."""
        return self._send("glasshouse.read", DISPATCH_QUEUE)

    def job_assigned(self, worker: str, job: str) -> bool:
        """Make a worker start a job that is assigned to it."""
        return self._send("glasshouse.supervise", worker_queue(worker), job)

    def job_changed(self, job: str) -> bool:
        """Wake waiters for changes of a job, in all processes."""
        return self._try(lambda: self._redis.publish(CHANNEL, job))

    def canary(self, worker: str) -> bool:
        """Send a worker a message that it only notes, to check that its queue works."""
        return self._send("glasshouse.canary", worker_queue(worker), worker)

    def is_full(self, queue: str) -> bool:
        """Return whether a queue has so many messages that more would not help."""
        length: list[int] = []
        self._try(lambda: length.append(self._redis.llen(queue)))
        return bool(length) and length[0] >= _FULL

    def reaches_broker(self) -> bool:
        """Return whether the broker answers now."""
        try:
            self._redis.ping()
        except (RedisError, OSError):
            return False
        return True

    def broker_version(self) -> tuple[str, str] | None:
        """Return product (``valkey`` or ``redis``) and version of the broker; None if unknown."""
        try:
            server = self._redis.info("server")
        except (RedisError, OSError):
            return None
        for product in ("valkey", "redis"):
            if f"{product}_version" in server:
                return product, str(server[f"{product}_version"])
        return None

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
        self._app.close()

    def _send(self, task: str, queue: str, *args: str) -> bool:
        def send() -> None:
            with self._lock:  # one connection is enough; a pool has one per thread
                if not self._is_quiet():  # another thread may have found the broker unavailable
                    self._app.send_task(
                        task,
                        args=args,
                        queue=queue,
                        expires=_EXPIRES_S,
                        ignore_result=True,
                        retry=False,
                    )

        return self._try(send) and not self._is_quiet()

    def _try(self, send: Callable[[], object]) -> bool:
        if self._is_quiet():
            return False
        try:
            send()
        except (RedisError, OperationalError, OSError) as error:
            self._quiet_until = time.monotonic() + _QUIET_S
            _log.warning("broker_away", error=f"{type(error).__name__}: {error}")
            return False
        return True

    def _is_quiet(self) -> bool:
        return time.monotonic() < self._quiet_until


def _producer(settings: Settings) -> Any:
    app: Any = Celery("glasshouse", broker=settings.celery_broker, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_publish_retry=False,
        broker_pool_limit=1,
        broker_connection_timeout=_TIMEOUT_S,
        broker_transport_options={
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
            "max_retries": 0,
            "retry_on_timeout": False,
        },
    )
    return app
