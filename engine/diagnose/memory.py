"""The memory of the host and of devices: its size, and how fast it is copied.

The bandwidth of a copy is the bytes copied per second. Each byte is read and written, so the memory
of a copy within one device carries twice as much.
"""

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import psutil
import torch

from engine.core.device import is_accelerator, memory_bytes, synchronize
from engine.diagnose import values

COPY_BYTES = 64 << 20
"""More than the caches of most processors hold."""
_RUNS = 5


@dataclass(frozen=True, slots=True)
class Copy:
    """A measured copy in one process."""

    rank: int
    source: str
    target: str
    """The types of the devices from and to which it copies; the same: within one."""
    size_bytes: int
    time_s: float
    """The median over the runs."""
    bandwidth_bytes_per_s: float
    correct: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of ``result.memory.copies``."""
        shown = asdict(self)
        return {"from": shown.pop("source"), "to": shown.pop("target"), **shown}

    @classmethod
    def read(cls, entry: dict[str, Any]) -> "Copy":
        """Read what `as_dict` has returned."""
        others = {name: value for name, value in entry.items() if name not in ("from", "to")}
        return cls(source=entry["from"], target=entry["to"], **others)


def copies(rank: int, device: torch.device) -> list[Copy]:
    """Measure the copies within host memory, and those from, to and within an accelerator."""
    host = torch.device("cpu")
    if not is_accelerator(device):
        return [_copy(rank, host, host)]
    ways = ((host, host), (host, device), (device, host), (device, device))
    return [_copy(rank, source, target) for source, target in ways]


def _copy(rank: int, source: torch.device, target: torch.device) -> Copy:
    count = COPY_BYTES // 4
    own = values.sent(rank, 0, count, source)
    copied = torch.zeros(count, device=target)
    if source != target:  # memory that is not pinned would be copied through a second buffer
        own, copied = (
            item if item.device != torch.device("cpu") else item.pin_memory()
            for item in (own, copied)
        )
    times_s: list[float] = []
    for _ in range(1 + _RUNS):
        _wait(source, target)
        began = time.perf_counter()
        copied.copy_(own)
        _wait(source, target)
        times_s.append(time.perf_counter() - began)
    time_s = median(times_s[1:])
    right = values.compare(copied, own.to(target)) is None
    size = count * 4
    return Copy(rank, source.type, target.type, size, time_s, size / time_s, right)


def _wait(*devices: torch.device) -> None:
    for device in devices:
        synchronize(device)


def sizes(rank: int, device: torch.device) -> dict[str, Any] | None:
    """Return the free and total memory of a process's accelerator; None: it has none."""
    found = memory_bytes(device) if is_accelerator(device) else None
    return found and {"rank": rank, "free_bytes": found[0], "total_bytes": found[1]}


def host_sizes() -> dict[str, int]:
    """Return the available and total memory of this host."""
    found = psutil.virtual_memory()
    return {"available_bytes": found.available, "total_bytes": found.total}
