"""Jobs on CUDA devices lease cores of their worker, on both databases. The devices are made up."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from api.routes.service.fleet import Fleet
from api.schemas.views import ranks_of
from models.access import quotas
from models.database import Database
from models.fleet import cores as core_shares
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import attempts, jobs, leases
from models.jobs.leases import Claim
from models.settings import Settings
from models.tables import Device, Job
from tests.integration.store.factories import LEASE_MS
from tests.interleaving import meetings
from worker.attempt.cores import Cores
from worker.attempt.launch import _describe
from worker.attempt.resume import Attempt
from worker.dispatch import Choice, dispatch, is_due
from worker.wakeups import Sweep

from .test_cores import MOST, begin, cores, dispatching, end, ending, fresh, submit
from .test_interleaving import station_of


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, lease_s=3600)


def make_host(database: Database, num_cores: int, num_cards: int, name: str = "w1") -> None:
    found = [FoundDevice(f"cpu:{n}", "cpu", n, "core") for n in range(num_cores)]
    found += [
        FoundDevice(f"cuda:{n}", "cuda", n, "card", uuid=f"GPU-{n}") for n in range(num_cards)
    ]
    with database.write() as tx:
        workers.register(tx, worker=name, host=name, pid=1, version="0", info={}, devices=found)


def submit_gpu(database: Database, loading: int = 0, kind: str = "train", **devices: Any) -> str:
    """Queue a job for CUDA devices with this many data workers."""
    processes = devices.pop("processes", 1)
    resolved = {
        "kind": kind,
        "devices": {"type": "cuda", **devices},
        "parallel": {"processes": processes},
        "data": {"workers": loading},
    }
    with database.write() as tx:
        spec = {"kind": kind}
        return jobs.add(tx, owner="ada", spec=spec, resolved=resolved, plan={}).id


def placed(database: Database, settings: Settings) -> dict[str, Choice]:
    return {choice.job: choice for choice in dispatch(database, settings)}


def reasons(database: Database) -> dict[str, str]:
    """Why each queued job waits, as in ``GET /queue``."""
    with database.read() as tx:
        surplus = core_shares.surplus(core_shares.flexible_jobs(tx))
        given = workers.devices_to_give(tx, lease_ms=3_600_000)
        names = {one.worker for one in given}
        fleet = Fleet(dict.fromkeys(names, "active"), given, (), surplus)
        return {job.job: fleet.why(job) for job in workers.queue(tx)}


def counts(database: Database) -> dict[str, int]:
    """How many devices each job has, cores among them."""
    return {job: len(held) for job, held in cores(database).items()}


def test_each_of_two_gpu_jobs_has_one_of_two_cores_and_a_third_waits_for_one(
    database: Database, settings: Settings
):
    make_host(database, num_cores=2, num_cards=3)
    first, second, third = (submit_gpu(database) for _ in range(3))
    found = placed(database, settings)
    assert [(found[job].devices, found[job].cores) for job in (first, second)] == [
        (("cuda:0",), ("cpu:0",)),
        (("cuda:1",), ("cpu:1",)),
    ]
    assert reasons(database) == {third: "not enough free CPU cores"}
    assert not is_due(database, settings) or dispatch(database, settings) == []
    assert end(database, begin(database, first))
    assert placed(database, settings)[third].cores == ("cpu:0",)
    with database.read() as tx:
        row = jobs.get(tx, third, None)
    assert [one["id"] for one in row.devices] == ["cuda:0", "cpu:0"]
    assert [(rank["device"], rank["threads"]) for rank in ranks_of(row)] == [("cuda:0", 1)]


def test_data_workers_have_cores_as_far_as_the_worker_has_any(
    database: Database, settings: Settings
):
    make_host(database, num_cores=4, num_cards=2)
    job = submit_gpu(database, loading=2)
    assert placed(database, settings)[job].cores == ("cpu:0", "cpu:1", "cpu:2")
    other = submit_gpu(database, loading=1)
    assert placed(database, settings) == {}
    assert reasons(database) == {other: "not enough free CPU cores"}
    assert end(database, begin(database, job))
    greedy = submit_gpu(database, loading=64, processes=2)
    assert end(database, begin(database, next(iter(placed(database, settings)))))
    assert len(placed(database, settings)[greedy].cores) == 4


def test_threads_are_the_cores_of_each_process(database: Database, settings: Settings):
    make_host(database, num_cores=5, num_cards=2)
    job = submit_gpu(database, loading=3, processes=2, threads=2)
    choice = placed(database, settings)[job]
    assert (choice.devices, len(choice.cores)) == (("cuda:0", "cuda:1"), 4)
    with database.read() as tx:
        ranks = ranks_of(jobs.get(tx, job, None))
    assert [(rank["device"], rank["threads"]) for rank in ranks] == [("cuda:0", 2), ("cuda:1", 2)]


def test_a_gpu_job_and_a_job_that_names_its_threads_wait_for_each_other(
    database: Database, settings: Settings
):
    make_host(database, num_cores=3, num_cards=1)
    named = submit(database, threads=2)
    placed(database, settings)
    card = submit_gpu(database, loading=1)
    assert placed(database, settings) == {}
    assert reasons(database) == {card: "not enough free CPU cores"}
    assert end(database, begin(database, named))
    assert [*placed(database, settings)] == [card]
    again = submit(database, threads=2)
    assert placed(database, settings) == {}
    assert reasons(database) == {again: "not enough free devices"}
    assert end(database, begin(database, card))
    assert [*placed(database, settings)] == [again]


def test_a_flexible_job_gives_up_cores_for_a_gpu_job_and_gets_them_back(
    database: Database, settings: Settings
):
    make_host(database, num_cores=4, num_cards=2)
    flexible = submit(database)
    placed(database, settings)
    claim = begin(database, flexible)
    assert counts(database) == {flexible: 4}
    card = submit_gpu(database, loading=1)
    assert reasons(database)[card] == "about to start"
    assert len(placed(database, settings)[card].cores) == 2
    assert counts(database) == {flexible: 2, card: 3}
    with database.write() as tx:
        beat = leases.beat(tx, claim, lease_ms=LEASE_MS)
    assert beat is not None
    assert beat.devices == {"cpu:0", "cpu:1"}, "its supervisor sees it"
    last = submit_gpu(database, loading=1)
    assert placed(database, settings) == {}, "the flexible job keeps its last core"
    assert reasons(database) == {last: "not enough free CPU cores"}
    assert end(database, begin(database, card))
    assert [*placed(database, settings)] == [last]
    assert end(database, begin(database, last))
    assert placed(database, settings) == {}
    assert counts(database) == {flexible: 4}


def test_the_cores_of_a_gpu_job_stay_as_they_are(database: Database, settings: Settings):
    make_host(database, num_cores=4, num_cards=1)
    card, flexible = submit_gpu(database), submit(database)
    placed(database, settings)
    claim = begin(database, card)
    assert counts(database) == {card: 2, flexible: 3}
    assert not is_due(database, settings)
    assert end(database, begin(database, flexible))
    assert placed(database, settings) == {}
    assert counts(database) == {card: 2}, "it gets no more of them"
    with database.write() as tx:
        beat = leases.beat(tx, claim, lease_ms=LEASE_MS)
    with database.read() as tx:
        held = Cores(jobs.get(tx, card, None))
    assert beat is not None
    held.receive(beat)
    held.started(1)
    assert held.changes == {}
    ranks: Any = None  # it is not sent anything
    held.deliver(ranks)


def cancelled(database: Database, claim: Claim) -> None:
    with database.write() as tx:
        tx.execute(update(Job).where(Job.id == claim.job).values(state="cancelling"))
    with database.write() as tx:
        assert attempts.finish(tx, claim, "cancelled", exit_kind="cancelled")


def paused(database: Database, claim: Claim) -> None:
    with database.write() as tx:
        tx.execute(update(Job).where(Job.id == claim.job).values(state="pausing"))
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind="paused", reason="asked", counted=False)


def lost(database: Database, claim: Claim, home: Path) -> None:
    with database.write() as tx:
        tx.execute(update(Job).values(lease_expires_ms=10**15))
        tx.execute(update(Job).where(Job.id == claim.job).values(lease_expires_ms=1))
    sweep = Sweep(station_of(database, home, "w1", lease_s=0.01))
    for _ in range(100):
        sweep()
        with database.read() as tx:
            left = jobs.get(tx, claim.job, None)
        if left.state == "queued":
            assert left.devices == []
            return
    raise AssertionError("the lost attempt was not ended")


@pytest.mark.parametrize("how", ["cancelled", "paused", "lost"])
def test_however_a_gpu_job_leaves_its_cores_are_free(
    database: Database, settings: Settings, tmp_path: Path, how: str
):
    make_host(database, num_cores=3, num_cards=1)
    flexible, card = submit(database), submit_gpu(database, loading=1)
    placed(database, settings)
    begin(database, flexible)
    claim = begin(database, card)
    assert counts(database) == {flexible: 1, card: 3}
    if how == "lost":
        lost(database, claim, tmp_path)
        with database.write() as tx:  # its next attempt would take them again
            tx.execute(update(Job).where(Job.id == card).values(not_before_ms=10**15))
    else:
        {"cancelled": cancelled, "paused": paused}[how](database, claim)
    dispatch(database, settings)
    assert counts(database) == {flexible: 3}
    with database.read() as tx:
        busy = tx.scalars(select(Device.id).where(Device.job.is_not(None), Device.kind == "cuda"))
        assert busy.all() == []


def test_auto_takes_a_gpu_with_a_core_and_waits_for_both(database: Database, settings: Settings):
    make_host(database, num_cores=1, num_cards=2)
    first, second = submit_gpu(database, type="auto"), submit_gpu(database, type="auto")
    choice = placed(database, settings)[first]
    assert (choice.devices, choice.cores, choice.is_flexible) == (("cuda:0",), ("cpu:0",), False)
    assert reasons(database) == {second: "not enough free CPU cores"}
    make_host(database, num_cores=3, num_cards=0, name="w2")
    assert placed(database, settings) == {}, "auto waits for a GPU where a worker has one"
    with database.write() as tx:
        tx.execute(update(Job).where(Job.id == second).values(wants={"type": "cpu"}))
    assert len(placed(database, settings)[second].devices) == 3


def test_where_no_worker_has_a_gpu_auto_is_flexible(database: Database, settings: Settings):
    make_host(database, num_cores=3, num_cards=0)
    job = submit_gpu(database, loading=2, type="auto")
    choice = placed(database, settings)[job]
    assert (len(choice.devices), choice.cores, choice.is_flexible) == (3, (), True)
    with database.read() as tx:
        assert [rank["threads"] for rank in ranks_of(jobs.get(tx, job, None))] == [3]


def test_an_infer_job_has_a_core_beside_its_gpu_if_one_is_free(
    database: Database, settings: Settings
):
    make_host(database, num_cores=1, num_cards=3)
    first, second = submit_gpu(database, kind="infer"), submit_gpu(database, kind="infer")
    found = placed(database, settings)
    assert (found[first].cores, found[second].cores) == (("cpu:0",), ())
    third = submit_gpu(database)
    assert reasons(database) == {third: "not enough free CPU cores"}
    with database.read() as tx:
        held = workers.devices_of(tx, jobs.get(tx, second, None))
    assert [row.id for row in held] == ["cuda:1"]


def test_a_quota_counts_cores_beyond_one_for_each_gpu(database: Database, settings: Settings):
    make_host(database, num_cores=8, num_cards=3)
    with database.write() as tx:
        quotas.put(tx, "ada", {"devices": 5}, by="root")
    plain, loading = submit_gpu(database), submit_gpu(database, loading=2)
    assert {*placed(database, settings)} == {plain, loading}

    def used() -> int:
        with database.read() as tx:
            return quotas.usage(tx, "ada")["devices"]

    assert used() == 4
    waits = submit_gpu(database, loading=1)
    assert placed(database, settings) == {}
    flexible = submit(database)
    assert [*placed(database, settings)] == [flexible]
    assert counts(database)[flexible] == 1, "the quota leaves it no more"
    assert used() == 5
    assert end(database, begin(database, loading))
    assert [*placed(database, settings)] == [waits]
    assert used() == 5
    assert counts(database) == {plain: 2, flexible: 2, waits: 3}


def test_what_a_rank_is_told_of_its_gpu_and_its_threads(
    database: Database, settings: Settings, tmp_path: Path
):
    make_host(database, num_cores=6, num_cards=3)
    station = station_of(database, tmp_path, "w1")
    for asked, threads, seen in (
        ({"loading": 2}, 1, ["GPU-0"]),
        ({"threads": 3}, 3, ["GPU-0"]),
        ({"ids": [2, 0], "processes": 2, "loading": 1}, 1, ["GPU-2", "GPU-0"]),
    ):
        job = submit_gpu(database, **asked)
        dispatch(database, settings)
        claim = begin(database, job)
        with database.read() as tx:
            told, envs = _describe(tx, Attempt(station, claim, jobs.get(tx, job, None)))
        assert told["device"] == {"type": "cuda", "threads": threads, "peak_flops": None}
        assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == seen
        assert end(database, claim)


# --- two at once -----------------------------------------------------------------------------


Prepare = Callable[[], Claim]


def settled(database: Database, settings: Settings) -> dict[str, int]:
    """How many devices each job has, after what a sweep would still do."""
    if is_due(database, settings):
        dispatch(database, settings)
    assert not is_due(database, settings)
    return counts(database)


def test_a_gpu_job_comes_while_the_one_that_has_all_cores_ends(
    database: Database, settings: Settings
):
    make_host(database, num_cores=3, num_cards=1)
    made: list[str] = []

    def prepare() -> Claim:
        fresh(database)
        first = submit(database)
        dispatch(database, settings)
        claim = begin(database, first)
        made[:] = [submit_gpu(database, loading=1)]
        return claim

    for met in meetings(database.url, prepare, partial(dispatching, settings), ending, most=MOST):
        assert met.values[1], met.statements
        assert settled(database, settings) == {made[0]: 3}, met.statements


def test_a_gpu_job_ends_while_its_cores_are_divided(database: Database, settings: Settings):
    make_host(database, num_cores=4, num_cards=1)
    made: list[str] = []

    def prepare() -> Claim:
        fresh(database)
        made[:] = [submit(database), submit_gpu(database, loading=1)]
        dispatch(database, settings)
        begin(database, made[0])
        claim = begin(database, made[1])
        made.append(submit_gpu(database, loading=2))
        return claim

    for met in meetings(database.url, prepare, partial(dispatching, settings), ending, most=MOST):
        assert met.values[1], met.statements
        assert settled(database, settings) == {made[0]: 1, made[2]: 4}, met.statements


def test_two_dispatchers_place_gpu_jobs_at_once(database: Database, settings: Settings):
    make_host(database, num_cores=4, num_cards=3)
    made: list[str] = []

    def prepare() -> None:
        fresh(database)
        made[:] = [submit(database)]
        dispatch(database, settings)
        begin(database, made[0])
        made[1:] = [submit_gpu(database), submit_gpu(database, loading=1), submit_gpu(database)]

    act = partial(dispatching, settings)
    for met in meetings(database.url, prepare, act, act, most=MOST):
        assert met.values == (None, None)
        held = counts(database)
        assert held == {made[0]: 1, made[1]: 2, made[2]: 3}, (met.order, met.statements)
        assert reasons(database) == {made[3]: "not enough free CPU cores"}
