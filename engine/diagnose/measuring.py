"""Time an operation in all processes, and check what each of them receives.

A barrier precedes each run, so that all processes begin together. A run takes as long as it takes
the slowest process; the result is the median over the runs. Buffers are filled before the clock
starts and compared after it stops, in every run, also in those that warm up.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from engine.core.device import synchronize
from engine.diagnose.bandwidth import SEND_RECV, bandwidths
from engine.diagnose.messages import VALUE_BYTES, Pair, message, num_values
from engine.diagnose.values import compare
from engine.distributed.group import Group

WARM_UP_RUNS = 2
MIN_RUNS, MAX_RUNS = 3, 20
_MEASURE_S = 0.1
"""How long the runs of one measurement should take together."""
ANY_PAIR: Pair = (0, 0)


@dataclass(frozen=True, slots=True)
class Measured:
    """An operation of one size, as process 0 reports it."""

    op: str
    size_bytes: int
    ranks: Pair | None
    """The processes of a point-to-point message; None: all."""
    runs: int
    time_s: float
    """The median over the runs; of a point-to-point message, half of the time of the round trip."""
    min_time_s: float
    bandwidth_bytes_per_s: float
    """The algorithm bandwidth."""
    bus_bandwidth_bytes_per_s: float
    wrong: tuple[dict[str, Any], ...] = ()
    """The first mismatch of each process that received wrong values, with its ``rank``."""

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of ``result.collectives``."""
        return {
            "op": self.op,
            "size_bytes": self.size_bytes,
            "ranks": None if self.ranks is None else list(self.ranks),
            "time_s": self.time_s,
            "min_time_s": self.min_time_s,
            "runs": self.runs,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "bus_bandwidth_bytes_per_s": self.bus_bandwidth_bytes_per_s,
            "correct": not self.wrong,
        }


def measure(
    group: Group, device: torch.device, op: str, size_bytes: int, pair: Pair = ANY_PAIR
) -> Measured | None:
    """Measure an operation; None except in process 0. All processes call it.

    ``pair``: the processes of a point-to-point message; the others wait.
    """
    takes_part = op != SEND_RECV or group.rank in pair
    own = _Runs(group, device, (op, size_bytes, pair), takes_part=takes_part)
    for _ in range(WARM_UP_RUNS):
        own.run()
    own.times_s = own.times_s[-1:]
    slowest_s = max(item["times_s"][0] for item in own.gathered() or [{"times_s": [1.0]}])
    num_runs = round(_MEASURE_S / max(slowest_s, 1e-9))
    num_runs = group.broadcast(min(MAX_RUNS, max(MIN_RUNS, num_runs)))
    own.times_s = []
    for _ in range(num_runs):
        own.run()
    found = own.gathered()
    if not group.is_first:
        return None
    return summary(op, size_bytes, None if op != SEND_RECV else pair, found, group.size)


class _Runs:
    """The runs of one process."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        what: tuple[str, int, Pair],
        *,
        takes_part: bool,
    ) -> None:
        self._group = group
        self._device = device
        self._what = what
        self._takes_part = takes_part
        self._num_runs = 0
        self._wrong: dict[str, Any] | None = None
        self.times_s: list[float] = []

    def run(self) -> None:
        """Run the operation once: fill, wait for the others, time, compare."""
        self._num_runs += 1
        if not self._takes_part:
            barrier(self._group)
            self.times_s.append(0.0)
            return
        op, size_bytes, pair = self._what
        one = message(op, self._group, size_bytes, self._num_runs, self._device, pair)
        synchronize(self._device)
        barrier(self._group)
        began = time.perf_counter()
        one.run()
        synchronize(self._device)
        self.times_s.append(time.perf_counter() - began)
        wrong = compare(one.received, one.expected)
        if wrong is not None and self._wrong is None:
            self._wrong = {"rank": self._group.rank, "run": self._num_runs, **wrong.as_dict()}

    def gathered(self) -> list[dict[str, Any]]:
        """Return the times and mismatches of all processes, by rank; empty except in process 0."""
        return self._group.gather({"times_s": self.times_s, "wrong": self._wrong})


def barrier(group: Group) -> None:
    """Wait until all processes are here."""
    group.sum(torch.zeros(1))


def summary(
    op: str, size_bytes: int, pair: Pair | None, found: list[dict[str, Any]], processes: int
) -> Measured:
    """Return the measurement from the ``times_s`` and ``wrong`` of all processes."""
    runs_s = [max(times) for times in zip(*(item["times_s"] for item in found), strict=True)]
    if pair is not None:
        runs_s = [time_s / 2 for time_s in runs_s]
    time_s = median(runs_s)
    moved = num_values(op, size_bytes, processes) * VALUE_BYTES
    algorithm, bus = bandwidths(op, moved, time_s, processes)
    wrong = tuple(item["wrong"] for item in found if item["wrong"] is not None)
    return Measured(op, size_bytes, pair, len(runs_s), time_s, min(runs_s), algorithm, bus, wrong)
