"""The routers for inspecting jobs and the machines that run them."""

from fastapi import APIRouter

from api.routes import events, files, fleet, layers, logs, metrics, plots, probes, stats

ROUTERS: tuple[APIRouter, ...] = (
    events.router,
    metrics.router,
    layers.router,
    stats.router,
    probes.router,
    files.router,
    logs.router,
    plots.router,
    fleet.router,
)
