from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import column, insert, inspect, table

from glasshouse import jsonio
from glasshouse.errors import InvalidRequest, JobEnded, ProbeNotFound
from glasshouse.spec.probes import MAX_FULL_BYTES
from models.database import Database
from models.jobs import attempts, jobs, leases
from models.jobs.shipments import Batch
from models.migrate import config, migrate
from models.observations import events, probes
from models.observations.events import NewEvent
from models.observations.probes import CheckedProbe, ProbeChange
from models.tables import Command, Job, JobSpec, Probe, core, now

from .factories import LEASE_MS, make_worker, purge_deleted, running, ship, start

SPEC = {"layers": ["fc"], "kinds": ["output"], "every": 5, "at": None, "want": ["stats"]}
CONV = CheckedProbe({**SPEC, "layers": ["conv*"], "every": 1}, ["conv1"], 400)


def watched_job(database: Database, **changes: Any) -> Job:
    plan = {"probes": [{"matched": ["fc"], "bytes_per_step": 40}]}
    with database.write() as tx:
        spec = {"kind": "train"}
        return jobs.add(
            tx, owner="ada", spec=spec, resolved={"probes": [SPEC]}, plan=plan, **changes
        )


def attach(database: Database, job: Job, checked: CheckedProbe = CONV) -> Probe:
    with database.write() as tx:
        return probes.add(tx, jobs.get(tx, job.id, None), checked, by="ada")


def read(database: Database, job: Job, probe_id: str) -> Probe:
    with database.read() as tx:
        return probes.get(tx, jobs.get(tx, job.id, None), probe_id)


def listed(database: Database, job: Job, *, gone: bool = False) -> list[Probe]:
    with database.read() as tx:
        return probes.of_job(tx, job.id, gone=gone)


def taken_up(revision: int, step: int) -> Batch:
    batch = Batch(probes=(revision, step))
    batch.events.append(NewEvent("probe", now(), {"probe": "prb_x", "step": step}))
    return batch


def test_the_probes_of_a_spec_are_active_from_step_0(database: Database):
    (row,) = listed(database, watched_job(database))
    assert (row.state, row.applied_step, row.revision, row.by) == ("active", 0, 0, "ada")
    assert (row.body, row.matched, row.bytes_per_step) == (SPEC, ["fc"], 40)


def test_a_change_is_pending_until_the_rank_has_applied_its_revision(database: Database):
    make_worker(database)
    job = watched_job(database)
    claim = running(database, job)
    first = attach(database, job)
    with database.write() as tx:
        beat = leases.beat(tx, claim, lease_ms=LEASE_MS)
        assert beat is not None
        assert beat.num_commands == 1
        wanted = probes.wanted(tx, job.id)
        assert [item.body for item in jobs.commands_pending(tx, job.id)] == [
            {"do": "probes", "revision": 1}
        ]
    assert wanted["revision"] == 1
    assert [entry["new"] for entry in wanted["probes"]] == [False, True]
    second = attach(database, job)
    assert ship(database, claim, taken_up(1, 7), (0, 10))
    assert (read(database, job, first.id).state, read(database, job, second.id).state) == (
        "active",
        "pending",
    )
    with database.write() as tx:
        found = jobs.get(tx, job.id, None)
        slower = CheckedProbe({**CONV.body, "every": 9}, ["conv1"], 400)
        probes.change(tx, found, first.id, slower, by="ada")
        probes.remove(tx, found, second.id, by="ada")
    assert ship(database, claim, taken_up(2, 8), (10, 20))  # knows nothing of what came after it
    assert read(database, job, first.id).state == "pending"
    assert read(database, job, second.id).applied_step is None
    assert ship(database, claim, taken_up(4, 11), (20, 30))
    changed, removed = read(database, job, first.id), read(database, job, second.id)
    assert (changed.state, changed.applied_step, changed.body["every"]) == ("active", 11, 9)
    assert (removed.state, removed.applied_step) == ("removed", 11)
    assert [row.id for row in listed(database, job, gone=True)][1:] == [first.id, second.id]
    assert len(listed(database, job)) == 2
    with database.read() as tx:
        assert jobs.commands_pending(tx, job.id) == []
        made = tx.query(Command).filter(Command.job == job.id).order_by(Command.step).all()
        assert [(item.state, item.step) for item in made] == [
            *[("applied", 7), ("applied", 8), ("applied", 11), ("applied", 11)]
        ]


