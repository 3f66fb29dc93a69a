"""State that the routes of one API process share. Created once, by the app factory."""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from api.planning.planner import Planner
from api.serving.replicas import Replicas
from api.serving.training_jobs import TrainingJobs
from api.streaming.streams import Streams
from api.streaming.wakeups import Wakeups
from api.uploads.receiving import Receiving
from models.database import Database
from models.fleet.notifier import Notifier
from models.settings import Settings
from models.storage.artifacts import Artifacts, open_artifacts
from models.storage.disk_space import Space

MAX_SEARCHES = 2
"""Searches of logs by pattern at the same time. Others wait, so that they do not use all cores."""


@dataclass(slots=True)
class AppState:
    """Everything that outlives a request."""

    settings: Settings
    database: Database
    artifacts: Artifacts
    planner: Planner
    notifier: Notifier
    wakeups: Wakeups
    streams: Streams
    space: Space
    replicas: Replicas
    training_jobs: TrainingJobs
    receiving: Receiving = field(default_factory=Receiving)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process was asked to end: open streams and waits finish."""
    background: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    """Background tasks of the process, cancelled at its end."""

    searches: CapacityLimiter = field(default_factory=partial(CapacityLimiter, MAX_SEARCHES))
    """Threads that match patterns."""
    loop: asyncio.AbstractEventLoop | None = None

    def wake(self, job: str) -> None:
        """Notify waiters in all processes that a job may have changed. Callable from any thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.wakeups.notify, job)
        self.notifier.job_changed(job)

    def drain(self) -> None:
        """Let open streams and waits finish, because the process is about to end."""
        self.draining.set()
        self.streams.drain()
        self.wakeups.wake_all()


def make_resources(settings: Settings) -> AppState:
    """Create the resources from the settings. Connects to nothing yet."""
    database = Database(settings.database, pool_size=settings.database_connections)
    notifier = Notifier(settings)
    artifacts = open_artifacts(settings)
    wakeups = Wakeups(settings.redis)
    return AppState(
        settings=settings,
        database=database,
        artifacts=artifacts,
        planner=Planner(settings),
        notifier=notifier,
        wakeups=wakeups,
        streams=Streams(settings, database, wakeups),
        space=Space(settings),
        replicas=Replicas(database, notifier),
        training_jobs=TrainingJobs(database),
    )


async def _resources(request: Request) -> AppState:
    return request.app.state.resources


AppStateDep = Annotated[AppState, Depends(_resources)]
"""Type of a route's parameter for the app state."""
