"""The cores of a worker change hands as jobs come and leave, on both databases."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

from models.access import quotas
from models.database import Database
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import attempts, jobs, leases
from models.jobs.leases import Claim
from models.settings import Settings
from models.state import LIVE
from models.tables import Job
from tests.integration.store.factories import LEASE_MS, make_worker
from tests.interleaving import meetings
from worker.dispatch import dispatch, is_due
from worker.wakeups import Sweep

from .test_interleaving import station_of

MOST = 40
"""Orders that are tried of the many that two long transactions have."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, lease_s=3600)


def submit(database: Database, threads: int | None = None, processes: int = 1, **more: Any) -> str:
    """Queue a job that trains on CPU cores; without ``threads`` it is flexible."""
    devices = {"type": "cpu", **({} if threads is None else {"threads": threads})}
    resolved = {"devices": devices, "parallel": {"processes": processes}}
    spec = {"kind": more.pop("kind", "train"), **more}
    with database.write() as tx:
        return jobs.add(tx, owner="ada", spec=spec, resolved=resolved, plan={}).id


def begin(database: Database, job: str, worker: str = "w1") -> Claim:
    """Have the worker run a job that was assigned to it."""
    with database.write() as tx:
        claimed = attempts.claim(tx, job, worker)
        assert claimed is not None
        assert attempts.run(tx, claimed[0], lease_ms=LEASE_MS) is not None
    return claimed[0]


def end(database: Database, claim: Claim) -> bool:
    with database.write() as tx:
        return attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")


def cores(database: Database) -> dict[str, list[str]]:
    """The cores that each job has; of no job that does not run under the fence of the core."""
    with database.read() as tx:
        rows = tx.execute(
            text(
                "SELECT devices.id, devices.job, devices.fence, jobs.fence AS now, jobs.state "
                "FROM devices LEFT JOIN jobs ON jobs.id = devices.job "
                "WHERE devices.job IS NOT NULL ORDER BY devices.worker, devices.number"
            )
        ).all()
    found: dict[str, list[str]] = {}
    for row in rows:
        assert row.state in LIVE, row
        assert row.fence == row.now, row
        found.setdefault(row.job, []).append(row.id)
    return found


def test_jobs_come_and_leave(database: Database, settings: Settings):
    make_worker(database, cores=2)
    first, second = submit(database), submit(database)
    with database.write() as tx:  # the second one comes later
        tx.execute(update(Job).where(Job.id == second).values(not_before_ms=10**15))
    (choice,) = dispatch(database, settings)
    assert choice.devices == ("cpu:0", "cpu:1")
    first_claim = begin(database, first)
    with database.write() as tx:
        tx.execute(update(Job).where(Job.id == second).values(not_before_ms=None))
    (choice,) = dispatch(database, settings)
    assert choice.devices == ("cpu:1",)
    second_claim = begin(database, second)
    assert cores(database) == {first: ["cpu:0"], second: ["cpu:1"]}
    assert end(database, second_claim)
    assert is_due(database, settings), "a sweep divides them if the worker dies now"
    assert dispatch(database, settings) == []
    assert cores(database) == {first: ["cpu:0", "cpu:1"]}
    assert not is_due(database, settings)
    with database.write() as tx:
        beat = leases.beat(tx, first_claim, lease_ms=LEASE_MS)
    assert beat is not None
    assert beat.devices == {"cpu:0", "cpu:1"}, "the supervisor sees it"


def test_jobs_that_name_their_threads_keep_them_and_take_what_others_can_do_without(
    database: Database, settings: Settings
):
    make_worker(database, cores=4)
    flexible = submit(database)
    dispatch(database, settings)
    exact = submit(database, threads=3)
    (choice,) = dispatch(database, settings)
    assert sorted(choice.devices) == ["cpu:1", "cpu:2", "cpu:3"]
    waits = submit(database, threads=1)
    assert dispatch(database, settings) == [], "the flexible one has one core and keeps it"
    assert end(database, begin(database, exact))
    (choice,) = dispatch(database, settings)
    assert choice.job == waits
    assert len(choice.devices) == 1
    assert len(cores(database)[flexible]) == 3


def test_the_processes_of_a_job_have_as_many_cores_each(database: Database, settings: Settings):
    make_worker(database, cores=5)
    pair = submit(database, processes=2)
    dispatch(database, settings)
    assert len(cores(database)[pair]) == 4
    single = submit(database)
    dispatch(database, settings)
    assert {job: len(held) for job, held in cores(database).items()} == {pair: 2, single: 3}


def test_a_brief_job_takes_a_core_back_before_it_shares_one(database: Database, settings: Settings):
    make_worker(database, cores=2)
    training = submit(database)
    dispatch(database, settings)
    infer = submit(database, kind="infer")
    (choice,) = dispatch(database, settings)
    assert (choice.job, choice.devices, choice.shared) == (infer, ("cpu:1",), False)
    assert cores(database)[training] == ["cpu:0"]


