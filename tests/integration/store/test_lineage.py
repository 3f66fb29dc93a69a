"""What a job shows after attempts that went on from checkpoints, against a list that is cut."""

import math
import random
from typing import Any

import pytest

from glasshouse import jsonio
from models.database import Database
from models.jobs import attempts, checkpoints, jobs, shipments
from models.jobs.checkpoints import SCRATCH, RefusedCheckpoint, StartPoint
from models.jobs.shipments import Batch
from models.observations import captures, events, lineage, metrics, outputs
from models.observations.events import NewEvent
from models.observations.lineage import Superseded
from models.tables import Event, Job, now
from worker.attempt.records import summarize

from .factories import losses, make_job, make_worker, next_attempt, running, saved, ship


def step_of(attempt: int, step: int) -> Batch:
    """All that an attempt says of a step; the value tells whose it is."""
    batch = losses((step, attempt + step / 1000))
    capture = {"id": f"cap_{attempt}_{step}", "step": step, "layer": "fc", "kind": "output"}
    capture |= {"phase": "train", "shape": [1], "dtype": "float32", "size_bytes": 4}
    batch.captures.append(capture | {"key": f"jobs/j/{attempt}/captures/{step}"})
    told = {"capture": capture["id"], "step": step}
    batch.events.append(NewEvent("capture", now(), told, step))
    artifact = {"name": f"samples-{step}", "media_type": "x/y", "size_bytes": 1, "step": step}
    batch.artifacts.append(artifact | {"key": f"jobs/j/{attempt}/artifacts/samples-{step}"})
    batch.events.append(NewEvent("log", now(), {"lines": [f"{attempt} {step}"]}))
    return batch


