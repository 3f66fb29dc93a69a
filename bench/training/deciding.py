"""What process 0's decision costs in each step, beside the sums of losses that it travels with.

One process, so nothing is sent: what is measured is the host's work. Both sides take turns. Prints
one JSON line: microseconds per step of both, and the decision as a fraction of a step of
``--step-ms``, such as those that ``bench.training.parallel`` measures.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from engine.distributed.group import ALONE
from engine.training.control import Decisions

COUNTS = [0.25] * 6
"""Times and counts of padding, as many as a job of two processes has."""


class Idle:
    """A control without requests, as in nearly all steps."""

    cancel_requested = False
    ends_as = "cancelled"
    wanted = None
    threads = None
    listen = None

    def __init__(self) -> None:
        self.orders: deque[dict[str, Any]] = deque()


def only_sums(numbers: list[torch.Tensor]) -> None:
    """Do the same without a decision: pack the numbers into one message, and unpack them."""
    flags = torch.tensor(COUNTS, dtype=torch.float64)
    joined = torch.cat([flags, torch.stack([item.to(torch.float64) for item in numbers])])
    first, rest = joined.tensor_split([len(COUNTS)])
    first.tolist()
    _ = [item.to(torch.float32) for item in rest.unbind()]


def microseconds(act: Callable[[], object], repeats: int) -> float:
    """Return the time of one call."""
    started = time.perf_counter()
    for _ in range(repeats):
        act()
    return (time.perf_counter() - started) / repeats * 1e6


def main() -> None:
    """Let both sides take turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, default=5.5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers = [torch.tensor(0.5), torch.tensor(12.0)]
    decisions = Decisions(Idle(), ALONE)

    def decide() -> None:
        decisions.send(numbers, COUNTS, 1.0, {})
        decisions.receive()

    turns = [
        (
            microseconds(lambda: only_sums(numbers), given.repeats),
            microseconds(decide, given.repeats),
        )
        for _ in range(given.rounds)
    ]
    decision = statistics.median(whole - sums for sums, whole in turns)
    line = {
        "sums_us": round(statistics.median(sums for sums, _ in turns), 2),
        "decision_us": round(decision, 2),
        "fraction_of_step": round(decision / given.step_ms / 1e3, 5),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
