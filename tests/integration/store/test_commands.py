"""Commands in the database: requested, applied, delivered again to a later attempt."""

from typing import Any

import pytest

from glasshouse.errors import CommandNotFound, JobEnded
from models.database import Database
from models.jobs import attempts, commands, jobs, leases, shipments
from models.jobs.commands import CommandChange
from models.tables import Command, Job

from .factories import LEASE_MS, make_job, make_worker, running


def ask(database: Database, job: Job, **body: Any) -> Command:
    with database.write() as tx:
        return commands.add(tx, jobs.get(tx, job.id, None), body, by="ada")


def applied(database: Database, job: Job, command: Command, step: int) -> None:
    values = {"state": "applied", "step": step, "old": {"x": 1}, "new": {"x": 2}}
    with database.write() as tx:
        commands.note(tx, job.id, [CommandChange(command.id, values)])


def read(database: Database, job: Job, command: Command) -> Command:
    with database.read() as tx:
        return commands.get(tx, jobs.get(tx, job.id, None), command.id)


def test_a_supervisor_learns_of_commands_by_its_beat_and_in_their_order(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    asked = [ask(database, job, set={"optimizer.lr": float(n)}) for n in range(20)]
    with database.write() as tx:
        beat = leases.beat(tx, claim, lease_ms=LEASE_MS)
        assert beat is not None
        assert beat.num_commands == 20
        told = commands.orders(jobs.commands_pending(tx, job.id))
    assert [one["id"] for one in told] == [command.id for command in asked]
    assert told[3] == {"id": asked[3].id, "by": "ada", "set": {"optimizer.lr": 3.0}}


def test_what_a_rank_did_is_stored_with_its_events_or_not_at_all(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    command = ask(database, job, set={"optimizer.lr": 0.5})
    values = {"state": "applied", "step": 7, "old": {"optimizer.lr": 0.1}, "problem": None}
    batch = shipments.Batch(commands=[CommandChange(command.id, values)])
    with database.write() as tx:
        shipments.ship(tx, claim, batch, offsets=(0, 10), lease_ms=LEASE_MS)
    found = read(database, job, command)
    assert (found.state, found.step, found.old) == ("applied", 7, {"optimizer.lr": 0.1})


def test_a_later_attempt_gets_what_held_from_its_first_step_on(database: Database):
    make_worker(database)
    job = make_job(database)
    running(database, job)
    early, late, saved = (
        ask(database, job, set={"optimizer.lr": 0.1}),
        ask(database, job, set={"optimizer.lr": 0.2, "stop.steps": 9}),
        ask(database, job, do="checkpoint"),
    )
    waits = ask(database, job, set={"optimizer.lr": 0.3})
    for command, step in ((early, 3), (late, 5), (saved, 5)):
        applied(database, job, command, step)
    spec = {
        "optimizer": {"type": "SGD", "args": {"lr": 1.0, "momentum": 0.5}},
        "stop": {"steps": 5},
    }
    with database.read() as tx:
        told = commands.to_carry_out(tx, job.id, 5)
        assert [(one["id"], one.get("step")) for one in told] == [
            (late.id, 5),
            (saved.id, 5),
            (waits.id, None),
        ]
        assert told[0]["old"] == {"x": 1}
        everything = [one["id"] for one in commands.to_carry_out(tx, job.id, None)]
        assert everything == [early.id, late.id, saved.id, waits.id]
        at_4 = commands.spec_at(tx, job.id, spec, 4)
        at_6 = commands.spec_at(tx, job.id, spec, 6)
        assert (
            commands.spec_at(tx, job.id, spec, 3)
            == spec
            == commands.spec_at(tx, job.id, spec, None)
        )
    assert at_4["optimizer"]["args"] == {"lr": 0.1, "momentum": 0.5}
    assert (at_6["optimizer"]["args"]["lr"], at_6["stop"]) == (0.2, {"steps": 9})
    assert spec["stop"] == {"steps": 5}


def test_commands_that_a_job_did_not_apply_are_rejected_at_its_end(database: Database):
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    done, waits = ask(database, job, do="checkpoint"), ask(database, job, do="evaluate")
    applied(database, job, done, 4)
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="t")
    assert read(database, job, waits).state == "pending"  # the job continues
    again = running(database, job)
    with database.write() as tx:
        assert attempts.finish(tx, again, "succeeded", exit_kind="succeeded")
    assert read(database, job, done).state == "applied"
    rejected = read(database, job, waits)
    assert rejected.problem is not None
    assert (rejected.state, rejected.problem["code"]) == ("rejected", "job_ended")
    with pytest.raises(JobEnded):
        ask(database, job, do="checkpoint")


def test_a_job_that_is_cancelled_at_once_rejects_what_waits(database: Database):
    job = make_job(database)
    command = ask(database, job, set={"optimizer.lr": 0.5})
    with database.write() as tx:
        jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)
    assert read(database, job, command).state == "rejected"


def test_a_command_belongs_to_its_job(database: Database):
    job, other = make_job(database), make_job(database)
    command = ask(database, job, do="checkpoint")
    with pytest.raises(CommandNotFound):
        read(database, other, command)
    with database.read() as tx:
        assert commands.find(tx, other.id, after=None, limit=5) == []
        assert [row.id for row in commands.find(tx, job.id, after=None, limit=5)] == [command.id]
        assert commands.find(tx, job.id, states=["applied"], after=None, limit=5) == []
