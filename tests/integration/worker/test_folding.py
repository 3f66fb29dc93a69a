"""Statistics are folded while a job runs and when it has ended, and nothing of them changes."""

from typing import Any

import pytest

from glasshouse.events import STATS_COLUMNS
from models.database import Database
from models.jobs.leases import Claim
from models.observations import stats, stats_folding, unfolded_stats
from models.tables import Job
from tests.integration.store.factories import make_job, make_worker, running
from tests.waiting import until
from worker.attempt import folding
from worker.attempt.folding import Folding

from .harness import Harness, train_spec

PROBE = {
    "layers": ["*"],
    "kinds": ["output", "param_grad"],
    "every": 1,
    "want": ["stats"],
    "max_overhead": None,
}


def left(database: Database, job: str) -> bool:
    with database.read() as tx:
        return unfolded_stats.is_left(tx, job)


@pytest.mark.shared_worker
def test_a_job_that_has_ended_is_folded_and_says_what_its_events_said(harness: Harness):
    job_id = harness.submit(train_spec(harness.dataset(), probes=[PROBE], stop={"steps": 30}))
    harness.wait(job_id, "succeeded")
    until(lambda: not left(harness.database, job_id))
    told: dict[tuple[str, str], dict[int, list[Any]]] = {}
    for event in harness.payloads(job_id, "stats"):
        assert event["columns"] == list(STATS_COLUMNS)
        for layer, kind, *figures in event["rows"]:
            told.setdefault((layer, kind), {})[event["step"]] = figures
    assert len(told) > 4
    with harness.database.read() as tx:
        found = {
            (series.layer, series.kind): dict(
                zip(data.steps.tolist(), data.values.T.tolist(), strict=True)
            )
            for series, data in stats.query(tx, job_id)
        }
        newest = {(row.series.layer, row.series.kind): row for row in stats.newest(tx, job_id)}
    assert found == told
    assert {key: (row.step, list(row.figures)) for key, row in newest.items()} == {
        key: (29, rows[29]) for key, rows in told.items()
    }


def watched(database: Database, num_steps: int) -> tuple[Job, Claim]:
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    for step in range(num_steps):
        row = ["fc", "output", *[float(step)] * 9]
        with database.write() as tx:
            stats.add(tx, job.id, 1, [{"step": step, "phase": "train", "rows": [row]}])
    return job, claim


def test_a_running_job_is_folded_turn_by_turn(database: Database, monkeypatch: Any):
    job, claim = watched(database, 9)
    turns = Folding(database, claim)
    turns.turn()
    monkeypatch.setattr(folding, "LOOK_EVERY_S", 0.0)
    turns.turn()
    assert left(database, job.id)  # it is not due
    monkeypatch.setattr(unfolded_stats, "MAX_BLOCKS", 4)
    for _ in range(40):
        turns.turn()
        with database.read() as tx:
            ((_, found),) = stats.query(tx, job.id)
        assert found.values[0].tolist() == [float(step) for step in range(9)]
    with database.read() as tx:
        assert stats.last_fold(tx, job.id) == 2
    assert left(database, job.id)  # one block: not enough for a fold
    turns.finish()
    assert not left(database, job.id)


def test_a_worker_that_lost_the_job_stops_folding(database: Database):
    job, claim = watched(database, 3)
    Folding(database, Claim(job.id, claim.attempt, claim.fence + 1)).finish()
    assert left(database, job.id)


def test_a_block_that_cannot_be_read_stops_the_folding_and_nothing_else(
    database: Database, monkeypatch: Any
):
    job, claim = watched(database, 3)
    monkeypatch.setattr(folding, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(unfolded_stats, "MAX_BLOCKS", 1)
    monkeypatch.setattr(stats_folding, "pack_chunk", lambda _: 1 / 0)
    turns = Folding(database, claim)
    for _ in range(9):
        turns.turn()
    turns.finish()
    assert left(database, job.id)
