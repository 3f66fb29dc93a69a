"""How long each process takes for the parts of a step."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from engine.distributed.group import Group
from engine.training.rank_times import MAX_LISTED, RankTimes

Seconds = defaultdict[str, float]


def clock_of(seconds: Seconds) -> Any:
    return SimpleNamespace(total_s=seconds.__getitem__)


class Processes:
    """The times of several processes, by rank."""

    def __init__(self, num: int) -> None:
        self.seconds = [Seconds(float) for _ in range(num)]
        self._ranks = [
            RankTimes(clock_of(own), Group(rank, num)) for rank, own in enumerate(self.seconds)
        ]
        self.figures = self._ranks[0].figures

    def exchange(self, step: int) -> None:
        added = [sum(column) for column in zip(*(one.own() for one in self._ranks), strict=True)]
        for rank in self._ranks:
            rank.take(added, step)

    def spend(self, part: str, *times: float) -> None:
        for own, spent in zip(self.seconds, times, strict=True):
            own[part] += spent


def test_the_times_of_each_process_their_spread_and_the_slowest_one():
    """Three processes; rank 2 waits for its data, rank 1 computes longer, rank 0 waits for both."""
    processes = Processes(3)
    assert processes.figures(0) == {}
    for step in range(5, 9):  # resumed at step 5
        processes.spend("data", 0.1, 0.1, 0.7)
        processes.spend("forward", 0.5, 0.6, 0.5)
        processes.spend("backward", 0.5, 0.6, 0.6)
        processes.spend("collective", 0.7, 0.5, 0.0)
        processes.spend("evaluate", 9.0, 9.0, 9.0)  # not a part of a step
        processes.exchange(step)
    found = processes.figures(8)
    values = {
        "data": (0.1, 0.1, 0.7),
        "compute": (1.0, 1.2, 1.1),
        "collective": (0.7, 0.5, 0.0),
        "step": (1.8, 1.8, 1.8),
    }
    expected = {"system/ranks/slowest": 2.0}
    for name, times in values.items():
        spread = zip(("min", "median", "max"), sorted(times), strict=True)
        expected |= {f"system/ranks/{name}_{what}_s": time for what, time in spread}
        expected |= {f"system/ranks/{rank}/{name}_s": time for rank, time in enumerate(times)}
    assert found == pytest.approx(expected)
    assert processes.figures(8) == {}
    processes.spend("forward", 0.0, 3.0, 0.0)
    processes.exchange(9)
    found = processes.figures(9)
    assert found["system/ranks/slowest"] == 1.0
    assert found["system/ranks/compute_max_s"] == pytest.approx(3.0)


@pytest.mark.parametrize(("num", "is_listed"), [(MAX_LISTED, True), (MAX_LISTED + 1, False)])
def test_of_many_processes_only_the_spread_is_reported(num: int, is_listed: bool):
    processes = Processes(num)
    processes.spend("data", *range(num))
    processes.exchange(0)
    found = processes.figures(0)
    assert found["system/ranks/data_max_s"] == num - 1
    assert found["system/ranks/slowest"] == num - 1
    assert ("system/ranks/63/data_s" in found) == is_listed
