"""Whether the service is well, for people, supervisors and Prometheus."""

import shutil
import time
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from api.access import Read
from api.answers import Json
from api.resources import House, Resources
from glasshouse.errors import ServiceError
from models import jobs, workers

router = APIRouter(tags=["service"])
_LEAST_FREE_BYTES = 512 * 1024**2


class Meters:
    """The figures of this process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "glasshouse_http_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "glasshouse_http_request_seconds",
            "Time to answer.",
            ["route"],
            registry=self.registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60),
        )
        self.jobs = Gauge("glasshouse_jobs", "Jobs by state.", ["state"], registry=self.registry)
        self.workers = Gauge(
            "glasshouse_workers", "Workers by state.", ["state"], registry=self.registry
        )
        self.streams = Gauge(
            "glasshouse_streams", "Open event streams of this process.", registry=self.registry
        )

    def seen(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer. Methods that nobody knows share one name."""
        known = method if method in {"GET", "HEAD", "POST", "PATCH", "DELETE"} else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


@router.get("/livez", summary="Whether this process answers")
async def get_livez() -> Response:
    """Always the same."""
    return Json({"status": "ok"})


@router.get("/readyz", summary="Whether the service can work")
def get_readyz(house: House) -> Response:
    """Each part by itself. 503 only without the database; `degraded` while another is away."""
    checks = {
        "database": _database(house),
        "broker": _said(house.bell.reaches_broker(), "the broker does not answer"),
        "workers": _workers(house),
        "planner": _said(house.planner.is_ready, "the planner is not there"),
        "disk": _disk(house),
    }
    if checks["database"] != "ok":
        status = "unavailable"
    else:
        status = "ok" if all(value == "ok" for value in checks.values()) else "degraded"
    code = 503 if status == "unavailable" else 200
    headers = {"Retry-After": "2"} if code == 503 else {}
    return Json({"status": status, "checks": checks}, status_code=code, headers=headers)


@router.get("/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse)
def get_metrics(request: Request, house: House, caller: Read) -> Response:
    """Requests, jobs by state, workers, streams, in Prometheus' text format."""
    del caller
    meters: Meters = request.app.state.meters
    with house.database.read() as tx:
        by_state = jobs.count_by_state(tx)
        known = workers.all_workers(tx, lease_ms=int(house.settings.lease_s * 1000))
    for state, count in by_state.items():
        meters.jobs.labels(state).set(count)
    for state in ("active", "draining", "lost"):
        meters.workers.labels(state).set(sum(found == state for _, found in known))
    meters.streams.set(house.streams.num_open.total())
    return Response(generate_latest(meters.registry), media_type=CONTENT_TYPE_LATEST)


def _said(well: bool, otherwise: str) -> str:
    return "ok" if well else otherwise


def _database(house: Resources) -> str:
    began = time.monotonic()
    try:
        house.database.ping()
    except ServiceError:
        return "the database does not answer"
    return _said(time.monotonic() - began < 5, "the database is slow")


def _workers(house: Resources) -> str:
    try:
        with house.database.read() as tx:
            known = workers.all_workers(tx, lease_ms=int(house.settings.lease_s * 1000))
    except ServiceError:
        return "unknown"
    return _said(any(state == "active" for _, state in known), "no worker takes jobs")


def _disk(house: Resources) -> str:
    place: Any = house.settings.artifacts
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return _said(free >= _LEAST_FREE_BYTES, "the disk is nearly full")
