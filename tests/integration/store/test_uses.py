"""A checkpoint that somebody is about to begin with, and that somebody is about to delete."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from glasshouse.errors import CheckpointNotFound
from models.database import Database
from models.jobs import checkpoint_retention, checkpoints, jobs
from models.jobs.checkpoint_retention import RetentionRule
from models.jobs.leases import Claim
from models.jobs.shipments import Batch
from models.storage import references
from models.tables import Job
from tests.waiting import until

from .factories import make_job, make_worker, running, saved, ship

SPEC = {"kind": "train"}


@pytest.fixture
def old(database: Database) -> str:
    """The older one of two checkpoints of a job that trains and keeps one."""
    make_worker(database)
    job = make_job(database)
    claim: Claim = running(database, job)
    for number, step in enumerate((2, 4)):
        batch = Batch(checkpoints=[saved(step, key=f"1/{step}")])
        assert ship(database, claim, batch, (number, number + 1))
    with database.read() as tx:
        first, _ = checkpoints.of_job(tx, job.id)
    return first.id


def supersede(database: Database, old: str, then: Callable[[], None] = lambda: None) -> list[str]:
    with database.write() as tx:
        job = checkpoints.get(tx, old, None).job
        assert job is not None
        gone = checkpoint_retention.supersede(tx, job, RetentionRule(last=1))
        then()
    return gone


def begin_with(database: Database, old: str, then: Callable[[], None] = lambda: None) -> Job:
    """Store a job that begins with a checkpoint, as the API does."""
    with database.write() as tx:
        references.share(tx, [old])
        checkpoints.get(tx, old, None)
        job = jobs.add(tx, owner="ada", spec=SPEC, resolved=SPEC, plan={}, uses=[old])
        then()
    return job


def is_held_up(database: Database) -> bool:
    """Whether a connection waits for another one; on SQLite every writer does."""
    if database.engine.dialect.name != "postgresql":
        return True
    with database.read() as tx:
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        return bool(tx.scalar(text(f"{query} AND datname = current_database()")))


@contextmanager
def meanwhile(database: Database, act: Callable[[], None]) -> Generator[Callable[[], None]]:
    """A thread that begins where this is called, and is over, or waits, when the call returns."""
    thread = threading.Thread(target=act)

    def begin() -> None:
        thread.start()
        until(lambda: not thread.is_alive() or is_held_up(database))

    yield begin
    thread.join(30)
    assert not thread.is_alive()


def test_what_a_job_is_about_to_begin_with_is_not_superseded(database: Database, old: str):
    gone: list[list[str]] = []
    with meanwhile(database, lambda: gone.append(supersede(database, old))) as begin:
        begin_with(database, old, then=begin)
    assert gone == [[]]
    with database.read() as tx:
        assert checkpoints.get(tx, old, None).step == 2


def test_no_job_begins_with_what_is_about_to_go(database: Database, old: str):
    found: list[object] = []

    def begin_too_late() -> None:
        try:
            found.append(begin_with(database, old))
        except CheckpointNotFound as error:
            found.append(error)

    with meanwhile(database, begin_too_late) as begin:
        assert supersede(database, old, then=begin) == ["1/2"]
    assert isinstance(found[0], CheckpointNotFound)
