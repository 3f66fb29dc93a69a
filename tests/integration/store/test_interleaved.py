"""Two transactions of the store, interleaved at every statement."""

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from api.submission.idempotent import once
from glasshouse.errors import Conflict, KeyInvalid
from models import keys, marks
from models.access import quotas, webhooks
from models.access.idempotency import Answer, IdempotencyUse
from models.database import Database
from models.jobs import attempts, checkpoint_retention, checkpoints
from models.jobs.checkpoint_retention import RetentionRule
from models.observations import events, metrics, probes
from models.observations.probes import CheckedProbe
from models.settings import Settings
from models.storage import pending_deletions, retention
from models.tables import Checkpoint, Event, Job, Key, Probe, Webhook, now
from tests.interleaving import meetings

from .factories import losses, make_job, make_worker, running, saved, ship

BODY: dict[str, Any] = {"layers": ["fc"], "kinds": ["output"], "want": ["stats"], "every": 1}


def test_two_clients_set_the_quotas_of_one_owner(database: Database, tmp_path: Any):
    settings = Settings(home=tmp_path)
    owners = (f"owner{n}" for n in range(1000))

    def put(limit: int, database: Database, owner: str) -> int:
        with database.write() as tx:
            quotas.put(tx, owner, {"queued_jobs": limit}, by="root")
            return quotas.of(tx, owner, settings).queued_jobs

    for meeting in meetings(database.url, lambda: next(owners), partial(put, 1), partial(put, 2)):
        assert meeting.values == (1, 2), meeting.statements
        with database.read() as tx:
            assert quotas.own(tx, meeting.state)["queued_jobs"] in (1, 2)


def test_two_clients_race_to_add_the_last_webhook_within_the_limit(database: Database):
    owners = (f"owner{n}" for n in range(1000))

    def add(database: Database, owner: str) -> bool:
        with database.write() as tx:
            try:
                webhooks.add(tx, owner=owner, url="https://example.org/", events=(), labels={})
            except Conflict:
                return False
        return True

    def prepare() -> str:
        owner = next(owners)
        for _ in range(webhooks.MAX_PER_OWNER - 1):
            assert add(database, owner)
        return owner

    for meeting in meetings(database.url, prepare, add, add, most=12):
        assert sorted(meeting.values) == [False, True], meeting.statements
        with database.read() as tx:
            query = select(func.count()).where(Webhook.owner == meeting.state)
            assert tx.scalar(query) == webhooks.MAX_PER_OWNER


def test_a_session_that_is_opened_while_its_key_is_revoked_opens_nothing(database: Database):
    def prepare() -> tuple[str, str]:
        with database.write() as tx:
            key, _ = keys.create(tx, name="k", owner="ada", scopes=["read"])
            ticket = keys.derive(tx, key.id, "ticket", timedelta(minutes=1))
        return key.id, ticket

    def revoke(database: Database, state: tuple[str, str]) -> None:
        with database.write() as tx:
            keys.revoke(tx, state[0])

    def open_session(database: Database, state: tuple[str, str]) -> str | None:
        with database.write() as tx:
            try:
                key = keys.redeem(tx, state[1])
                return keys.derive(tx, key, "session", timedelta(hours=1))
            except KeyInvalid:
                return None

    for meeting in meetings(database.url, prepare, revoke, open_session):
        _, session = meeting.values
        if session is None:
            continue
        with database.read() as tx, pytest.raises(KeyInvalid):
            keys.api_key_of(tx, keys.check(tx, session, kind="session"))
        with database.read() as tx:
            row = tx.scalars(
                select(Key).where(Key.kind == "session", Key.parent == meeting.state[0])
            )
            assert not keys.is_good(tx, row.one().sha256), meeting.statements


def test_a_fork_of_the_newest_checkpoint_while_a_newer_one_supersedes_it(database: Database):
    make_worker(database)
    jobs_made: list[Job] = []

    def prepare() -> Job:
        if not jobs_made:
            jobs_made.append(make_job(database))
            running(database, jobs_made[0])
        with database.write() as tx:
            tx.execute(delete(Checkpoint))
            checkpoints.add(tx, jobs_made[0].id, 1, [saved(1)])
        return jobs_made[0]

    def choose(database: Database, job: Job) -> str:
        with database.write() as tx:
            return checkpoints.newest(tx, job, hold=True).id

    def save(database: Database, job: Job) -> None:
        with database.write() as tx:
            checkpoints.add(tx, job.id, 1, [saved(2)])
            checkpoint_retention.supersede(tx, job.id, RetentionRule(last=1))

    for meeting in meetings(database.url, prepare, choose, save):
        chosen, _ = meeting.values
        with database.read() as tx:
            assert checkpoints.get(tx, chosen, None).id == chosen, meeting.statements


def test_two_clients_revoke_the_same_key(database: Database):
    def prepare() -> str:
        with database.write() as tx:
            return keys.create(tx, name="k", owner="ada", scopes=["read"])[0].id

    def revoke(database: Database, key: str) -> Any:
        with database.write() as tx:
            return keys.revoke(tx, key).revoked_at

    for meeting in meetings(database.url, prepare, revoke, revoke):
        first, second = meeting.values
        assert first == second, meeting.statements


