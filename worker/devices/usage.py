"""Measures what a job uses of its machine, once a second, from outside the job.

CPU, memory and disk: the sum over the processes of its group. Network: the whole host, which is
all that the system reports. CUDA devices: see `worker.devices.gpus`.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from worker.devices.gpus import GpuUsageReader

EVERY_S = 1.0
_DISK = ("disk_read_bytes", "disk_write_bytes")


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one process has used since it started."""

    started: float
    cpu_s: float
    read_bytes: int
    written_bytes: int


class Usage:
    """Measures the series ``system/…`` of one attempt."""

    def __init__(
        self,
        leader: int,
        gpus: Sequence[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leader = leader
        self._clock = clock
        self._gpus = GpuUsageReader(gpus) if gpus else None
        self._looked_at = clock()
        self._taken: dict[int, _Taken] = {}
        self._network = _network()
        self._sum(members(leader))

    def figures(self) -> dict[str, float]:
        """Return the newest values; empty in the first second and after the job has ended."""
        now = self._clock()
        passed_s = now - self._looked_at
        if passed_s < EVERY_S:
            return {}
        self._looked_at = now
        figures = self._sum(members(self._leader))
        if not self._taken:
            return {}
        figures["cpu_percent"] = 100 * figures.pop("cpu_s") / passed_s
        for name in _DISK:
            figures[f"{name}_per_s"] = figures.pop(name) / passed_s
        sent, received = self._network
        self._network = _network()
        figures["host_network_sent_bytes_per_s"] = (self._network[0] - sent) / passed_s
        figures["host_network_received_bytes_per_s"] = (self._network[1] - received) / passed_s
        if self._gpus is not None:
            figures |= self._gpus.newest()
        return {f"system/{name}": float(value) for name, value in figures.items()}

    def close(self) -> None:
        """Stop measuring."""
        if self._gpus is not None:
            self._gpus.close()

    def _sum(self, processes: Sequence[psutil.Process]) -> dict[str, float]:
        """Return what processes use now, and what they have used since the previous call."""
        before, self._taken = self._taken, {}
        figures: dict[str, float] = {"cpu_s": 0.0, "memory_bytes": 0.0, "threads": 0.0}
        figures |= dict.fromkeys(_DISK, 0.0)
        for process in processes:
            with contextlib.suppress(psutil.Error), process.oneshot():
                memory_bytes = process.memory_info().rss
                if not memory_bytes:
                    continue  # a zombie
                now = _taken(process)
                figures["memory_bytes"] += memory_bytes
                figures["threads"] += process.num_threads()
                then = before.get(process.pid)
                if then is None or then.started != now.started:
                    then = _Taken(now.started, 0.0, 0, 0)  # started since the previous call
                self._taken[process.pid] = now
                figures["cpu_s"] += now.cpu_s - then.cpu_s
                figures[_DISK[0]] += now.read_bytes - then.read_bytes
                figures[_DISK[1]] += now.written_bytes - then.written_bytes
        return figures


def members(leader: int) -> list[psutil.Process]:
    """Return the processes of the group that ``leader`` leads."""
    found: list[psutil.Process] = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == leader:
                found.append(psutil.Process(pid))
    return found


def _taken(process: psutil.Process) -> _Taken:
    times = process.cpu_times()
    read = written = 0
    with contextlib.suppress(psutil.AccessDenied, AttributeError):  # not on macOS
        counters: Any = process.io_counters()
        read, written = counters.read_bytes, counters.write_bytes
    return _Taken(process.create_time(), times.user + times.system, read, written)


def _network() -> tuple[int, int]:
    """Return the bytes sent and received by the host's interfaces, without loopback."""
    with contextlib.suppress(OSError):
        cards = psutil.net_io_counters(pernic=True)
        outer = [card for name, card in cards.items() if not name.startswith("lo")]
        return sum(card.bytes_sent for card in outer), sum(card.bytes_recv for card in outer)
    return 0, 0
