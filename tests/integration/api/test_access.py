import time
from typing import Any

import httpx2
import pytest

from api.__main__ import refuse_to_bind
from models.database import Database
from models.migrate import migrate
from models.settings import Settings
from tests.running import Api


@pytest.fixture(scope="module")
def nobody(service: Api):
    with httpx2.Client(base_url=service.url) as client:
        yield client


@pytest.mark.parametrize(
    "authorization",
    ["Bearer", "Bearer gh_x", "Basic abc", "gh_x", "Bearer " + "x" * 5000],
)
def test_an_invalid_key_is_refused(nobody: httpx2.Client, authorization: str):
    answer = nobody.get("/api/v1/jobs", headers={"Authorization": authorization})
    assert answer.status_code == 401
    assert answer.json()["code"] == "key_invalid"


def test_an_unknown_path_says_nothing_without_a_key(nobody: httpx2.Client):
    assert nobody.get("/api/v1/nothing").status_code == 401
    assert nobody.get("/livez").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("scope", "method", "path", "allowed"),
    [
        ("read", "GET", "/api/v1/jobs", True),
        ("read", "POST", "/api/v1/jobs", False),
        ("read", "POST", "/api/v1/datasets", False),
        ("read", "DELETE", "/api/v1/jobs/job_x", False),
        ("read", "POST", "/api/v1/jobs/job_x/cancel", False),
        ("read", "PATCH", "/api/v1/jobs/job_x", False),
        ("read", "DELETE", "/api/v1/datasets/ds_x", False),
        ("read", "POST", "/api/v1/tickets", True),
        ("submit", "GET", "/api/v1/jobs", True),
        ("submit", "DELETE", "/api/v1/jobs/job_x", True),
        ("submit", "GET", "/api/v1/keys", False),
        ("submit", "POST", "/api/v1/keys", False),
        ("submit", "DELETE", "/api/v1/keys/key_x", False),
        ("admin", "GET", "/api/v1/keys", True),
        ("admin", "GET", "/metrics", True),
        ("read", "GET", "/openapi.json", True),
    ],
)
def test_a_scope_allows_what_it_says(
    service: Api, scope: str, method: str, path: str, allowed: bool
):
    with service.client(service.key("scoped", scope)) as client:
        answer = client.request(method, path, headers={"Content-Type": "application/json"})
    assert (answer.status_code != 403) == allowed, answer.text
    if not allowed:
        assert answer.json()["code"] == "scope_too_small"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@x", "::1"]
)
def test_another_host_name_is_refused_everywhere(service: Api, host: str):
    with service.client(headers={"Host": host}) as client:
        for path in ("/livez", "/api/v1/jobs", "/docs", "/nothing"):
            answer = client.get(path)
            assert answer.status_code in {400, 421}
            assert host == "" or answer.json()["code"] == "host_not_allowed"


def test_loopback_host_names_are_accepted(service: Api):
    with service.client(headers={"Host": "LOCALHOST:99"}) as client:
        assert client.get("/livez").status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1"])
def test_a_page_of_another_origin_is_refused(service: Api, origin: str):
    with service.client(headers={"Origin": origin}) as client:
        for method in ("GET", "POST", "DELETE"):
            answer = client.request(method, "/api/v1/jobs")
            assert answer.status_code == 403
            assert answer.json()["code"] == "origin_not_allowed"


def test_a_page_of_this_service_is_not_refused(service: Api):
    with service.client(headers={"Origin": service.url}) as client:
        assert client.get("/api/v1/jobs").status_code == 200


def test_a_ticket_opens_one_browser_session(service: Api):
    with service.client(service.key("surfer")) as client:
        ticket = client.post("/api/v1/tickets").json()
    assert ticket["url"].startswith(service.url)
    with httpx2.Client(base_url=service.url) as browser:
        opened = browser.get(ticket["url"])
        assert opened.status_code == 303
        cookie = opened.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert browser.get("/docs").status_code == 200
        assert browser.get("/openapi.json").status_code == 200
        body = {"builtin": "digits"}
        without = browser.post("/api/v1/datasets", json=body)
        assert (without.status_code, without.json()["code"]) == (403, "origin_not_allowed")
        with_origin = browser.post("/api/v1/datasets", json=body, headers={"Origin": service.url})
        assert with_origin.status_code == 201
    with httpx2.Client(base_url=service.url) as browser:
        assert browser.get(ticket["url"]).status_code == 401
        assert browser.get("/api/v1/jobs").status_code == 401


def test_a_ticket_is_no_key_and_a_key_is_no_ticket(service: Api):
    with service.client(service.key("surfer")) as client:
        ticket = client.post("/api/v1/tickets").json()["url"].partition("ticket=")[2]
    with service.client(ticket) as client:
        assert client.get("/api/v1/jobs").status_code == 401
    with httpx2.Client(base_url=service.url) as browser:
        assert browser.get("/open", params={"ticket": service.admin}).status_code == 401


def test_a_revoked_key_is_refused_within_five_seconds(service: Api):
    with service.client() as admin:
        made = admin.post("/api/v1/keys", json={"name": "n", "scopes": ["read"], "owner": "bob"})
        assert made.status_code == 201
        key = made.json()
        assert key["owner"] == "bob"
        with service.client(key["key"]) as client:
            assert client.get("/api/v1/jobs").status_code == 200
            assert admin.delete(f"/api/v1/keys/{key['id']}").status_code == 204
            revoked = asked = time.monotonic()
            while client.get("/api/v1/jobs").status_code != 401:
                assert asked < revoked + 5, "asked later than that, and answered"
                asked = time.monotonic()
        listed = admin.get("/api/v1/keys", params={"limit": 1000}).json()["data"]
    found = next(entry for entry in listed if entry["id"] == key["id"])
    assert found["revoked_at"] is not None
    assert "key" not in found


def test_a_key_is_shown_once_even_to_a_replay(service: Api):
    with service.client(headers={"Idempotency-Key": "one key"}) as admin:
        body = {"name": "once", "scopes": ["read"]}
        first = admin.post("/api/v1/keys", json=body)
        again = admin.post("/api/v1/keys", json=body)
    assert first.json()["key"].startswith("gh_")
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == first.json() | {"key": None}


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["root"]},
        {"name": "", "scopes": ["read"]},
        {"name": "a\x00b", "scopes": ["read"]},
        {"name": "x", "scopes": ["read"], "extra": 1},
        {"scopes": ["read"]},
    ],
)
def test_a_key_request_that_is_wrong_names_the_field(service: Api, body: dict[str, Any]):
    with service.client() as admin:
        answer = admin.post("/api/v1/keys", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"]


def test_the_service_binds_only_loopback_by_itself(tmp_path: Any):
    settings = Settings(home=tmp_path)
    assert refuse_to_bind("127.0.0.1", settings) is None
    assert "TLS proxy" in (refuse_to_bind("192.0.2.1", settings) or "")
    proxied = Settings(home=tmp_path, behind_proxy=True)
    database = Database(proxied.database)
    migrate(database, lock_file=tmp_path / "lock")
    database.close()
    assert "make an API key" in (refuse_to_bind("192.0.2.1", proxied) or "")
