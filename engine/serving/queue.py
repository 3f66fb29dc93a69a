"""The bounded queue of requests, and how requests become batches."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.inference.blocks import Column
from engine.serving.requests import Asked
from engine.serving.served_models import ServedVersion

_SMOOTHING = 0.1
MAX_BYTES = 1 << 30
"""The most bytes of rows that wait, whatever the number of requests."""


class QueueFull(Exception):
    """As many requests wait as may."""

    def __init__(self, size: int, wait_s: float) -> None:
        """``wait_s``: how long the requests in the queue will take, as far as is known."""
        super().__init__(size)
        self.size, self.wait_s = size, wait_s


@dataclass(eq=False)
class Pending:
    """A request that waits for its answer."""

    asked: Asked
    version: ServedVersion
    reference: str
    """The model as the client named it."""
    answer: Callable[[dict[str, Any], bytes], None]
    """Sends the answer: its head and its body."""
    deadline: float
    """By ``time.monotonic``: nobody waits for the answer any more."""
    priority: int = 0
    arrived: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    shadows: "Pending | None" = None
    """The request whose answer this one is compared with; None: this is a client's."""
    shadow: "Pending | None" = None
    """The request that is compared with this one's answer."""
    columns: Mapping[str, Column] | None = None
    """Its outputs, kept for a shadow."""

    @property
    def num_bytes(self) -> int:
        """The size of its rows."""
        return sum(loaded.nbytes for loaded in self.asked.rows.values())

    @property
    def group(self) -> Hashable:
        """Requests of the same group can be computed together."""
        asked = self.asked
        wanted = (asked.outputs, asked.fields, asked.top_k)
        alone = id(self) if self.version.inputs.depends_on_longest(asked.outputs) else None
        return (self.priority, id(self.version), *wanted, _bucket(asked), alone)


def _bucket(asked: Asked) -> int:
    """Return the power of two that the longest sequence fits in, so that padding stays below 2 x.

    0 without sequences.
    """
    longest = 0
    for loaded in asked.rows.values():
        lengths = getattr(loaded, "lengths", None)
        if lengths is not None and len(lengths):
            longest = max(longest, int(lengths.max()))
    return (longest - 1).bit_length() + 1 if longest else 0


def _order(request: Pending) -> tuple[int, float, int]:
    return (-request.priority, request.arrived, id(request))


class RequestQueue:
    """Requests in the order of priority and arrival."""

    def __init__(self, max_requests: int, max_rows: int, max_delay_s: float) -> None:
        """``max_rows``: of a batch. ``max_delay_s``: that a batch waits for more requests."""
        self._max_requests, self._max_rows, self._max_delay_s = max_requests, max_rows, max_delay_s
        self._groups: dict[Hashable, deque[Pending]] = {}
        self._size = self._bytes = 0
        self._changed = threading.Condition()
        self._request_s = 0.0
        """The smoothed time that one request takes, seconds."""

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return self._size

    @property
    def is_busy(self) -> bool:
        """Whether more than half of the requests wait that may."""
        return self._size > self._max_requests // 2

    def put(self, request: Pending) -> None:
        """Add a request.

        Raises:
            QueueFull: as many wait as may.
        """
        with self._changed:
            size = request.num_bytes
            if self._size >= self._max_requests or (self._size and self._bytes + size > MAX_BYTES):
                raise QueueFull(self._size, self._size * self._request_s)
            self._groups.setdefault(request.group, deque()).append(request)
            self._size += 1
            self._bytes += size
            self._changed.notify()

    def take(self, timeout_s: float) -> list[Pending]:
        """Return requests that are computed together; empty: none came in time.

        Those that nobody waits for any more are left out.
        """
        with self._changed:
            if not self._size:
                self._changed.wait(timeout_s)
            found = self._next()
            if not found:
                return []
            until = found[0].arrived + self._max_delay_s
            group, rows = found[0].group, sum(one.asked.num_rows for one in found)
            while rows < self._max_rows and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
                more = self._of_group(group, self._max_rows - rows)
                found += more
                rows += sum(one.asked.num_rows for one in more)
            return found

    def took(self, num_requests: int, seconds: float) -> None:
        """Note how long a batch took."""
        each_s = seconds / max(1, num_requests)
        self._request_s += _SMOOTHING * (each_s - self._request_s)

    def wake(self) -> None:
        """Let `take` return."""
        with self._changed:
            self._changed.notify()

    def _next(self) -> list[Pending]:
        """Return the requests of the group whose first one is due."""
        while self._groups:
            _, group = min((_order(waiting[0]), group) for group, waiting in self._groups.items())
            if found := self._of_group(group, self._max_rows):
                return found
        return []

    def _of_group(self, group: Hashable, max_rows: int) -> list[Pending]:
        """Remove and return requests of a group with at most ``max_rows`` rows, at least one."""
        found: list[Pending] = []
        waiting, now, rows = self._groups.get(group), time.monotonic(), 0
        while waiting:
            if waiting[0].is_cancelled or waiting[0].deadline < now:
                self._remove(waiting)
                continue
            if found and rows + waiting[0].asked.num_rows > max_rows:
                break
            rows += waiting[0].asked.num_rows
            found.append(self._remove(waiting))
            if rows >= max_rows:
                break
        if waiting is not None and not waiting:
            del self._groups[group]
        return found

    def _remove(self, waiting: deque[Pending]) -> Pending:
        request = waiting.popleft()
        self._size -= 1
        self._bytes -= request.num_bytes
        return request
