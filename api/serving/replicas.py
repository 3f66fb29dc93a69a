"""The replicas of all serve jobs: find one for a request, send it there, return the reply.

Which replicas there are is read from the database at most once in ``FRESH_S`` while requests come,
and at once when none is known for a request. No request is stored anywhere.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool

from api.serving.connection import (
    SILENT_S,
    Connections,
    ReplicaConnection,
    ReplicaLost,
    Reply,
    exchange,
)
from api.serving.refreshing import Refresher
from api.serving.served_models import reason_of, references_of
from glasshouse.errors import (
    JobEnded,
    JobNotPaused,
    ModelNotServed,
    PredictionTimeout,
    QueueFull,
    ReplicaUnavailable,
)
from glasshouse.spec.jobs.serve_job import IDLE
from glasshouse.spec.model_names import canonical, parse_model_reference
from models import published_models
from models.database import Database
from models.fleet.notifier import Notifier
from models.jobs import jobs, pausing, replicas
from models.jobs.replicas import Route

FRESH_S = 1.0
AT_ONCE_S = 0.1
"""How often the database is asked while requests wait for a replica that starts."""
AGAIN_S = 0.5
"""A replica that was lost is tried again after this time."""


@dataclass(slots=True)
class _Table:
    """The serve jobs at some time."""

    routes: Sequence[Route] = ()
    found: dict[tuple[str, str], list[tuple[Route, str]]] = field(
        default_factory=dict[tuple[str, str], list[tuple[Route, str]]]
    )
    """By owner and reference: the replicas that serve it, and under which reference."""

    def find(self, owner: str, reference: str) -> list[tuple[Route, str]]:
        """Return the replicas that serve a model of an owner."""
        if (known := self.found.get((owner, reference))) is not None:
            return known
        able = [
            (route, served)
            for route in self.routes
            if route.owner == owner
            and route.attempt is not None
            and (served := _served(route, reference)) is not None
        ]
        if able:  # clients choose the references: only those that are served are kept
            self.found[owner, reference] = able
        return able


class Replicas:
    """Connections to replicas, and what each serves."""

    def __init__(self, database: Database, notifier: Notifier) -> None:
        self._database, self._notifier = database, notifier
        self._table = _Table()
        self._refresher = Refresher(self._read)
        self._connections = Connections()

    async def ask(
        self, owner: str, reference: str, head: Mapping[str, Any], body: bytes, timeout_s: float
    ) -> Reply:
        """Send a request to a replica that serves a model; return its reply.

        If a replica is lost before it has answered, or its queue is full, another one gets the
        request.

        Args:
            owner: whose model it is.
            reference: ``name``, ``name@alias`` or ``name:version``.
            head: what the replica needs to know of the request.
            body: of the request.
            timeout_s: the longest that the client waits.

        Raises:
            ModelNotFound, ModelVersionNotFound: there is no such model.
            ModelNotServed: no serve job has it.
            QueueFull: too many requests wait.
            PredictionTimeout: there was no answer in time.
            ReplicaUnavailable: it cannot be reached.
        """
        reference = canonical(reference)
        until = time.monotonic() + timeout_s
        lost: ReplicaLost | None = None
        tried: dict[tuple[str, int], float] = {}
        while True:
            route, served = await self._choose(owner, reference, tried, until, lost)
            try:
                place = (route.job, route.attempt or 0)
                connection = await self._connections.get(place, route.address, route.token, until)
                reply = await self._exchange(connection, route, served, head, body, until)
                is_full = reply.head.get("code") == "queue_full"
                if not is_full or len(self._able(owner, reference, tried)) <= 1:
                    return reply
                tried[route.job, route.attempt or 0] = time.monotonic()  # others have room
            except ReplicaLost as error:
                lost = error
                tried[route.job, route.attempt or 0] = time.monotonic()
                self._refresher.read_at = min(self._refresher.read_at, time.monotonic() - FRESH_S)

    async def routes_of(self, owner: str) -> list[Route]:
        """Return the serve jobs of an owner that have not ended."""
        if self._refresher.age_s > FRESH_S:
            await self._refresher.refresh()
        return [route for route in self._table.routes if route.owner == owner]

    async def check_ready(self, owner: str, reference: str) -> None:
        """Check that a request for a model would be answered.

        Raises:
            ModelNotFound, ModelVersionNotFound: there is no such model.
            ModelNotServed: no serve job has it.
            ReplicaUnavailable: its replica has not started yet.
        """
        routes = await self.routes_of(owner)
        if self._table.find(owner, reference):
            return
        starting = [route for route in routes if _is_wanted(route, reference)]
        if await self._idle(owner, reference, starting) is None:
            raise ReplicaUnavailable(f"{reference!r} is not ready: {reason_of(starting[0])}.")

    def close(self) -> None:
        """End all connections."""
        self._connections.keep(())

    async def _exchange(
        self,
        connection: ReplicaConnection,
        route: Route,
        served: str,
        head: Mapping[str, Any],
        body: bytes,
        until: float,
    ) -> Reply:
        most = int(route.spec["max_queue"]) + int(route.spec["max_batch_size"])
        is_urgent = head.get("priority", 0) > 0  # another one may have to make room for it
        if connection.num_waiting >= most and not is_urgent:  # the replica would refuse it
            detail = f"{connection.num_waiting} requests wait for {served!r} already."
            raise QueueFull(detail, retry_after_s=1)
        left_s = until - time.monotonic()
        try:
            return await exchange(connection, {**head, "reference": served}, body, left_s)
        except TimeoutError:
            raise _too_late(served) from None

    def _able(
        self, owner: str, reference: str, tried: Mapping[tuple[str, int], float]
    ) -> Sequence[tuple[Route, str]]:
        """Return the replicas that serve a model and were not tried lately."""
        able = self._table.find(owner, reference)
        if not tried:
            return able
        lately = time.monotonic() - AGAIN_S
        return [
            (route, served)
            for route, served in able
            if tried.get((route.job, route.attempt or 0), lately) <= lately
        ]

    async def _choose(
        self,
        owner: str,
        reference: str,
        tried: Mapping[tuple[str, int], float],
        until: float,
        lost: ReplicaLost | None,
    ) -> tuple[Route, str]:
        """Return a replica, and the reference under which it serves the model.

        Waits for one that starts. ``tried``: those that were lost or full, and when.
        """
        self._refresh_later()
        while True:
            if able := self._able(owner, reference, tried):
                return able[0] if len(able) == 1 else min(able, key=self._load_of)
            starting = [
                route
                for route in self._table.routes
                if route.owner == owner and _is_wanted(route, reference)
            ]
            if self._refresher.age_s < AT_ONCE_S:
                await self._wait(owner, reference, starting, until, lost)
            await self._refresher.refresh()

    async def _wait(
        self,
        owner: str,
        reference: str,
        starting: Sequence[Route],
        until: float,
        lost: ReplicaLost | None,
    ) -> None:
        """Wait until the table may have changed.

        Raises:
            ModelNotFound, ModelVersionNotFound, ModelNotServed, ReplicaUnavailable: nothing starts.
            PredictionTimeout: the client waits no longer.
        """
        if (idle := await self._idle(owner, reference, starting)) is not None:
            await run_in_threadpool(self._resume, idle)
        if time.monotonic() + AT_ONCE_S > until:
            if lost is not None:
                raise ReplicaUnavailable(f"No replica of {reference!r} answers: {lost}.")
            raise _too_late(reference)
        await asyncio.sleep(AT_ONCE_S / 2)

    async def _idle(self, owner: str, reference: str, starting: Sequence[Route]) -> Route | None:
        """Return a job that a request must resume; None: one will run without that.

        Raises:
            ModelNotFound, ModelVersionNotFound, ModelNotServed: none will.
        """
        if not starting:
            await run_in_threadpool(self._check_published, owner, reference)
            raise ModelNotServed(f"No serve job of yours serves {reference!r}.")
        if any(route.state != "paused" for route in starting):
            return None
        idle = [route for route in starting if route.state_reason == IDLE]
        if not idle:
            detail = f"The serve job of {reference!r} is paused ({starting[0].job})"
            raise ModelNotServed(f"{detail}: resume it.")
        return idle[0]

    def _check_published(self, owner: str, reference: str) -> None:
        with self._database.read() as tx:
            published_models.by_reference(tx, reference, owner=owner)

    def _resume(self, route: Route) -> None:
        """Queue a serve job that was paused because no request came."""
        with self._database.write() as tx:
            job = jobs.get(tx, route.job, None)
            try:
                pausing.request_resume(tx, job)
            except (JobNotPaused, JobEnded):  # another request was faster
                return
        self._notifier.job_queued()

    # --- connections -------------------------------------------------------------------------

    def _load_of(self, able: tuple[Route, str]) -> tuple[bool, int, float]:
        """Return what orders replicas; equal ones get requests at random.

        Otherwise each of several API processes would send its only request to the first one.
        """
        route, even = able[0], random.random()  # noqa: S311 (no secret)
        connection = self._connections.known((route.job, route.attempt or 0))
        if connection is None:
            return (False, 0, even)
        at = time.monotonic()
        is_silent = connection.num_waiting > 0 and at - connection.heard_at > SILENT_S
        is_silent |= at < connection.doubted_until
        return (is_silent, connection.num_waiting, even)

    # --- the table ---------------------------------------------------------------------------

    def _refresh_later(self) -> None:
        """Read the table in the background if it is old; the request does not wait for it."""
        if self._refresher.age_s > FRESH_S:
            self._refresher.start()

    async def _read(self) -> None:
        routes = await run_in_threadpool(self._routes)
        self._table = _Table(routes)
        self._connections.keep({(route.job, route.attempt or 0) for route in routes})

    def _routes(self) -> Sequence[Route]:
        with self._database.read() as tx:
            return replicas.routes(tx)


def _served(route: Route, reference: str) -> str | None:
    """Return the reference under which a replica serves what another one names, if it does.

    A version by its number is also served under an alias that names it now.
    """
    wanted = parse_model_reference(reference)
    for served in route.models:
        if served["reference"] == reference:
            return reference
    for served in route.models:
        if (
            wanted is not None
            and wanted.number is not None
            and served["model"] == wanted.name
            and served["version"] == wanted.number
        ):
            return str(served["reference"])
    return None


def _is_wanted(route: Route, reference: str) -> bool:
    """Return whether a serve job serves a reference while it runs."""
    is_first = route.parent is None
    return is_first and reference in references_of(route) and route.state != "cancelling"


def _too_late(reference: str) -> PredictionTimeout:
    detail = f"{reference!r} did not answer within the time that the request allows"
    return PredictionTimeout(f"{detail}: raise timeout_s, or start more replicas.")
