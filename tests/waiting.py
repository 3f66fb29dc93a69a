"""Waits for a condition, with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONGEST_PAUSE_S = 0.1
"""Four test processes that look more often take a third of the processor from what they await."""


def until(
    look: Callable[[], T | None],
    within_s: float = 180.0,
    what: str = "it",
    *,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> T:
    """Poll until ``look`` returns something truthy, and return that.

    The deadline only catches what never happens: being late on a busy machine is not a failure.

    Raises:
        AssertionError: it did not happen in time.
    """
    deadline = time.monotonic() + within_s
    pause_s = min(0.01, longest_pause_s)
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen within {within_s:g} s"
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, longest_pause_s)
