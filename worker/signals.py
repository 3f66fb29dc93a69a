"""What signals say to a worker: end in order, or end in order and in a hurry."""

import signal
from collections.abc import Callable
from typing import Any

from celery.worker import state  # pyright: ignore[reportMissingTypeStubs]

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""SIGTERM, SIGINT and SIGHUP: end in order. SIGQUIT, or SIGINT once more: do not ask, signal."""


class Ending:
    """What the signals that end a worker do, in its main thread."""

    def __init__(self) -> None:
        """Until somebody listens, leave the start-up by way of its ``finally``."""
        self._asked = False
        self._handle_with(self._leave)

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
        if self._asked:
            handle(signal.SIGTERM, None)

    def _leave(self, _number: int, _frame: Any) -> None:
        # Python drops what is raised in a finalizer, and signals come there too: it is asked again
        self._asked = True
        raise SystemExit(0)

    def _handle_with(self, handle: Callable[[int, Any], None]) -> None:
        for number in ENDING:
            signal.signal(number, handle)
