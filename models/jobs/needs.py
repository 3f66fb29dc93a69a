"""The devices that a job asks for, and how many of a worker's devices meet that. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.spec.parallel import num_processes

GIB = 1 << 30
BRIEF = ("infer", "evaluate")
"""The kinds of job that use a trained network and end soon: they take the devices that are free."""


def wants(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resolved spec asks for: its ``devices``, and what else decides on cores.

    That is ``processes`` if there are several, and ``data_workers`` of each if the job may get CUDA
    devices.
    """
    asked: dict[str, Any] = dict(resolved.get("devices") or {})
    if (processes := num_processes(resolved)) > 1:
        asked["processes"] = processes
    data: Mapping[str, Any] = resolved.get("data") or {}
    if data.get("workers") and asked.get("type") != "cpu":
        asked["data_workers"] = data["workers"]
    return asked


@dataclass(frozen=True, slots=True)
class Need:
    """The devices that a job asks for."""

    kind: str = "auto"
    ids: tuple[int, ...] | None = None
    """The numbers of the CUDA devices; None: any."""
    threads: int | None = None
    """CPU cores of each process, each with one torch thread. None: on CPU cores at least one, and
    more while no other job needs them; with CUDA devices see `num_cores`."""
    worker: str | None = None
    brief: bool = False
    """Whether it is a brief job of one process: it takes what is free and may share a core."""
    processes: int = 1
    """Number of processes; each gets ``threads`` cores, or a CUDA device and cores beside it."""
    min_memory_bytes: int = 0
    """Minimum memory of each device; of CPU cores, that of their host."""
    trains: bool = True
    """Whether it is a training job: the others keep the cores that they start with."""
    num_devices: int | None = None
    """Number of CUDA devices; None: one for each process. One process may have several."""
    data_workers: int = 0
    """Threads of each process that prepare batches."""

    @classmethod
    def of(cls, wants: Mapping[str, Any], job_kind: str = "train") -> "Need":
        """Read what `wants` has returned."""
        ids = wants.get("ids")
        return cls(
            wants.get("type", "auto"),
            None if ids is None else tuple(ids),
            wants.get("threads"),
            wants.get("worker"),
            job_kind in BRIEF and (wants.get("processes") or 1) == 1,
            wants.get("processes") or 1,
            int((wants.get("min_memory_gib") or 0) * GIB),
            job_kind == "train",
            wants.get("count") or len(ids or ()) or None,
            wants.get("data_workers") or 0,
        )

    @property
    def num_cuda(self) -> int:
        """Number of CUDA devices that it needs to start."""
        return self.processes if self.num_devices is None else self.num_devices

    @property
    def is_flexible(self) -> bool:
        """Whether its CPU cores may become more or fewer while the job runs."""
        return self.threads is None and self.trains and not self.brief

    def fits(self, number: int, memory_bytes: int | None = None) -> bool:
        """Return whether a device of the right kind, with this number and memory, may be used.

        A device whose memory is not known (None) does not have the minimum.
        """
        has_memory = not self.min_memory_bytes or (memory_bytes or 0) >= self.min_memory_bytes
        return has_memory and (self.ids is None or number in self.ids)

    def count(self, kind: str, num_all: int, num_free: int, most: int | None = None) -> int:
        """Return how many of a worker's devices of a kind it needs to start.

        Without ``threads`` that is one core per process; see `models.fleet.cores`. A brief job
        takes half of the cores, or as many of them as are free, at least one. ``num_all``: the
        worker's devices that fit. ``most``: the quota's limit.
        """
        if kind != "cpu":
            return self.num_cuda
        if self.threads is not None:
            return self.threads * self.processes
        if not self.brief:
            return self.processes
        half = num_all // 2 if most is None else min(num_all // 2, most)
        return max(1, min(half, num_free))

    def num_cores(self, kind: str, num_all: int, num_free: int, most: int | None = None) -> int:
        """Return how many cores of a worker it needs beside devices of a kind to start.

        Beside CPU cores none. Beside CUDA devices, without ``threads``, one for each process, which
        launches the kernels, and one for each of its data workers, but no more than the worker has.
        A brief job takes one if it is free. ``num_all``: the worker's cores. ``most``: the quota's
        limit.
        """
        if kind == "cpu":
            return 0
        if self.threads is not None:
            return self.threads * self.processes
        if self.brief:
            return min(1, num_free)
        wanted = self.processes * (1 + self.data_workers)
        return min(wanted, num_all if most is None else min(num_all, most))

    @property
    def least(self) -> int:
        """The fewest devices that it can count as in a quota: cores, or CUDA devices if more."""
        cores = (self.threads or 1) * self.processes
        with_cuda = self.num_cuda if self.threads is None else max(self.num_cuda, cores)
        return {"cpu": cores, "cuda": with_cuda}.get(self.kind, min(cores, with_cuda))

    @property
    def field(self) -> str:
        """The pointer of the field that decides on how many devices it needs."""
        if self.threads is not None and self.least > self.processes:
            return "/devices/threads"
        if self.num_devices is not None:
            return "/devices/count" if self.ids is None else "/devices/ids"
        return "/parallel/processes" if self.processes > 1 else "/devices"

    def num_threads(self, kinds: Sequence[str]) -> int:
        """Return the torch threads of each process; ``kinds``: those of the job's devices.

        On CPU cores one for each core. With CUDA devices they are as named, or one: the other cores
        are those of data workers.
        """
        if "cuda" in kinds:
            return self.threads or 1
        return max(1, len(kinds) // self.processes)

    def kinds(self, cuda: Mapping[str, int]) -> tuple[str, ...]:
        """Return the kinds of devices that meet it, the preferred one first.

        ``auto`` waits for CUDA if a worker has enough devices; a brief job takes CPU cores rather
        than wait. ``cuda``: the number of healthy CUDA devices of each worker that have enough
        memory.
        """
        if self.kind != "auto":
            return (self.kind,)
        able = (number for name, number in cuda.items() if self.worker in (None, name))
        if max(able, default=0) < self.num_cuda:
            return ("cpu",)
        return ("cuda", "cpu") if self.brief else ("cuda",)

    def is_on(self, numbers: Collection[int]) -> bool:
        """Return whether a worker with devices of these numbers has all that are asked for."""
        return self.ids is None or set(self.ids) <= set(numbers)
