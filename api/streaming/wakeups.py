"""Wake waiters when a job may have changed.

One subscriber per process listens on the channel to which every writer publishes after its commit.
A notification is only a hint: each may be lost, which costs latency, never an event. So no wait is
longer than ``poll_s``, and after a wake-up waiters read the database again.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from models.fleet.notifier import CHANNEL

POLL_S = 1.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_SILENCE_S = 10.0
_log = structlog.get_logger(__name__)


class Subscription:
    """A subscription to changes of jobs. Changes between two waits are not missed."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._is_notified = False
        self._waiter: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Note that there may be changes."""
        self._is_notified = True
        self._wake()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait for changes, at most for the poll interval or ``timeout_s``.

        It uses one future and one timer, because it runs for every client and every chunk.
        ``wait_for`` creates a task each time in Python 3.11, which is a quarter of the cost of many
        clients.
        """
        limit = self._poll_s if timeout_s is None else min(timeout_s, self._poll_s)
        if not self._is_notified:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            alarm = loop.call_later(max(limit, 0.0), self._wake)
            try:
                await self._waiter
            finally:
                alarm.cancel()
                self._waiter = None
        self._is_notified = False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Wakeups:
    """The subscriptions of this process, and the subscriber that wakes them."""

    def __init__(self, redis_url: str, *, poll_s: float = POLL_S) -> None:
        self._url = redis_url
        self._poll_s = poll_s
        self._watches: dict[str, set[Subscription]] = {}
        self.connected = False
        """Whether the subscriber is connected to the channel."""

    @contextmanager
    def watch(self, *jobs: str) -> Generator[Subscription]:
        """Subscribe to changes of these jobs during the block. Read after entering it."""
        watch = Subscription(self._poll_s)
        for job in jobs:
            self._watches.setdefault(job, set()).add(watch)
        try:
            yield watch
        finally:
            for job in jobs:
                rest = self._watches.get(job, set())
                rest.discard(watch)
                if not rest:
                    self._watches.pop(job, None)

    def notify(self, job: str) -> None:
        """Wake waiters for this job in this process."""
        for watch in self._watches.get(job, ()):
            watch.notify()

    def wake_all(self) -> None:
        """Wake all waiters: notifications may have been missed, or the process ends."""
        for watches in self._watches.values():
            for watch in watches:
                watch.notify()

    async def run(self) -> None:
        """Listen until cancelled, reconnecting as often as needed."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._listen()
            except (RedisError, OSError, TimeoutError) as error:
                if self.connected:
                    _log.warning("wakeups_lost", error=type(error).__name__)
                    pause_s = _FIRST_PAUSE_S
                self.connected = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _listen(self) -> None:
        # typed loosely: redis-py's own annotations are partly unknown
        redis: Any = Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            self._url, socket_connect_timeout=2.0, retry=Retry(NoBackoff(), 0)
        )
        unanswered = False
        try:
            async with redis.pubsub() as channel:
                await channel.subscribe(CHANNEL)
                while True:
                    message = await channel.get_message(timeout=_SILENCE_S)
                    if message is None:
                        if unanswered:
                            raise TimeoutError
                        await channel.ping()
                        unanswered = True
                        continue
                    unanswered = False
                    self._on_message(message)
        finally:
            await redis.aclose()

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            self.connected = True
            self.wake_all()
        elif message["type"] == "message":
            self.notify(message["data"].decode("ascii", "replace"))
