"""A rank stands still while too much of what it said waits on disk for the ledger.

Losses and events are never dropped, and a disk is not endless: when the ledger is away for long
the whole process group is stopped, and goes on where it was once half of that is stored.
"""

import signal
from typing import Any

import structlog

from worker.ranks import Rank

_log: Any = structlog.get_logger()


class Hold:
    """Stops and continues one rank by what waits in its spool."""

    def __init__(self, rank: Rank, max_bytes: int) -> None:
        self._rank = rank
        self._max_bytes = max_bytes
        self.holds = False
        """Whether the rank stands still."""

    def weigh(self, waiting_bytes: int) -> None:
        """Look at how much waits; hold the rank, or let it go."""
        if not self.holds and waiting_bytes > self._max_bytes:
            self.holds = self._rank.signal(signal.SIGSTOP)
            _log.warning("rank_held", waiting_bytes=waiting_bytes)
        elif self.holds and waiting_bytes <= self._max_bytes // 2:
            self.release()

    def release(self) -> None:
        """Let it go on, whatever waits: it is to stop by itself."""
        if self.holds:
            self.holds = False
            self._rank.signal(signal.SIGCONT)
            _log.info("rank_goes_on")