def test_removing_twice_asks_once_and_what_is_gone_cannot_be_changed(database: Database):
    job = watched_job(database)
    (row,) = listed(database, job)
    with database.write() as tx:
        found = jobs.get(tx, job.id, None)
        probes.remove(tx, found, row.id, by="ada")
        assert probes.remove(tx, found, row.id, by="ada").revision == 1
        with pytest.raises(ProbeNotFound):
            probes.change(tx, found, row.id, CONV, by="ada")
        with pytest.raises(ProbeNotFound):
            probes.get(tx, found, "prb_0")
    assert listed(database, job) == []


def test_a_job_that_is_queued_again_starts_with_the_list_of_now(database: Database):
    make_worker(database)
    job = watched_job(database)
    claim = running(database, job)
    row = attach(database, job)
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="x")
    start(database, job)
    with database.read() as tx:
        wanted = probes.wanted(tx, job.id)
    assert [entry["id"] for entry in wanted["probes"]][1:] == [row.id]
    assert read(database, job, row.id).state == "pending"


@pytest.mark.parametrize("how", ["finished", "cancelled while queued"])
def test_commands_that_an_ended_job_did_not_apply_are_rejected(
    database: Database, how: str, tmp_path: Path
):
    make_worker(database)
    job = watched_job(database)
    if how == "finished":
        claim = running(database, job)
        row = attach(database, job)
        with database.write() as tx:
            assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    else:
        row = attach(database, job)
        with database.write() as tx:
            jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)
    found = read(database, job, row.id)
    assert (found.state, (found.problem or {})["code"]) == ("rejected", "job_ended")
    with database.read() as tx:
        made = tx.query(Command).filter(Command.job == job.id).order_by(Command.id).first()
        assert made is not None
        assert (made.state, made.step) == ("rejected", None)
        types = [event.type for event in events.after(tx, job.id, 0)]
    assert types[-1] == "end"
    with pytest.raises(JobEnded):
        attach(database, job)
    with database.write() as tx:
        jobs.delete(tx, jobs.get(tx, job.id, None))
    purge_deleted(database, tmp_path)
    with database.read() as tx:
        assert tx.query(Probe).filter(Probe.job == job.id).all() == []


def test_jobs_from_before_the_probes_keep_those_of_their_specs(database: Database, tmp_path: Path):
    job = watched_job(database)
    plain, spec = core(Job), core(JobSpec)
    with database.read() as tx:
        row = dict(tx.execute(plain.select().where(plain.c.id == job.id)).mappings().one())
        row |= tx.execute(spec.select().where(spec.c.job == job.id)).mappings().one()
    with database.engine.connect() as connection:
        command.downgrade(config(connection), "0001")
        connection.commit()
    known = {column["name"] for column in inspect(database.engine).get_columns("jobs")}
    row = {name: value for name, value in row.items() if name in known}
    old = {**row, "id": job.id.replace("job_", "job_0")[:30], "resolved": {"probes": [SPEC] * 2}}
    types = {found.name: found.type for found in (*plain.c, *spec.c)}
    without_defaults = table("jobs", *(column(name, types.get(name)) for name in known))
    with database.write() as tx:
        tx.execute(insert(without_defaults), [old])
    migrate(database, lock_file=tmp_path / "migrate.lock")
    with database.read() as tx:
        (found,) = probes.of_job(tx, job.id)
        both = probes.of_job(tx, old["id"])
    assert (found.body, found.matched, found.state) == (SPEC, ["fc"], "active")
    assert [(item.position, item.matched) for item in both] == [(0, ["fc"]), (1, [])]
    assert (found.by, found.created_at) == ("ada", job.created_at)
    assert jsonio.dumps(found.body) == jsonio.dumps(SPEC)