class Shown:
    """The log of one uninterrupted run: what is run again is cut off first."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.saved: list[tuple[int, int]] = []

    def rewind(self, step: int) -> None:
        self.steps = [pair for pair in self.steps if pair[1] < step]
        self.saved = [pair for pair in self.saved if pair[1] <= step]

    def check(self, database: Database, job: str) -> None:
        with database.read() as tx:
            points = metrics.query(tx, job, "loss")
            page = events.read(tx, job, 0, limit=10_000)
            kept = captures.find(tx, job, limit=1000)
            files = outputs.of_job(tx, job)
            found = [(row.attempt, row.step) for row in checkpoints.of_job(tx, job)]
            table = metrics.names(tx, job)
        told = [jsonio.loads(event.as_json()) for event in page.events]
        assert [(p.attempt, p.step) for p in points] == self.steps
        assert [p.value for p in points] == [a + s / 1000 for a, s in self.steps]
        of_steps = [(e["attempt"], e["step"]) for e in told if e["type"] == "metrics"]
        assert of_steps == self.steps
        assert [(e["attempt"], e["step"]) for e in told if e["type"] == "capture"] == self.steps
        assert sorted((row.attempt, row.step) for row in kept) == sorted(self.steps)
        assert sorted((row.attempt, row.step) for row in files) == sorted(self.steps)
        assert found == self.saved
        if self.steps:
            assert (table[0].num_values, table[0].last_step) == (len(self.steps), self.steps[-1][1])


def live_through(database: Database, job: Job, back_to: tuple[int, ...]) -> list[tuple[int, int]]:
    """A job that crashes and resumes at those steps or earlier; every step that ran."""
    claim = running(database, job)
    model, step, all_steps = Shown(), 0, list[tuple[int, int]]()
    for crash in (*back_to, None):
        for offset in range(10):
            if step % 4 == 0 and step:
                ship(
                    database, claim, Batch(checkpoints=[saved(step)]), (2 * offset, 2 * offset + 1)
                )
                model.saved.append((claim.attempt, step))
            else:
                ship(database, claim, Batch(), (2 * offset, 2 * offset + 1))
            ship(database, claim, step_of(claim.attempt, step), (2 * offset + 1, 2 * offset + 2))
            model.steps.append((claim.attempt, step))
            all_steps.append((claim.attempt, step))
            step += 1
        model.check(database, job.id)
        if crash is None:
            break
        with database.read() as tx:
            rows = [row for row in checkpoints.resumable(tx, job.id) if row.step <= crash]
        origin = StartPoint(rows[0].id, rows[0].step) if rows else SCRATCH
        claim = next_attempt(database, job, claim, origin)
        step = origin.step
        model.rewind(step)
        model.check(database, job.id)
    with database.write() as tx:
        assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    model.check(database, job.id)
    return all_steps


@pytest.mark.parametrize("back_to", [(4, 8, 12), (8, 4, 4), (12, 4, 8), (0, 4, 0), (4, 0, 4)])
def test_three_crashes_in_a_row_leave_the_record_of_one_run(
    database: Database, back_to: tuple[int, ...]
):
    make_worker(database)
    job = make_job(database)
    all_steps = live_through(database, job, back_to)
    with database.read() as tx:
        whole = metrics.query(tx, job.id, "loss", attempt_filter="all")
        second = metrics.query(tx, job.id, "loss", attempt_filter=2)
        told = events.read(tx, job.id, 0, limit=10_000, attempt_filter="all").events
        log = events.read(tx, job.id, 0, limit=10_000).events
        kept = captures.find(tx, job.id, limit=1000, attempt_filter="all")
        small: list[events.LoggedEvent] = []
        seq = 0
        while seq < log[-1].seq:
            page = events.read(tx, job.id, seq, limit=3)
            assert page.seq > seq
            small, seq = small + page.events, page.seq
    assert sorted((p.attempt, p.step) for p in whole) == sorted(all_steps)
    assert {p.attempt for p in second} == {2}
    assert [event.seq for event in told] == list(range(1, len(told) + 1))
    assert len(kept) == len(all_steps)
    assert small == log  # in small pages as in one
    begun = [jsonio.loads(event.payload) for event in log if event.type == "attempt"]
    assert [one["n"] for one in begun] == [1, 2, 3, 4]
    assert begun[0]["resumed_from_step"] is None
    assert all(isinstance(one["resumed_from_step"], int) for one in begun[1:])
    assert [event.type for event in log].count("end") == 1
    assert log[-1].type == "end"
    printed = [event for event in log if event.type == "log"]
    assert len(printed) == len(all_steps)  # what was printed is not of a step, and stays


def test_a_job_of_one_attempt_pays_nothing():
    assert lineage.condition([], Event.attempt, Event.step) == []
    assert lineage.steps_of(
        [Superseded(2, 5), Superseded(3, 9), Superseded(4, 7), Superseded(5, 7), Superseded(6, 8)]
    ) == [
        Superseded(2, 5),
        Superseded(5, 7),
        Superseded(6, 8),
    ]


def test_the_summary_at_a_step_is_what_it_was_when_training_was_there(database: Database):
    make_worker(database)
    job = make_job(database)
    chance = random.Random(1)  # noqa: S311
    odd = [math.nan, math.inf, -math.inf]
    claim = running(database, job)
    batch = Batch()
    summaries: list[dict[str, Any]] = [{}]
    summary: dict[str, dict[str, Any]] = {}
    for step in range(60):
        values = {"loss": chance.choice([*odd, *[round(chance.random(), 1)] * 5]), "time/step": 1.0}
        if step % 7 == 3:
            values["validation/loss"] = chance.choice([*odd, 0.5, 0.25, 0.25])
        for name, value in values.items():
            batch.metrics.append({"step": step, "epoch": 0, "name": name, "value": value})
            if not name.startswith("time/"):
                summarize(summary, name, value, step)
        summaries.append({name: dict(entry) for name, entry in summary.items()})
    assert ship(database, claim, batch, (0, 1))
    with database.read() as tx:
        found = [lineage.summary_before(tx, job.id, step) for step in range(61)]
    assert [in_order(one) for one in found] == [in_order(one) for one in summaries]


def in_order(summary: dict[str, dict[str, Any]]) -> str:
    """As text, in which NaN is what it is."""
    return repr(sorted((name, sorted(entry.items())) for name, entry in summary.items()))


def test_a_claim_says_of_the_job_what_it_was_at_the_checkpoint(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    batch = losses((0, 1.0), (1, 2.0))
    batch.job = {"progress": {"step": 2}, "summary": {"loss": {"last": 2.0}}}
    batch.checkpoints = [saved(1), saved(2)]
    assert ship(database, claim, batch, (0, 1))
    with database.read() as tx:
        newer, older = checkpoints.resumable(tx, job.id)
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="x")
    with database.read() as tx:  # nothing has given way yet, and the job says so
        waiting = jobs.get(tx, job.id, None)
        assert (waiting.progress, waiting.summary) == ({"step": 2}, {"loss": {"last": 2.0}})
        assert len(metrics.query(tx, job.id, "loss")) == 2
    refused = RefusedCheckpoint(newer.id, "it has 3 bytes and not 4")
    origin = StartPoint(older.id, 1, {"step": 1}, {"loss": {"last": 1.0}}, (refused,))
    running(database, job, origin=origin)
    with database.read() as tx:
        found = jobs.get(tx, job.id, None)
        assert (found.progress, found.summary) == ({"step": 1}, {"loss": {"last": 1.0}})
        assert [row.id for row in checkpoints.resumable(tx, job.id)] == [older.id]
        assert checkpoints.get(tx, newer.id, None).state == "damaged"
        log = events.read(tx, job.id, 0).events
        assert attempts.of_job(tx, job.id)[1].checkpoint == older.id
    told = [jsonio.loads(event.payload) for event in log if event.type == "log"]
    assert len(told) == 1
    assert "it has 3 bytes and not 4" in told[0]["lines"][0]


def test_a_start_that_was_deleted_meanwhile_is_not_taken(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    assert ship(database, claim, Batch(checkpoints=[saved(5)]), (0, 1))
    with database.read() as tx:
        (row,) = checkpoints.resumable(tx, job.id)
    with database.write() as tx, pytest.raises(checkpoints.CheckpointInUse):
        checkpoints.delete(tx, row)
    with pytest.raises(checkpoints.CheckpointNotFound):
        next_attempt(database, job, claim, StartPoint(row.id, 4))
    with database.read() as tx:
        assert attempts.waiting(tx, "w1") == [job.id]  # not claimed: another start may be


def test_no_checkpoint_is_there_before_the_events_up_to_its_step(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    batch = losses((0, 1.0), (1, 1.0))
    batch.checkpoints = [saved(2)]
    with pytest.raises(KeyError), database.write() as tx:
        shipments.ship(tx, claim, batch, offsets=(0, 9), lease_ms=1000)
        raise KeyError
    with database.read() as tx:
        assert checkpoints.resumable(tx, job.id) == []
        assert metrics.query(tx, job.id, "loss") == []
    assert ship(database, claim, batch, (0, 9))
    with database.read() as tx:
        assert [row.step for row in checkpoints.resumable(tx, job.id)] == [2]
        assert len(metrics.query(tx, job.id, "loss")) == 2
