"""A job says which key submitted it, whatever becomes of the key, and to its owner only."""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from glasshouse.ids import new_id
from models import keys
from models.jobs import checkpoints
from models.tables import now
from tests.running import Api, digits, small_job

Named = Callable[..., httpx2.Client]


@pytest.fixture
def named(each_service: Api) -> Generator[Named]:
    """Makes a client with a new key of this name."""
    with ExitStack() as stack:

        def make(name: str, owner: str = "mara", *scopes: str) -> httpx2.Client:
            with each_service.database.write() as tx:
                row, secret = keys.create(tx, name=name, owner=owner, scopes=scopes or ("submit",))
            client = each_service.client(secret, headers={"X-Key": row.id})
            return stack.enter_context(client)

        yield make


@pytest.fixture(scope="module")
def spec(each_service: Api) -> dict[str, Any]:
    with each_service.client(each_service.key("mara")) as client:
        return small_job(digits(client))


def made(client: httpx2.Client, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
    answer = client.post(f"/api/v1{path}", json=body, headers=headers)
    assert answer.status_code in (201, 202), answer.text
    return answer.json()


def who(client: httpx2.Client, job: dict[str, Any]) -> Any:
    return client.get(f"/api/v1/jobs/{job['id']}").json()["created_by"]


def test_a_job_says_the_name_of_the_key_that_submitted_it(named: Named, spec: dict[str, Any]):
    laptop, nightly = named("laptop"), named("nightly run")
    mine, its = made(laptop, "/jobs", spec), made(nightly, "/jobs", spec)
    assert (mine["created_by"], its["created_by"]) == ("laptop", "nightly run")
    assert (who(nightly, mine), who(laptop, its)) == ("laptop", "nightly run")
    listed = {job["id"]: job["created_by"] for job in laptop.get("/api/v1/jobs").json()["data"]}
    assert (listed[mine["id"]], listed[its["id"]]) == ("laptop", "nightly run")
    refused = laptop.post("/api/v1/jobs", json=spec | {"created_by": "somebody"})
    assert refused.status_code == 422


def test_what_is_asked_of_a_job_later_changes_nothing(named: Named, spec: dict[str, Any]):
    laptop, other = named("laptop"), named("other")
    job = made(laptop, "/jobs", spec)
    for action in ("pause", "resume", "cancel"):
        assert made(other, f"/jobs/{job['id']}/{action}")["created_by"] == "laptop"
    renamed = other.patch(f"/api/v1/jobs/{job['id']}", json={"name": "renamed"}).json()
    assert (renamed["name"], renamed["created_by"]) == ("renamed", "laptop")


def test_a_retry_and_a_fork_are_of_their_requester(
    each_service: Api, named: Named, spec: dict[str, Any]
):
    laptop, other = named("laptop"), named("other")
    job = made(laptop, "/jobs", spec)
    made(laptop, f"/jobs/{job['id']}/cancel")
    assert made(other, f"/jobs/{job['id']}/retry")["created_by"] == "other"
    row = {"id": new_id("ckpt"), "owner": "mara", "step": 1, "epoch": 0, "final": False}
    row |= {"files": {}, "size_bytes": 1, "metrics": {}, "key": "jobs/x", "created_at": now()}
    with each_service.database.write() as tx:
        checkpoints.add(tx, job["id"], 1, [row])
    forked = made(other, f"/jobs/{job['id']}/fork", {"step": 1, "load": "model"})
    assert (forked["created_by"], forked["parent"]) == ("other", job["id"])
    assert who(other, job) == "laptop"


def test_an_answer_that_is_given_again_is_the_first(named: Named, spec: dict[str, Any]):
    first = made(named("first"), "/jobs", spec, **{"Idempotency-Key": "who"})
    again = made(named("second"), "/jobs", spec, **{"Idempotency-Key": "who"})
    assert (again["id"], again["created_by"]) == (first["id"], "first")


def test_a_browser_is_known_by_the_key_that_opened_it(
    each_service: Api, named: Named, spec: dict[str, Any]
):
    laptop = named("laptop")
    link = laptop.post("/api/v1/tickets").json()["url"]
    with httpx2.Client(base_url=each_service.url, headers={"Origin": each_service.url}) as browser:
        assert browser.get(link).status_code == 303
        assert made(browser, "/jobs", spec)["created_by"] == "laptop"
        further = browser.post("/api/v1/tickets").json()["url"]
    with httpx2.Client(base_url=each_service.url, headers={"Origin": each_service.url}) as second:
        assert second.get(further).status_code == 303
        assert made(second, "/jobs", spec)["created_by"] == "laptop"


def test_the_name_outlives_its_key(each_service: Api, named: Named, spec: dict[str, Any]):
    old, new = named("rotated"), named("its successor")
    job = made(old, "/jobs", spec)
    with each_service.client() as admin:
        assert admin.delete(f"/api/v1/keys/{old.headers['X-Key']}").status_code == 204
    assert old.get("/api/v1/jobs").status_code == 401
    assert who(new, job) == "rotated"


def test_no_tenant_reads_the_name_of_anothers_key(named: Named, spec: dict[str, Any]):
    mine = named("a secret of mara's")
    job = made(mine, "/jobs", spec)
    boss = named("the boss's own key", "boss", "admin")
    made(mine, f"/jobs/{job['id']}/cancel")
    assert who(boss, job) == "a secret of mara's"
    again = made(boss, f"/jobs/{job['id']}/retry")  # it belongs to the caller
    assert again["created_by"] == "the boss's own key"
    nosy = named("nosy", "ned")
    for name in ("jobs", "queue", "devices", "workers", f"jobs/{job['id']}", "stream"):
        assert "secret of mara" not in nosy.get(f"/api/v1/{name}").text
    for path in (f"/api/v1/jobs/{again['id']}", f"/api/v1/jobs/{again['id']}/events"):
        assert mine.get(path).status_code == 404
    for name in ("jobs?limit=1000", "queue", "devices", "workers"):
        assert "the boss's" not in mine.get(f"/api/v1/{name}").text
