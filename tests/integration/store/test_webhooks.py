"""Webhook deliveries in the database layer, on both databases."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from glasshouse import jsonio
from glasshouse.errors import Conflict, WebhookNotFound
from models.access import webhooks
from models.access.webhooks import MAX_PER_OWNER, Sending
from models.database import Database
from models.jobs import attempts, jobs
from models.observations import events
from models.observations.events import NewEvent
from models.tables import Delivery, Webhook, now
from tests.integration.store.factories import make_job, make_worker, running


def add(database: Database, owner: str = "ada", **options: Any) -> str:
    wanted: dict[str, Any] = {"url": "https://example.org/", "events": (), "labels": {}} | options
    with database.write() as tx:
        return webhooks.add(tx, owner=owner, **wanted).id


def deliveries_of(database: Database, webhook: str) -> list[Delivery]:
    with database.read() as tx:
        return webhooks.deliveries(tx, webhook, after=None, limit=100)[::-1]


def take(database: Database, hold_ms: int = 60_000) -> list[Sending]:
    """What a worker takes in one turn, without sending it."""
    with database.write() as tx:
        turns = [
            webhooks.take(tx, webhook, hold_ms=hold_ms)
            for webhook in webhooks.due(tx)
            for _ in range(webhooks.PER_TURN if hold_ms else 1)
        ]
    return [sending for sending in turns if sending is not None]


def miss(database: Database, sending: Sending, **options: Any) -> bool:
    how: dict[str, Any] = {"status": 500, "problem": "no", "retry_in_s": 0.0} | options
    with database.write() as tx:
        return webhooks.missed(tx, sending, disable_after_s=60, **how)


def test_each_move_is_a_message_written_with_it(database: Database):
    make_worker(database)
    webhook = add(database)
    job = make_job(database, name="n")
    claim = running(database, job)
    failure = {"code": "spec_failed", "message": "m", "category": "spec", "log_tail": "a secret"}
    with database.write() as tx:
        attempts.finish(tx, claim, "failed", exit_kind="user_error", error=failure)
    rows = deliveries_of(database, webhook)
    assert sorted(row.type for row in rows) == [
        "job.failed",
        "job.queued",
        "job.running",
        "job.starting",
    ]
    (failed,) = [jsonio.loads(row.body) for row in rows if row.type == "job.failed"]
    assert failed["data"]["from"] == "running"
    assert failed["data"]["to"] == "failed"
    assert failed["data"]["name"] == "n"
    assert failed["data"]["error"]["code"] == "spec_failed"
    assert "log_tail" not in failed["data"]["error"]


def test_a_finding_is_a_message_if_it_is_to_be_announced(database: Database):
    make_worker(database)
    every, findings = add(database), add(database, events=["job.finding"])
    failures = add(database, events=["job.failed"])
    job = make_job(database, name="n")
    running(database, job)
    found = {"rule": "drift", "kind": "not that of the job", "psi": 1.5}
    with database.write() as tx:
        new = [NewEvent("finding", now(), found, announce=say) for say in (True, False)]
        events.append(tx, job.id, new)
    (row,) = deliveries_of(database, findings)
    sent = jsonio.loads(row.body)
    assert (row.type, sent["type"]) == ("job.finding", "job.finding")
    assert sent["data"]["finding"] == found
    assert (sent["data"]["job"], sent["data"]["name"], sent["data"]["error"]) == (job.id, "n", None)
    assert sent["data"]["kind"] == "train"
    assert [one.type for one in deliveries_of(database, every)].count("job.finding") == 1
    assert deliveries_of(database, failures) == []


def test_a_state_change_that_is_rolled_back_sends_no_webhook(database: Database):
    webhook = add(database)

    class Crash(Exception):
        pass

    def submit_and_crash() -> None:
        with database.write() as tx:
            jobs.add(tx, owner="ada", spec={"kind": "train"}, resolved={}, plan={})
            raise Crash

    with pytest.raises(Crash):
        submit_and_crash()
    assert deliveries_of(database, webhook) == []


def test_only_the_owners_wanted_types_and_labels_are_reported(database: Database):
    everything, others = add(database), add(database, owner="bob")
    failed = add(database, events=["job.failed"])
    labelled = add(database, labels={"team": "a"})
    make_job(database)
    make_job(database, labels={"team": "a", "x": "y"})
    make_job(database, labels={"team": "b"})
    assert [
        len(deliveries_of(database, one)) for one in (everything, others, failed, labelled)
    ] == [
        3,
        0,
        0,
        1,
    ]


def test_what_one_worker_has_taken_no_other_takes_until_it_had_time(database: Database):
    webhook = add(database)
    make_job(database)
    (sending,) = take(database, hold_ms=0)
    assert sending.webhook == webhook
    (again,) = take(database)  # as if the first had died
    assert (again.id, again.tries) == (sending.id, 2)
    assert take(database) == []
    with database.write() as tx:
        webhooks.delivered(tx, again, 204)
    (row,) = deliveries_of(database, webhook)
    assert (row.state, row.status, row.tries) == ("delivered", 204, 2)
    assert take(database, hold_ms=0) == []


def test_one_webhook_with_a_long_queue_does_not_keep_another_waiting(database: Database):
    busy, other = add(database, labels={"team": "a"}), add(database, labels={"team": "b"})
    for _ in range(10):
        make_job(database, labels={"team": "a"})
    make_job(database, labels={"team": "b"})
    taken = [sending.webhook for sending in take(database)]
    assert taken.count(busy) == 4
    assert taken.count(other) == 1


def test_a_failure_is_retried_and_a_success_forgets_it(database: Database):
    webhook = add(database)
    make_job(database)
    (sending,) = take(database)
    assert not miss(database, sending)
    (row,) = deliveries_of(database, webhook)
    assert (row.state, row.status, row.problem) == ("pending", 500, "no")
    with database.read() as tx:
        assert webhooks.get(tx, webhook, "ada").failing_since is not None
    (sending,) = take(database)
    with database.write() as tx:
        webhooks.delivered(tx, sending, 200)
    with database.read() as tx:
        assert webhooks.get(tx, webhook, "ada").failing_since is None
    make_job(database)
    (sending,) = take(database)
    miss(database, sending, retry_in_s=None)
    assert [row.state for row in deliveries_of(database, webhook)] == ["delivered", "failed"]


def test_after_a_long_time_without_success_it_is_switched_off(database: Database):
    webhook = add(database)
    make_job(database)
    make_job(database)
    first, second = take(database)
    assert not miss(database, first)
    past = now() - timedelta(seconds=61)
    with database.write() as tx:
        tx.execute(update(Webhook).values(failing_since=past))
    assert miss(database, second)
    assert {row.state for row in deliveries_of(database, webhook)} == {"failed"}
    make_job(database)
    assert len(deliveries_of(database, webhook)) == 2
    assert take(database) == []


def test_a_secret_is_never_shown_by_accident(database: Database):
    add(database)
    make_job(database)
    (sending,) = take(database)
    assert sending.secret.startswith("whsec_")
    assert sending.secret not in repr(sending)


def test_webhooks_are_limited_per_owner_and_hidden_from_others(database: Database):
    for _ in range(MAX_PER_OWNER):
        mine = add(database)
    with pytest.raises(Conflict):
        add(database)
    add(database, owner="bob")
    with database.read() as tx:
        with pytest.raises(WebhookNotFound):
            webhooks.get(tx, mine, "bob")
        assert len(webhooks.find(tx, owner="bob", after=None, limit=100)) == 1
