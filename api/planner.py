"""The client of the planner: the one process of an API that has torch, and checks specs with it.

The planner answers one line per line. It may die or hang at any spec: then it is killed, the
spec is refused, and a new one is started.
"""

import asyncio
import contextlib
import hashlib
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import structlog

from api.children import clean_environment
from api.turns import Turns
from glasshouse import jsonio
from glasshouse.errors import CatalogNotFound, FieldProblem, InvalidSpec, PlannerUnavailable
from models.settings import Settings

SECTIONS = (
    "layers",
    "presets",
    "losses",
    "optimizers",
    "schedulers",
    "metrics",
    "datasets",
    "rules",
)
UNFILLED = ("rules",)
"""Sections of the contract that have no entry yet: they can be asked for, and nobody is told to."""
_START_S = 120.0
_PAUSE_S = 2.0
"""After a planner that did not start, requests are refused for this long before another try."""
_LINE_BYTES = 256 * 1024**2
_KEPT_PLANS = 128
_KEPT_BYTES = 256 * 1024
_log: Any = structlog.get_logger("glasshouse.api.planner")


class PlannerDied(Exception):
    """The process ended before it answered."""


class Planner:
    """One warm planner process, and the queue before it."""

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.planner_timeout_s
        self._is_warmed = settings.warm_planner
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._turns = Turns()
        self._number = 0
        self._down_until = 0.0
        self._warming: asyncio.Task[None] | None = None
        self._plans: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._sections: dict[str, list[Any]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a planner is there to be asked, or will be once it is."""
        if self._process is None:
            return not self._is_warmed and time.monotonic() >= self._down_until
        return self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """The process's id, while there is one."""
        return self._process.pid if self._process is not None else None

    def open(self) -> None:
        """Start the process with the API, unless the settings leave that to the first question."""
        if self._is_warmed:
            self.warm()

    def warm(self) -> None:
        """Begin to start the process, and answer meanwhile."""
        self._warming = asyncio.create_task(self._warm())

    async def close(self) -> None:
        """End the process."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self._kill()

    async def plan(
        self,
        spec: Mapping[str, Any],
        datasets: Mapping[str, Any],
        network: Mapping[str, Any] | None = None,
        *,
        owner: str = "",
    ) -> dict[str, Any]:
        """What a job would do: its resolved spec, layers, parameters, memory, warnings.

        One question of an owner stands in the queue at a time.

        Raises:
            InvalidSpec: it cannot be run; names every field to change.
            PlannerUnavailable: there is no planner now.
        """
        shown = {"name", "labels", "priority"}  # they change nothing of the plan
        asked = {key: value for key, value in spec.items() if key not in shown}
        request = {"do": "plan", "spec": asked, "datasets": dict(datasets)}
        if network is not None:
            request["network"] = dict(network)
        text = jsonio.dumps(request)
        key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        plan = self._plans.get(key)
        if plan is None:
            async with self._turns.of(owner):
                plan = (await self._ask(request))["plan"]
            self._keep(key, plan)
        self._plans.move_to_end(key) if key in self._plans else None
        resolved = plan["spec"] | {key: spec[key] for key in shown if key in spec}
        return plan | {"spec": resolved}

    async def check_set(self, spec: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Check new values of settings of a job that runs; ``spec`` is as it holds now.

        Raises:
            InvalidSpec: one cannot be set, or not to this value; points into ``/set``.
            PlannerUnavailable: there is no planner now.
        """
        await self._ask({"do": "set", "spec": dict(spec), "set": dict(changes)})

    async def check_upload(
        self, upload: Mapping[str, Any], tensors: Mapping[str, Any], *, owner: str
    ) -> dict[str, Any]:
        """Whether the tensors of a file are the weights of a network.

        Returns:
            ``upload`` with all inputs filled in, and the ``state`` of a checkpoint of it.

        Raises:
            InvalidSpec: they are not; names what differs.
            PlannerUnavailable: there is no planner now.
        """
        request = {"do": "upload", "upload": dict(upload), "tensors": dict(tensors)}
        async with self._turns.of(owner):
            return (await self._ask(request))["upload"]

    async def catalog(self, section: str) -> list[Any]:
        """The entries of one section of the catalogue.

        Raises:
            CatalogNotFound: there is no such section.
            PlannerUnavailable: there is no planner now.
        """
        if section not in SECTIONS:
            raise CatalogNotFound(
                f"The catalogue has no section of this name; it has {', '.join(SECTIONS)}."
            )
        if section not in self._sections:
            answer = await self._ask({"do": "catalog", "section": section})
            self._sections[section] = answer["entries"]
        return self._sections[section]

    def _keep(self, key: str, plan: dict[str, Any]) -> None:
        if len(jsonio.dumps(plan)) > _KEPT_BYTES:
            return
        self._plans[key] = plan
        while len(self._plans) > _KEPT_PLANS:
            self._plans.popitem(last=False)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One question, one answer. A planner that dies at it is tried once more."""
        async with self._turn:
            for _ in range(2):
                process = await self._running()
                try:
                    async with asyncio.timeout(self._timeout_s):
                        answer = await self._exchange(process, request)
                except TimeoutError:
                    await self._kill()
                    self.warm()
                    raise InvalidSpec(
                        f"The spec took longer than {self._timeout_s:g} s to check; make the "
                        "network smaller."
                    ) from None
                except PlannerDied:
                    _log.warning("planner_died", code=process.returncode)
                    await self._kill()
                except BaseException:  # an answer nobody reads must not reach the next question
                    await self._kill()
                    raise
                else:
                    return _checked(answer)
            self.warm()
            raise InvalidSpec("The process that checks specs died at this one.")

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
        """The process, started if need be. Only in one's turn."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        if time.monotonic() < self._down_until:
            raise PlannerUnavailable(retry_after_s=2)
        self._process = None
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine.planner",
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


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.get("ok"):
        return answer
    found = [
        FieldProblem(str(entry["pointer"]), str(entry["detail"]), str(entry["code"]))
        for entry in answer["errors"]
    ]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise InvalidSpec(f"{found[0].pointer or '/'}: {found[0].detail}{more}", problems=found)
