"""How many replicas a serve job has: the decision, and two workers that make it at once."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from glasshouse import jsonio
from glasshouse.spec import parse_job
from glasshouse.spec.jobs.serve_job import IDLE
from models.access import quotas
from models.database import Database, database_time
from models.jobs import attempts, jobs, pausing, replicas, scaling
from models.jobs.jobs import Filter
from models.jobs.leases import Claim
from models.jobs.scaling import Decision, Member, ReplicaGroup, decide
from models.settings import Settings
from models.tables import Job, JobUse, Replica
from tests.interleaving import meetings

from .factories import make_worker, running

START = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = {"kind": "serve", "models": ["m"], "name": "web", "labels": {"team": "vision"}}


def after_s(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def ms(seconds: float) -> int:
    return round(after_s(seconds).timestamp() * 1000)


def resolved(**changes: Any) -> dict[str, Any]:
    return parse_job(jsonio.dumps(SPEC | changes)).model_dump(mode="json")


def group(*reports: dict[str, Any] | None, state: str = "running", **more: Any) -> ReplicaGroup:
    """A serve job of which each replica has sent a report; the first one is its own."""
    members = [Member(f"job_{n}", "running", report) for n, report in enumerate(reports)]
    low, high = more.pop("least", 1), more.pop("most", 3)
    spec = resolved(replicas={"min": low, "max": high}, idle_s=60 if low < high else None)
    spec |= more.pop("spec", {})
    return ReplicaGroup("job_0", state, spec, members[0], tuple(members[1:]), **more)


def late(p50: float = 80.0, busy: float = 1.0) -> dict[str, Any]:
    return {"queue_ms": {"p50": p50, "p99": 2 * p50}, "waiting": 3, "busy": busy, "idle_s": 0.0}


QUIET = {"waiting": 0, "busy": 0.0, "idle_s": 100.0}


def test_requests_that_wait_too_long_for_some_time_get_another_replica():
    assert decide(group(late()), START) == Decision(scaling={"short_ms": ms(0)})
    since = {"short_ms": ms(0)}
    assert decide(group(late(), scaling=since), after_s(3)) == Decision(scaling=since)
    assert decide(group(late(), scaling=since), after_s(4)) == Decision(create=1)
    assert decide(group(late(40), scaling=since), after_s(4)) == Decision()
    full = {"waiting": 200, "busy": 1.0, "idle_s": 0.0}  # none was answered since the last report
    assert decide(group(full, scaling=since), after_s(4)) == Decision(create=1)


def test_a_delay_that_was_asked_for_is_not_a_wait():
    since = {"short_ms": ms(0)}
    delayed = group(late(80), spec={"max_delay_ms": 100.0}, scaling=since)
    assert decide(delayed, after_s(9)) == Decision()


def test_none_is_added_before_the_last_one_reports():
    """It may be queued for want of a device: then more would not help."""
    since = {"short_ms": ms(0)}
    assert decide(group(late(), None, scaling=since), after_s(9)).create == 0


def test_there_are_never_more_than_max_nor_more_after_a_failure():
    since = {"short_ms": ms(0)}
    assert decide(group(late(), late(), late(), scaling=since), after_s(9)).create == 0
    assert decide(group(late(), scaling=since, has_failed=True), after_s(9)).create == 0
    assert decide(group(late(), least=2, has_failed=True), START) == Decision()


def test_min_replicas_are_created_at_once_also_before_the_first_one_listens():
    for state in ("queued", "starting", "running"):
        assert decide(group(None, state=state, least=3), START) == Decision(create=2)


def test_a_spare_replica_ends_after_idle_s():
    first = decide(group(late(1, 0.3), late(1, 0.2)), START)
    assert first == Decision(scaling={"spare_ms": ms(0)})
    since = {"spare_ms": ms(0)}
    assert decide(group(late(1, 0.3), late(1, 0.2), scaling=since), after_s(59)).cancel == ()
    ended = decide(group(late(1, 0.3), late(1, 0.2), scaling=since), after_s(60))
    assert ended == Decision(cancel=("job_1",))
    assert decide(group(late(1, 0.3), late(1, 0.3), scaling=since), after_s(60)) == Decision()


def test_of_several_spare_replicas_one_that_does_not_run_ends_first():
    found = group(QUIET, QUIET, QUIET, scaling={"spare_ms": ms(0)})
    queued = found.children[0]._replace(state="queued", traffic=None)
    waits = ReplicaGroup(
        found.job, found.state, found.spec, found.first, (queued, found.children[1]), found.scaling
    )
    assert decide(waits, after_s(60)).cancel == ("job_1",)
    assert decide(found, after_s(60)).cancel == ("job_2",)


@pytest.mark.parametrize("state", [None, "pausing", "paused", "cancelling"])
def test_children_end_with_their_serve_job(state: Any):
    found = decide(group(QUIET, QUIET, QUIET, state=state), START)
    assert found == Decision(cancel=("job_1", "job_2"))


def test_a_serve_job_is_paused_only_once_it_has_no_children():
    assert decide(group(QUIET, least=0), START).pauses
    assert not decide(group(QUIET, least=1), START).pauses
    assert not decide(group(QUIET | {"idle_s": 59.0}, least=0), START).pauses
    assert not decide(group({}, least=0), START).pauses  # it has only just started
    assert not decide(group(QUIET, QUIET, least=0), START).pauses
    ends = group(QUIET, QUIET, least=0)
    ends = ReplicaGroup(
        ends.job, "running", ends.spec, ends.first, (ends.children[0]._replace(state="cancelling"),)
    )
    assert not decide(ends, START).pauses


# --- in the database -----------------------------------------------------------------------------


def serve(database: Database, **changes: Any) -> Job:
    with database.write() as tx:
        spec = resolved(**changes)
        return jobs.add(tx, owner="ada", spec=SPEC | changes, resolved=spec, plan={}, uses=["c"])


def report(database: Database, claim: Claim, **traffic: Any) -> None:
    with database.write() as tx:
        reported = {"address": "unix:/x", "token": "t", "traffic": traffic}
        replicas.store(tx, claim.job, claim.attempt, reported)


def scale(tmp_path: Path) -> Callable[[Database, Job], Decision]:
    settings = Settings(home=tmp_path)

    def act(database: Database, job: Job) -> Decision:
        with database.write() as tx:
            return scaling.scale(tx, job.id, settings)

    return act


def children(database: Database, job: Job) -> list[Job]:
    with database.read() as tx:
        found = jobs.find(tx, Filter(parent=job.id), after=None, limit=100, order="asc")
        return [jobs.whole(tx, one.id, None) for one in found]


def test_a_child_is_a_job_like_any_with_one_process(database: Database, tmp_path: Path):
    job = serve(database, replicas={"min": 2, "max": 4}, priority=3, max_queue=7)
    with database.read() as tx:
        assert scaling.due(tx) == [job.id]
    assert scale(tmp_path)(database, job).create == 1
    (child,) = children(database, job)
    assert (child.kind, child.state, child.owner) == ("serve", "queued", "ada")
    assert (child.priority, child.parent, child.name) == (3, job.id, "web-replica-1")
    assert child.labels == {"team": "vision", "replica_of": job.id}
    for spec in (child.spec, child.resolved):
        read: Any = parse_job(jsonio.dumps(spec))
        assert (read.replicas.min, read.replicas.max, read.max_queue) == (1, 1, 7)
    with database.read() as tx:
        assert list(tx.scalars(select(JobUse.used).where(JobUse.job == child.id))) == ["c"]
        assert scaling.due(tx) == []


def test_a_child_gets_requests_only_while_its_serve_job_serves(database: Database, tmp_path: Path):
    make_worker(database)
    job = serve(database, replicas={"min": 2, "max": 2})
    scale(tmp_path)(database, job)
    (child,) = children(database, job)
    report(database, running(database, child))

    def listening() -> list[str]:
        with database.read() as tx:
            return [route.job for route in replicas.routes(tx) if route.attempt is not None]

    assert listening() == [child.id]  # its serve job has lost its worker, or waits for a device
    with database.write() as tx:
        pausing.request_pause(tx, jobs.get(tx, job.id, None))
    assert listening() == []
    assert scale(tmp_path)(database, job).cancel == (child.id,)
    assert children(database, job)[0].state == "cancelling"
    assert children(database, job)[0].state_reason == scaling.PARENT_GONE


def test_a_quota_of_queued_jobs_holds_for_children(database: Database, tmp_path: Path):
    with database.write() as tx:
        quotas.put(tx, "ada", {"queued_jobs": 1}, by="root")
    job = serve(database, replicas={"min": 2, "max": 2})
    assert scale(tmp_path)(database, job).create == 0
    assert children(database, job) == []
    with database.write() as tx:
        quotas.put(tx, "ada", {}, by="root")
    assert scale(tmp_path)(database, job).create == 1


def test_no_child_is_created_again_right_after_one_has_failed(database: Database, tmp_path: Path):
    make_worker(database)
    job = serve(database, replicas={"min": 2, "max": 2})
    scale(tmp_path)(database, job)
    (child,) = children(database, job)
    with database.write() as tx:
        tx.execute(
            update(Job).where(Job.id == child.id).values(state="failed", ended_at=database_time(tx))
        )
    assert scale(tmp_path)(database, job).create == 0
    with database.write() as tx:
        long_ago = database_time(tx) - timedelta(seconds=scaling.FAILED_S + 1)
        tx.execute(update(Job).where(Job.id == child.id).values(ended_at=long_ago))
    assert scale(tmp_path)(database, job).create == 1


def test_a_replica_that_reports_no_more_is_silent(database: Database, tmp_path: Path):
    make_worker(database)
    job = serve(database, replicas={"min": 0, "max": 2}, idle_s=1)
    claim = running(database, job)
    report(database, claim, idle_s=100.0)
    with database.write() as tx:
        tx.execute(
            update(Replica).values(
                updated_at=database_time(tx) - timedelta(seconds=scaling.REPORTED_S + 1)
            )
        )
    assert not scale(tmp_path)(database, job).pauses
    report(database, claim, idle_s=100.0)
    assert scale(tmp_path)(database, job).pauses
    with database.write() as tx:
        assert jobs.get(tx, job.id, None).state == "pausing"
        attempts.give_up(tx, claim, exit_kind="paused", reason="paused by its owner")
    with database.read() as tx:
        found = jobs.get(tx, job.id, None)
    assert (found.state, found.state_reason) == ("paused", IDLE)


def test_a_pause_by_the_owner_is_not_one_for_want_of_requests(database: Database):
    """A request resumes only the latter."""
    make_worker(database)
    job = serve(database, replicas={"min": 0, "max": 1})
    claim = running(database, job)

    def pause() -> None:
        with database.write() as tx:
            pausing.request_pause(tx, jobs.get(tx, job.id, None))

    def reason() -> str | None:
        with database.read() as tx:
            return jobs.get(tx, job.id, None).state_reason

    pause()  # while the replica stops by itself
    with database.write() as tx:
        attempts.give_up(tx, claim, exit_kind="paused", reason=IDLE)
    assert reason() == pausing.PAUSED
    with database.write() as tx:
        pausing.request_resume(tx, jobs.get(tx, job.id, None))
    claim = running(database, job)
    with database.write() as tx:
        attempts.give_up(tx, claim, exit_kind="paused", reason=IDLE)
    assert reason() == IDLE
    pause()
    assert reason() == pausing.PAUSED


def test_two_workers_scale_a_serve_job_at_once(database: Database, tmp_path: Path):
    def prepare() -> Job:
        return serve(database, replicas={"min": 3, "max": 3})

    act = scale(tmp_path)
    for meeting in meetings(database.url, prepare, act, act, most=16):
        assert sorted(one.create for one in meeting.values) == [0, 2], meeting.statements
        assert len(children(database, meeting.state)) == 2


def test_two_workers_end_one_spare_replica(database: Database, tmp_path: Path):
    make_worker(database, cores=200)
    act = scale(tmp_path)

    def prepare() -> Job:
        job = serve(database, replicas={"min": 2, "max": 3}, idle_s=60)
        act(database, job)
        with database.write() as tx:
            scaling._add_child(tx, jobs.whole(tx, job.id, None))  # pyright: ignore[reportPrivateUsage]
        report(database, running(database, job), busy=0.0)
        with database.write() as tx:
            replicas.note_scaling(tx, job.id, {"spare_ms": 0})
        return job

    for meeting in meetings(database.url, prepare, act, act, most=12):
        assert len([one for one in meeting.values if one.cancel]) == 1, meeting.statements
        states = [child.state for child in children(database, meeting.state)]
        assert sorted(states) == ["cancelled", "queued"]


def test_a_serve_job_is_cancelled_while_it_is_scaled(database: Database, tmp_path: Path):
    """Whichever is first: no child is left after the next sweep."""

    def prepare() -> Job:
        return serve(database, replicas={"min": 3, "max": 3})

    def cancel(database: Database, job: Job) -> None:
        with database.write() as tx:
            jobs.request_cancel(tx, jobs.get(tx, job.id, None), by="ada", force=False)

    act = scale(tmp_path)
    for meeting in meetings(database.url, prepare, act, cancel, most=12):
        assert meeting.results[1].error is None, meeting.statements
        with database.read() as tx:
            left = scaling.due(tx)
        assert left == ([meeting.state.id] if children(database, meeting.state) else [])
        act(database, meeting.state)
        states = {child.state for child in children(database, meeting.state)}
        assert states <= {"cancelled"}, meeting.statements
