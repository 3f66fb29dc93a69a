"""One process that checks specs: ``engine.process.planner``, with one line per request.

Any request may crash or block it. Then it is killed, the request is refused, and a new process is
started.
"""

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import Any

import structlog

from api.planning.child_environment import clean_environment
from glasshouse import jsonio
from glasshouse.errors import InvalidSpec, PlannerUnavailable

_START_S = 120.0
_PAUSE_S = 2.0
"""After a planner that did not start, requests are refused for this long before another try."""
_LINE_BYTES = 256 * 1024**2
_log: Any = structlog.get_logger("glasshouse.api.planner")


class PlannerDied(Exception):
    """The process ended before it answered."""


class PlannerProcess:
    """The process, started on demand, and the queue for it."""

    def __init__(self, timeout_s: float, *, stays: bool) -> None:
        self._timeout_s = timeout_s
        self._stays = stays
        """Whether to restart it at once after it died, before the next request."""
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._number = 0
        self._down_until = 0.0
        self._warming: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Return the process's id, if it exists."""
        return self._process.pid if self._process is not None else None

    @property
    def has_ended(self) -> bool:
        """Return whether the process existed and ended by itself."""
        return self._process is not None and self._process.returncode is not None

    @property
    def may_start(self) -> bool:
        """Return whether the last failed start is long enough ago."""
        return time.monotonic() >= self._down_until

    def warm(self) -> None:
        """Start the process in the background."""
        self._warming = asyncio.create_task(self._warm())

    async def close(self) -> None:
        """End the process."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self._kill()

    async def rest(self) -> None:
        """End the process unless a request is using it."""
        if not self._turn.locked():
            async with self._turn:
                await self._kill()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the response. If the planner dies, try once more."""
        async with self._turn:
            for _ in range(2):
                process = await self._running()
                try:
                    async with asyncio.timeout(self._timeout_s):
                        answer = await self._exchange(process, request)
                except TimeoutError:
                    await self._kill()
                    self._restart()
                    raise InvalidSpec(
                        f"The spec took longer than {self._timeout_s:g} s to check; make the "
                        "network smaller."
                    ) from None
                except PlannerDied:
                    _log.warning("planner_died", code=process.returncode)
                    await self._kill()
                except BaseException:  # an unread response must not reach the next request
                    await self._kill()
                    raise
                else:
                    return answer
            self._restart()
            raise InvalidSpec("The process that checks specs died at this one.")

    def _restart(self) -> None:
        if self._stays:
            self.warm()

    async def _exchange(self, process: Process, request: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None  # noqa: S101 (PIPE was asked for)
        assert process.stdout is not None  # noqa: S101
        self._number += 1
        line = jsonio.dumps({"id": self._number} | request).encode("utf-8", "replace") + b"\n"
        try:
            process.stdin.write(line)
            await process.stdin.drain()
            answer = await process.stdout.readline()
        except (OSError, ValueError) as error:
            raise PlannerDied from error
        if not answer.endswith(b"\n"):
            raise PlannerDied
        return jsonio.loads(answer)

    async def _warm(self) -> None:
        with contextlib.suppress(PlannerUnavailable):
            async with self._turn:
                await self._running()

    async def _running(self) -> Process:
        """Return the process, starting it if needed. Call only while holding the lock."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        if time.monotonic() < self._down_until:
            raise PlannerUnavailable(retry_after_s=2)
        self._process = None
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine.process.planner",
            stdin=PIPE,
            stdout=PIPE,
            limit=_LINE_BYTES,
            env=clean_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        )
        assert process.stdout is not None  # noqa: S101
        self._process = process
        line = b""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_S):
                    line = await process.stdout.readline()
        except BaseException:
            await self._kill()
            raise
        if b'"ready"' not in line:
            await self._kill()
            self._down_until = time.monotonic() + _PAUSE_S
            _log.error("planner_did_not_start", code=process.returncode)
            raise PlannerUnavailable(retry_after_s=2)
        return process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
