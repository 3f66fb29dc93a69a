"""All processes of one attempt, handled as one: they start together and end together.

Process 0 gets the requests. If a process fails, the others cannot continue: they are ended, and the
one that failed first is the cause.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from glasshouse.processes import Identity
from worker.processes.rank import Exit, Rank

_log: Any = structlog.get_logger()

PEER_LOST = "peer_lost"
"""The code of a failure that another process caused."""
PEERS_S = 2.0
"""How long the other processes may take to end after one has failed, or process 0 has ended."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended."""

    rank: int
    exit: Exit
    end: dict[str, Any] | None
    """Its ``end`` record, if it has written one."""
    was_signalled: bool = False
    """Whether this worker had sent it a signal."""

    @property
    def has_failed(self) -> bool:
        """Whether it ended other than as it was asked to."""
        return self.end is None or self.end["state"] == "failed"

    @property
    def is_cause(self) -> bool:
        """Whether it failed by itself, not because of another process or a signal of ours."""
        if self.end is None:
            return not self.was_signalled
        error: dict[str, Any] = self.end["error"] or {}
        return self.has_failed and error.get("code") != PEER_LOST


class Ranks:
    """The processes of one attempt, by rank."""

    def __init__(
        self, ranks: Sequence[Rank], read_end: Callable[[int], dict[str, Any] | None]
    ) -> None:
        """``read_end`` returns the ``end`` record of a process that has ended, by rank."""
        self._ranks = list(ranks)
        self._read_end = read_end
        self._ended: dict[int, Ended] = {}
        """In the order in which they were found to have ended."""
        self._pressed_at: float | None = None

    @property
    def first(self) -> Rank:
        """Process 0."""
        return self._ranks[0]

    @property
    def identities(self) -> list[Identity]:
        """The identity of each process."""
        return [rank.identity for rank in self._ranks]

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait for the end of all processes; return how the cause of it, or process 0, ended.

        None while one of them is running.
        """
        if len(self._ranks) == 1:
            exit_ = self.first.wait(timeout_s)
            if exit_ is not None:
                self._ended[0] = Ended(0, exit_, None, self.first.is_signalled)
            return exit_
        for number, rank in enumerate(self._ranks):
            if number not in self._ended and (exit_ := rank.wait(timeout_s)) is not None:
                end = self._read_end(number)
                self._ended[number] = Ended(number, exit_, end, rank.is_signalled)
            timeout_s = timeout_s if number in self._ended else 0
        if len(self._ended) == len(self._ranks):
            return self.cause.exit
        self._end_others()
        return None

    @property
    def cause(self) -> Ended:
        """The process that decides what the end of all means: the first that failed, or process 0.

        A process that died without a word comes before one that reported a failure: the report may
        be a consequence. One that this worker has ended decides nothing.
        """
        found = [one for one in self._ended.values() if one.is_cause]
        found.sort(key=lambda one: one.end is not None)
        failed = [one for one in self._ended.values() if one.end is not None and one.has_failed]
        return next(iter([*found, *failed]), self._ended[0])

    @property
    def are_ending(self) -> bool:
        """Whether one has failed, or process 0 has ended, so that the others are ended too."""
        return 0 in self._ended or any(one.has_failed for one in self._ended.values())

    def running(self) -> dict[int, Identity]:
        """Return the identities of the processes that are still running, by rank."""
        return {
            number: rank.identity
            for number, rank in enumerate(self._ranks)
            if number not in self._ended
        }

    def report(self, number: int, name: str) -> None:
        """Ask a process for its stacks and for what it waits for; see `Rank.report`."""
        self._ranks[number].report(name)

    def _end_others(self) -> None:
        """End the remaining processes some time after one has failed, or process 0 has ended."""
        if not self.are_ending:
            return
        now = time.monotonic()
        if self._pressed_at is None:
            self._pressed_at = now
        if now < self._pressed_at + PEERS_S:
            return
        for number, rank in enumerate(self._ranks):
            if number not in self._ended and not rank.is_signalled:
                _log.warning("rank_ended_with_others", rank=number, pid=rank.identity.pid)
                rank.ask(force=True)

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command to process 0, which shares it with the others."""
        self.first.tell(command)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to all processes; return whether process 0 got it."""
        for rank in self._ranks[1:]:
            rank.signal(number)
        return self.first.signal(number)

    @property
    def is_signalled(self) -> bool:
        """Whether `ask` or `press` sent process 0 a signal."""
        return self.first.is_signalled

    def has_survived(self, unkillable_s: float) -> bool:
        """Whether SIGKILL has not ended one of them for so long."""
        return any(
            rank.has_survived(unkillable_s)
            for number, rank in enumerate(self._ranks)
            if number not in self._ended
        )

    def ask(self, how: str = "cancelled", *, force: bool = False) -> None:
        """Ask process 0 to stop at its next step boundary; ``force``: send all SIGTERM at once."""
        self.first.ask(how, force=force)
        if force:
            for rank in self._ranks[1:]:
                rank.ask(how, force=True)

    def press(self, *, grace_s: float, kill_s: float) -> None:
        """Send the next signal to each process for which it is due."""
        self.first.press(grace_s=grace_s, kill_s=kill_s)
        for rank in self._ranks[1:]:
            if self.first.is_signalled:
                rank.ask(force=True)
            rank.press(grace_s=grace_s, kill_s=kill_s)

    def close(self) -> None:
        """Close the lifelines; a process that is still running then ends itself."""
        for rank in self._ranks:
            rank.close()
