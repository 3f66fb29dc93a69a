"""Decides which job gets which devices now. ``choose`` is pure; ``dispatch`` is its transaction.

A job gets all its devices at once or none: those of all its processes, on one worker. With CUDA
devices it also gets cores, for what its processes do on the host: see `Need.num_cores`. An
``infer`` job is short: with ``auto`` it takes a CUDA device or CPU cores, whichever is free, and if
no core is free it shares one.

A core that a flexible job can do without is as good as free: see `models.fleet.cores`. After jobs
were placed, and after one has ended, the cores are divided anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from glasshouse.failpoints import failpoint
from models.access import quotas
from models.access.quotas import QuotaLeft
from models.database import Database, Transaction, lock_at_most
from models.fleet import cores, heartbeats, workers
from models.fleet.cores import FlexibleJob, Moves
from models.jobs import attempts
from models.jobs.needs import Need
from models.settings import Settings
from models.tables import Device, now

ENDLESS = QuotaLeft(None, None, None)
MOST_AT_ONCE = 100
"""The most jobs that one transaction places; the next one places the rest."""
_LOCK_S = 1.0
"""The longest wait for a row or for another dispatcher; after it the sweep tries again."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A device of a worker that accepts jobs."""

    worker: str
    id: str
    kind: str
    number: int
    healthy: bool = True
    free: bool = True
    memory_bytes: int | None = None
    """Of a CPU core: the memory of its host, if a job asks for it."""
    kept: int = 0
    """If its job can do without it: how many cores the job then has. 0: it cannot."""

    def fits(self, need: Need) -> bool:
        """Return whether a job that needs devices of this kind may have this one."""
        return need.fits(self.number, self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued job. A sequence of these is in dispatch order."""

    job: str
    need: Need
    waited_s: float = 0.0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The devices of one worker that one job gets."""

    job: str
    worker: str
    devices: tuple[str, ...]
    """The ids of the devices that it computes on."""
    shared: bool = False
    """Whether another job has this core, and keeps it."""
    owner: str = ""
    is_flexible: bool = False
    """Whether its cores may become more or fewer while it runs."""
    cores: tuple[str, ...] = ()
    """The ids of the cores that it gets beside CUDA devices."""

    @property
    def held(self) -> tuple[str, ...]:
        """All devices that it keeps from other jobs."""
        return () if self.shared else (*self.devices, *self.cores)

    @property
    def num_counted(self) -> int:
        """How many devices of the quota it takes."""
        return quotas.num_counted(len(self.devices), len(self.cores))


def choose(
    queue: Sequence[Waiting],
    slots: Iterable[Slot],
    *,
    starvation_s: float,
    remaining: Mapping[str, QuotaLeft] | None = None,
    shares: Mapping[str, int] | None = None,
    most: int | None = None,
) -> list[Choice]:
    """Place jobs from the head of the queue. A starving job reserves devices that are free.

    ``remaining``: what the quotas of owners leave; an owner without an entry has no limit. A job
    that exceeds its owner's quota waits and reserves nothing. ``shares``: how many more jobs each
    worker may run on cores that other jobs have. ``most``: the most jobs to place.
    """
    fleet = _Fleet(slots, shares or {})
    left = {owner: replace(room) for owner, room in (remaining or {}).items()}
    unplaceable: set[tuple[Need, str, bool]] = set()
    """Needs that cannot be met. Devices and quotas only become fewer, so they are not retried."""
    chosen: list[Choice] = []
    for waiting in queue:
        if most is not None and len(chosen) >= most:
            break
        starves = waiting.waited_s >= starvation_s
        if (waiting.need, waiting.owner, starves) in unplaceable:
            continue
        room = left.get(waiting.owner, ENDLESS)
        choice = fleet.place(waiting, room)
        if choice is not None:
            chosen.append(choice)
            room.take(choice.num_counted)
        elif not (starves and fleet.reserve(waiting.need, room)):
            unplaceable.add((waiting.need, waiting.owner, starves))
    return chosen


@dataclass(frozen=True, slots=True)
class _Place:
    """A worker that could meet a need with ``count`` of its devices of one kind."""

    worker: str
    kind: str
    free: list[str]
    """The devices that fit the need and may be taken, in order: first those that no job has."""
    num_idle: int
    """How many of them no job has."""
    count: int
    cores: list[str]
    """The cores that may be taken beside CUDA devices, in the same order."""
    num_cores: int
    """How many of them are needed."""

    @property
    def missing(self) -> int:
        lacking = max(0, self.num_cores - len(self.cores))
        return max(0, self.count - len(self.free)) + lacking


class _Fleet:
    """The healthy devices by kind and worker, and which of them are still free."""

    def __init__(self, slots: Iterable[Slot], shares: Mapping[str, int]) -> None:
        self._all: dict[str, dict[str, list[Slot]]] = {}
        for slot in sorted(slots, key=lambda slot: (slot.worker, slot.number)):
            if slot.healthy:
                self._all.setdefault(slot.kind, {}).setdefault(slot.worker, []).append(slot)
        self._free = {
            (kind, worker): {slot.id for slot in found if slot.free or slot.kept}
            for kind, hosts in self._all.items()
            for worker, found in hosts.items()
        }
        self._shares = dict(shares)

    def place(self, waiting: Waiting, room: QuotaLeft) -> Choice | None:
        """Give a job its devices; return None if they are not free."""
        ready = [place for place in self._places(waiting.need, room) if not place.missing]
        if not ready:
            return self._share(waiting, room)
        # the worker with the most free devices: jobs share caches and memory bandwidth
        preferred = [place for place in ready if place.kind == ready[0].kind]
        best = min(preferred, key=lambda one: (-one.num_idle, -len(one.free), one.worker))
        flexible = best.kind == "cpu" and waiting.need.is_flexible
        devices, beside = self._take(best)
        return Choice(
            waiting.job,
            best.worker,
            devices,
            owner=waiting.owner,
            is_flexible=flexible,
            cores=beside,
        )

    def reserve(self, need: Need, room: QuotaLeft) -> bool:
        """Reserve free devices for a job that needs more of them; return whether there were any.

        Cores beside CUDA devices are not reserved while none of those is free.
        """
        places = self._places(need, room)
        if not places:
            return False
        best = min(places, key=lambda place: (place.missing, place.worker))
        return bool(best.free and self._take(best))

    def _places(self, need: Need, room: QuotaLeft) -> list[_Place]:
        """Return where a need could be met, the preferred kind first."""
        places: list[_Place] = []
        cuda = {
            worker: sum(slot.fits(need) for slot in found) if need.min_memory_bytes else len(found)
            for worker, found in self._all.get("cuda", {}).items()
        }
        for kind in need.kinds(cuda):
            for worker, found in self._all.get(kind, {}).items():
                if need.worker not in (None, worker):
                    continue
                fit = [slot for slot in found if slot.fits(need)]
                able = self._able(kind, worker, fit)
                idle = sum(slot.free for slot in able)
                most = room.most_devices
                count = need.count(kind, len(fit), idle, most)
                cores = self._all.get("cpu", {}).get(worker, [])
                beside = [slot.id for slot in self._able("cpu", worker, cores)]
                num_cores = need.num_cores(kind, len(cores), len(beside), most)
                has_all = len(fit) >= count and len(cores) >= num_cores
                if has_all and room.has_for(quotas.num_counted(count, num_cores)):
                    free = [slot.id for slot in able]
                    places.append(_Place(worker, kind, free, idle, count, beside, num_cores))
        return places

    def _able(self, kind: str, worker: str, slots: Sequence[Slot]) -> list[Slot]:
        """Return those that may be taken: first those that no job has."""
        left = self._free.get((kind, worker), set())
        able = [slot for slot in slots if slot.id in left]
        return sorted(able, key=lambda slot: (not slot.free, -slot.kept))  # stable

    def _take(self, place: _Place) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Take the devices of a place, and the cores beside them."""
        taken, cores = tuple(place.free[: place.count]), tuple(place.cores[: place.num_cores])
        self._free[place.kind, place.worker] -= set(taken)
        if cores:
            self._free["cpu", place.worker] -= set(cores)
        return taken, cores

    def _share(self, waiting: Waiting, room: QuotaLeft) -> Choice | None:
        """Place a brief job on a core that another job has."""
        need = waiting.need
        if not need.brief or need.kind == "cuda" or need.threads not in (None, 1):
            return None
        hosts = self._all.get("cpu", {})
        able = [
            worker
            for worker, left in self._shares.items()
            if left > 0
            and worker in hosts
            and need.worker in (None, worker)
            and hosts[worker][0].fits(need)
        ]
        if not able or not room.has_for(1):
            return None
        best = min(able, key=lambda worker: (-self._shares[worker], worker))
        self._shares[best] -= 1
        return Choice(waiting.job, best, (hosts[best][0].id,), shared=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one transaction does."""

    chosen: list[Choice]
    moves: Moves

    def __bool__(self) -> bool:
        return bool(self.chosen or self.moves)


def dispatch(database: Database, settings: Settings, *, most: int = MOST_AT_ONCE) -> list[Choice]:
    """Give at most ``most`` queued jobs to workers, in one transaction, and divide the cores.

    Whether there is anything to do is checked first, without a lock. The caller notifies the
    chosen workers after the commit.
    """
    with database.read() as tx:
        if not _plan(tx, settings, most):
            return []
    with database.write() as tx:
        lock_at_most(tx, _LOCK_S)
        workers.lock_queue(tx)
        plan = _plan(tx, settings, most)
        held = _hold(tx, plan)
        cores.release(tx, plan.moves, held)
        given = [choice for choice in plan.chosen if _assign(tx, choice, held, settings)]
        cores.grant(tx, plan.moves, held)
        if plan:
            failpoint("dispatch.commit")
        return given


def _hold(tx: Transaction, plan: _Plan) -> dict[tuple[str, str], Device]:
    """Lock the devices of a plan.

    Nobody waits for a job that is about to end, and whose supervisor may be stalled: without its
    cores the rest is carried out, and the next sweep tries again.
    """
    wanted = {(one.worker, id_) for one in plan.chosen for id_ in one.held}
    free = wanted - plan.moves.cores
    held = workers.hold(tx, free)
    return held | workers.hold(tx, (wanted | plan.moves.cores) - free, wait=False)


def is_due(database: Database, settings: Settings) -> bool:
    """Return whether a queued job may be tried now, or cores are to change hands."""
    with database.read() as tx:
        return workers.any_waits(tx) or bool(_plan(tx, settings, 0).moves)


def _plan(tx: Transaction, settings: Settings, most: int) -> _Plan:
    flexible = cores.flexible_jobs(tx)
    chosen = _choose(tx, settings, most, flexible) if most else []
    placed = [choice for choice in chosen if not choice.shared]
    if not (flexible or any(choice.is_flexible for choice in placed)):
        return _Plan(chosen, Moves())
    taken = {(one.worker, id_) for one in placed for id_ in one.held}
    new = [
        FlexibleJob(one.job, 0, one.owner, one.worker, len(one.devices), one.devices)
        for one in placed
        if one.is_flexible
    ]
    mine = {job.job for job in flexible}
    fixed = {(one.worker, id_) for one in placed if not one.is_flexible for id_ in one.held}
    usable = {(w, id_) for w, id_, job in workers.usable_cores(tx) if job is None or job in mine}
    owners = {job.owner for job in [*flexible, *new]}
    room = quotas.room_for(tx, settings, owners, cores.cores_by_owner(flexible))
    for one in placed:
        if one.owner in room and not one.is_flexible:
            room[one.owner] -= one.num_counted
    moves = cores.redistribute(flexible, usable - fixed, room, new=new, taken=taken)
    extra: dict[str, list[str]] = {}
    for (_, id_), job in moves.granted:
        extra.setdefault(job.job, []).append(id_)
    chosen = [replace(one, devices=(*one.devices, *extra.get(one.job, ()))) for one in chosen]
    begun = {job.job for job in new}
    granted = tuple((core, job) for core, job in moves.granted if job.job not in begun)
    return _Plan(chosen, replace(moves, granted=granted))


def _choose(
    tx: Transaction, settings: Settings, most: int, flexible: Sequence[FlexibleJob]
) -> list[Choice]:
    remaining = quotas.remaining(tx, settings, cores.surplus_by_owner(flexible))
    full = [owner for owner, room in remaining.items() if room.is_used_up]
    since = now() - timedelta(seconds=settings.starvation_s)
    asked = workers.asked_for(tx, without=full, most=most, starved_since=since)
    if not asked:
        return []
    queue = [
        Waiting(
            one.job,
            Need.of(one.wants, one.kind),
            (now() - one.queued_at).total_seconds(),
            one.owner,
        )
        for one in asked
    ]
    short = heartbeats.low_on_disk(tx, settings.min_free_bytes)
    devices = workers.devices_to_give(tx, lease_ms=round(settings.lease_s * 1000), without=short)
    if any(waiting.need.min_memory_bytes for waiting in queue):
        devices = workers.with_host_memory(tx, devices)
    kept = cores.surplus(flexible)
    slots = [Slot(*row, kept=kept.get((row.worker, row.id), 0)) for row in devices]
    shares: dict[str, int] = {}
    if any(waiting.need.brief for waiting in queue):
        sharing = workers.sharing(tx)
        hosts = {slot.worker for slot in slots}
        shares = {host: settings.infer_overcommit - sharing.get(host, 0) for host in hosts}
    return choose(
        queue,
        slots,
        starvation_s=settings.starvation_s,
        remaining=remaining,
        shares=shares,
        most=most,
    )


def _assign(
    tx: Transaction, choice: Choice, held: Mapping[tuple[str, str], Device], settings: Settings
) -> bool:
    """Assign a choice, unless one of its devices was taken, failed or disappeared meanwhile."""
    names = [(choice.worker, id_) for id_ in (*choice.devices, *choice.cores)]
    if choice.shared:
        held = workers.devices(tx, names)
    rows = [held[name] for name in names if name in held]
    if not choice.shared:
        rows = [row for row in rows if row.healthy and row.job is None]
    if len(rows) < len(names):
        return False
    lease_ms = round(settings.lease_s * 1000)
    return attempts.assign(tx, choice.job, choice.worker, rows, lease_ms, shared=choice.shared)
