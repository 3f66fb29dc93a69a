"""A fair queue for a scarce resource: an owner with many requests waits behind their own."""

import asyncio
from weakref import WeakValueDictionary


class FairQueue:
    """Limits the places of each owner in a queue. Used on one event loop.

    An owner has at most ``at_once`` requests in the actual queue. So another owner waits for at
    most that many of them, however many the first one has sent.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, owner: str) -> asyncio.Semaphore:
        """Return the owner's semaphore. Acquire it before entering the queue."""
        found = self._of.get(owner)
        if found is None:
            found = self._of[owner] = asyncio.Semaphore(self._at_once)
        return found
