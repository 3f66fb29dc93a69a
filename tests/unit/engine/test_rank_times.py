"""How long each process takes for its own part of a step."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.distributed.group import Group
from engine.training.rank_times import RankTimes


def clock_of(seconds: dict[str, float]) -> Any:
    return SimpleNamespace(total_s=lambda part: seconds[part])


def test_the_slowest_process_and_the_spread_of_each_part():
    """Three processes; rank 2 waits for its data, rank 1 computes longer."""
    seconds = [{"data": 0.0, "forward": 0.0} for _ in range(3)]
    ranks = [RankTimes(clock_of(own), Group(rank, 3)) for rank, own in enumerate(seconds)]

    def exchange(step: int) -> None:
        added = [sum(column) for column in zip(*(rank.own() for rank in ranks), strict=True)]
        for rank in ranks:
            rank.take(added, step)

    assert ranks[0].figures(0) == {}
    for step in range(5, 9):  # resumed at step 5
        for own, data, forward in zip(seconds, (0.1, 0.1, 0.7), (1.0, 1.2, 1.1), strict=True):
            own["data"] += data
            own["forward"] += forward
        exchange(step)
    assert ranks[0].figures(8) == pytest.approx(
        {
            "system/ranks/data_min_s": 0.1,
            "system/ranks/data_max_s": 0.7,
            "system/ranks/forward_min_s": 1.0,
            "system/ranks/forward_max_s": 1.2,
            "system/ranks/slowest": 2.0,
        }
    )
    assert ranks[0].figures(8) == {}
    seconds[1]["forward"] += 3.0
    exchange(9)
    found = ranks[0].figures(9)
    assert (found["system/ranks/slowest"], found["system/ranks/forward_max_s"]) == (1.0, 3.0)
