"""A worker that is stopped for longer than its lease and then continues: it has lost its jobs."""

import os
import signal
from typing import Any

import psutil
import pytest
from sqlalchemy import func, select

from glasshouse import jsonio, processes
from glasshouse.errors import DatabaseUnavailable
from models.database import IDLE_IN_TRANSACTION_S
from models.fleet import heartbeats
from models.observations import events
from models.tables import Attempt, Checkpoint, Event, Metric
from tests.integration.worker.harness import Harness, endless, train_spec
from tests.waiting import until

LEASE_S = "3"
SAVING = {"every_steps": 20, "keep_last": 2}


def halt(harness: Harness, name: str, where: str) -> None:
    """Have a worker stop itself at a failpoint; on SQLite not while one of its threads writes.

    There nobody else could write, and nobody could take its job.
    """
    worker = psutil.Process(harness.workers[name].pid)
    while True:
        (harness.home / "reached").unlink(missing_ok=True)
        (harness.home / "point").write_text(f"{where} stop")
        until((harness.home / "reached").exists)
        until(lambda: worker.status() == psutil.STATUS_STOPPED)
        try:
            with harness.database.write() as tx:
                heartbeats.note(tx, "nobody", {})
        except DatabaseUnavailable:
            os.kill(worker.pid, signal.SIGCONT)
        else:
            return


def written(harness: Harness, job_id: str, attempt: int) -> dict[str, int]:
    """How much of an attempt the database has."""
    with harness.database.read() as tx:
        mine = {
            table.__tablename__: select(func.count()).where(
                table.job == job_id, table.attempt == attempt
            )
            for table in (Event, Metric)
        }
        mine["offset"] = select(Attempt.spool_offset).where(
            Attempt.job == job_id, Attempt.n == attempt
        )
        return {name: tx.scalars(query).one() for name, query in mine.items()}


def saved(harness: Harness, job_id: str, attempt: int) -> set[str]:
    """The checkpoints of an attempt."""
    query = select(Checkpoint.id).where(Checkpoint.job == job_id, Checkpoint.attempt == attempt)
    with harness.database.read() as tx:
        return set(tx.scalars(query))


def shown(harness: Harness, job_id: str) -> list[dict[str, Any]]:
    """The log as a client reads it."""
    with harness.database.read() as tx:
        page = events.read(tx, job_id, 0, limit=100_000, max_bytes=1 << 30)
    return [jsonio.loads(event.as_json()) for event in page.events]


CASES = [
    pytest.param("sqlite", "ship.begin", id="sqlite"),
    pytest.param("postgresql", "ship.begin", id="postgresql", marks=pytest.mark.slow),
    pytest.param("postgresql", "ship.commit", id="in-a-transaction", marks=pytest.mark.slow),
]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("database_url", "where"), CASES, indirect=["database_url"])
def test_a_worker_that_wakes_beyond_its_lease_has_lost_its_job(any_harness: Harness, where: str):
    harness = any_harness
    harness.start_worker("w1", misbehaving=True, LEASE_S=LEASE_S)
    job_id = harness.submit(endless(harness.dataset(), checkpoint=SAVING))
    until(lambda: harness.payloads(job_id, "checkpoint"))
    leader = processes.identify(harness.rank_pid(job_id))
    assert leader is not None
    harness.start_worker("w2", LEASE_S=LEASE_S)
    halt(harness, "w1", where)
    until(lambda: harness.job(job_id).attempt == 2, 180 + IDLE_IN_TRANSACTION_S)
    harness.wait_step(job_id)
    before, kept = written(harness, job_id, 1), saved(harness, job_id, 1)
    assert processes.alive(leader), "it was to train on meanwhile"
    os.kill(harness.workers["w1"].pid, signal.SIGCONT)
    until(lambda: not processes.alive(leader))
    until(lambda: harness.logged("w1", "fenced_out"))
    harness.wait_more(job_id, 20)
    on_w1 = {"type": "cpu", "threads": 1, "worker": "w1"}
    assert (
        harness.wait(harness.submit(train_spec(harness.dataset(), devices=on_w1))).state
        == "succeeded"
    )
    harness.cancel(job_id)
    assert harness.wait(job_id).state == "cancelled"
    assert written(harness, job_id, 1) == before
    assert saved(harness, job_id, 1) <= kept
    check_log(harness, job_id)


def check_log(harness: Harness, job_id: str) -> None:
    """Two attempts, the second where a checkpoint of the first was; one log of every step."""
    told = harness.events(job_id)
    assert [event.seq for event in told] == list(range(1, len(told) + 1))
    types = [event.type for event in told]
    assert (types.count("end"), types[-1]) == (1, "end")
    begun = [number for number, event in enumerate(told) if event.type == "attempt"]
    assert {event.attempt for event in told[begun[1] :]} == {2}
    first, second = harness.attempts(job_id)
    assert (first.worker, first.exit_kind) == ("w1", "lease_lost")
    assert (second.worker, second.exit_kind) == ("w2", "cancelled")
    assert second.resumed_from_step
    steps = [event["step"] for event in shown(harness, job_id) if "loss" in event.get("values", {})]
    assert steps == list(range(len(steps)))
