"""The CPU cores of a running attempt: the dispatcher may change them at any time.

Every write of an attempt returns the devices that it has. If they have changed, the job's row gets
them with the next write, and the processes use the new number of threads from the next step on.
"""

from typing import Any

from models.jobs.leases import LeaseState
from models.jobs.needs import Need
from models.tables import Job
from worker.processes.ranks import Ranks


class Cores:
    """The devices of one attempt, and the threads that its processes were sent."""

    def __init__(self, job: Job) -> None:
        self._worker = job.worker
        self._need = Need.of(job.wants, job.kind)
        self._is_fixed = any(one["kind"] != "cpu" for one in job.devices)
        """Whether it has CUDA devices: then its cores stay as they are."""
        self._stored = self._held = frozenset(str(one["id"]) for one in job.devices)
        self._sent: int | None = None

    def receive(self, beat: LeaseState) -> None:
        """Take the devices that a write of this attempt returned."""
        if beat.devices and not self._is_fixed:
            self._held = beat.devices

    @property
    def changes(self) -> dict[str, Any]:
        """The columns of the job's row that are out of date."""
        if self._held == self._stored:
            return {}
        numbers = sorted(int(device.partition(":")[2]) for device in self._held)
        devices = [{"worker": self._worker, "kind": "cpu", "id": f"cpu:{n}"} for n in numbers]
        return {"devices": devices}

    def stored(self, changes: dict[str, Any]) -> None:
        """Note that `changes` were stored."""
        if changes:
            self._stored = frozenset(str(one["id"]) for one in changes["devices"])

    def started(self, threads: int) -> None:
        """Note how many threads each process starts with."""
        self._sent = threads

    def deliver(self, rank: Ranks) -> None:
        """Tell the processes of another number of threads."""
        if self._is_fixed:
            return
        threads = self._need.num_threads(["cpu"] * len(self._held))
        if self._sent is not None and threads != self._sent:
            self._sent = threads
            rank.tell({"do": "threads", "threads": threads})
