"""Two transactions interleaved at each of their statements, on PostgreSQL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from glasshouse.errors import TransactionConflict
from models import quotas, workers
from models.artifacts import LocalArtifacts
from models.database import Database
from models.settings import Settings
from tests.integration.fleet.stepping import Stepped, count_statements
from tests.integration.store.making import make_worker
from worker.app import make_app
from worker.bells import Bells
from worker.station import Station

LEASE_S = 30.0
Act = Callable[[Database], Any]


def interleaved(url: str, one: Act, other: Act, prepare: Callable[[], None]) -> None:
    """Try every place of the first at which the second may come in; neither may fail."""
    prepare()
    for steps in range(count_statements(url, one)):
        prepare()
        with Stepped(url, one) as first, Stepped(url, other) as second:
            first.steps(steps)
            second.release()
            second.steps(1000)
            first.finish()
            second.finish()
            assert (first.error, second.error) == (None, None), f"after {steps} statements"


def station_of(database: Database, home: Path, name: str) -> Station:
    nobody = "unix:///nowhere/v.sock"
    settings = Settings(home=home, redis_url=nobody, worker_name=name, lease_s=LEASE_S)
    nursery: Any = None
    bells = Bells(settings, make_app(settings))
    return Station(settings, database, LocalArtifacts(settings.artifacts), bells, nursery)


def test_quotas_of_one_owner_are_set_twice_at_once(postgres_url: str):
    def put(limit: int) -> Act:
        def act(database: Database) -> None:
            with database.write() as tx:
                quotas.put(tx, "ada", {"running_jobs": limit}, by="root")

        return act

    interleaved(postgres_url, put(1), put(2), lambda: None)
    opened = Database(postgres_url)
    with opened.read() as tx:
        assert quotas.own(tx, "ada") in ({"running_jobs": 1}, {"running_jobs": 2})
    opened.close()


def test_a_deadlock_is_told_as_what_it_is(postgresql: Database, postgres_url: str):
    make_worker(postgresql, "a")
    make_worker(postgresql, "b")

    def beat(first: str, then: str) -> Act:
        def act(database: Database) -> None:
            with database.write() as tx:
                for name in (first, then):
                    workers.drain(tx, name)

        return act

    with (
        Stepped(postgres_url, beat("a", "b")) as one,
        Stepped(postgres_url, beat("b", "a")) as other,
    ):
        one.step()
        other.step()
        one.step()
        other.finish()
        one.finish()
        (error,) = [found for found in (one.error, other.error) if found is not None]
    assert isinstance(error, TransactionConflict)
    assert error.retryable
    assert error.code == "transaction_conflict"
