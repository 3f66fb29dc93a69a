"""Wake-ups through the broker. Every one may be lost: the sweep finds what they would have said."""

import threading
import time
from typing import Any

import redis
import structlog
from kombu.exceptions import OperationalError  # pyright: ignore[reportMissingTypeStubs]
from redis.backoff import NoBackoff
from redis.retry import Retry

from models.settings import Settings

_log: Any = structlog.get_logger()

DISPATCH_QUEUE = "glasshouse.dispatch"
CHANNEL = "glasshouse:jobs"
_TIMEOUT_S = 1.0
_AWAY_S = 2.0
_MANY = 10
_EXPIRES_S = 30.0
"""A worker that was away for longer finds its jobs by its sweep."""


def worker_queue(worker: str) -> str:
    """The queue of one machine."""
    return f"glasshouse.worker.{worker}"


class Bells:
    """Rings; a broker that is away costs a short time-out and is then left alone for a while."""

    def __init__(self, settings: Settings, app: Any) -> None:
        self._app = app
        self._away_until = 0.0
        self._lock = threading.Lock()
        self._redis: Any = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            settings.redis,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    def supervise(self, worker: str, job_id: str) -> bool:
        """Tell a worker that a job is assigned to it. False: it was not told."""
        queue = worker_queue(worker)
        return self._try(lambda: self._send("glasshouse.supervise", queue, job_id))

    def canary(self, worker: str) -> bool:
        """Let a worker hear whether it hears its bell. False: the broker is away."""
        return self._try(lambda: self._send("glasshouse.canary", worker_queue(worker), worker))

    def changed(self, job_id: str) -> bool:
        """Wake those who watch a job."""
        return self._try(lambda: self._redis.publish(CHANNEL, job_id))

    def crowded(self, queue: str) -> bool:
        """Whether so many messages wait in a queue that more would not help."""
        length: list[int] = []
        self._try(lambda: length.append(self._redis.llen(queue)))
        return bool(length) and length[0] >= _MANY

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _send(self, task: str, queue: str, job_id: str) -> None:
        with self._lock:  # one producer: kombu's pool of them is not worth its memory
            self._app.send_task(task, args=[job_id], queue=queue, expires=_EXPIRES_S, retry=False)

    def _try(self, ring: Any) -> bool:
        if time.monotonic() < self._away_until:
            return False
        try:
            ring()
        except (redis.RedisError, OperationalError, OSError) as error:
            self._away_until = time.monotonic() + _AWAY_S
            _log.warning("broker_away", error=str(error))
            return False
        return True
