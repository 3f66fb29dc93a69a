"""Measures what a job uses of its machine, once a second, from outside the job.

CPU, memory and disk: the sum over the processes of its group. Network: the whole host, which is
all that the system reports. CUDA devices: `worker.devices.hardware` reads them, in a process of its
own; if that hangs or ends, there are no more values, and nothing waits for it.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

EVERY_S = 1.0
_STALE_S = 5.0
_Taken = tuple[float, int, int]
"""What a process has used: CPU seconds, bytes read and written."""
_DISK = ("disk_read_bytes", "disk_write_bytes")


class Usage:
    """Measures the series ``system/…`` of one attempt: of the groups that ``leaders`` lead."""

    def __init__(
        self,
        leaders: int | Sequence[int],
        gpus: Sequence[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leaders = [leaders] if isinstance(leaders, int) else [*leaders]
        self._clock = clock
        self._gpus = GpuUsageReader(gpus) if gpus else None
        self._looked_at = clock()
        self._taken: dict[psutil.Process, _Taken] = {}
        """By process: psutil compares the pid and the time of the start."""
        self._network = _network()
        self._sum(self._members())

    def _members(self) -> list[psutil.Process]:
        return [one for leader in self._leaders for one in members(leader)]

    def figures(self) -> dict[str, float]:
        """Return the newest values; empty in the first second and after the job has ended."""
        now = self._clock()
        passed_s = now - self._looked_at
        if passed_s < EVERY_S:
            return {}
        self._looked_at = now
        figures = self._sum(self._members())
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
                then = before.get(process, (0.0, 0, 0))  # it may have started since
                self._taken[process] = now
                for name, used, used_before in zip(("cpu_s", *_DISK), now, then, strict=True):
                    figures[name] += used - used_before
        return figures


class GpuUsageReader:
    """The supervisor's handle of the process."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._newest: tuple[float, dict[str, float]] = (0.0, {})
        self._process = subprocess.Popen(  # noqa: S603 (a list, of identifiers of devices)
            [sys.executable, "-m", "worker.devices.hardware", "--follow", *uuids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._follow, name="gpus", daemon=True).start()

    def newest(self) -> dict[str, float]:
        """Return the newest values; empty if they are older than 5 s."""
        at, figures = self._newest
        return dict(figures) if time.monotonic() - at < _STALE_S else {}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _follow(self) -> None:
        out, into = self._process.stdout, self._process.stdin
        if out is None or into is None:
            return
        with out, into:
            for line in out:
                with contextlib.suppress(ValueError):
                    self._newest = (time.monotonic(), json.loads(line))


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
    return times.user + times.system, read, written


def _network() -> tuple[int, int]:
    """Return the bytes sent and received by the host's interfaces, without loopback."""
    with contextlib.suppress(OSError):
        cards = psutil.net_io_counters(pernic=True)
        outer = [card for name, card in cards.items() if not name.startswith("lo")]
        return sum(card.bytes_sent for card in outer), sum(card.bytes_recv for card in outer)
    return 0, 0
