"""The devices that a job asks for, and how many of a worker's devices meet that. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from glasshouse.spec.parallel import num_processes


def wants(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resolved spec asks for: its ``devices``, and ``processes`` if several."""
    asked: dict[str, Any] = dict(resolved.get("devices") or {})
    processes = num_processes(resolved)
    return asked if processes == 1 else {**asked, "processes": processes}


@dataclass(frozen=True, slots=True)
class Need:
    """The devices that a job asks for."""

    kind: str = "auto"
    ids: tuple[int, ...] | None = None
    """The numbers of the CUDA devices; None: any."""
    threads: int | None = None
    """CPU cores of each process."""
    worker: str | None = None
    brief: bool = False
    """Whether it is an ``infer`` job: it takes what is free, and may share a core."""
    processes: int = 1
    """Number of processes; each gets a CUDA device, or ``threads`` cores."""

    @classmethod
    def of(cls, wants: Mapping[str, Any], job_kind: str = "train") -> "Need":
        """Read what `wants` has returned."""
        ids = wants.get("ids")
        return cls(
            wants.get("type", "auto"),
            None if ids is None else tuple(ids),
            wants.get("threads"),
            wants.get("worker"),
            job_kind == "infer",
            wants.get("processes") or wants.get("count") or len(ids or ()) or 1,
        )

    def fits(self, number: int) -> bool:
        """Return whether a device of the right kind, with this number, may be used."""
        return self.ids is None or number in self.ids

    def count(self, kind: str, num_all: int, num_free: int, most: int | None = None) -> int:
        """Return how many of a worker's devices of a kind it takes.

        Without ``threads`` that is half of the cores, at least one per process and the same number
        for each. ``num_all``: the worker's devices that fit. ``most``: the quota's limit.
        """
        if kind != "cpu":
            return self.processes
        if self.threads is not None:
            return self.threads * self.processes
        half = num_all // 2 if most is None else min(num_all // 2, most)
        half = max(1, half // self.processes) * self.processes
        return max(1, min(half, num_free)) if self.brief else half

    def kinds(self, cuda: Mapping[str, int]) -> tuple[str, ...]:
        """Return the kinds of devices that meet it, the preferred one first.

        ``auto`` waits for CUDA if a worker has enough devices for all processes; a brief job takes
        CPU cores rather than wait. ``cuda``: the number of healthy CUDA devices of each worker.
        """
        if self.kind != "auto":
            return (self.kind,)
        able = (number for name, number in cuda.items() if self.worker in (None, name))
        if max(able, default=0) < self.processes:
            return ("cpu",)
        return ("cuda", "cpu") if self.brief else ("cuda",)

    def is_on(self, numbers: Collection[int]) -> bool:
        """Return whether a worker with devices of these numbers has all that are asked for."""
        return self.ids is None or set(self.ids) <= set(numbers)
