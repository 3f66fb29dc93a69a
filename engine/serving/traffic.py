"""Counts the requests of a replica, and reports them."""

import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from engine.core.spool import now
from engine.inference.blocks import Column
from engine.serving.listener import Listener
from engine.serving.queue import Pending
from engine.serving.request_log import RequestRecorder
from engine.training.report import Outputs

REPORT_S = 2.0
"""How often the counts are reported while requests come."""
BEAT_S = 10.0
"""How often a replica shows that it works while none come."""


class Traffic:
    """Counts of one replica from its start on, and times of requests after the last report."""

    def __init__(self, out: Outputs, stall_s: float | None = None) -> None:
        """``stall_s``: a replica that reports nothing for so long counts as stalled."""
        self._out = out
        self._beat_s = BEAT_S if stall_s is None else min(BEAT_S, stall_s / 4)
        self._started = self._reported_at = self._requested_at = time.monotonic()
        self._answered: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._shadows: dict[str, dict[str, float]] = {}
        self._times: list[tuple[float, float]] = []
        self._reported = 0
        self._worked_s = 0.0
        self.recorder: RequestRecorder | None = None
        """What records requests, if they are recorded."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last request, or since the start."""
        return time.monotonic() - self._requested_at

    def count(self, request: Pending, queued_s: float, compute_s: float) -> None:
        """Count an answer."""
        self._answered[request.version.label] += 1
        self._times.append((queued_s, queued_s + compute_s))

    def worked(self, seconds: float) -> None:
        """Count the time that a batch took, with the encoding of its answers."""
        self._worked_s += seconds

    def failed(self, request: Pending) -> None:
        """Count a request on which the network failed."""
        self._failed[request.version.label] += 1

    def compare(self, shadow: Pending, columns: Mapping[str, Column]) -> None:
        """Count how the answer of a shadow differs from the one that the client got."""
        given = None if shadow.shadows is None else shadow.shadows.columns
        if given is None:
            return
        new = {"requests": 0, "same_classes": 0, "max_difference": 0.0}
        entry = self._shadows.setdefault(shadow.version.label, new)
        entry["requests"] += 1
        classes = [key for key in columns if key.endswith("/id") and key in given]
        if classes and all(_is_same(columns[key], given[key]) for key in classes):
            entry["same_classes"] += 1
        for key, column in columns.items():
            if key.endswith("/value") and key in given:
                largest = _difference(column, given[key])
                entry["max_difference"] = max(entry["max_difference"], largest)

    def look(self, num_waiting: int, listener: Listener) -> None:
        """Report if it is time."""
        at = time.monotonic()
        has_news = self._reported != listener.num_received
        if has_news:
            self._requested_at = at
        is_new = has_news or bool(self._times)
        if at - self._reported_at >= min(self._beat_s, REPORT_S if is_new else BEAT_S):
            self._report(num_waiting, listener, at)

    def end(self, listener: Listener) -> None:
        """Report the last counts."""
        self._report(0, listener, time.monotonic())

    def _report(self, num_waiting: int, listener: Listener, at: float) -> None:
        seconds = max(1e-9, at - self._reported_at)
        requests = listener.num_received - self._reported
        record: dict[str, Any] = {
            "type": "traffic",
            "at": now(),
            "requests": listener.num_received,
            "requests_per_s": round(requests / seconds, 3),
            "answered": dict(self._answered),
            "failed": dict(self._failed),
            "refused": dict(listener.num_refused),
            "waiting": num_waiting,
            "busy": round(min(1.0, self._worked_s / seconds), 4),
            "idle_s": round(at - self._requested_at, 3),
        }
        if self.recorder is not None:
            record["request_log"] = self.recorder.counts
        if self._shadows:
            record["shadows"] = {name: dict(entry) for name, entry in self._shadows.items()}
        if self._times:
            queued = sorted(item[0] for item in self._times)
            whole = sorted(item[1] for item in self._times)
            record["queue_ms"] = {"p50": _ms(queued, 0.5), "p99": _ms(queued, 0.99)}
            record["latency_ms"] = {"p50": _ms(whole, 0.5), "p99": _ms(whole, 0.99)}
        self._out.emit(record)
        self._out.flush()
        self._times.clear()
        self._worked_s = 0.0
        self._reported, self._reported_at = listener.num_received, at


def _is_same(column: Column, other: Column) -> bool:
    return bool(torch.equal(column.values, other.values))


def _difference(column: Column, other: Column) -> float:
    """Return the largest absolute difference; infinity if the shapes differ."""
    if column.values.shape != other.values.shape:
        return math.inf
    return float((column.values.double() - other.values.double()).abs().max())


def _ms(ordered: list[float], quantile: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] * 1e3, 3)
