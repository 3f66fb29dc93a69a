"""A glance at a long series is what a reader of all its values would say."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alembic import command
from sqlalchemy import Engine, event, text

from models.database import Database
from models.jobs.checkpoints import StartPoint
from models.jobs.leases import Claim
from models.jobs.shipments import Batch
from models.migrate import config, migrate
from models.observations import metrics
from models.observations.lineage import AttemptFilter
from models.observations.metrics import MetricPoint, Summary
from models.observations.rollups import LENGTH
from models.observations.thinning import kept_places
from models.tables import Job

from .factories import make_job, make_worker, next_attempt, running, saved, ship

ODD = [math.nan, math.inf, -math.inf]


def measured(*values: tuple[int, str, float]) -> Batch:
    batch = Batch()
    for step, name, value in values:
        batch.metrics.append({"step": step, "epoch": 0, "name": name, "value": value})
    return batch


def by_reading_all(name: str, points: list[MetricPoint]) -> Summary:
    finite = [point.value for point in points if math.isfinite(point.value)]
    odd = [point.step for point in points if not math.isfinite(point.value)]
    last = points[-1]
    low, high = min(finite, default=None), max(finite, default=None)
    return Summary(name, last.value, last.step, low, high, len(points), min(odd, default=None))


def agree(database: Database, job: Job, attempt_filter: AttemptFilter = None) -> list[Summary]:
    """What a glance says, once it is what all values say."""
    with database.read() as tx:
        found = metrics.names(tx, job.id, attempt_filter)
        series = {
            name: metrics.query(tx, job.id, name, attempt_filter=attempt_filter)
            for name in ("acc", "loss")
        }
    read = [by_reading_all(name, points) for name, points in series.items() if points]
    assert repr(found) == repr(read)  # of NaN, too
    return found


class Run:
    """A job whose attempts ship values of their own choice."""

    def __init__(self, database: Database, seed: int) -> None:
        make_worker(database)
        self.chance = random.Random(seed)  # noqa: S311
        self.database, self.job = database, make_job(database)
        self.claim: Claim = running(database, self.job)
        self.step = self.offset = 0

    def ship(self) -> None:
        """More steps, some reported twice: the later value is kept."""
        chance = self.chance
        values: list[tuple[int, str, float]] = []
        for _ in range(chance.randrange(1, 20)):
            self.step += chance.choice([0, 0, 1, 7, LENGTH // 3, LENGTH])
            names = ["loss"] if chance.random() < 0.7 else ["loss", "acc"]
            values += [(self.step, name, chance.choice([*ODD, chance.random()])) for name in names]
        offsets = (self.offset, self.offset + 1)
        assert ship(self.database, self.claim, measured(*values), offsets)
        self.offset += 1

    def begin_again(self) -> None:
        """At a step of before: what comes after it is hidden."""
        at = self.chance.randrange(self.step + 2)
        batch = Batch()
        batch.checkpoints = [saved(at)]
        assert ship(self.database, self.claim, batch, (self.offset, self.offset + 1))
        origin = StartPoint(batch.checkpoints[0]["id"], at)
        self.claim = next_attempt(self.database, self.job, self.claim, origin)
        self.step, self.offset = at, 0


@pytest.mark.parametrize("seed", range(4))
def test_a_glance_is_what_all_values_say_whatever_was_run_again(database: Database, seed: int):
    run = Run(database, seed)
    for _ in range(6):
        for _ in range(3):
            run.ship()
            agree(database, run.job)
        run.begin_again()
        agree(database, run.job)
        for attempt_filter in range(1, run.claim.attempt + 1):
            agree(database, run.job, attempt_filter)


def test_fewer_points_are_those_of_all_that_the_rule_keeps(database: Database):
    run = Run(database, 7)
    for _ in range(60):
        run.ship()
    run.begin_again()
    with database.read() as tx:
        whole = metrics.query(tx, run.job.id, "loss")
        few = metrics.query(tx, run.job.id, "loss", max_points=40)
    places = kept_places([np.array([point.value for point in whole])], 40)
    assert 40 <= len(few) < len(whole)
    assert repr(few) == repr([whole[place] for place in places])  # of NaN, too


def test_a_value_in_anothers_place_is_counted_once(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    assert ship(database, claim, measured((5, "loss", 9.0), (6, "loss", 1.0)), (0, 1))
    again = measured((5, "loss", 2.0), (7, "loss", math.inf), (7, "loss", 0.5))
    assert ship(database, claim, again, (1, 2))
    (loss,) = agree(database, job)
    assert loss == Summary("loss", 0.5, 7, 0.5, 2.0, 3, None)


@pytest.fixture
def reads() -> Iterator[list[str]]:
    """The statements that read values."""
    told: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "FROM metrics" in statement or "JOIN metrics" in statement:
            told.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield told
    event.remove(Engine, "before_cursor_execute", note)


def test_of_a_long_series_only_its_last_value_is_read(database: Database, reads: list[str]):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    steps = range(4 * LENGTH)
    assert ship(database, claim, measured(*((step, "loss", 0.0) for step in steps)), (0, 1))
    reads.clear()
    with database.read() as tx:
        (loss,) = metrics.names(tx, job.id)
    assert (loss.num_values, loss.last_step) == (4 * LENGTH, 4 * LENGTH - 1)
    (statement,) = reads
    assert "metrics.step =" in statement


def test_values_stored_before_the_rollups_count(database: Database, tmp_path: Path):
    run = Run(database, seed=9)
    run.ship()
    run.begin_again()
    run.ship()
    before = agree(database, run.job)
    with database.engine.connect() as connection:
        command.downgrade(config(connection), "0014")
        connection.commit()
    migrate(database, lock_file=tmp_path / "migrate.lock")
    assert repr(agree(database, run.job)) == repr(before)
    with database.read() as tx:
        assert tx.execute(text("SELECT count(*) FROM metric_spans")).scalar_one() > 0
