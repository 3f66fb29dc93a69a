"""Signal handlers of a worker: shut down gracefully, or gracefully without asking ranks first."""

import signal
from collections.abc import Callable
from typing import Any

from celery.worker import state  # pyright: ignore[reportMissingTypeStubs]

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""SIGTERM, SIGINT, SIGHUP: shut down. SIGQUIT or a second SIGINT: signal the ranks at once."""


class ShutdownSignals:
    """Handles the signals that end a worker, in its main thread.

    No handler raises: an exception between any two instructions could leave a lock of the
    interpreter held forever, for example the import lock.
    """

    def __init__(self) -> None:
        """Keep the signals that arrive before ``listen``."""
        self._early: list[int] = []
        self._handle_with(lambda number, _frame: self._early.append(number))

    def listen(self, stop: Callable[[], None], hurry: Callable[[], None]) -> None:
        """Call ``stop`` or ``hurry`` on signals from now on; both must return at once."""
        interrupted = False

        def handle(number: int, _frame: Any) -> None:
            nonlocal interrupted
            if number == signal.SIGQUIT or (number == signal.SIGINT and interrupted):
                hurry()
            else:
                stop()
            interrupted = interrupted or number == signal.SIGINT
            celery_state: Any = state
            celery_state.should_stop = 0  # Celery's main loop ends, with this status

        self._handle_with(handle)
        for number in self._early:
            handle(number, None)

    def _handle_with(self, handle: Callable[[int, Any], None]) -> None:
        for number in ENDING:
            signal.signal(number, handle)
