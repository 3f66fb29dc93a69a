"""How long each process takes for its own part of a step, so that a slow one can be seen.

The backward pass is not among the parts: in it, a process waits for the others.
"""

from collections.abc import Sequence

from engine.core.timing import Clock
from engine.distributed.group import Group

PARTS = ("data", "forward")
"""The parts of a step in which a process does not wait for others."""


class RankTimes:
    """The time of each part in each process, since training began."""

    def __init__(self, clock: Clock, group: Group) -> None:
        self._clock = clock
        self._group = group
        self._times = [0.0] * (len(PARTS) * group.size)
        self._before = [*self._times]
        self._step: int | None = None
        """The newest step that was reported; None: no step has ended."""

    def own(self) -> list[float]:
        """Return the times of this process in its place, and 0 in the places of the others."""
        numbers = [0.0] * len(self._times)
        start = self._group.rank * len(PARTS)
        numbers[start : start + len(PARTS)] = [self._clock.total_s(part) for part in PARTS]
        return numbers

    def take(self, times: Sequence[float], step: int) -> None:
        """Take the sum of what all processes returned in a step."""
        self._times = [*times]
        self._step = step - 1 if self._step is None else self._step

    def figures(self, step: int) -> dict[str, float]:
        """Return means over the steps since the last call; empty if there was none.

        Seconds per step of the fastest and of the slowest process, and the slowest one's rank.
        """
        if self._step is None or step <= self._step:
            return {}
        num_steps = step - self._step
        spent = [
            (now - before) / num_steps
            for now, before in zip(self._times, self._before, strict=True)
        ]
        self._before, self._step = self._times, step
        figures: dict[str, float] = {}
        for number, part in enumerate(PARTS):
            own = spent[number :: len(PARTS)]
            figures |= {f"system/ranks/{part}_min_s": min(own)}
            figures |= {f"system/ranks/{part}_max_s": max(own)}
        whole = [sum(spent[at : at + len(PARTS)]) for at in range(0, len(spent), len(PARTS))]
        return figures | {"system/ranks/slowest": float(whole.index(max(whole)))}
