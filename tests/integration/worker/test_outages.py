"""The broker forgets everything, the database goes away: no job is lost, and none runs twice.

``OUTAGE_S`` is how long PostgreSQL is unavailable, in seconds. The default is three times a lease.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Generator
from datetime import datetime
from pathlib import Path

import pytest
from redis import Redis
from sqlalchemy import select

from models.tables import Event, now
from tests.integration.worker.conftest import Broker
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.running import Postgres
from tests.waiting import until

OUTAGE_S = float(os.environ.get("OUTAGE_S", "15"))
NUM_WAITING = 20


def flush(broker: Broker) -> None:
    with Redis.from_url(broker.url) as client:
        client.flushall()


def wipe(broker: Broker) -> None:
    """It keeps nothing on disk: what was in it is gone."""
    broker.kill()
    time.sleep(1)  # it is unavailable for a moment, for every process that waits for it
    broker.start()


def check_log(harness: Harness, job_id: str) -> None:
    """One whole log with one end, of one attempt, and every step once."""
    events = harness.events(job_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    types = [event.type for event in events]
    assert (types.count("end"), types[-1]) == (1, "end")
    tried = [(one.worker, one.exit_kind) for one in harness.attempts(job_id)]
    assert len(tried) == 1, tried
    steps = harness.steps(job_id)
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize("lose", [flush, wipe])
@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
def test_a_broker_that_forgets_everything_loses_no_job(
    lose: Callable[[Broker], None], any_harness: Harness, broker: Broker
):
    any_harness.start_worker()
    dataset = any_harness.dataset()
    running = [any_harness.submit(endless(dataset)) for _ in range(2)]
    for job_id in running:
        any_harness.wait_step(job_id, 10)
    waiting = [any_harness.submit(train_spec(dataset)) for _ in range(NUM_WAITING)]
    lose(broker)
    for job_id in running:
        any_harness.wait_more(job_id, 20)
    assert {any_harness.job(job_id).state for job_id in waiting} == {"queued"}
    for job_id in running:
        any_harness.cancel(job_id)
    for job_id in waiting:
        assert any_harness.wait(job_id).state == "succeeded"
        assert any_harness.steps(job_id) == list(range(20))
    for job_id in running:
        assert any_harness.wait(job_id).state == "cancelled"
    for job_id in (*running, *waiting):
        check_log(any_harness, job_id)


@pytest.fixture
def postgres_harness(own_postgres: Postgres, broker: Broker, tmp_path: Path) -> Generator[Harness]:
    """A service whose database may be killed."""
    opened = Harness(own_postgres.url, broker.url, tmp_path)
    opened.variables |= {"LEASE_S": "5", "CPU_CORES": "1"}
    yield opened
    opened.close()


@pytest.mark.timeout(240 + 3 * OUTAGE_S)
def test_training_continues_while_the_database_is_unavailable(
    own_postgres: Postgres, postgres_harness: Harness
):
    harness = postgres_harness
    harness.start_workers("w1", "w2")
    dataset = harness.dataset()
    jobs = [harness.submit(endless(dataset)) for _ in range(2)]  # one each
    for job_id in jobs:
        harness.wait_step(job_id, 10)
    gone_at = now()
    own_postgres.kill()
    time.sleep(OUTAGE_S)
    back_at = now()
    own_postgres.start()
    began = time.monotonic()
    for job_id in jobs:
        until(lambda job_id=job_id: lag_s(harness, job_id) < 2, 120)
    caught_up_s = time.monotonic() - began
    for job_id in jobs:
        harness.cancel(job_id)
    for job_id in jobs:
        assert harness.wait(job_id).state == "cancelled"
        check_log(harness, job_id)
        check_trained_meanwhile(harness, job_id, gone_at, back_at)
    assert all(harness.logged(name, "database_unavailable") for name in harness.workers)
    told = {"outage_s": OUTAGE_S, "caught_up_s": round(caught_up_s, 1)}
    told["steps"] = [len(harness.steps(job_id)) for job_id in jobs]
    sys.stdout.write(json.dumps({"outage": told}) + "\n")


def lag_s(harness: Harness, job_id: str) -> float:
    """The age of the newest loss in the database, in seconds."""
    query = select(Event.at).where(Event.job == job_id, Event.type == "metrics")
    with harness.database.read() as tx:
        newest = tx.scalars(query.order_by(Event.seq.desc()).limit(1)).one()
    return (now() - newest).total_seconds()


def check_trained_meanwhile(
    harness: Harness, job_id: str, gone_at: datetime, back_at: datetime
) -> None:
    """In every fifth of the outage the job has made steps."""
    told = [event.at for event in harness.events(job_id) if event.type == "metrics"]
    fifth = (back_at - gone_at) / 5
    edges = [gone_at + fifth * number for number in range(6)]
    for begin, end in itertools.pairwise(edges):
        assert any(begin <= at < end for at in told), (job_id, begin, end)
