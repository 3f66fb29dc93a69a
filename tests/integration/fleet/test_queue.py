"""Who is served of a long queue, and what the queue says."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, text

from api.routes.service.fleet import Fleet
from api.schemas.views import ranks_of
from glasshouse.ids import new_id
from models.database import Database
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import jobs
from models.settings import Settings
from models.tables import Job, core
from tests.integration.store.factories import make_worker
from worker.attempt.launch import environments
from worker.dispatch import dispatch

NUM_BEFORE = 1_000


def submit(database: Database, count: int = 1, kind: str = "train", **devices: Any) -> list[str]:
    """Queue jobs; all but the first are copies of its row."""
    resolved = {"devices": devices}
    with database.write() as tx:
        first = jobs.add(tx, owner="ada", spec={"kind": kind}, resolved=resolved, plan={})
        columns = [column.key for column in core(Job).columns]
        row = {name: getattr(first, name) for name in columns}
        made = [first.id, *(new_id("job") for _ in range(count - 1))]
        if count > 1:
            tx.execute(insert(Job), [row | {"id": id_} for id_ in made[1:]])
    return sorted(made)  # the order in which they are served


def with_busy_gpu(database: Database, cores: int = 2) -> None:
    found = [FoundDevice(f"cpu:{n}", "cpu", n, "core") for n in range(cores)]
    found.append(FoundDevice("cuda:0", "cuda", 0, "card"))
    with database.write() as tx:
        workers.register(tx, worker="w1", host="h", pid=1, version="0", info={}, devices=found)
    with database.write() as tx:
        tx.execute(text("UPDATE devices SET job = 'other' WHERE id = 'cuda:0'"))


def test_a_thousand_jobs_for_a_busy_gpu_do_not_keep_a_cpu_job_waiting(
    database: Database, tmp_path: Path
):
    with_busy_gpu(database)
    submit(database, NUM_BEFORE, type="cuda")
    (small,) = submit(database, type="cpu", threads=1)
    (auto,) = submit(database, kind="infer", type="auto")
    given = dispatch(database, Settings(home=tmp_path))
    assert [(one.job, one.devices) for one in given] == [(small, ("cpu:0",)), (auto, ("cpu:1",))]


@pytest.mark.parametrize(
    ("devices", "seen", "first"),
    [({"count": 2}, "GPU-0,GPU-1", "cuda:0"), ({"ids": [2, 0]}, "GPU-2,GPU-0", "cuda:2")],
)
def test_one_process_sees_all_the_devices_that_its_layers_are_placed_on(
    database: Database, tmp_path: Path, devices: dict[str, Any], seen: str, first: str
):
    cards = [FoundDevice(f"cuda:{n}", "cuda", n, "card", uuid=f"GPU-{n}") for n in range(3)]
    with database.write() as tx:
        workers.register(tx, worker="w1", host="h", pid=1, version="0", info={}, devices=cards)
        resolved = {"devices": {"type": "cuda", **devices}, "parallel": {"strategy": "placed"}}
        job = jobs.add(tx, owner="ada", spec={"kind": "train"}, resolved=resolved, plan={}).id
    (given,) = dispatch(database, Settings(home=tmp_path))
    assert len(given.devices) == 2
    with database.read() as tx:
        row = jobs.get(tx, job, None)
        held = workers.devices_of(tx, row)
        assert environments(row.resolved, held) == [{"CUDA_VISIBLE_DEVICES": seen}]
        (rank,) = ranks_of(row)
        assert (rank["rank"], rank["device"], rank["threads"]) == (0, first, 1)
    submit(database, type="cuda", ids=[1, 2])
    assert dispatch(database, Settings(home=tmp_path)) == [], "only one of them is free"


def test_a_dispatch_that_places_nothing_takes_no_lock(database: Database, tmp_path: Path):
    with_busy_gpu(database)
    submit(database, type="cuda")
    said: list[str] = []
    event.listen(
        database.engine, "before_cursor_execute", lambda *given: said.append(str(given[2]))
    )
    assert dispatch(database, Settings(home=tmp_path)) == []
    assert all(statement.lstrip().startswith("SELECT") for statement in said), said
    assert not any("advisory" in statement or "FOR UPDATE" in statement for statement in said)


def test_more_jobs_than_one_transaction_places_are_all_placed(database: Database, tmp_path: Path):
    make_worker(database, cores=7)
    wanted = submit(database, 7, type="cpu", threads=1)
    given: list[str] = []
    for expected in (3, 3, 1, 0):
        placed = dispatch(database, Settings(home=tmp_path), most=3)
        assert len(placed) == expected
        given += [choice.job for choice in placed]
    assert given == wanted


def test_brief_jobs_share_a_core_and_only_so_many(database: Database, tmp_path: Path):
    make_worker(database, cores=2)
    settings = Settings(home=tmp_path, infer_overcommit=2)
    (training,) = submit(database, type="cpu", threads=2)
    assert [choice.job for choice in dispatch(database, settings)] == [training]
    brief = submit(database, 3, kind="infer", type="auto")
    first = dispatch(database, settings)
    assert [(one.job, one.shared) for one in first] == [(brief[0], True), (brief[1], True)]
    assert dispatch(database, settings) == []
    with database.read() as tx:
        held = {row.job for row, _ in workers.all_devices(tx, lease_ms=30_000)}
        assert held == {training}
        shared = jobs.get(tx, brief[0], None)
        assert shared.devices == [{"worker": "w1", "kind": "cpu", "id": "cpu:0"}]
        assert [row.id for row in workers.devices_of(tx, shared)] == ["cpu:0"]


MEMORY = {"memory_bytes": 64 << 30}


def with_memory(database: Database) -> None:
    """Two workers: a host of 64 GiB with a device of 16 GiB, and one that knows no memory."""
    card = FoundDevice("cuda:0", "cuda", 0, "card", memory_bytes=16 << 30)
    with database.write() as tx:
        for name, info in (("w1", MEMORY), ("w2", {})):
            cores = [FoundDevice(f"cpu:{n}", "cpu", n, "core") for n in range(2)]
            devices = [*cores, card] if info else cores
            workers.register(
                tx, worker=name, host="h", pid=1, version="0", info=info, devices=devices
            )


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({"type": "cuda", "min_memory_gib": 16}, ("w1", ("cuda:0",))),
        ({"type": "cuda", "min_memory_gib": 16.1}, None),
        ({"type": "cpu", "threads": 1, "min_memory_gib": 64}, ("w1", ("cpu:0",))),
        ({"type": "cpu", "threads": 1, "min_memory_gib": 65}, None),
        ({"type": "auto", "min_memory_gib": 20}, ("w1", ("cpu:0", "cpu:1"))),
        ({"type": "cpu", "threads": 1, "worker": "w2", "min_memory_gib": 1}, None),
    ],
)
def test_a_job_gets_devices_with_the_memory_that_it_asks_for(
    database: Database, tmp_path: Path, devices: Any, expected: Any
):
    with_memory(database)
    submit(database, **devices)
    given = [(one.worker, one.devices) for one in dispatch(database, Settings(home=tmp_path))]
    assert given == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ({"type": "cuda", "min_memory_gib": 40}, "no cuda device with 40 GiB"),
        ({"type": "cpu", "min_memory_gib": 64.5}, "no cpu device with 64.5 GiB"),
        ({"type": "cuda", "min_memory_gib": 16}, "about to start"),
        ({"type": "auto", "min_memory_gib": 20}, "about to start"),
    ],
)
def test_the_queue_says_that_no_device_has_the_memory(
    database: Database, devices: Any, reason: str
):
    with_memory(database)
    (job,) = submit(database, **devices)
    with database.read() as tx:
        (queued,) = workers.queue(tx)
        given = workers.with_host_memory(tx, workers.devices_to_give(tx, lease_ms=30_000))
    assert queued.job == job
    assert Fleet({"w1": "active", "w2": "active"}, given, ()).why(queued) == reason


def test_new_facts_replace_the_old_ones_unless_another_process_has_the_name(database: Database):
    with_memory(database)
    for instance, size in (("", 7), ("another", 8)):
        with database.write() as tx:
            info = {"memory_bytes": size}
            workers.refresh_devices(tx, "w1", [], info=info, instance=instance)
        with database.read() as tx:
            assert workers.info_of(tx, "w1") == {"memory_bytes": 7}


def test_the_queue_of_an_owner_counts_the_jobs_of_others(database: Database):
    submit(database, 3)
    with database.write() as tx:
        spec = {"kind": "train", "priority": 1}
        mine = jobs.add(tx, owner="bob", spec=spec, resolved={}, plan={}).id
        last = jobs.add(tx, owner="bob", spec={"kind": "train"}, resolved={}, plan={}).id
    with database.read() as tx:
        found = workers.queue(tx, owner="bob")
        everybody = workers.queue(tx)
    assert [(one.position, one.job) for one in found] == [(0, mine), (4, last)]
    assert [one.position for one in everybody] == [0, 1, 2, 3, 4]
