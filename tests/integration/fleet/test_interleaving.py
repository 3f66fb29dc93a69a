"""Two transactions interleaved at each of their statements, on PostgreSQL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import text

from glasshouse.errors import TransactionConflict
from models.access import quotas
from models.database import Database
from models.fleet import workers
from models.fleet.notifier import Notifier
from models.fleet.workers import FoundDevice
from models.jobs import jobs
from models.settings import Settings
from models.storage.artifacts import LocalArtifacts
from models.tables import Device
from tests.integration.store.factories import make_worker
from tests.interleaving import meeting, meetings
from worker.context import WorkerContext
from worker.dispatch import dispatch
from worker.wakeups import Sweep

LEASE_S = 30.0
MOST = 60
"""Orders that are tried of the many that two long transactions have."""
Act = Callable[[Database, None], Any]


def station_of(database: Database, home: Path, name: str, **more: Any) -> WorkerContext:
    """A worker without a process or a broker."""
    wanted = {"home": home, "redis_url": "unix:///nowhere/v.sock", "worker_name": name}
    settings = Settings(**(wanted | {"lease_s": LEASE_S} | more))
    fork_server: Any = None
    notifier = Notifier(settings, enabled=False)
    return WorkerContext(
        settings, database, LocalArtifacts(settings.artifacts), notifier, fork_server
    )


def test_quotas_of_one_owner_are_set_twice_at_once(postgres_url: str):
    def put(limit: int) -> Act:
        def act(database: Database, _: None) -> None:
            with database.write() as tx:
                quotas.put(tx, "ada", {"running_jobs": limit}, by="root")

        return act

    opened = Database(postgres_url)
    for met in meetings(postgres_url, lambda: None, put(1), put(2)):
        assert met.values == (None, None)
        with opened.read() as tx:
            assert quotas.own(tx, "ada") in ({"running_jobs": 1}, {"running_jobs": 2})
    opened.close()


def test_a_deadlock_is_reported_as_what_it_is(postgresql: Database, postgres_url: str):
    make_worker(postgresql, "a")
    make_worker(postgresql, "b")

    def beat(first: str, then: str) -> Act:
        def act(database: Database, _: None) -> None:
            with database.write() as tx:
                for name in (first, then):
                    workers.drain(tx, name)

        return act

    order = ((0, 1), (1, 1), (0, 1))
    met = meeting(postgres_url, beat("a", "b"), beat("b", "a"), order)
    (error,) = [result.error for result in met.results if result.error is not None]
    assert isinstance(error, TransactionConflict)
    assert error.retryable
    assert error.code == "transaction_conflict"


def swept(home: Path, name: str) -> Act:
    """Sweep once, and raise what the sweep only logs."""

    def act(database: Database, _: None) -> None:
        with structlog.testing.capture_logs([structlog.processors.format_exc_info]) as logs:
            Sweep(station_of(database, home, name))()
        bad = [line for line in logs if line["event"] in ("database_unavailable", "sweep_failed")]
        assert not bad, bad

    return act


def occupied(database: Database, job: str | None) -> None:
    """Have all devices be some job's, or nobody's."""
    with database.write() as tx:
        tx.execute(text("UPDATE devices SET job = :job"), {"job": job})


def queue_four(database: Database) -> None:
    """Have four jobs of one core each wait, the last made first, and nothing else."""
    spec = {"devices": {"type": "cpu", "threads": 1}}
    with database.write() as tx:
        tx.execute(text("DELETE FROM jobs"))
    for priority in range(4):
        with database.write() as tx:
            wanted = {"kind": "train", "priority": priority}
            jobs.add(tx, owner="ada", spec=wanted, resolved=spec, plan={})


def test_a_sweep_that_found_nothing_free_meets_a_dispatch_that_does(
    postgresql: Database, postgres_url: str, tmp_path: Path
):
    """A dispatch takes jobs by priority; the sweep must not lock them in another order."""
    settings = Settings(home=tmp_path, lease_s=LEASE_S)
    make_worker(postgresql, "w1", cores=4)
    make_worker(postgresql, "w2", cores=0)

    def prepare() -> None:
        queue_four(postgresql)
        occupied(postgresql, "other")

    def freed(database: Database, _: None) -> None:
        occupied(database, None)
        dispatch(database, settings)

    for met in meetings(postgres_url, prepare, swept(tmp_path, "w2"), freed, most=MOST):
        assert [result.error for result in met.results] == [None, None], met.order


def assigned(database: Database) -> dict[str, str]:
    """Device and job, of the devices that jobs have."""
    with database.read() as tx:
        rows = tx.execute(text("SELECT id, job FROM devices WHERE job IS NOT NULL"))
        return {row.id: row.job for row in rows}


def test_devices_change_while_a_dispatch_takes_them(
    postgresql: Database, postgres_url: str, tmp_path: Path
):
    """One becomes unhealthy, one vanishes: the others are given, and nothing a job has goes."""
    settings = Settings(home=tmp_path, lease_s=LEASE_S)
    make_worker(postgresql, "w1", cores=4)
    cores = [FoundDevice(f"cpu:{n}", "cpu", n, "core", healthy=n != 1) for n in range(3)]

    def refresh(database: Database, _: None) -> None:
        with database.write() as tx:
            workers.refresh_devices(tx, "w1", cores)

    def prepare() -> None:
        queue_four(postgresql)
        with postgresql.write() as tx:
            tx.execute(text("DELETE FROM devices"))
        make_worker(postgresql, "w1", cores=4)

    def giving(database: Database, _: None) -> Any:
        return dispatch(database, settings)

    for met in meetings(postgres_url, prepare, giving, refresh, most=MOST):
        chosen, _ = met.values
        given = {id_: choice.job for choice in chosen for id_ in choice.devices}
        assert assigned(postgresql) == given, met.order
        assert {"cpu:0", "cpu:2"} <= set(given), met.order
        with postgresql.read() as tx:
            assert not tx.get_one(Device, ("w1", "cpu:1")).healthy
