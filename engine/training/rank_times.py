"""How long each process takes for the parts of a step, so that a slow one can be seen.

All processes end a step together: a slow one takes longer for its own parts, and the others wait
for it in collectives.
"""

from collections.abc import Sequence
from statistics import median

from engine.core.timing import COLLECTIVE, PARTS, REPORT, Clock
from engine.distributed.group import Group

MEASURED = {
    "step": tuple(
        part for part in (*PARTS, COLLECTIVE, REPORT) if part not in ("checkpoint", "evaluate")
    ),
    "data": ("data",),
    "compute": ("forward", "backward", "optimizer"),
    "collective": (COLLECTIVE,),
}
"""What is measured in each process, and the parts of the clock that belong to it."""
_OWN = ("data", "compute")
"""In these a process does not wait for others."""
MAX_LISTED = 64
"""With more processes, only the spread is reported."""


class RankTimes:
    """The times of each process, since training began."""

    def __init__(self, clock: Clock, group: Group) -> None:
        self._clock = clock
        self._group = group
        self._times = [0.0] * (len(MEASURED) * group.size)
        self._before = [*self._times]
        self._step: int | None = None
        """The newest step that was reported; None: no step has ended."""

    def own(self) -> list[float]:
        """Return the times of this process in its place, and 0 in the places of the others."""
        numbers = [0.0] * len(self._times)
        start = self._group.rank * len(MEASURED)
        numbers[start : start + len(MEASURED)] = [
            sum(self._clock.total_s(part) for part in parts) for parts in MEASURED.values()
        ]
        return numbers

    def take(self, times: Sequence[float], step: int) -> None:
        """Take the sum of what all processes returned in a step."""
        self._times = [*times]
        self._step = step - 1 if self._step is None else self._step

    def figures(self, step: int) -> dict[str, float]:
        """Return means over the steps since the last call; empty if there was none.

        Seconds per step of each process, their min, median and max, and the slowest one's rank.
        """
        if self._step is None or step <= self._step:
            return {}
        num_steps = step - self._step
        spent = [
            (now - before) / num_steps
            for now, before in zip(self._times, self._before, strict=True)
        ]
        self._before, self._step = self._times, step
        by_name = {name: spent[at :: len(MEASURED)] for at, name in enumerate(MEASURED)}
        found: dict[str, float] = {}
        for name, times in by_name.items():
            found |= {f"{name}_min_s": min(times), f"{name}_median_s": median(times)}
            found |= {f"{name}_max_s": max(times)}
            if len(times) <= MAX_LISTED:
                found |= {f"{rank}/{name}_s": one for rank, one in enumerate(times)}
        own = [sum(parts) for parts in zip(*(by_name[name] for name in _OWN), strict=True)]
        found["slowest"] = float(own.index(max(own)))
        return {f"system/ranks/{name}": value for name, value in found.items()}
