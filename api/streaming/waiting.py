"""Long polling with ``Prefer: wait=N``. No thread and no session is held while waiting."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request

from api.streaming.wakeups import Wakeups
from glasshouse.errors import InvalidHeader

MAX_WAIT_S = 60
T = TypeVar("T")


def preferred_wait(request: Request) -> int | None:
    """Return the seconds of ``Prefer: wait=N``, at most 60; None without it.

    Raises:
        InvalidHeader: It is not a whole number.
    """
    for preference in request.headers.get("prefer", "").split(","):
        name, _, value = preference.strip().partition("=")
        if name.strip().lower() != "wait":
            continue
        digits = value.strip().strip('"')
        if not re.fullmatch(r"[0-9]{1,9}", digits):
            raise InvalidHeader("Prefer: wait needs a whole number of seconds, e.g. wait=30.")
        return min(int(digits), MAX_WAIT_S)
    return None


async def wait_for(
    wakeups: Wakeups,
    draining: asyncio.Event,
    job: str,
    look: Callable[[], T | None],
    wait_s: float,
    limiter: CapacityLimiter | None = None,
) -> T | None:
    """Call ``look`` in a thread, with its own short read, until it returns a value or times out.

    ``limiter``: how many threads such calls may use. Default: those of all requests.
    """
    end = time.monotonic() + wait_s
    with wakeups.watch(job) as watch:
        while True:
            found = await to_thread.run_sync(look, limiter=limiter)
            left = end - time.monotonic()
            if found is not None or left <= 0 or draining.is_set():
                return found
            await watch.wait(left)


def applied(wait_s: int | None) -> dict[str, str]:
    """Return the header that confirms the wait."""
    return {} if wait_s is None else {"Preference-Applied": f"wait={wait_s}"}
