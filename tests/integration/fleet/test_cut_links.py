"""A worker whose link to PostgreSQL is cut in the middle of a transaction."""

import time
from pathlib import Path

import pytest
from sqlalchemy import text

from glasshouse.errors import TransactionConflict
from models.database import Database
from models.fleet import workers
from models.tables import Job
from tests.integration.fleet.test_interleaving import station_of
from tests.integration.store.factories import make_job, make_worker, running
from tests.waiting import until
from worker.context import idle_s
from worker.wakeups import Sweep

LEASE_S = 4.0
LIMIT_S = 18.0
"""A lease, the time until the transaction is ended, and a lot for a busy machine. It was 24."""


def test_its_job_is_taken_soon_though_it_holds_the_rows_and_the_dispatchers_lock(
    postgresql: Database, postgres_url: str, tmp_path: Path
):
    make_worker(postgresql, "cut")
    make_worker(postgresql, "w2", cores=0)
    job = make_job(postgresql)
    running(postgresql, job, "cut", lease_ms=round(LEASE_S * 1000))
    make_job(postgresql)
    cut = Database(postgres_url, pool_size=1, idle_s=idle_s(LEASE_S))
    context = station_of(postgresql, tmp_path, "w2", lease_s=LEASE_S, sweep_s=0.5)
    sweep = Sweep(context)
    connection = cut.engine.connect()  # nothing is said on it any more after this
    connection.execute(text("SELECT pg_advisory_xact_lock(7241309)"))
    connection.execute(text("UPDATE jobs SET version = version WHERE id = :id"), {"id": job.id})
    began = time.monotonic()

    def is_taken() -> bool:
        sweep()
        with postgresql.read() as tx:
            return tx.get_one(Job, job.id, populate_existing=True).state == "queued"

    until(is_taken, 60)
    took = time.monotonic() - began
    assert took < LIMIT_S, took
    connection.invalidate()
    connection.close()
    cut.close()


def test_a_lease_bounds_how_long_a_silent_transaction_is_kept():
    assert [idle_s(lease_s) for lease_s in (1, 9, 30, 600)] == [2, 3, 10, 20]


def test_who_dispatches_waits_for_no_lock_for_long(
    postgresql: Database, postgres_url: str, tmp_path: Path
):
    """One that is cut off while it dispatches holds the lock of all dispatchers."""
    make_worker(postgresql, "w1")
    context = station_of(postgresql, tmp_path, "w1")
    other = Database(postgres_url, pool_size=1)
    make_job(postgresql)
    with other.write() as tx:
        workers.lock_queue(tx)
        with pytest.raises(TransactionConflict):
            context.dispatch()
    other.close()
