"""What a worker counts about itself. Other processes read it in the ledger."""

import os
import threading
from collections.abc import Sequence
from typing import Any

import psutil

from models.events import NewEvent
from models.tables import now

BOUNDS_S = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Upper bounds of the buckets of the time from a record to its commit; the last has none."""


class Tally:
    """Counts since the worker's start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events = 0
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._process = psutil.Process(os.getpid())

    def shipped(self, events: Sequence[NewEvent]) -> None:
        """Events were committed now: how many, and how long after the oldest had happened."""
        if not events:
            return
        waited_s = max(0.0, (now() - min(event.at for event in events)).total_seconds())
        place = next((n for n, bound in enumerate(BOUNDS_S) if waited_s <= bound), len(BOUNDS_S))
        with self._lock:
            self._events += len(events)
            self._seconds += waited_s
            self._buckets[place] += 1

    def figures(self) -> dict[str, Any]:
        """All counts, for the ledger."""
        with self._lock:
            counted: dict[str, Any] = {
                "events": self._events,
                "ship_seconds": round(self._seconds, 3),
                "ship_buckets": list(self._buckets),
            }
        return counted | {
            "memory_bytes": self._process.memory_info().rss,
            "open_files": self._process.num_fds(),
        }
