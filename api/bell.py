"""Notifying a dispatcher after a commit. The message may be lost: the sweep finds the job."""

import time
from typing import Any

import structlog
from celery import Celery  # pyright: ignore[reportMissingTypeStubs]
from kombu.exceptions import OperationalError
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from api.wakeups import CHANNEL
from models.settings import Settings

QUEUE = "glasshouse.dispatch"
TASK = "glasshouse.dispatch"
READ_TASK = "glasshouse.read"
_SILENT_S = 5.0
"""After a broker failed, no bell is rung for this long: the sweep rings instead."""
_SOCKET_S = 0.3
_log: Any = structlog.get_logger("glasshouse.api.bell")


class Bell:
    """Sends the dispatcher's doorbell. Never raises, never waits long."""

    def __init__(self, settings: Settings) -> None:
        self._app: Any = Celery("glasshouse", broker=settings.celery_broker, set_as_current=False)
        self._app.conf.update(
            task_serializer="json",
            accept_content=["json"],
            result_backend=None,
            task_ignore_result=True,
            task_publish_retry=False,
            broker_pool_limit=4,
            broker_connection_timeout=_SOCKET_S,
            broker_transport_options={
                "socket_timeout": _SOCKET_S,
                "socket_connect_timeout": _SOCKET_S,
                "max_retries": 0,
                "retry_on_timeout": False,
            },
        )
        self._redis: Any = Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            settings.redis,
            socket_timeout=_SOCKET_S,
            socket_connect_timeout=_SOCKET_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._silent_until = 0.0

    def ring(self) -> bool:
        """Wake a dispatcher. False: the broker is away; the sweep will ring."""
        return self._send(TASK)

    def ring_readers(self) -> bool:
        """Wake a worker that reads uploaded files. False: the broker is unavailable.

        The workers then find the file when they look the next time.
        """
        return self._send(READ_TASK)

    def _send(self, task: str) -> bool:
        if time.monotonic() < self._silent_until:
            return False
        try:
            self._app.send_task(task, queue=QUEUE, expires=30, ignore_result=True, retry=False)
        except (OperationalError, OSError) as error:
            self._fall_silent(error)
            return False
        return True

    def announce(self, job: str) -> None:
        """Wake who waits for news of a job in any process."""
        if time.monotonic() < self._silent_until:
            return
        try:
            self._redis.publish(CHANNEL, job)
        except (RedisError, OSError) as error:
            self._fall_silent(error)

    def reaches_broker(self) -> bool:
        """Whether the broker answers now."""
        try:
            self._redis.ping()
        except (RedisError, OSError):
            return False
        return True

    def broker_version(self) -> tuple[str, str] | None:
        """Product (``valkey`` or ``redis``) and version of the broker; None: it does not say."""
        try:
            told = self._redis.info("server")
        except (RedisError, OSError):
            return None
        for product in ("valkey", "redis"):
            if f"{product}_version" in told:
                return product, str(told[f"{product}_version"])
        return None

    def _fall_silent(self, error: Exception) -> None:
        self._silent_until = time.monotonic() + _SILENT_S
        _log.warning("broker_away", error=type(error).__name__)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
        self._app.close()
