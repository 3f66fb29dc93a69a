"""Which job gets which devices now. ``choose`` is pure; ``dispatch`` is its transaction.

A job gets all its devices at once or none. Without ``threads`` a CPU job gets half of the
cores of the worker that it is put on, at least one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glasshouse.failpoints import failpoint
from models import attempts, jobs, quotas, workers
from models.database import Database
from models.quotas import Room
from models.settings import Settings
from models.tables import Device, now

ENDLESS = Room(None, None, None)


@dataclass(frozen=True, slots=True)
class Slot:
    """A device of a worker that takes jobs."""

    worker: str
    id: str
    kind: str
    number: int
    healthy: bool = True
    free: bool = True


@dataclass(frozen=True, slots=True)
class Need:
    """What a spec's ``devices`` asks for."""

    kind: str = "auto"
    number: int | None = None
    threads: int | None = None
    worker: str | None = None

    @classmethod
    def of(cls, devices: Mapping[str, Any]) -> "Need":
        """Read the ``devices`` of a spec."""
        ids = devices.get("ids") or (None,)
        return cls(
            devices.get("type", "auto"), ids[0], devices.get("threads"), devices.get("worker")
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued job; a sequence of these is in the order in which they are served."""

    job: str
    need: Need
    waited_s: float = 0.0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """Devices of one worker for one job."""

    job: str
    worker: str
    devices: tuple[str, ...]


def choose(
    queue: Sequence[Waiting],
    slots: Sequence[Slot],
    *,
    starvation_s: float,
    rooms: Mapping[str, Room] | None = None,
) -> list[Choice]:
    """Serve the queue from its head. A job that has waited long keeps devices from those behind.

    ``rooms``: what the quotas of owners leave; one who is not named has no limit. A job for which
    its owner has no room waits and keeps nothing from others.
    """
    free = {(slot.worker, slot.id) for slot in slots if slot.healthy and slot.free}
    left = {owner: replace(room) for owner, room in (rooms or {}).items()}
    chosen: list[Choice] = []
    for waiting in queue:
        room = left.get(waiting.owner, ENDLESS)
        places = _places(waiting.need, slots, room.most_devices)
        places = [place for place in places if room.has_for(place.count)]
        ready = [place for place in places if place.missing(free) == 0]
        if ready:
            # the emptiest worker: jobs share caches and memory bandwidth
            place = min(ready, key=lambda place: (-place.num_free(free), place.worker))
            taken = place.take(free)
            chosen.append(Choice(waiting.job, place.worker, tuple(id_ for _, id_ in taken)))
            free.difference_update(taken)
            room.take(place.count)
        elif places and waiting.waited_s >= starvation_s:
            place = min(places, key=lambda place: (place.missing(free), place.worker))
            free.difference_update(place.take(free))
    return chosen


@dataclass(frozen=True, slots=True)
class _Place:
    """A worker on which a need could be met: some number of these devices."""

    worker: str
    devices: tuple[tuple[str, str], ...]
    count: int

    def num_free(self, free: set[tuple[str, str]]) -> int:
        return sum(device in free for device in self.devices)

    def missing(self, free: set[tuple[str, str]]) -> int:
        return max(0, self.count - self.num_free(free))

    def take(self, free: set[tuple[str, str]]) -> list[tuple[str, str]]:
        return [device for device in self.devices if device in free][: self.count]


def _places(need: Need, slots: Sequence[Slot], most: int | None = None) -> list[_Place]:
    kind = _kind(need, slots)
    by_worker: dict[str, list[Slot]] = {}
    for slot in sorted(slots, key=lambda slot: (slot.worker, slot.number)):
        if slot.kind == kind and slot.healthy and need.worker in (None, slot.worker):
            by_worker.setdefault(slot.worker, []).append(slot)
    places: list[_Place] = []
    for worker, found in by_worker.items():
        half = max(1, len(found) // 2) if most is None else max(1, min(len(found) // 2, most))
        count = (need.threads or half) if kind == "cpu" else 1
        usable = [slot for slot in found if need.number in (None, slot.number)]
        if len(usable) >= count:
            places.append(_Place(worker, tuple((slot.worker, slot.id) for slot in usable), count))
    return places


def _kind(need: Need, slots: Iterable[Slot]) -> str:
    """``auto`` means CUDA where a healthy device exists, and then it waits for that."""
    if need.kind != "auto":
        return need.kind
    fits = (slot for slot in slots if need.worker in (None, slot.worker))
    return "cuda" if any(slot.kind == "cuda" and slot.healthy for slot in fits) else "cpu"


def dispatch(database: Database, settings: Settings) -> list[Choice]:
    """Give queued jobs to workers, in one transaction under the dispatchers' lock.

    The caller rings the workers that were chosen, after this has committed.
    """
    lease_ms = int(settings.lease_s * 1000)
    with database.write() as tx:
        workers.lock_queue(tx)
        if not workers.any_free(tx):
            return []
        rooms = quotas.rooms(tx, settings)
        full = [owner for owner, room in rooms.items() if room.is_used_up]
        queue = [
            Waiting(job, Need.of(devices), (now() - queued_at).total_seconds(), owner)
            for job, owner, devices, queued_at in workers.asked_for(tx, without=full)
        ]
        if not queue:
            return []
        rows = {
            (row.worker, row.id): row
            for row, state in workers.all_devices(tx, lease_ms=lease_ms)
            if state == "active"
        }
        slots = [_slot(row) for row in rows.values()]
        chosen = choose(queue, slots, starvation_s=settings.starvation_s, rooms=rooms)
        given = [
            choice
            for choice in chosen
            if attempts.assign(
                tx,
                choice.job,
                choice.worker,
                [rows[choice.worker, device] for device in choice.devices],
                lease_ms,
            )
        ]
        for choice in given:
            jobs.rung(tx, job=choice.job)
        if given:
            failpoint("dispatch.commit")
        return given


def _slot(row: Device) -> Slot:
    return Slot(row.worker, row.id, row.kind, row.number, row.healthy, row.job is None)
