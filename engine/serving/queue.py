"""The bounded queue of requests, and how requests become batches."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from engine.data.columns.loaded import LoadedSequence
from engine.inference.blocks import Column
from engine.serving.request_log import SentRequest
from engine.serving.requests import Asked
from engine.serving.served_models import ServedNetwork

_SMOOTHING = 0.1
_FORGETTING = 0.98
_MAX_DEAD = 100
_MAX_KINDS = 100
MAX_BYTES = 1 << 30
"""The most bytes of rows that wait, whatever the number of requests."""


class QueueFull(Exception):
    """As many requests wait as may."""

    def __init__(self, size: int, wait_s: float, removed: Sequence["Pending"] = ()) -> None:
        """``wait_s``: how long the requests in the queue will take, as far as is known.

        ``removed``: requests that nevertheless had to make room.
        """
        super().__init__(size)
        self.size, self.wait_s, self.removed = size, wait_s, removed


Group = tuple[Hashable, int]
"""The kind of requests, and the power of two that their sequences fit in."""


@dataclass(eq=False)
class Pending:
    """A request that waits for its answer."""

    asked: Asked
    version: ServedNetwork
    reference: str
    """The model as the client named it."""
    answer: Callable[[dict[str, Any], bytes], None]
    """Sends the answer: its head and its body."""
    deadline: float
    """By ``time.monotonic``: nobody waits for the answer any more."""
    priority: int = 0
    arrived: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    is_queued: bool = False
    """Whether it counts as one of those that wait."""
    shadows: "Pending | None" = None
    """The request whose answer this one is compared with; None: this is a client's."""
    shadow: "Pending | None" = None
    """The request that is compared with this one's answer."""
    columns: Mapping[str, Column] | None = None
    """Its outputs, kept for a shadow."""
    sent: SentRequest | None = None
    """What the client sent, if the request is to be recorded."""

    @cached_property
    def num_bytes(self) -> int:
        """The size of its rows, and of what is kept to record it."""
        body = None if self.sent is None else self.sent.body
        return sum(loaded.nbytes for loaded in self.asked.rows.values()) + len(body or b"")

    @cached_property
    def kind(self) -> Hashable:
        """Requests of the same kind can be computed together."""
        asked = self.asked
        wanted = (asked.outputs, asked.fields, asked.top_k)
        alone = id(self) if self.version.inputs.depends_on_longest(asked.outputs) else None
        return (self.priority, id(self.version), *wanted, alone)

    @cached_property
    def num_steps(self) -> int:
        """The power of two that its longest sequence fits in; 1 without sequences.

        Rows that are padded to the same power of two are padded to less than 2 x their length.
        """
        longest = 1
        for loaded in self.asked.rows.values():
            if isinstance(loaded, LoadedSequence):
                longest = max(longest, loaded.longest)
        return 1 << (longest - 1).bit_length()

    @property
    def group(self) -> "Group":
        """The group that it waits in."""
        return self.kind, self.num_steps


def _num_rows(requests: Sequence[Pending]) -> int:
    return sum(one.asked.num_rows for one in requests)


def _order(request: Pending) -> tuple[int, float, int]:
    return (-request.priority, request.arrived, id(request))


