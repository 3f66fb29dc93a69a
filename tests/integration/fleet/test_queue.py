"""Who is served of a long queue, and what the queue says."""

from pathlib import Path
from typing import Any

from sqlalchemy import event, insert, text

from glasshouse.ids import new_id
from models.database import Database
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import jobs
from models.settings import Settings
from models.tables import Job, core
from tests.integration.store.factories import make_worker
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
