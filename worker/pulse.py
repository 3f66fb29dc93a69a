"""Whether a rank gets on: progress is another signal than the lease, which its worker keeps.

A rank whose main thread is stuck, in native code or for a disk, says nothing more; its worker
lives and goes on renewing the lease. Nobody then takes the job for lost, and nobody waits in vain.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

_EVERY_S = 0.5


class Pulse:
    """Looks at how far the spool of a rank has grown: all that a rank does, it says there."""

    def __init__(self, spool: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spool = spool
        self._clock = clock
        self._began_at = self._looked_at = self._moved_at = clock()
        self._told = False
        self.size = 0
        """Bytes of the spool when it was last looked at."""

    @property
    def lived_s(self) -> float:
        """Since the rank began."""
        return self._clock() - self._began_at

    @property
    def silent_s(self) -> float:
        """Since the last sign of progress."""
        return self._clock() - self._moved_at

    def stalls(self, timeout_s: float) -> bool:
        """Look; whether the rank is found to stall now. Once, until it has moved again."""
        now = self._clock()
        if now - self._looked_at < min(_EVERY_S, timeout_s / 4):
            return False
        self._looked_at = now
        size = self.size
        with contextlib.suppress(OSError):
            size = self._spool.stat().st_size
        if size != self.size:
            self.size = size
            self.moved()
        if self._told or self.silent_s < timeout_s:
            return False
        self._told = True
        return True

    def moved(self) -> None:
        """Begin anew: it has moved, or it was made to stand still."""
        self._moved_at = self._clock()
        self._told = False
