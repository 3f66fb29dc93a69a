"""Webhooks over HTTP."""

from typing import Any

import httpx2
import pytest

from models.access import webhooks
from tests.running import Api, digits, small_job

GOOD = {"url": "https://example.org/hook", "events": ["job.failed"], "labels": {"team": "a"}}


@pytest.fixture
def ada(service: Api):
    with service.client(service.key("ada")) as client:
        yield client


def make(client: httpx2.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post("/api/v1/webhooks", json=GOOD | changes)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_the_secret_is_shown_once_and_never_again(ada: httpx2.Client):
    key = {"Idempotency-Key": "a webhook"}
    first = ada.post("/api/v1/webhooks", json=GOOD, headers=key)
    assert first.status_code == 201
    made = first.json()
    assert made["secret"].startswith("whsec_")
    path = first.headers["location"]
    assert path == made["links"]["self"]
    again = ada.post("/api/v1/webhooks", json=GOOD, headers=key)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == made | {"secret": None}
    shown = {name: value for name, value in made.items() if name != "secret"}
    assert ada.get(path).json() == shown
    listed = ada.get("/api/v1/webhooks")
    assert shown in listed.json()["data"]
    assert made["secret"] not in listed.text
    assert ada.delete(path).status_code == 204
    assert ada.get(path).json()["code"] == "webhook_not_found"


def test_what_was_sent_is_listed_page_by_page(service: Api, ada: httpx2.Client):
    made = make(ada, events=[], labels={})
    dataset = digits(ada)
    for number in range(3):
        job = small_job(dataset, seed=number)
        ada.post("/api/v1/jobs", json=job).raise_for_status()
    path = made["links"]["deliveries"]
    first = ada.get(path, params={"limit": "2"}).json()
    rest = ada.get(path, params={"limit": "2", "after": first["next"]}).json()
    rows = first["data"] + rest["data"]
    assert [row["type"] for row in rows] == ["job.queued"] * 3
    assert {row["state"] for row in rows} == {"pending"}
    assert len({row["payload"]["data"]["job"] for row in rows}) == 3
    assert (first["has_more"], rest["has_more"]) == (True, False)
    ada.delete(made["links"]["self"])


def test_resources_of_others_cannot_be_seen_or_deleted(service: Api, ada: httpx2.Client):
    made = make(ada)
    with service.client(service.key("bob")) as bob:
        assert bob.get("/api/v1/webhooks").json()["data"] == []
        for path in (made["links"]["self"], made["links"]["deliveries"]):
            assert bob.get(path).status_code == 404
        assert bob.delete(made["links"]["self"]).status_code == 404
    with service.client(service.key("ada", "read")) as reader:
        assert reader.get(made["links"]["self"]).status_code == 200
        assert reader.post("/api/v1/webhooks", json=GOOD).status_code == 403
        assert reader.delete(made["links"]["self"]).status_code == 403
    ada.delete(made["links"]["self"])


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "https://127.0.0.1:8420/api/v1/jobs",
        "https://localhost/",
        "https://x.localhost/",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://10.1.2.3/",
        "https://169.254.169.254/latest/meta-data/",
        "https://user:secret@example.org/",
        "ftp://example.org/",
        "file:///etc/passwd",
        "gopher://example.org/",
        "https://",
        "example.org",
        "https://example.org/\r\nX: y",
    ],
)
def test_a_url_that_can_be_seen_to_be_no_public_place_is_refused(ada: httpx2.Client, url: str):
    answer = ada.post("/api/v1/webhooks", json=GOOD | {"url": url})
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["pointer"] == "/url"


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"events": ["job.failed", "job.exploded"]}, "/events/1"),
        ({"events": "job.failed"}, "/events"),
        ({"labels": {"a": 1}}, "/labels/a"),
        ({"color": "red"}, "/color"),
        ({"url": None}, "/url"),
    ],
)
def test_a_wrong_field_is_named(ada: httpx2.Client, change: dict[str, Any], pointer: str):
    answer = ada.post("/api/v1/webhooks", json=GOOD | change)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == pointer


def test_every_state_of_a_job_has_its_type():
    from models.state import STATES

    assert (*(f"job.{state}" for state in STATES), "job.finding") == webhooks.TYPES
