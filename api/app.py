"""The app factory: middleware and routes. Nothing runs at import."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

from api.app_state import AppState, make_resources
from api.http import dashboard, documentation, problems
from api.http.access import AccessMiddleware, Keyring
from api.http.disk_full import DiskFullMiddleware
from api.http.middleware import Head, RequestGuard, RequestLog, host_names
from api.routes import inspection
from api.routes.access import keys, quotas, webhooks
from api.routes.jobs import commands, control, jobs
from api.routes.service import catalog, health
from api.routes.service.catalog import VERSION
from api.routes.service.prometheus import ProcessMetrics
from api.routes.service.readiness import Readiness
from api.routes.serving import inference_protocol, predict
from api.routes.storage import checkpoints, datasets, models
from api.schemas import openapi
from api.serving import grpc_server
from api.serving.direct import DirectPredictions
from api.serving.grpc_server import GrpcParts
from models.settings import Settings
from models.telemetry.tracing import Tracing

ROUTERS: tuple[APIRouter, ...] = (
    catalog.router,
    keys.router,
    keys.session_routes,
    datasets.router,
    checkpoints.router,
    models.router,
    predict.router,
    predict.job_routes,
    inference_protocol.router,
    jobs.router,
    control.router,
    commands.router,
    health.router,
    webhooks.router,
    documentation.router,
    dashboard.router,
    quotas.router,
    *inspection.ROUTERS,
)
"""Every router, each with its whole prefix (``APIRouter(prefix="/api/v1")``). Add new ones here."""

UNTRACED = frozenset({"/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"})
"""Polled all the time by machines."""


class Api(FastAPI):
    """The API; predictions take a shorter way through it."""

    def __init__(self, predictions: DirectPredictions | None, **options: Any) -> None:
        """``predictions``: the shorter way; None: there is none, because requests are traced."""
        super().__init__(**options)
        self._predictions = predictions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if self._predictions is not None and self._predictions.takes(scope):
            await self._predictions(scope, receive, send, super().__call__)
        else:
            await super().__call__(scope, receive, send)


def create_app(settings: Settings) -> FastAPI:
    """Create the API of one process."""
    resources = make_resources(settings)
    keyring = Keyring(resources.database, settings)
    meters = ProcessMetrics()
    meters.watch(resources)
    tracing = Tracing("glasshouse-api")
    hosts = host_names(settings.allowed_hosts)
    direct = DirectPredictions(resources.replicas, keyring, settings, hosts, meters.seen)
    app = Api(
        direct if tracing.provider is None else None,
        telemetry=_telemetry(tracing),
        title="Glasshouse",
        version=VERSION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_name,
        lifespan=_lifespan,
        middleware=[
            Middleware(RequestLog, seen=meters.seen),
            Middleware(Head),
            Middleware(
                RequestGuard,
                hosts=hosts,
                max_bytes=_limits(settings),
                body_timeout_s=settings.body_timeout_s,
            ),
            Middleware(AccessMiddleware, keyring=keyring),
            Middleware(DiskFullMiddleware, space=resources.space),
        ],
    )
    app.state.resources = resources
    app.state.keyring = keyring
    app.state.meters = meters
    app.state.tracing = tracing
    app.state.readiness = Readiness(resources)
    app.state.routers = ROUTERS
    app.state.page = dashboard.find_page()
    problems.install(app)
    openapi.install(app)
    for router in ROUTERS:
        app.include_router(router)
    return app


def _operation_name(route: APIRoute) -> str:
    return openapi.operation_name(route.name)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    resources: AppState = app.state.resources
    resources.loop = asyncio.get_running_loop()
    resources.background.add(asyncio.create_task(resources.wakeups.run()))
    resources.planner.open()
    stop_grpc = await _start_grpc(app, resources)
    try:
        yield
    finally:
        resources.drain()
        await stop_grpc()
        for task in resources.background:
            task.cancel()
        await asyncio.gather(*resources.background, return_exceptions=True)
        resources.loop = None
        resources.replicas.close()
        resources.training_jobs.close()
        await resources.planner.close()
        app.state.readiness.close()
        resources.notifier.close()
        resources.database.close()
        await asyncio.to_thread(app.state.tracing.close)


async def _start_grpc(app: FastAPI, resources: AppState) -> Callable[[], Awaitable[None]]:
    """Listen for gRPC if there is a port for it; return what ends that."""

    async def nothing() -> None:
        """There is no gRPC."""

    if resources.settings.grpc_port is None:
        return nothing
    readiness: Readiness = app.state.readiness
    return await grpc_server.start(
        GrpcParts(
            resources.settings,
            resources.replicas,
            app.state.keyring,
            app.state.meters.seen,
            lambda: readiness.report().status != "down",
            inference_protocol.SERVER,
        )
    )


def _telemetry(tracing: Tracing) -> TelemetryConfig:
    """Configure spans of requests, if tracing is on. Metrics and logs are our own."""
    return {
        "tracer_provider": tracing.provider,
        "tracing": tracing.provider is not None,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": lambda scope: scope.get("path") in UNTRACED,
    }


_PREDICTS = ("/predict", "/infer")
_UPLOADS = ("/api/v1/datasets", "/api/v1/checkpoints")


def _limits(settings: Settings) -> Callable[[Scope], int]:
    def max_bytes(scope: Scope) -> int:
        if scope["method"] == "POST" and scope["path"] in _UPLOADS:
            return settings.max_upload_bytes
        if scope["method"] == "POST" and scope["path"].endswith(_PREDICTS):
            return settings.max_predict_bytes
        return settings.max_json_bytes

    return max_bytes
