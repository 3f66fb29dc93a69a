"""Reads what is known from the database again, once for all requests that wait for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable


class Refresher:
    """Calls a function that reads from the database, at most once at a time."""

    def __init__(self, read: Callable[[], Awaitable[None]]) -> None:
        self.read_at = -1e9
        """When the newest successful call began, by ``time.monotonic``."""
        self._read = read
        self._reading: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the newest successful call began."""
        return time.monotonic() - self.read_at

    def start(self) -> None:
        """Read in the background. If that fails, the next call tries again."""
        if self._reading is None:
            self._begin().add_done_callback(_retrieve)

    async def refresh(self) -> None:
        """Read, or wait for the call that is under way."""
        await asyncio.shield(self._begin() if self._reading is None else self._reading)

    def _begin(self) -> asyncio.Task[None]:
        self._reading = asyncio.create_task(self._call())
        return self._reading

    async def _call(self) -> None:
        began = time.monotonic()
        try:
            await self._read()
            self.read_at = began
        finally:
            self._reading = None


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
