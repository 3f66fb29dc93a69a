"""Prometheus metrics: of this process, and of the database that all processes share."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from api.app_state import AppState
from glasshouse.errors import ServiceError
from models.fleet import heartbeats
from models.fleet.heartbeats import WorkerHealth
from models.jobs import jobs

_METHODS = frozenset({"GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS"})
_MAX_WORKERS = 200
"""Workers above this number have no metrics of their own."""
_REFRESH_S = 2.0
_SIZES_S = 60.0
"""Minimum interval between queries over many rows, such as sizes and ended attempts."""
_SHIP_BOUNDS = ("0.02", "0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "60.0", "+Inf")
"""The buckets of ``worker.context.Counters``; a test compares them."""


class ProcessMetrics:
    """The metrics of this process."""

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
            "Time to answer; of a stream, as long as it was open.",
            ["route"],
            registry=self.registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60),
        )
        self._streams = Gauge(
            "glasshouse_streams", "Open event streams of this process.", registry=self.registry
        )
        ProcessCollector(registry=self.registry)

    def seen(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response. Unknown methods share one name."""
        known = method if method in _METHODS else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def watch(self, app_state: AppState) -> None:
        """Read the metrics of streams and of the database at every scrape."""
        self._streams.set_function(app_state.streams.num_open.total)
        self.registry.register(DatabaseMetrics(app_state))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class DatabaseMetrics(Collector):
    """Metrics read from the database and cached: for 2 s, or for 60 s if the query is expensive."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._lock = threading.Lock()
        self._known: list[Metric] = []
        self._read_at = -_REFRESH_S
        self._sizes: list[Metric] = []
        self._wal: list[Metric] = []
        self._sized_at = -_SIZES_S

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not collect at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics. If the database is unavailable, return only that fact."""
        with self._lock:
            up = GaugeMetricFamily("glasshouse_database_up", "Whether the database answers.")
            try:
                self._refresh()
                up.add_metric([], 1)
            except ServiceError:
                up.add_metric([], 0)
                return [up]
            return [up, *self._known, *self._sizes, *self._wal]

    def _refresh(self) -> None:
        app_state = self._app_state
        if time.monotonic() - self._read_at >= _REFRESH_S:
            with app_state.database.read() as tx:
                by_state = jobs.count_by_state(tx)
                age_s = heartbeats.queue_age_s(tx)
                sent = heartbeats.deliveries(tx)
                disabled = heartbeats.disabled_webhooks(tx)
                signs = heartbeats.signs(
                    tx,
                    lease_ms=int(app_state.settings.lease_s * 1000),
                    canary_s=app_state.settings.canary_s,
                )
            self._known = [
                _gauges("glasshouse_jobs", "Jobs by state.", "state", by_state),
                _gauge("glasshouse_queue_age_seconds", "Wait of the oldest queued job.", age_s),
                _gauges("glasshouse_webhook_deliveries", "Messages that are kept.", "state", sent),
                _gauge("glasshouse_webhooks_disabled", "Webhooks switched off.", disabled),
                *_of_workers(signs),
                _gauges("glasshouse_free_bytes", "Space left.", "place", app_state.space.free()),
            ]
            self._read_at = time.monotonic()
        if time.monotonic() - self._sized_at >= _SIZES_S:
            with app_state.database.read() as tx:
                ended = heartbeats.ended_attempts(tx)
                stored = heartbeats.stored_bytes(tx)
                size = heartbeats.database_bytes(tx)
            self._sizes = [
                _gauges("glasshouse_attempts", "Ended attempts that are kept.", "exit_kind", ended),
                _gauges("glasshouse_stored_bytes", "Bytes of the artifacts.", "what", stored),
                _gauge("glasshouse_database_bytes", "Bytes of the database.", size),
            ]
            self._sized_at = time.monotonic()
        self._wal = _wal(app_state)


def _wal(app_state: AppState) -> list[Metric]:
    if not app_state.database.is_sqlite:
        return []
    wal = Path(app_state.database.url.removeprefix("sqlite:///") + "-wal")
    size = wal.stat().st_size if wal.exists() else 0
    return [_gauge("glasshouse_wal_bytes", "Bytes of SQLite's write-ahead log.", size)]


def _of_workers(signs: list[WorkerHealth]) -> list[Metric]:
    states = {state: sum(sign.state == state for sign in signs) for state in _STATES}
    states["unresponsive"] = sum(sign.unresponsive for sign in signs)
    alive = [sign for sign in signs if sign.state not in heartbeats.GONE][:_MAX_WORKERS]
    found: list[Metric] = [_gauges("glasshouse_workers", "Workers by state.", "state", states)]
    ages = [sign.swept_ago_s for sign in signs if sign.swept_ago_s is not None]
    if ages:
        name = "glasshouse_sweep_age_seconds"
        found.append(_gauge(name, "Time since any worker looked for what was lost.", min(ages)))
    for name, key, help_text in _WORKER_GAUGES:
        figures = {sign.worker: sign.figures[key] for sign in alive if key in sign.figures}
        found.append(_gauges(f"glasshouse_worker_{name}", help_text, "worker", figures))
    free = GaugeMetricFamily(
        "glasshouse_worker_free_bytes", "Space left.", labels=["worker", "place"]
    )
    events = CounterMetricFamily(
        "glasshouse_events_shipped", "Events stored since the worker's start.", labels=["worker"]
    )
    ships = HistogramMetricFamily(
        "glasshouse_ship_seconds",
        "From an event to its commit; of each shipment, its oldest event.",
        labels=["worker"],
    )
    for sign in alive:
        for place, left in sign.figures.get("free_bytes", {}).items():
            free.add_metric([sign.worker, place], left)
        if "events" in sign.figures:
            events.add_metric([sign.worker], sign.figures["events"])
            ships.add_metric([sign.worker], *_buckets(sign.figures))
    return [*found, free, events, ships]


def _buckets(figures: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    total, buckets = 0.0, list[tuple[str, float]]()
    for bound, count in zip(_SHIP_BOUNDS, figures["ship_buckets"], strict=True):
        total += count
        buckets.append((bound, total))
    return buckets, figures["ship_seconds"]


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _gauges(name: str, help_text: str, label: str, values: dict[str, Any]) -> Metric:
    found = GaugeMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        found.add_metric([key], value)
    return found


_STATES = ("active", "draining", "stopped", "lost")
_WORKER_GAUGES = (
    ("running_attempts", "running", "Attempts that run."),
    ("memory_bytes", "memory_bytes", "Resident memory of the worker itself."),
    ("open_files", "open_files", "File descriptors of the worker itself."),
)
