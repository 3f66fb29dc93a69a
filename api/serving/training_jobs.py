"""Training jobs that predict: ask one to listen, send it a request, return its reply.

The connections are those to replicas. Which jobs listen is read from the database at most once in
``FRESH_S`` while requests come, and more often while a request waits for a job that begins to
listen.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool

from api.serving.connection import Connections, ReplicaLost, Reply, exchange
from api.serving.refreshing import Refresher
from api.serving.replicas import AGAIN_S, AT_ONCE_S, FRESH_S
from glasshouse.errors import (
    CannotPredict,
    JobEnded,
    PredictionTimeout,
    ReplicaUnavailable,
)
from glasshouse.spec.parallel import parallel_of
from models.database import Database
from models.jobs import jobs, live_predictions
from models.jobs.live_predictions import LiveRoute
from models.observations import metrics
from models.state import ENDED
from models.tables import Job

_STEP_TIME = "time/step"


class TrainingJobs:
    """Connections to training jobs that answer requests for predictions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connections = Connections()
        self._routes: Mapping[str, LiveRoute] = {}
        self._refresher = Refresher(self._read)

    async def ask(
        self, sees: str | None, job_id: str, head: Mapping[str, Any], body: bytes, timeout_s: float
    ) -> Reply:
        """Send a request to a training job; return its reply.

        The first request lets the job listen. If the process of the job is lost, requests wait for
        the next attempt.

        Args:
            sees: the owner whose jobs the caller sees; None: those of all owners.
            job_id: the job.
            head: what the job needs to know of the request.
            body: of the request.
            timeout_s: the longest that the client waits.

        Raises:
            JobNotFound: there is no such job.
            JobEnded: it has ended.
            CannotPredict: it is not running, or jobs like it cannot predict.
            PredictionTimeout: there was no answer in time.
            ReplicaUnavailable: its process was lost and is not back in time.
        """
        until = time.monotonic() + timeout_s
        lost: ReplicaLost | None = None
        lost_at = -1e9
        if self._refresher.age_s > FRESH_S:
            await self._refresh_for(job_id)
        while True:
            route = self._find(sees, job_id)
            if route is not None and route.address and time.monotonic() > lost_at + AGAIN_S:
                try:
                    return await self._send(route, head, body, until)
                except ReplicaLost as error:
                    lost, lost_at = error, time.monotonic()
            elif route is None or not route.is_asked or route.state != "running" or lost:
                await run_in_threadpool(self._let_listen, sees, job_id)
            await self._wait(job_id, until, lost)

    def close(self) -> None:
        """End all connections."""
        self._connections.keep(())

    async def _send(
        self, route: LiveRoute, head: Mapping[str, Any], body: bytes, until: float
    ) -> Reply:
        place = (route.job, route.attempt)
        connection = await self._connections.get(place, route.address, route.token, until)
        left_s = until - time.monotonic()
        try:
            return await exchange(connection, {**head, "reference": route.job}, body, left_s)
        except TimeoutError:
            raise await run_in_threadpool(self._too_late, route.job) from None

    def _find(self, sees: str | None, job_id: str) -> LiveRoute | None:
        """Return what is known of a job, if the caller may see it.

        Raises:
            CannotPredict: its process could not begin to listen.
        """
        route = self._routes.get(job_id)
        if route is None or (sees is not None and route.owner != sees):
            return None
        if route.problem is not None:
            raise CannotPredict(f"{job_id} cannot answer: {route.problem}. {_instead(job_id)}")
        return route

    def _let_listen(self, sees: str | None, job_id: str) -> None:
        """Ask a job to listen, if it runs. One that is restarted will.

        Raises:
            JobNotFound, JobEnded, CannotPredict: it will not answer.
        """
        with self._database.read() as tx:
            job = jobs.get(tx, job_id, sees)
            asked = live_predictions.asked_attempt(tx, job)
            if asked is not None and job.state in ("queued", "starting"):
                return
            _check_state(job)
            if asked == job.attempt:
                return
            reason = parallel_of(jobs.whole(tx, job_id, sees).resolved).why_no_predictions
            if reason is not None:
                detail = f"{job_id} cannot predict while it trains: {reason}"
                raise CannotPredict(f"{detail}. {_instead(job_id)}")
        with self._database.write() as tx:
            job = jobs.get(tx, job_id, sees, lock=True)
            _check_state(job)
            live_predictions.ask(tx, job)

    async def _wait(self, job_id: str, until: float, lost: ReplicaLost | None) -> None:
        """Wait until more may be known of a job.

        Raises:
            PredictionTimeout, ReplicaUnavailable: the client waits no longer.
        """
        if time.monotonic() + AT_ONCE_S > until:
            route = self._routes.get(job_id)
            is_away = route is not None and route.state != "running"
            if lost is not None or is_away:
                why = f" ({lost})" if lost is not None else ""
                detail = f"The process of {job_id} was lost{why}, and is not back in time"
                raise ReplicaUnavailable(f"{detail}: try again.")
            raise await run_in_threadpool(self._too_late, job_id)
        await asyncio.sleep(AT_ONCE_S / 2)
        if self._refresher.age_s > AT_ONCE_S / 2:
            await self._refresher.refresh()

    def _too_late(self, job_id: str) -> PredictionTimeout:
        """Return the error that says how long a step of the job takes."""
        with self._database.read() as tx:
            step_s = metrics.newest(tx, job_id, _STEP_TIME)
        known = "no step of which is measured yet" if step_s is None else _taking(step_s)
        detail = f"{job_id} did not answer within the time that the request allows. It answers"
        detail += f" between two steps of training, {known}; evaluations and checkpoints add to"
        return PredictionTimeout(f"{detail} that. Raise timeout_s.")

    async def _refresh_for(self, job_id: str) -> None:
        """Read the table again; without waiting, if it has where a job listens."""
        route = self._routes.get(job_id)
        if route is None or not route.address:
            await self._refresher.refresh()
        else:
            self._refresher.start()

    async def _read(self) -> None:
        routes = await run_in_threadpool(self._read_routes)
        self._routes = {route.job: route for route in routes}
        self._connections.keep({(route.job, route.attempt) for route in routes})

    def _read_routes(self) -> list[LiveRoute]:
        with self._database.read() as tx:
            return live_predictions.routes(tx)


def _check_state(job: Job) -> None:
    """Check that a job trains now.

    Raises:
        JobEnded, CannotPredict: it does not.
    """
    if job.kind != "train":
        detail = f"Only a training job predicts with its current weights, and {job.id} is of the"
        raise CannotPredict(f"{detail} kind {job.kind}.")
    if job.state in ENDED:
        raise JobEnded(f"The job has ended ({job.state}). {_instead(job.id)}")
    if job.state != "running":
        detail = f"The job is {job.state}, and predicts only while it trains: try again once it is"
        raise CannotPredict(f"{detail} running. {_instead(job.id)}")


def _instead(job_id: str) -> str:
    publish, serve = f"glasshouse models publish NAME {job_id}", "glasshouse serve NAME"
    return f"Publish a checkpoint of it and serve that: {publish}, {serve}."


def _taking(step_s: float) -> str:
    return f"each of which takes about {step_s:.3g} s"
