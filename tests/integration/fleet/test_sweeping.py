"""The sweep finds jobs whose messages were lost, with Redis for example."""

from pathlib import Path
from typing import Any

import pytest

from models.database import Database
from models.settings import Settings
from tests.integration.fleet.test_interleaving import station_of
from tests.integration.store.factories import make_job, make_worker
from tests.waiting import until
from worker import dispatch
from worker.wakeups import Sweep


def test_a_job_of_which_no_worker_was_notified_is_begun_by_the_first_sweep(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_worker(database)
    job = make_job(database)
    context = station_of(database, tmp_path, "w1")
    begun: list[str] = []
    monkeypatch.setattr(context, "supervise", lambda job, _: begun.append(job))
    Sweep(context)()
    until(lambda: begun, 10)
    assert begun == [job.id]


def test_one_worker_dispatches_for_all_and_another_where_it_is_gone(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_job(database)  # there is no device for it
    calls: list[Any] = []
    monkeypatch.setattr(dispatch, "dispatch", lambda *given: calls.append(given) or [])

    def sweep_of(name: str, sweep_s: float) -> Sweep:
        return Sweep(station_of(database, tmp_path, name, sweep_s=sweep_s))

    first, second = sweep_of("w1", 3600.0), sweep_of("w2", 3600.0)
    for _ in range(3):
        first()
        second()
    assert len(calls) == 3, "the first one each time"
    third = sweep_of("w3", 0.001)
    until(lambda: third() or len(calls) == 4)


def test_a_job_is_found_and_begun_within_five_seconds():
    assert 2 * Settings().sweep_s < 5
