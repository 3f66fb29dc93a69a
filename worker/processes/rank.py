"""The supervisor's side of a rank: its lifeline, its signals, and how it is stopped."""

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from glasshouse import jsonio, processes
from glasshouse.processes import Identity


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended. ``lost``: the fork server died too, so how it ended is not known."""

    code: int | None = None
    signal: int | None = None
    lost: bool = False
    peak_bytes: int | None = None
    """The peak memory of the process, bytes."""

    def __str__(self) -> str:
        if self.lost:
            return "it was lost with its fork server"
        if self.signal:
            return f"it was killed by {signal_name(self.signal)}"
        return f"it ended with status {self.code}"


class Rank:
    """One training process, and the pipe whose end means that its supervisor is gone."""

    def __init__(self, identity: Identity, lifeline: int) -> None:
        self.identity = identity
        self._lifeline: int | None = lifeline
        self._over = threading.Event()
        self._exit: Exit | None = None

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait for the end and return it; None while the rank is running."""
        self._over.wait(timeout_s)
        return self._exit

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command through the lifeline. A rank that has ended does not receive it."""
        if self._lifeline is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifeline, jsonio.dumps(command).encode() + b"\n")

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the rank's whole process group."""
        return processes.signal_group(self.identity, number)

    def ended(self, how: Exit) -> None:
        """Store the end; called by the thread that reads from the fork server."""
        self._exit = how
        self._over.set()

    def close(self) -> None:
        """Close the lifeline; a rank that is still running then ends itself."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


class RankStop:
    """Stops one rank: asks, then sends SIGTERM, then SIGKILL. To ask again can only add force."""

    def __init__(
        self, rank: Rank, *, grace_s: float, kill_s: float, unkillable_s: float = 60.0
    ) -> None:
        self._rank = rank
        self._grace_s = grace_s
        self._kill_s = kill_s
        self._unkillable_s = unkillable_s
        self._how: str | None = None
        self._asked_at: float | None = None
        self._termed_at: float | None = None
        self._killed_at: float | None = None

    @property
    def signalled(self) -> bool:
        """Whether this sent a signal, so that a death by signal is expected."""
        return self._termed_at is not None

    @property
    def is_unkillable(self) -> bool:
        """Whether even SIGKILL has not ended the rank: it hangs in a system call."""
        if self._killed_at is None:
            return False
        return time.monotonic() > self._killed_at + self._unkillable_s

    def ask(self, how: str = "cancelled", *, force: bool = False) -> None:
        """Ask the rank to stop at its next step boundary; with ``force``, send SIGTERM at once.

        ``how``: ``cancelled``, or with a checkpoint to resume from as ``paused`` or
        ``interrupted``. The first request starts the grace period.
        """
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        if how != self._how:
            self._how = how
            cancels = how == "cancelled"
            self._rank.tell({"do": "cancel"} if cancels else {"do": "stop", "as": how})
        if force:
            self._terminate()

    def press(self) -> None:
        """Send the next signal if it is due. Called each time the supervisor checks the rank."""
        now = time.monotonic()
        if self._asked_at is not None and now >= self._asked_at + self._grace_s:
            self._terminate()
        due = self._termed_at is not None and now >= self._termed_at + self._kill_s
        if due and self._killed_at is None:
            self._killed_at = now
            self._rank.signal(signal.SIGKILL)

    def _terminate(self) -> None:
        if self._termed_at is None:
            self._termed_at = time.monotonic()
            self._rank.signal(signal.SIGTERM)


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGSEGV`` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
