"""What signals say to a worker: end in order, or end in order and in a hurry."""

import signal
from collections.abc import Callable
from typing import Any

from celery.worker import state  # pyright: ignore[reportMissingTypeStubs]

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""SIGTERM, SIGINT and SIGHUP: end in order. SIGQUIT, or SIGINT once more: do not ask, signal."""


class ShutdownSignals:
    """What the signals that end a worker do, in its main thread.

    No handler raises: an exception between any two instructions may leave a lock of the
    interpreter's own held for ever, the import lock for one.
    """

    def __init__(self) -> None:
        """Keep what comes before somebody listens."""
        self._early: list[int] = []
        self._handle_with(lambda number, _frame: self._early.append(number))

    def listen(self, stop: Callable[[], None], hurry: Callable[[], None]) -> None:
        """Let them call these from now on; both return at once."""
        interrupted = False

        def handle(number: int, _frame: Any) -> None:
            nonlocal interrupted
            if number == signal.SIGQUIT or (number == signal.SIGINT and interrupted):
                hurry()
            else:
                stop()
            interrupted = interrupted or number == signal.SIGINT
            told: Any = state
            told.should_stop = 0  # Celery's main loop ends with this status

        self._handle_with(handle)
        for number in self._early:
            handle(number, None)

    def _handle_with(self, handle: Callable[[int, Any], None]) -> None:
        for number in ENDING:
            signal.signal(number, handle)
