"""The CPU cores of jobs that train on cores and name no number of threads: who has how many.

Such a job is flexible. It starts with one core for each of its processes and gets more while no
other job needs them: the cores of a worker that no other job has are divided among its flexible
jobs. A job that names ``threads``, an ``infer`` job, and a job with CUDA devices keeps the cores
that it started with.

Only rows of devices are written here. The supervisor of a job finds them changed with its next
write, at most a second later, and the processes change their threads at the next step boundary.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import exists, select
from sqlalchemy.orm import Session, aliased

from models.jobs.needs import Need
from models.state import LIVE
from models.tables import Device, Job

Core = tuple[str, str]
"""The worker of a core, and its id."""


@dataclass(frozen=True, slots=True)
class FlexibleJob:
    """A running job whose cores may become more or fewer."""

    job: str
    fence: int
    owner: str
    worker: str
    processes: int
    cores: tuple[str, ...]
    """The ids of the cores that it has: the healthy ones first, by number."""

    @property
    def surplus(self) -> tuple[str, ...]:
        """The cores that it can do without."""
        return self.cores[self.processes :]


def flexible_jobs(tx: Session) -> list[FlexibleJob]:
    """Return the flexible jobs that have cores, by id."""
    columns = (Job.id, Job.fence, Job.owner, Job.kind, Job.wants, Device.worker, Device.id)
    other = aliased(Device)
    has_cuda = exists(select(other.id).where(other.job == Job.id, other.kind != "cpu"))
    rows = tx.execute(
        select(*columns)
        .join(Device, (Device.job == Job.id) & (Device.fence == Job.fence))
        .where(Device.kind == "cpu", Job.kind == "train", Job.state.in_(LIVE), ~has_cuda)
        .order_by(Job.id, Device.healthy.desc(), Device.number)
    )
    found: dict[str, FlexibleJob] = {}
    for job, fence, owner, kind, wants, worker, core in rows:
        known = found.get(job)
        if known is not None:
            found[job] = replace(known, cores=(*known.cores, core))
            continue
        need = Need.of(wants, kind)
        if need.is_flexible:
            found[job] = FlexibleJob(job, fence, owner, worker, need.processes, (core,))
    return list(found.values())


def surplus(jobs: Iterable[FlexibleJob]) -> dict[Core, int]:
    """Return the cores that jobs can do without, each with how many its job has without it.

    A job gives up the core with the highest number first.
    """
    return {
        (job.worker, core): kept
        for job in jobs
        for kept, core in enumerate(job.cores)
        if kept >= job.processes
    }


def cores_by_owner(jobs: Iterable[FlexibleJob]) -> Counter[str]:
    """Return how many cores the jobs of each owner have."""
    found = Counter[str]()
    for job in jobs:
        found[job.owner] += len(job.cores)
    return found


def surplus_by_owner(jobs: Iterable[FlexibleJob]) -> Counter[str]:
    """Return how many cores the jobs of each owner can do without."""
    return cores_by_owner(replace(job, cores=job.surplus) for job in jobs)


def divide(
    jobs: Sequence[FlexibleJob], num_cores: Mapping[str, int], room: Mapping[str, int]
) -> dict[str, int]:
    """Return how many cores each job should have.

    Each job gets one core for each process. Then the job with the fewest cores, or the older one of
    two, gets another one for each process, as long as there are enough. ``num_cores``: the cores of
    each worker for these jobs together. ``room``: the most cores of all jobs of an owner together;
    no entry: any number.
    """
    shares = {job.job: job.processes for job in jobs}
    spare, left = Counter(num_cores), dict(room)
    for job in jobs:
        spare[job.worker] -= job.processes
        if job.owner in left:
            left[job.owner] -= job.processes
    waiting = [(job.processes, job.job, job) for job in jobs]
    heapq.heapify(waiting)
    while waiting:
        has, _, job = heapq.heappop(waiting)
        more = job.processes
        if spare[job.worker] < more or left.get(job.owner, more) < more:
            continue  # neither grows again
        spare[job.worker] -= more
        if job.owner in left:
            left[job.owner] -= more
        shares[job.job] = has + more
        heapq.heappush(waiting, (has + more, job.job, job))
    return shares


@dataclass(frozen=True, slots=True)
class Moves:
    """How cores change hands."""

    released: tuple[tuple[Core, str], ...] = ()
    """Cores that jobs give up, each with its job."""
    granted: tuple[tuple[Core, FlexibleJob], ...] = ()
    """Cores that jobs get."""

    def __bool__(self) -> bool:
        return bool(self.released or self.granted)

    @property
    def cores(self) -> set[Core]:
        """All cores to lock for them: with those that the jobs have, so that none of them ends."""
        had = {(job.worker, core) for _, job in self.granted for core in job.cores}
        return had | {core for core, _ in (*self.released, *self.granted)}


def redistribute(
    jobs: Sequence[FlexibleJob],
    usable: Collection[Core],
    room: Mapping[str, int],
    *,
    new: Sequence[FlexibleJob] = (),
    taken: Collection[Core] = (),
) -> Moves:
    """Return how cores change hands so that every job has its share.

    ``usable``: the healthy cores that flexible jobs may have, whether they have them or not.
    ``room``: as of `divide`. ``new``: jobs that start now. ``taken``: the cores that jobs which
    start now take from ``jobs``.
    """
    lost = [
        ((job.worker, core), job.job)
        for job in jobs
        for core in job.cores
        if (job.worker, core) in taken
    ]
    left = [
        replace(job, cores=tuple(core for core in job.cores if (job.worker, core) not in taken))
        for job in jobs
    ]
    everyone = [*left, *new]
    shares = divide(everyone, Counter(worker for worker, _ in usable), room)
    moves = _moves(everyone, shares, usable)
    return Moves((*lost, *moves.released), moves.granted)


def _moves(
    jobs: Sequence[FlexibleJob], shares: Mapping[str, int], usable: Collection[Core]
) -> Moves:
    """Return how the jobs get their shares; each keeps as many of its cores as it can."""
    kept = {(job.worker, core) for job in jobs for core in job.cores[: shares[job.job]]}
    released = [
        ((job.worker, core), job.job) for job in jobs for core in job.cores[shares[job.job] :]
    ]
    available = defaultdict[str, list[Core]](list)
    for core in sorted(set(usable) - kept, key=_number):
        available[core[0]].append(core)
    granted: list[tuple[Core, FlexibleJob]] = []
    for job in jobs:
        wanted = max(0, shares[job.job] - len(job.cores))
        found = available[job.worker]
        granted += [(core, job) for core in found[:wanted]]
        available[job.worker] = found[wanted:]
    return Moves(tuple(released), tuple(granted))


def _number(core: Core) -> int:
    return int(core[1].partition(":")[2])


def release(tx: Session, wanted: Moves, rows: Mapping[Core, Device]) -> None:
    """Take cores from jobs; ``rows``: the locked rows of `Moves.cores`."""
    for core, job in wanted.released:
        row = rows.get(core)
        if row is not None and row.job == job:
            row.job = row.fence = None
    tx.flush()


def grant(tx: Session, wanted: Moves, rows: Mapping[Core, Device]) -> None:
    """Give cores to jobs; ``rows``: the locked rows of `Moves.cores`.

    A job that has ended since the decision gets nothing: none of its cores is its own any more.
    """
    for core, job in wanted.granted:
        held = (rows.get((job.worker, id_)) for id_ in job.cores)
        still_runs = any(row and (row.job, row.fence) == (job.job, job.fence) for row in held)
        row = rows.get(core)
        if still_runs and row is not None and row.healthy and row.job is None:
            row.job, row.fence = job.job, job.fence
    tx.flush()
