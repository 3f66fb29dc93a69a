"""Which checkpoints go when a new one is stored."""

from typing import Any

import pytest
from sqlalchemy import update

from glasshouse.errors import CheckpointNotFound
from models.database import Database
from models.jobs import checkpoint_retention, checkpoints, jobs
from models.jobs.checkpoint_retention import Best, RetentionRule
from models.jobs.checkpoints import StartPoint
from models.jobs.leases import Claim
from models.jobs.shipments import Batch
from models.tables import Checkpoint, Job, JobSpec

from .factories import make_job, make_worker, next_attempt, running, saved, ship


class Saver:
    """A job that saves, and forgets what is superseded."""

    def __init__(self, database: Database) -> None:
        make_worker(database)
        self.database = database
        self.job: Job = make_job(database)
        self.claim: Claim = running(database, self.job)
        self.offset = 0

    def save(self, step: int, rule: RetentionRule | None = None, **values: Any) -> list[str]:
        """Store one; with a rule, the keys that may go."""
        row = saved(step, key=f"{self.claim.attempt}/{step}", **values)
        batch = Batch(checkpoints=[row])
        assert ship(self.database, self.claim, batch, (self.offset, self.offset + 1))
        self.offset += 1
        if rule is None:
            return []
        with self.database.write() as tx:
            return checkpoint_retention.supersede(tx, self.job.id, rule)

    def resume(self, step: int) -> None:
        with self.database.read() as tx:
            rows = checkpoints.resumable(tx, self.job.id)
        start = next(StartPoint(row.id, row.step) for row in rows if row.step == step)
        self.claim, self.offset = next_attempt(self.database, self.job, self.claim, start), 0

    def steps(self) -> list[tuple[int, int]]:
        with self.database.read() as tx:
            rows = checkpoints.of_job(tx, self.job.id, "all")
        return sorted((row.attempt, row.step) for row in rows)


@pytest.fixture
def saver(database: Database) -> Saver:
    return Saver(database)


def test_the_last_ones_are_kept(saver: Saver):
    gone = [saver.save(step, RetentionRule(last=2)) for step in (2, 4, 6, 8)]
    assert gone == [[], [], ["1/2"], ["1/4"]]
    assert saver.steps() == [(1, 6), (1, 8)]


def test_the_best_are_kept_beside_the_last(saver: Saver):
    values = [0.5, 0.9, "NaN", 0.9, 0.7, None, 0.8]
    rule = RetentionRule(last=1, best=Best("validation/accuracy", "max", 2))
    for step, value in enumerate(values, start=1):
        saver.save(step, rule, metrics={} if value is None else {"validation/accuracy": value})
    assert saver.steps() == [(1, 2), (1, 4), (1, 7)]
    assert rule.best is not None


def test_the_least_are_the_best_where_that_is_asked(saver: Saver):
    rule = RetentionRule(last=1, best=Best("loss", "min"))
    for step, value in enumerate((3.0, 1.0, 2.0), start=1):
        saver.save(step, rule, metrics={"loss": value})
    assert saver.steps() == [(1, 2), (1, 3)]


def test_the_best_that_is_there_is_marked_by_the_rule_of_its_job(saver: Saver):
    """Of all that are kept, also where two are; a job without a rule has none."""
    rule: dict[str, Any] = {"metric": "validation/accuracy", "mode": "max", "count": 2}
    keeping_ = RetentionRule(last=2, best=Best(**rule))
    for step, value in enumerate((0.5, 0.9, 0.8, 0.7), start=1):
        saver.save(step, keeping_, metrics={"validation/accuracy": value})

    def best() -> dict[int, str]:
        with saver.database.read() as tx:
            found = checkpoint_retention.best(tx, [saver.job.id])
            rows = checkpoints.of_job(tx, saver.job.id)
        return {row.step: found[row.id] for row in rows if row.id in found}

    assert best() == {}
    with saver.database.write() as tx:
        spec = {"kind": "train", "checkpoint": {"keep_best": rule}}
        tx.execute(update(JobSpec).where(JobSpec.job == saver.job.id).values(resolved=spec))
    assert best() == {2: "highest validation/accuracy"}
    with saver.database.write() as tx:
        tx.execute(update(Checkpoint).where(Checkpoint.step == 2).values(state="damaged"))
    assert best() == {3: "highest validation/accuracy"}


def test_what_a_rewound_part_saved_goes_only_once_there_is_something_new(saver: Saver):
    for step in (10, 20, 30):
        saver.save(step, RetentionRule(last=3))
    saver.resume(10)
    with saver.database.write() as tx:
        assert checkpoint_retention.supersede(tx, saver.job.id, RetentionRule(last=1)) == []
    assert saver.steps() == [(1, 10), (1, 20), (1, 30)]
    assert saver.save(12, RetentionRule(last=2)) == ["1/20", "1/30"]
    assert saver.steps() == [(1, 10), (2, 12)]


def test_what_another_job_uses_stays(saver: Saver):
    saver.save(1, RetentionRule(last=1))
    with saver.database.write() as tx:
        (row,) = checkpoints.of_job(tx, saver.job.id)
        jobs.add(tx, owner="ada", spec={"kind": "infer"}, resolved={}, plan={}, uses=[row.id])
    saver.save(2, RetentionRule(last=1))
    saver.save(3, RetentionRule(last=1))
    assert saver.steps() == [(1, 1), (1, 3)]


def test_the_rule_is_read_from_the_resolved_spec():
    best = {"metric": "loss", "mode": "min", "count": 2}
    spec = {"kind": "train", "checkpoint": {"keep_last": 5, "keep_best": best}}
    assert RetentionRule.of(spec) == RetentionRule(5, Best("loss", "min", 2))
    assert RetentionRule.of({"kind": "train"}) == RetentionRule(3, None)
    assert RetentionRule.of({"kind": "infer", "checkpoint": "ckpt_x"}) == RetentionRule(3, None)


def test_a_checkpoint_that_a_job_is_submitted_for_is_not_superseded_meanwhile(saver: Saver):
    """A fork chooses the newest, and is planned while the job stores three newer ones."""
    saver.save(2, RetentionRule(last=1))
    with saver.database.write() as tx:
        chosen = checkpoints.newest(tx, saver.job, hold=True)
    assert [saver.save(step, RetentionRule(last=1)) for step in (4, 6)] == [[], ["1/4"]]
    with saver.database.read() as tx:
        assert checkpoints.get(tx, chosen.id, None).step == 2
    with saver.database.write() as tx:  # a minute later
        tx.execute(update(Checkpoint).values(held_until_ms=0))
    assert saver.save(8, RetentionRule(last=1)) == ["1/2", "1/6"]
    with saver.database.write() as tx, pytest.raises(CheckpointNotFound):
        checkpoints.hold(tx, chosen.id)
