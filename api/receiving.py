"""Uploads that are coming in now, by owner. In this process; those being read are in SQL."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from api.access import Caller
from models import quotas


class Receiving:
    """How many uploads each owner is sending. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self.num_of_owner: Counter[str] = Counter()

    @contextmanager
    def one_more(self, caller: Caller) -> Generator[None]:
        """Count one upload while the block lasts.

        Raises:
            QuotaExceeded: the owner is sending too many already.
        """
        wanted = self.num_of_owner[caller.owner] + 1
        quotas.refuse_over("uploads", wanted, caller.limits.uploads)
        self.num_of_owner[caller.owner] += 1
        try:
            yield
        finally:
            self.num_of_owner -= Counter((caller.owner,))
