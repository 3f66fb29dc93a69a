"""Fair turns at something that only few can have at once: whoever has many waits behind himself."""

import asyncio
from weakref import WeakValueDictionary


class FairQueue:
    """Places in a queue by owner. Used on one event loop.

    An owner has at most ``at_once`` of them standing in the queue behind this; so another owner
    waits for as many at most, however many the first has brought.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, owner: str) -> asyncio.Semaphore:
        """The owner's own gate; to be entered before the queue."""
        found = self._of.get(owner)
        if found is None:
            found = self._of[owner] = asyncio.Semaphore(self._at_once)
        return found
