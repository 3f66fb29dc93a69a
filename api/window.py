"""The routes that look into jobs and at the machines that run them."""

from fastapi import APIRouter

from api import events, files, layers, machines, metrics, plots, printed, probes, stats

ROUTERS: tuple[APIRouter, ...] = (
    events.router,
    metrics.router,
    layers.router,
    stats.router,
    probes.router,
    files.router,
    printed.router,
    plots.router,
    machines.router,
)
