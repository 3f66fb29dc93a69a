"""The client of the planner: the one process of an API that has torch, and checks specs with it.

The planner answers one line per line. It may die or hang at any spec: then it is killed, the
spec is refused, and a new one is started.
"""

import asyncio
from asyncio.subprocess import Process
from typing import Any

import structlog

from models.settings import Settings

_START_S = 60.0
_LINE_BYTES = 256 * 1024**2
_log: Any = structlog.get_logger("glasshouse.api.planner")


class PlannerDied(Exception):
    """The process ended before it answered."""


class Planner:
    """One warm planner process, and the queue before it."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.planner_timeout_s
        self._memory_bytes = settings.planner_memory_bytes
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._number = 0
        self._closed = False

    @property
    def is_ready(self) -> bool:
        """Whether a planner is there to be asked."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Begin to start the process; does not wait for it."""

    async def close(self) -> None:
        """End the process."""