def test_a_quota_bounds_the_cores_of_all_jobs_and_the_least_of_them_counts_for_new_ones(
    database: Database, settings: Settings
):
    make_worker(database, cores=8)
    with database.write() as tx:
        quotas.put(tx, "ada", {"devices": 3}, by="root")
    first = submit(database)
    dispatch(database, settings)
    assert len(cores(database)[first]) == 3
    submit(database, threads=2)
    submit(database)
    assert [len(one.devices) for one in dispatch(database, settings)] == [2]
    assert sorted(map(len, cores(database).values())) == [1, 2]


def test_a_core_that_fails_is_given_up(database: Database, settings: Settings):
    make_worker(database, cores=3)
    job = submit(database)
    dispatch(database, settings)
    left = [FoundDevice(f"cpu:{n}", "cpu", n, "core") for n in range(2)]
    with database.write() as tx:
        workers.refresh_devices(tx, "w1", left)
    dispatch(database, settings)
    assert cores(database) == {job: ["cpu:0", "cpu:1"]}
    assert not is_due(database, settings)


def test_the_cores_of_a_lost_worker_job_go_back_when_its_lease_expires(
    database: Database, tmp_path: Path
):
    station = station_of(database, tmp_path, "w1", lease_s=0.01)
    make_worker(database, cores=2)
    first = submit(database)
    dispatch(database, Settings(home=tmp_path))
    second = submit(database)
    dispatch(database, Settings(home=tmp_path))
    for job in (first, second):
        begin(database, job)
    with database.write() as tx:
        tx.execute(update(Job).where(Job.id == second).values(lease_expires_ms=1))
        tx.execute(update(Job).where(Job.id == first).values(lease_expires_ms=10**15))
    sweep = Sweep(station)
    for _ in range(100):
        sweep()
        with database.read() as tx:
            if jobs.get(tx, second, None).state == "queued":
                break
    else:
        raise AssertionError("the lost attempt was not ended")
    assert cores(database) == {first: ["cpu:0", "cpu:1"]}


# --- two at once -----------------------------------------------------------------------------


def fresh(database: Database) -> None:
    with database.write() as tx:
        tx.execute(text("DELETE FROM jobs"))
        tx.execute(text("UPDATE devices SET job = NULL, fence = NULL"))


def dispatching(settings: Settings, database: Database, _: Any) -> None:
    dispatch(database, settings)


def ending(database: Database, claim: Claim) -> bool:
    return end(database, claim)


def settled(database: Database, settings: Settings) -> dict[str, int]:
    """How many cores each job has, after what a sweep would still do."""
    cores(database)
    if is_due(database, settings):
        dispatch(database, settings)
    assert not is_due(database, settings)
    return {job: len(held) for job, held in cores(database).items()}


def test_a_job_comes_while_the_one_that_has_all_cores_ends(database: Database, settings: Settings):
    make_worker(database, cores=3)

    def prepare() -> Claim:
        fresh(database)
        first = submit(database)
        dispatch(database, settings)
        claim = begin(database, first)
        submit(database)
        return claim

    for met in meetings(database.url, prepare, partial(dispatching, settings), ending, most=MOST):
        assert met.values[1], met.statements
        assert list(settled(database, settings).values()) == [3], met.statements


def test_a_job_ends_while_it_gets_the_cores_of_another_one(database: Database, settings: Settings):
    make_worker(database, cores=3)

    def prepare() -> Claim:
        fresh(database)
        pair = [submit(database), submit(database)]
        dispatch(database, settings)
        claims = [begin(database, job) for job in pair]
        assert end(database, claims[0])
        return claims[1]

    for met in meetings(database.url, prepare, partial(dispatching, settings), ending, most=MOST):
        assert met.values[1], met.statements
        assert settled(database, settings) == {}, met.statements


def test_two_workers_divide_the_cores_at_once(database: Database, settings: Settings):
    make_worker(database, cores=5)
    made: list[str] = []

    def prepare() -> None:
        fresh(database)
        made[:] = [submit(database) for _ in range(2)]
        dispatch(database, settings)
        begin(database, made[0])
        assert end(database, begin(database, made[1]))
        made[1] = submit(database, threads=2)

    act = partial(dispatching, settings)
    for met in meetings(database.url, prepare, act, act, most=MOST):
        assert met.values == (None, None)
        assert settled(database, settings) == {made[0]: 3, made[1]: 2}, met.statements


def test_a_stalled_end_of_a_job_keeps_no_other_from_starting(
    postgresql: Database, settings: Settings
):
    make_worker(postgresql, "w1", cores=2)
    first = submit(postgresql)
    dispatch(postgresql, settings)
    claim = begin(postgresql, first)
    make_worker(postgresql, "w2", cores=1)
    submit(postgresql, priority=1)
    second = submit(postgresql, threads=2)  # on w1, and only with a core of the first one
    with postgresql.write() as tx:
        assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
        (choice,) = dispatch(postgresql, settings)
        assert choice.worker == "w2"
    assert [one.job for one in dispatch(postgresql, settings)] == [second]
