"""The client of the planner: processes of the API that have torch and check specs.

One process always runs, and spends at most ``QUICK_S`` of CPU time on a request. A request that
takes longer goes to a second process with the planner's full limit, which is started on demand and
ended when idle. So a large network delays only other large ones.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from api.planning.fair_queue import FairQueue
from api.planning.planner_process import PlannerProcess
from glasshouse import jsonio
from glasshouse.errors import CatalogNotFound, FieldProblem, InvalidSpec
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
"""Sections without entries so far: you can request them, but no list names them."""
QUICK_S = 2.0
"""CPU time of a request in the shared process: about 900 layers on a typical core."""
CPU_S = 10.0
"""CPU time of a request in the second process."""
_SLOW_KEPT_S = 60.0
"""The second process, which needs the memory of torch again, ends when idle for this long."""
_KEPT_PLANS = 128
_KEPT_BYTES = 256 * 1024
_ASKED = {
    "plan": ("checking the network", "/network", "make the network smaller"),
    "set": ("checking the new settings", "/set", "set fewer at once"),
    "upload": ("comparing the weights with the network", "/network", "make the network smaller"),
    "catalog": ("listing the catalog", "", "ask again later"),
}
"""By request: what the planner did, the field it was about, and what to do."""


class Planner:
    """Checks specs, taking turns between owners."""

    def __init__(self, settings: Settings) -> None:
        self._is_warmed = settings.warm_planner
        self._quick = PlannerProcess(settings.planner_timeout_s, stays=True)
        self._slow = PlannerProcess(settings.planner_timeout_s, stays=False)
        self._closing: asyncio.Task[None] | None = None
        self._turns = FairQueue()
        self._plans: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._sections: dict[str, list[Any]] = {}

    @property
    def is_ready(self) -> bool:
        """Return whether a planner is ready, or will be started by the first request."""
        if self._quick.pid is None:
            return not self._is_warmed and self._quick.may_start
        return not self._quick.has_ended

    @property
    def pids(self) -> tuple[int | None, int | None]:
        """Return the ids of the processes: the shared one, and the one for long requests."""
        return self._quick.pid, self._slow.pid

    def open(self) -> None:
        """Start the process with the API, unless the settings leave that to the first request."""
        if self._is_warmed:
            self._quick.warm()

    async def close(self) -> None:
        """End the processes."""
        if self._closing is not None:
            self._closing.cancel()
        await self._quick.close()
        await self._slow.close()

    async def plan(
        self,
        spec: Mapping[str, Any],
        datasets: Mapping[str, Any],
        network: Mapping[str, Any] | None = None,
        *,
        owner: str = "",
        models: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return what a job would do: its resolved spec, layers, parameters, memory, warnings.

        ``models``: of a serve job, what trained each model, by its reference.

        Each owner has one request in the queue at a time.

        Raises:
            InvalidSpec: It cannot run; the error names every field to change.
            PlannerUnavailable: There is no planner now.
        """
        shown = {"name", "labels", "priority"}  # they do not change the plan
        asked = {key: value for key, value in spec.items() if key not in shown}
        request = {"do": "plan", "spec": asked, "datasets": dict(datasets)}
        if network is not None:
            request["network"] = dict(network)
        if models:
            request["models"] = dict(models)
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
        """Check new values of settings of a running job. ``spec`` is its current spec.

        Raises:
            InvalidSpec: One cannot be set, or not to this value; the pointers start with ``/set``.
            PlannerUnavailable: There is no planner now.
        """
        await self._ask({"do": "set", "spec": dict(spec), "set": dict(changes)})

    async def check_upload(
        self, upload: Mapping[str, Any], tensors: Mapping[str, Any], *, owner: str
    ) -> dict[str, Any]:
        """Check whether the tensors of a file are the weights of a network.

        Returns:
            ``upload`` with all inputs filled in, and the ``state`` of its checkpoint.

        Raises:
            InvalidSpec: They are not; the error names the differences.
            PlannerUnavailable: There is no planner now.
        """
        request = {"do": "upload", "upload": dict(upload), "tensors": dict(tensors)}
        async with self._turns.of(owner):
            return (await self._ask(request))["upload"]

    async def catalog(self, section: str) -> list[Any]:
        """Return the entries of one section of the catalog.

        Raises:
            CatalogNotFound: There is no such section.
            PlannerUnavailable: There is no planner now.
        """
        if section not in SECTIONS:
            raise CatalogNotFound(
                f"The catalog has no section of this name; it has {', '.join(SECTIONS)}."
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
        """Send one request and return the response; a long one runs in the second process.

        Raises:
            InvalidSpec: It is refused; the error names every field to change.
            PlannerUnavailable: There is no planner now.
        """
        answer = await self._quick.ask(request | {"max_seconds": QUICK_S})
        if answer.get("overtime"):
            if self._closing is not None:
                self._closing.cancel()
            answer = await self._slow.ask(request | {"max_seconds": CPU_S})
            self._closing = asyncio.create_task(self._close_later())
        if answer.get("overtime"):
            raise _refused(request, f"took more than {CPU_S:g} s of processor time")
        return _checked(answer)

    async def _close_later(self) -> None:
        await asyncio.sleep(_SLOW_KEPT_S)
        await self._slow.rest()


def _refused(request: Mapping[str, Any], why: str) -> InvalidSpec:
    what, pointer, advice = _ASKED[request["do"]]
    detail = f"{what} {why}: {advice}"
    return InvalidSpec(
        f"{detail[0].upper()}{detail[1:]}.", problems=[FieldProblem(pointer, detail, "too_large")]
    )


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.get("ok"):
        return answer
    found = [
        FieldProblem(str(entry["pointer"]), str(entry["detail"]), str(entry["code"]))
        for entry in answer["errors"]
    ]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise InvalidSpec(f"{found[0]}{more}", problems=found)
