"""Run a diagnose job: measure messages and memory, and report what was found."""

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.core.spool import now
from engine.core.versions import versions
from engine.diagnose import memory
from engine.diagnose.bandwidth import ALL_GATHER, ALL_REDUCE, BROADCAST, SEND_RECV
from engine.diagnose.findings import Observed, findings, verdict
from engine.diagnose.measuring import ANY_PAIR, Measured, barrier, measure
from engine.diagnose.messages import VALUE_BYTES, Pair
from engine.distributed.group import Group
from engine.training.control import RunControl
from engine.training.report import Outputs
from glasshouse.spec import DiagnoseJob

TIMEOUT = timedelta(minutes=5)
"""The longest that a message waits; then the job fails, and says which one it was."""
MAX_ALL_PAIRS = 8
"""With more processes, each one exchanges messages with the next one only."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class _Step:
    """One measurement."""

    op: str
    size_bytes: int
    pair: Pair = ANY_PAIR
    of_latency: bool = False
    """Whether it is a message of one value, whose time is the latency."""

    def __str__(self) -> str:
        where = f" between {self.pair[0]} and {self.pair[1]}" if self.op == SEND_RECV else ""
        return f"{self.op} of {self.size_bytes} bytes{where}"


class Diagnosis:
    """A diagnose job in one of its processes. Only process 0 keeps and reports measurements."""

    def __init__(
        self,
        job: DiagnoseJob,
        device: torch.device,
        *,
        control: RunControl,
        out: Outputs,
        is_first: bool,
    ) -> None:
        """``is_first``: whether this is process 0, which reports."""
        self._job = job
        self._device = device
        self._control = control
        self._out = out
        self._is_first = is_first
        self._backend = _backend(device)
        self._has_backend = dist.is_backend_available(self._backend)
        self._doing = "a connection"
        self._processes: list[dict[str, Any]] = []
        self._copies: list[memory.Copy] = []
        self._sizes: list[dict[str, Any]] = []
        self._collectives: list[Measured] = []
        self._latencies: dict[str, float] = {}
        """Seconds by operation; of the slowest pair."""

    def run(self, join: Callable[[], Group]) -> str:
        """Measure and report; return ``succeeded`` or ``cancelled``.

        ``join`` joins the group of the processes. If an operation fails, what was measured before
        is reported, and the exception continues.
        """
        try:
            has_ended = self._measure(join())
        except RuntimeError as error:
            message = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            self._processes = self._processes or [_about(0, self._device)]
            self._report((self._doing, message.rstrip(".")))
            raise
        if not has_ended:
            return "cancelled"
        self._report(None)
        return "succeeded"

    def _measure(self, group: Group) -> bool:
        """Measure everything; return False if the job was canceled."""
        self._processes = group.gather(_about(group.rank, self._device))
        self._doing = "copies in memory"
        self._measure_memory(group)
        steps = [*_steps(self._job, group.size)] if self._has_backend else []
        for number, step in enumerate(steps):
            if group.broadcast(self._control.cancel_requested):
                return False
            self._doing = str(step)
            found = measure(group, self._device, step.op, step.size_bytes, step.pair)
            if found is not None:
                self._keep(step, found)
                self._progress(number + 1, len(steps))
        return True

    def _keep(self, step: _Step, found: Measured) -> None:
        if step.of_latency:
            self._latencies[step.op] = max(found.time_s, self._latencies.get(step.op, 0.0))
        if found.wrong or not step.of_latency:
            self._collectives.append(found)

    def _measure_memory(self, group: Group) -> None:
        """Measure the copies of one process after another: they share the host's memory."""
        own: list[memory.Copy] = []
        for rank in range(group.size):
            barrier(group)
            if rank == group.rank:
                own = memory.copies(rank, self._device)
        sizes = memory.sizes(group.rank, self._device)
        for item in group.gather({"copies": [one.as_dict() for one in own], "sizes": sizes}):
            self._copies += [memory.Copy.read(entry) for entry in item["copies"]]
            self._sizes += [item["sizes"]] if item["sizes"] else []

    def _progress(self, done: int, num_steps: int) -> None:
        record = {"type": "progress", "at": now(), "step": done, "num_steps": num_steps}
        record |= {"epoch": 0, "samples": 0, "samples_per_s": None, "eta_s": None}
        self._out.emit(record)
        self._out.settle()

    def _report(self, failure: tuple[str, str] | None) -> None:
        if not self._is_first:
            return
        seen = Observed(
            device=self._device.type,
            backend=self._backend,
            has_backend=self._has_backend,
            processes=self._processes,
            collectives=self._collectives,
            copies=self._copies,
            failure=failure,
        )
        found = findings(seen)
        result = {
            "verdict": verdict(seen, found),
            "findings": [item.as_dict(number) for number, item in enumerate(found)],
            "collectives": [item.as_dict() for item in self._collectives],
            "latency_s": self._latencies,
            "memory": {
                "copies": [copy.as_dict() for copy in self._copies],
                "devices": self._sizes,
                "host": memory.host_sizes(),
            },
            "backend": self._backend if self._job.processes > 1 else None,
            "versions": self._processes[0]["versions"],
            "processes": [
                {name: value for name, value in one.items() if name != "versions"}
                for one in self._processes
            ],
        }
        self._out.emit({"type": "result", "at": now(), "result": result})
        self._out.flush()


def _steps(job: DiagnoseJob, processes: int) -> Iterator[_Step]:
    if processes == 1:
        return
    sizes, pairs = sorted(job.sizes_bytes), pairs_of(processes)
    for op in (ALL_REDUCE, ALL_GATHER, BROADCAST):
        yield _Step(op, VALUE_BYTES, of_latency=True)
        for size in sizes:
            yield _Step(op, size)
    for pair in pairs:
        yield _Step(SEND_RECV, VALUE_BYTES, pair, of_latency=True)
    for size in sizes if processes <= MAX_ALL_PAIRS else sizes[-1:]:
        for pair in pairs:
            yield _Step(SEND_RECV, size, pair)


def pairs_of(processes: int) -> list[Pair]:
    """Return the pairs of processes that exchange messages."""
    if processes <= MAX_ALL_PAIRS:
        return list(combinations(range(processes), 2))
    return [(rank, (rank + 1) % processes) for rank in range(processes)]


def _backend(device: torch.device) -> str:
    """Return the name of the backend for messages between devices of this type."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:  # torch knows none
        return f"backend for {device.type}"


def _about(rank: int, device: torch.device) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": platform.node(),
        "pid": os.getpid(),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cores": _num_cores(),
        "versions": versions(),
    }


def _num_cores() -> int:
    """Return how many cores this process may use."""
    may = getattr(os, "sched_getaffinity", None)
    cores = len(may(0)) if may is not None else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no limit, or no cgroup of version 2
        quota, period = map(int, _QUOTA.read_text().split())
        cores = max(1, min(cores, -(-quota // period)))
    return cores
