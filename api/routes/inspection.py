"""The routers for inspecting jobs and the machines that run them."""

from fastapi import APIRouter

from api.routes.observations import events, layers, logs, metrics, plots, probes, requests, stats
from api.routes.service import fleet
from api.routes.storage import files

ROUTERS: tuple[APIRouter, ...] = (
    events.router,
    metrics.router,
    layers.router,
    stats.router,
    probes.router,
    files.router,
    logs.router,
    plots.router,
    requests.router,
    fleet.router,
)
