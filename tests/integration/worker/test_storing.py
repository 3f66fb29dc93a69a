"""What one attempt says is stored exactly once, also when the answer of a commit gets lost."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from engine.core.spool import SpoolWriter
from glasshouse import jsonio
from glasshouse.errors import DatabaseUnavailable
from models.database import Database, Transaction
from models.fleet.notifier import Notifier
from models.jobs import jobs
from models.observations import events
from models.observations.events import NewEvent
from models.settings import Settings
from models.storage.artifacts import LocalArtifacts
from models.tables import Event, Job, now
from tests.integration.store.factories import make_job, make_worker, running
from worker.attempt.captures import CapturedTensors
from worker.attempt.control import CommandDelivery
from worker.attempt.resume import Attempt
from worker.attempt.store import MAX_RECORDS, AttemptStore, punch_hole
from worker.context import WorkerContext
from worker.processes.fork_server import ForkServerClient, log_path

Say = Callable[[AttemptStore, Path], None]


class Forgetful(Database):
    """Loses the results of a given number of commits."""

    num_to_lose = 0

    @contextmanager
    def write(self) -> Generator[Transaction]:
        with super().write() as tx:
            yield tx
        if self.num_to_lose:
            self.num_to_lose -= 1
            raise DatabaseUnavailable


@pytest.fixture
def forgetful(database_url: str) -> Generator[Forgetful]:
    opened = Forgetful(database_url)
    yield opened
    opened.close()


@pytest.fixture
def store(forgetful: Forgetful, tmp_path: Path) -> Generator[AttemptStore]:
    """The store of an attempt, whose rank is this test."""
    nobody = f"unix://{tmp_path}/nobody"
    settings = Settings(home=tmp_path, redis_url=nobody, worker_name="w1", lease_s=30)
    notifier = Notifier(settings)
    fork_server = ForkServerClient(log_path=tmp_path / "fork-server.log")
    context = WorkerContext(
        settings, forgetful, LocalArtifacts(settings.artifacts), notifier, fork_server
    )
    make_worker(forgetful)
    job = make_job(forgetful)
    claim = running(forgetful, job)
    with forgetful.read() as tx:
        attempt = Attempt(context, claim, jobs.whole(tx, job.id, None))
    log_path(attempt.directory, "stdout").parent.mkdir(parents=True)
    (tmp_path / "attempt").symlink_to(attempt.directory)
    made = AttemptStore(attempt, CommandDelivery(forgetful, attempt.job, attempt.directory))
    yield made
    made.drain.close()
    notifier.close()


def log_of(database: Database) -> list[dict[str, Any]]:
    """All that the only job has told."""
    with database.read() as tx:
        job = tx.scalars(select(Job.id)).one()
        return [jsonio.loads(event.as_json()) for event in events.after(tx, job, 0)]


def print_a_line(store: AttemptStore, directory: Path) -> None:
    log_path(directory, "stdout").write_text("hello\n")


def note_a_stall(store: AttemptStore, directory: Path) -> None:
    store.note(NewEvent("stalled", now(), {"step": 1, "seconds": 9.0, "action": "warn"}))


def drop_a_tensor(store: AttemptStore, directory: Path) -> None:
    lost = NewEvent("dropped", now(), {"what": "captures: no room", "count": 1}, 1)
    store.drain._finished.append(CapturedTensors(0, events=[lost]))


def report_a_loss(store: AttemptStore, directory: Path) -> None:
    record = {"type": "metrics", "at": "2026-01-01T00:00:00Z", "step": 0, "epoch": 0}
    spool = SpoolWriter(directory / "spool")
    spool.append(record | {"values": {"loss": 1.0}})
    spool.close()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("say", "kind"),
    [
        (print_a_line, "log"),
        (note_a_stall, "stalled"),
        (drop_a_tensor, "dropped"),
        (report_a_loss, "metrics"),
    ],
)
def test_what_is_stored_and_not_confirmed_is_not_stored_again(
    say: Say, kind: str, times: int, forgetful: Forgetful, store: AttemptStore, tmp_path: Path
):
    say(store, tmp_path / "attempt")
    forgetful.num_to_lose = times
    for _ in range(times):
        store.look(final=True)
        assert not store.idle, "it was to think that nothing is stored"
        store._retry_at = 0.0
    store.look(final=True)
    assert store.idle
    assert [event["type"] for event in log_of(forgetful)].count(kind) == 1
    note_a_stall(store, tmp_path)  # what comes then is something else
    store.look(final=True)
    log = log_of(forgetful)
    assert log[-1]["type"] == "stalled"
    assert [event["seq"] for event in log] == list(range(1, len(log) + 1))


def test_a_store_that_is_behind_comes_back_after_each_portion(
    forgetful: Forgetful, store: AttemptStore, tmp_path: Path
):
    """Else nobody would tell a rank that it is cancelled, while it says more than is stored."""
    spool = SpoolWriter(tmp_path / "attempt" / "spool")
    for step in range(2 * MAX_RECORDS + 5):
        record = {"type": "metrics", "at": "2026-01-01T00:00:00Z", "step": step, "epoch": 0}
        spool.append(record | {"values": {"loss": 1.0}})
    spool.close()
    store.look(final=False)
    first = num_metrics(forgetful)
    assert first == MAX_RECORDS
    assert store.pause_s() == 0
    store.look(final=True)
    assert num_metrics(forgetful) == 2 * MAX_RECORDS + 5
    assert store.pause_s() > 0


def test_a_silent_rank_after_a_full_portion_is_polled_with_pauses(
    store: AttemptStore, tmp_path: Path
):
    spool = SpoolWriter(tmp_path / "attempt" / "spool")
    for step in range(MAX_RECORDS):
        record = {"type": "metrics", "at": "2026-01-01T00:00:00Z", "step": step, "epoch": 0}
        spool.append(record | {"values": {"loss": 1.0}})
    spool.close()
    store.look(final=False)
    assert store.pause_s() == 0, "there might be more"
    store.look(final=False)
    assert store.pause_s() > 0


def test_the_disk_space_of_what_is_stored_is_freed_in_large_pieces(
    forgetful: Forgetful, store: AttemptStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "attempt" / "spool"
    path.write_bytes(b"x")
    if not punch_hole(path, 1):
        pytest.skip("this file system cannot do it")
    path.unlink()
    freed = [0]

    def punch(path: Path, size: int) -> bool:
        freed.append(size)
        return punch_hole(path, size)

    monkeypatch.setattr("worker.attempt.store.punch_hole", punch)
    monkeypatch.setattr("worker.attempt.store.TRIM_BYTES", 256 * 1024)
    spool = SpoolWriter(path)
    taken: list[int] = []
    for step in range(64):
        record = {"type": "progress", "at": "2026-01-01T00:00:00Z", "step": step}
        spool.append(record | {"text": "x" * 32 * 1024})
        spool.flush()
        store.look(final=True)
        taken.append(path.stat().st_blocks * 512)
    spool.close()
    assert store.offset == path.stat().st_size > 2 * 1024**2
    assert 128 * 1024 < max(taken) < 512 * 1024
    assert min(taken[8:]) < 128 * 1024
    assert all(after - before >= 256 * 1024 for before, after in pairwise(freed))
    assert store.sorter.step == 63


def num_metrics(database: Database) -> int:
    with database.read() as tx:
        query = select(func.count()).select_from(Event).where(Event.type == "metrics")
        return tx.scalars(query).one()
