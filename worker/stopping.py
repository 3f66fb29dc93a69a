"""How a rank is made to stop: asked at a step boundary, then SIGTERM, then SIGKILL."""

import signal
import time

from worker.ranks import Rank


class Stop:
    """The escalation for one rank. Asking twice changes nothing, except that force hurries."""

    def __init__(
        self, rank: Rank, *, grace_s: float, kill_s: float, unkillable_s: float = 60.0
    ) -> None:
        self._rank = rank
        self._grace_s = grace_s
        self._kill_s = kill_s
        self._unkillable_s = unkillable_s
        self._how: str | None = None
        self._asked_at: float | None = None
        self._termed_at: float | None = None
        self._killed_at: float | None = None

    @property
    def signalled(self) -> bool:
        """Whether we sent a signal, so that a death by one is our doing."""
        return self._termed_at is not None

    @property
    def hopeless(self) -> bool:
        """Whether even SIGKILL does not end it: it waits in the kernel, and will not come back."""
        if self._killed_at is None:
            return False
        return time.monotonic() > self._killed_at + self._unkillable_s

    def ask(self, how: str = "cancelled", *, force: bool = False) -> None:
        """Ask the rank to stop at its next step boundary; with force, signal it at once.

        ``how`` it is to end: ``cancelled``, or with a checkpoint to go on from as ``paused`` or
        ``interrupted``. The time that it has begins with the first asking.
        """
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        if how != self._how:
            self._how = how
            cancels = how == "cancelled"
            self._rank.tell({"do": "cancel"} if cancels else {"do": "stop", "as": how})
        if force:
            self._terminate()

    def press(self) -> None:
        """Go one step further if the time for it has come. Called at every look at the rank."""
        now = time.monotonic()
        if self._asked_at is not None and now >= self._asked_at + self._grace_s:
            self._terminate()
        due = self._termed_at is not None and now >= self._termed_at + self._kill_s
        if due and self._killed_at is None:
            self._killed_at = now
            self._rank.signal(signal.SIGKILL)

    def _terminate(self) -> None:
        if self._termed_at is None:
            self._termed_at = time.monotonic()
            self._rank.signal(signal.SIGTERM)