class _Cost:
    """What a batch costs: some seconds, and some for each step of its padded rows.

    A straight line through the batches before, of which the newest count most.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        self._known = (0.0, 0.0)

    def add(self, num_steps: int, seconds: float) -> None:
        """Note a batch."""
        x, y = float(num_steps), seconds
        self._sums = _FORGETTING * self._sums + (1.0, x, x * x, y, x * y)
        n, sum_x, sum_xx, sum_y, sum_xy = self._sums.tolist()
        spread = n * sum_xx - sum_x * sum_x
        if spread <= 1e-6 * n * sum_xx:  # batches of one size do not tell the two apart
            return
        slope = max(0.0, (n * sum_xy - sum_x * sum_y) / spread)
        self._known = max(0.0, (sum_y - slope * sum_x) / n), slope

    def is_worth(self, more_steps: int) -> bool:
        """Whether so many steps of padding cost less than a batch more."""
        fixed_s, step_s = self._known
        return more_steps * step_s < fixed_s


class RequestQueue:
    """Requests in the order of priority and arrival."""

    def __init__(self, max_requests: int, max_rows: int, max_delay_s: float) -> None:
        """``max_rows``: of a batch. ``max_delay_s``: that a batch waits for more requests."""
        self._max_requests, self._max_rows, self._max_delay_s = max_requests, max_rows, max_delay_s
        self._groups: dict[Group, deque[Pending]] = {}
        self._costs: dict[Hashable, _Cost] = {}
        self._size = self._bytes = self._num_dead = 0
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

    def put(self, request: Pending) -> list[Pending]:
        """Add a request; return those of lower priority that had to make room for it.

        Raises:
            QueueFull: as many wait as may, and none of them has a lower priority.
        """
        removed: list[Pending] = []
        with self._changed:
            size = request.num_bytes
            while self._is_full(size):
                if (found := self._less_urgent(request.priority)) is None:
                    raise QueueFull(self._size, self._size * self._request_s, removed)
                removed.append(found)
            self._groups.setdefault(request.group, deque()).append(request)
            request.is_queued = True
            self._size += 1
            self._bytes += size
            self._changed.notify()
        return removed

    def cancel(self, request: Pending) -> None:
        """Drop a request that nobody waits for any more. Its place is free at once."""
        with self._changed:
            request.is_cancelled = True
            if request.is_queued:
                self._forget(request)
                self._num_dead += 1
            if self._num_dead > max(_MAX_DEAD, self._size):
                self._compact()

    def take(self, timeout_s: float) -> list[Pending]:
        """Return requests that are computed together; empty: none came in time.

        Requests that nobody waits for any more are dropped.
        """
        with self._changed:
            if not self._size:
                self._changed.wait(timeout_s)
            found = self._next()
            if not found:
                return []
            until = found[0].arrived + self._max_delay_s
            group, rows = found[0].group, _num_rows(found)
            while rows < self._max_rows and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
                more = self._of_group(group, self._max_rows - rows)
                found += more
                rows += _num_rows(more)
            return self._with_other_lengths(found, rows)

    def took(self, batch: Sequence[Pending], seconds: float) -> None:
        """Note how long a batch took."""
        self._request_s += _SMOOTHING * (seconds / len(batch) - self._request_s)
        kind = batch[0].kind
        if (cost := self._costs.get(kind)) is None:
            if len(self._costs) >= _MAX_KINDS:
                self._costs.clear()
            cost = self._costs[kind] = _Cost()
        cost.add(_num_rows(batch) * max(one.num_steps for one in batch), seconds)

    def wake(self) -> None:
        """Let `take` return."""
        with self._changed:
            self._changed.notify()

    def _with_other_lengths(self, found: list[Pending], rows: int) -> list[Pending]:
        """Add requests whose rows are longer or shorter, while that costs less than a batch more.

        Those of the most similar length come first.
        """
        kind, num_steps = found[0].group
        cost = self._costs.get(kind)
        if cost is None or rows >= self._max_rows:
            return found
        others = sorted(
            (steps for other, steps in self._groups if other == kind),
            key=lambda steps: abs(steps.bit_length() - num_steps.bit_length()),
        )
        for steps in others:
            waiting = self._groups[kind, steps]
            more = min(self._max_rows - rows, sum(one.asked.num_rows for one in waiting))
            longest = max(num_steps, steps)
            padding = rows * (longest - num_steps) + more * (longest - steps)
            if rows + waiting[0].asked.num_rows > self._max_rows or not cost.is_worth(padding):
                continue
            added = self._of_group((kind, steps), self._max_rows - rows)
            found += added
            rows += _num_rows(added)
            num_steps = longest
        return found

    def _next(self) -> list[Pending]:
        """Return the requests of the group whose first one is due."""
        while self._groups:
            _, group = min((_order(waiting[0]), group) for group, waiting in self._groups.items())
            if found := self._of_group(group, self._max_rows):
                return found
        return []

    def _of_group(self, group: Group, max_rows: int) -> list[Pending]:
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
        if request.is_queued:
            self._forget(request)
        else:
            self._num_dead -= 1
        return request

    def _forget(self, request: Pending) -> None:
        request.is_queued = False
        self._size -= 1
        self._bytes -= request.num_bytes

    def _is_full(self, size: int) -> bool:
        """Return whether a request with so many bytes has no place."""
        too_long = self._size > 0 and self._bytes + size > MAX_BYTES
        return too_long or self._size >= self._max_requests

    def _less_urgent(self, priority: int) -> Pending | None:
        """Remove and return the newest request of the lowest priority, if that is below one."""
        if self._num_dead:
            self._compact()
        newest = (waiting[-1] for waiting in self._groups.values())
        found = min(newest, key=lambda one: (one.priority, -one.arrived), default=None)
        if found is None or found.priority >= priority:
            return None
        self._forget(found)
        self._groups[found.group].pop()
        if not self._groups[found.group]:
            del self._groups[found.group]
        return found

    def _compact(self) -> None:
        """Remove cancelled requests, which would pile up behind those of higher priority."""
        for group in [*self._groups]:
            live = deque(one for one in self._groups[group] if one.is_queued)
            if live:
                self._groups[group] = live
            else:
                del self._groups[group]
        self._num_dead = 0
