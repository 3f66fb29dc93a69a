"""A rank as its supervisor holds it: the lifeline, the signals, the way it ended."""

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

from glasshouse import jsonio, processes
from glasshouse.processes import Identity


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended. ``lost``: the nursery died with it, nobody saw how."""

    code: int | None = None
    signal: int | None = None
    lost: bool = False
    peak_bytes: int | None = None
    """The most memory that the process ever had in use."""

    def __str__(self) -> str:
        if self.lost:
            return "it was lost with its nursery"
        if self.signal:
            return f"it was killed by {signal_name(self.signal)}"
        return f"it ended with status {self.code}"


class Rank:
    """One training process and the pipe whose end tells it that its supervisor is gone."""

    def __init__(self, identity: Identity, lifeline: int) -> None:
        self.identity = identity
        self._lifeline: int | None = lifeline
        self._over = threading.Event()
        self._exit: Exit | None = None

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait for the end; None while it runs."""
        self._over.wait(timeout_s)
        return self._exit

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command down the lifeline. A rank that has ended does not hear it."""
        if self._lifeline is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifeline, jsonio.dumps(command).encode() + b"\n")

    def signal(self, number: signal.Signals) -> bool:
        """Signal the rank's whole process group."""
        return processes.signal_group(self.identity, number)

    def ended(self, how: Exit) -> None:
        """Note the end; the nursery's reader thread says it."""
        self._exit = how
        self._over.set()

    def close(self) -> None:
        """Let the lifeline go; a rank that still runs then ends itself."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def signal_name(number: int) -> str:
    """``SIGSEGV`` rather than 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
