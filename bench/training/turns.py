"""Runs two jobs in one thread, alternating at their step boundaries.

The speed of a machine may change by 10 % from one second to the next, but hardly between two
consecutive steps. So the ratio of two jobs is exact to some thousandths; consecutive blocks of a
second each would give some hundredths.
"""

import statistics
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from bench.training.step import clocks

TURN = 5
"""Steps of a turn by default."""
Times = tuple[float, float]
"""Seconds of wall time and of CPU time."""


class Turn:
    """A job's control that switches to the other job after every ``length`` steps.

    ``spent`` has the wall and CPU time of each turn but the first, which is a warm-up.
    """

    wanted = None
    threads = None
    listen = None
    ends_as = "cancelled"
    orders = ()

    def __init__(self, length: int, settled: Callable[[], float] | None) -> None:
        self.length, self.settled = length, settled
        self.other: greenlet | None = None
        self.spent: list[Times] = []
        self._num_steps = 0
        self._began: Times | None = None

    @property
    def cancel_requested(self) -> bool:
        """Read at every step boundary."""
        self._num_steps += 1
        if (self._num_steps - 1) % self.length == 0:
            self._give_way()
        return False

    def _give_way(self) -> None:
        ended, others = clocks(), 0.0
        if self.settled is not None:  # other processes must not work in the other job's turn
            others = self.settled()
        if self._began is not None:
            wall, cpu = (z - a for a, z in zip(self._began, ended, strict=True))
            self.spent.append((wall, cpu + others))
        if self.other is not None and not self.other.dead:
            self.other.switch()
        self._began = clocks()


def take_turns(
    run: Callable[[Any, Turn], None],
    jobs: tuple[Any, Any],
    length: int,
    settled: Callable[[], float] | None = None,
) -> tuple[list[Times], list[Times]]:
    """Return the wall and CPU seconds of each job's turns of ``length`` steps, in order.

    ``run`` trains a job under a control, in the calling thread. ``settled`` waits until other
    processes have finished the work of a turn, and returns the CPU seconds that they took.
    """
    turns = (Turn(length, settled), Turn(length, settled))
    threads = [
        greenlet(lambda job=job, turn=turn: run(job, turn), getcurrent())
        for job, turn in zip(jobs, turns, strict=True)
    ]
    turns[0].other, turns[1].other = threads[1], threads[0]
    while alive := [thread for thread in threads if not thread.dead]:
        alive[0].switch()
    return turns[0].spent, turns[1].spent


def ratios(mine: list[Times], others: list[Times], in_round: int) -> list[Times]:
    """Return the ratios of sums over rounds of ``in_round`` turns; the first round is a warm-up."""

    def summed(turns: list[Times], clock: int, start: int) -> float:
        return sum(turn[clock] for turn in turns[start : start + in_round])

    starts = range(in_round, len(mine) - in_round + 1, in_round)
    wall, cpu = (
        [summed(mine, clock, start) / summed(others, clock, start) for start in starts]
        for clock in (0, 1)
    )
    return list(zip(wall, cpu, strict=True))


def figures(found: list[Times]) -> dict[str, float | None]:
    """Return medians of the ratios, and the standard error of the ratio of wall times."""
    walls = [wall for wall, _ in found]
    return {
        "ratio": round(statistics.median(walls), 4),
        "min": round(min(walls), 4),
        "max": round(max(walls), 4),
        "cpu_ratio": round(statistics.median(cpu for _, cpu in found), 4),
        "error": standard_error(walls),
    }


def standard_error(values: list[float]) -> float | None:
    """Return the standard error of the median, assuming a normal distribution."""
    if len(values) < 2:
        return None
    return round(1.2533 * statistics.stdev(values) / len(values) ** 0.5, 4)