def test_two_clients_remove_the_same_probe(database: Database):
    """Removed once: a second revision would say that the first was never taken up."""
    make_worker(database, cores=200)

    def prepare() -> tuple[Job, str]:
        job = make_job(database)
        running(database, job)
        with database.write() as tx:
            return job, probes.add(tx, job, CheckedProbe(BODY, ["fc"], 8), by="ada").id

    def remove(database: Database, state: tuple[Job, str]) -> int:
        with database.write() as tx:
            return probes.remove(tx, state[0], state[1], by="ada").revision

    for meeting in meetings(database.url, prepare, remove, remove, most=30):
        first, second = meeting.values
        assert first == second, meeting.statements
        with database.read() as tx:
            row = tx.get_one(Probe, meeting.state[1])
            assert (row.state, row.revision) == ("removed", first)


def test_two_processes_store_a_mark_for_the_first_time(database: Database):
    names = (f"mark{n}" for n in range(1000))

    def note(by: str, database: Database, name: str) -> int:
        with database.write() as tx:
            return marks.note(tx, name, by)

    for meeting in meetings(
        database.url, lambda: next(names), partial(note, "a"), partial(note, "b")
    ):
        times = meeting.values
        with database.read() as tx:
            found = marks.read(tx, meeting.state)
        assert found is not None
        assert found[0] in times


def test_two_workers_give_up_the_same_file(database: Database):
    names = (f"jobs/{n}" for n in range(1000))

    def add(database: Database, key: str) -> None:
        with database.write() as tx:
            pending_deletions.add(tx, [key, "shared"])

    for meeting in meetings(database.url, lambda: next(names), add, add):
        assert meeting.values == (None, None), meeting.statements
        with database.write() as tx:
            assert meeting.state in pending_deletions.find(tx, limit=10)
            pending_deletions.gone(tx, [meeting.state, "shared"])


def test_two_purges_of_one_jobs_events(database: Database):
    """The first event that is kept is the one that ``first_seq`` names, in every order."""
    make_worker(database, cores=200)
    stored = next(kind for kind in retention.KINDS if kind.name == "events")

    def prepare() -> Job:
        job = make_job(database)
        claim = running(database, job)
        assert ship(database, claim, losses(*((n, 1.0) for n in range(40))), (0, 1))
        with database.write() as tx:
            attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
        return job

    def once(database: Database, job: Job) -> None:
        with database.write() as tx:
            stored.some(tx, job.id, 5)

    def thrice(database: Database, job: Job) -> None:
        for _ in range(3):
            once(database, job)

    for meeting in meetings(database.url, prepare, once, thrice, most=40):
        assert meeting.values == (None, None)
        with database.write() as tx:
            first = tx.scalar(select(Job.first_seq).where(Job.id == meeting.state.id))
            kept = tx.scalar(select(func.min(Event.seq)).where(Event.job == meeting.state.id))
            assert first == kept, meeting.statements
            tx.execute(update(Job).where(Job.id == meeting.state.id).values(ended_at=now()))


def test_what_is_read_together_is_of_one_moment(database: Database):
    def look(database: Database, job: Job) -> tuple[int | None, ...]:
        with database.read() as tx:
            job_row = select(Job.last_seq).where(Job.id == job.id)
            newest = select(func.max(Event.seq)).where(Event.job == job.id)
            return tx.scalar(job_row), tx.scalar(newest), tx.scalar(job_row)

    def append(database: Database, job: Job) -> None:
        with database.write() as tx:
            events.append(tx, job.id, [events.NewEvent("log", now(), {"lines": []})])

    for meeting in meetings(database.url, lambda: make_job(database), look, append):
        seen, _ = meeting.values
        assert len(set(seen)) == 1, (seen, meeting.statements)


def test_metrics_that_are_listed_while_they_are_purged(database: Database):
    """The spans say that there are values; the values may be gone already."""
    make_worker(database, cores=200)
    values = next(kind for kind in retention.KINDS if kind.name == "metrics")

    def prepare() -> Job:
        job = make_job(database)
        claim = running(database, job)
        assert ship(database, claim, losses((0, 1.0), (1, 2.0)), (0, 1))
        with database.write() as tx:
            attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
        return job

    def listed(database: Database, job: Job) -> list[float]:
        with database.read() as tx:
            return [row.last for row in metrics.names(tx, job.id)]

    def purge(database: Database, job: Job) -> None:
        with database.write() as tx:
            values.some(tx, job.id, 1000)

    for meeting in meetings(database.url, prepare, listed, purge):
        found, _ = meeting.values
        assert found in ([2.0], []), meeting.statements


def test_one_request_that_is_sent_twice_is_carried_out_once(database: Database):
    keys_used = (f"key{n}" for n in range(1000))
    token = IdempotencyUse("ada", "POST /jobs", "", "aa")

    def prepare() -> IdempotencyUse:
        return replace(token, key=next(keys_used))

    def post(database: Database, token: IdempotencyUse) -> tuple[str, bool]:
        def make(tx: Session) -> Answer:
            return Answer(201, {}, keys.create(tx, name=token.key, owner="ada", scopes=[])[0].id)

        answer, replayed = once(database, token, make)
        return answer.body, replayed

    for meeting in meetings(database.url, prepare, post, post, most=30):
        first, second = meeting.values
        assert first[0] == second[0], meeting.statements
        assert sorted([first[1], second[1]]) == [False, True]
        with database.read() as tx:
            made = select(func.count()).where(Key.name == meeting.state.key)
            assert tx.scalar(made) == 1
