"""What signals say to a worker: end in order, or end in order and in a hurry."""

import signal
from collections.abc import Callable
from typing import Any

from celery.worker import state  # pyright: ignore[reportMissingTypeStubs]

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""SIGTERM, SIGINT and SIGHUP: end in order. SIGQUIT, or SIGINT once more: do not ask, signal."""


def listen(stop: Callable[[], None], hurry: Callable[[], None]) -> None:
    """Handle the signals that end a worker, in its main thread. Both callables return at once."""
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

    for number in ENDING:
        signal.signal(number, handle)
