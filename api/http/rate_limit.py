"""Limit the request rate per key with token buckets in this process.

The buckets are in memory, so each API process counts separately: with n processes behind a proxy, a
key gets up to n times its rate. Counting in the database would turn every read into a write.
"""

import time
from collections.abc import Callable

BURST_S = 2.0
"""A bucket holds the requests of this many seconds, and at least one."""
_MAX_BUCKETS = 10_000


class RateLimiter:
    """The buckets of one process. Use only on the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def look(self, key: str, rate: float) -> float:
        """Return 0 if a key may send a request, or the seconds until it may. Takes no token."""
        return max(0.0, 1.0 - self._level(key, rate, self._clock())) / rate

    def _level(self, key: str, rate: float, time_now: float) -> float:
        most = max(1.0, rate * BURST_S)
        level, since = self._buckets.get(key, (most, time_now))
        return min(most, level + (time_now - since) * rate)

    def take(self, key: str, rate: float) -> float:
        """Take one token of a key. Return 0, or the seconds until there is one."""
        time_now = self._clock()
        level = self._level(key, rate, time_now)
        if level < 1.0:
            self._buckets[key] = (level, time_now)
            return (1.0 - level) / rate
        if key not in self._buckets and len(self._buckets) >= _MAX_BUCKETS:
            self._forget_full(time_now)
        self._buckets[key] = (level - 1.0, time_now)
        return 0.0

    def _forget_full(self, time_now: float) -> None:
        """Drop buckets that were unused for a while: they are full again, or will be soon."""
        for key, (_, since) in list(self._buckets.items()):
            if time_now - since > BURST_S:
                del self._buckets[key]