def changed(*changes: ProbeChange, job: dict[str, Any] | None = None) -> Batch:
    batch = Batch(probe_changes=[*changes], job=job or {})
    batch.events.append(NewEvent("probe", now(), {"probe": "prb_x", "step": 1}))
    return batch


def test_what_a_job_measured_and_changed_is_kept_until_the_probe_is_another(database: Database):
    make_worker(database)
    job = watched_job(database)
    claim = running(database, job)
    (row,) = listed(database, job)
    usual = 40 / probes.STATS_BYTES_PER_S + probes.TENSOR_S
    assert row.estimated_cost_s == pytest.approx(usual)
    assert (row.cost_s, row.every_now) == (None, None)
    cost, wider = ProbeChange(row.id, {"cost_s": 0.5}, 0), ProbeChange(row.id, {"every_now": 40}, 0)
    told = {"fraction": 0.4, "budget": 0.03}
    assert ship(database, claim, changed(cost, wider, job={"probe_overhead": told}), (0, 10))
    found = read(database, job, row.id)
    assert (found.cost_s, found.every_now) == (0.5, 40)
    with database.read() as tx:
        assert jobs.get(tx, job.id, None).probe_overhead == told
    # another one of the same form is expected to take as long for each byte
    assert attach(database, job).estimated_cost_s == pytest.approx(0.5 * 400 / 40)
    with database.write() as tx:
        body = CheckedProbe({**SPEC, "every": 7}, ["fc"], 40)
        again = probes.change(tx, jobs.get(tx, job.id, None), row.id, body, by="ada")
        assert (again.cost_s, again.every_now) == (None, None)
    assert ship(database, claim, changed(cost, wider), (10, 20))  # of the probe as it was
    assert read(database, job, row.id).every_now is None
    with database.write() as tx:
        assert attempts.give_up(tx, claim, exit_kind="lease_lost", reason="x")
    with database.read() as tx:
        assert jobs.get(tx, job.id, None).probe_overhead is None


def test_a_probe_that_was_switched_off_is_failed_until_it_is_changed(database: Database):
    make_worker(database)
    job = watched_job(database)
    claim = running(database, job)
    (row,) = listed(database, job)
    problem = {"code": "probe_failed", "detail": "no"}
    off = ProbeChange(row.id, {"state": "failed", "problem": problem}, 0)
    assert ship(database, claim, changed(off), (0, 10))
    found = read(database, job, row.id)
    assert (found.state, found.problem) == ("failed", problem)
    with database.read() as tx:
        (entry,) = probes.wanted(tx, job.id)["probes"]
    assert entry["failed"] is True
    with database.write() as tx:
        same = CheckedProbe(SPEC, ["fc"], 40)
        again = probes.change(tx, jobs.get(tx, job.id, None), row.id, same, by="ada")
        assert (again.state, again.problem) == ("pending", None)
        (entry,) = probes.wanted(tx, job.id)["probes"]
    assert (entry["failed"], entry["revision"]) == (False, 1)
    assert ship(database, claim, changed(off), (10, 20))  # told late, of the probe as it was
    assert read(database, job, row.id).state == "pending"


def test_two_that_each_fit_do_not_together_pass_the_limit_of_whole_tensors(database: Database):
    """Both were planned against the list of before; the second finds the first under the lock."""
    job = watched_job(database)
    half = CheckedProbe({**CONV.body, "want": ["full"]}, ["conv1"], MAX_FULL_BYTES // 2 + 1)
    first = attach(database, job, half)
    with pytest.raises(InvalidRequest) as refused:
        attach(database, job, half)
    assert [item.pointer for item in refused.value.problems] == ["/want"]
    (row, _) = listed(database, job)
    with database.write() as tx, pytest.raises(InvalidRequest):
        probes.change(tx, jobs.get(tx, job.id, None), row.id, half, by="ada")
    with database.write() as tx:
        probes.remove(tx, jobs.get(tx, job.id, None), first.id, by="ada")
    assert attach(database, job, half).state == "pending"
