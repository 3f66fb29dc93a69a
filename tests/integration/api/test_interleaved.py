"""Two requests at once, interleaved at every statement: no change of either is lost."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from api.http.access import Caller
from api.http.bodies import Parsed
from api.routes.jobs import jobs as routes
from api.routes.jobs.jobs import JobPatch, job_tag
from glasshouse import jsonio
from glasshouse.errors import JobNotFound, PreconditionFailed
from models.database import Database
from models.jobs import jobs, pausing
from models.observations import events
from models.settings import Settings
from models.tables import Job, now
from tests.integration.store.factories import losses, make_job, make_worker, running, ship
from tests.interleaving import meetings


def request(**headers: str) -> Request:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "PATCH", "path": "/", "headers": given})


def app_state(database: Database) -> Any:
    """What the routes need of the process around them; the database is real."""
    artifacts = SimpleNamespace(delete=_nothing)
    return SimpleNamespace(database=database, wake=_nothing, artifacts=artifacts)


def _nothing(_: str) -> None:
    """Nobody waits for news, and there are no files."""


@pytest.fixture
def caller(tmp_path: Any) -> Caller:
    from models.access import quotas

    limits = quotas.defaults(Settings(home=tmp_path))
    return Caller("key_1", "test", "ada", frozenset({"read", "submit"}), "", limits)


def patching(caller: Caller, body: dict[str, Any], **headers: str) -> Callable[..., Any]:
    def act(database: Database, job: Job) -> Any:
        parsed = Parsed(b"", JobPatch(**body))
        named = {name: value.format(tag=job_tag(job)) for name, value in headers.items()}
        answer = routes.update_job(request(**named), app_state(database), caller, job.id, parsed)
        return jsonio.loads(bytes(answer.body)) | {"etag": answer.headers["etag"]}

    return act


def stored(database: Database, job: Job) -> Job:
    with database.read() as tx:
        return jobs.get(tx, job.id, None)


def test_two_patches_of_one_job_both_take_place(database: Database, caller: Caller):
    for meeting in meetings(
        database.url,
        lambda: make_job(database),
        patching(caller, {"labels": {"a": "1"}}),
        patching(caller, {"labels": {"b": "2"}, "name": "two"}),
    ):
        one, two = meeting.values
        after = stored(database, meeting.state)
        assert (after.labels, after.name) == ({"a": "1", "b": "2"}, "two"), meeting.statements
        assert after.version == meeting.state.version + 2, meeting.statements
        assert one["etag"] != two["etag"], meeting.statements


def test_of_two_patches_of_one_version_only_one_takes_place(database: Database, caller: Caller):
    for meeting in meetings(
        database.url,
        lambda: make_job(database),
        patching(caller, {"name": "one"}, if_match="{tag}"),
        patching(caller, {"name": "two"}, if_match="{tag}"),
    ):
        errors = [result.error for result in meeting.results]
        assert sorted(error is None for error in errors) == [False, True], meeting.statements
        assert any(isinstance(error, PreconditionFailed) for error in errors), meeting.statements
        winner = "one" if errors[0] is None else "two"
        assert stored(database, meeting.state).name == winner


def test_a_patch_beside_what_a_rank_ships(database: Database, caller: Caller):
    """The version only grows: who polls with the newest tag misses nothing."""
    make_worker(database, cores=200)
    claims: dict[str, Any] = {}

    def prepare() -> Job:
        job = make_job(database)
        claims[job.id] = running(database, job)
        return stored(database, job)

    def shipped(database: Database, job: Job) -> bool:
        return ship(database, claims[job.id], losses((0, 1.0)), (0, 1))

    for meeting in meetings(
        database.url, prepare, patching(caller, {"labels": {"a": "1"}}), shipped, most=30
    ):
        _, was_stored = meeting.values
        after = stored(database, meeting.state)
        assert was_stored
        assert after.labels == {"a": "1"}
        assert after.version == meeting.state.version + 2, meeting.statements


def test_a_patch_beside_a_pause(database: Database, caller: Caller):
    def pause(database: Database, job: Job) -> str:
        with database.write() as tx:
            return pausing.request_pause(tx, jobs.get(tx, job.id, "ada")).state

    for meeting in meetings(
        database.url, lambda: make_job(database), patching(caller, {"priority": 7}), pause
    ):
        shown, state = meeting.values
        after = stored(database, meeting.state)
        assert (shown["priority"], state) == (7, "paused")
        assert (after.priority, after.state) == (7, "paused")
        assert after.version == meeting.state.version + 2, meeting.statements


def test_a_patch_beside_a_deletion(database: Database, caller: Caller):
    def prepare() -> Job:
        job = make_job(database)
        with database.write() as tx:
            new = events.moved(now(), "queued", "cancelled")
            events.append(tx, job.id, new, state="cancelled", ended_at=now())
        return stored(database, job)

    def delete(database: Database, job: Job) -> int:
        answer = routes.delete_job(request(), app_state(database), caller, job.id)
        return answer.status_code

    for meeting in meetings(database.url, prepare, patching(caller, {"name": "one"}), delete):
        patched, deleted = meeting.results
        assert deleted.value == 204, (meeting.statements, deleted.error)
        assert patched.error is None or isinstance(patched.error, JobNotFound), meeting.statements
        with pytest.raises(JobNotFound):
            stored(database, meeting.state)
