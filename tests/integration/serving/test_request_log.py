"""The request log over HTTP: what is stored, what never is, its bounds and its end."""

import json
import os
import signal
import struct
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from glasshouse.client import Client
from tests.integration.serving.service import ROW, Service
from tests.waiting import until


@pytest.fixture
def model(service: Service) -> str:
    """The name of a model of its own with the version 1."""
    name = f"m-{uuid4().hex[:8]}"
    service.publish(name, service.checkpoint(), "live")
    return name


@pytest.fixture
def client(service: Service):
    with Client(service.api.url, api_key=service.key) as opened:
        yield opened


def listed(client: Client, job: str, **wanted: Any) -> list[dict[str, Any]]:
    return [one.data for one in client.jobs.get(job).requests(**wanted)]


def recorded(client: Client, job: str, num: int, **wanted: Any) -> list[dict[str, Any]]:
    """Wait until so many requests are recorded; return them, newest first."""

    def look() -> list[dict[str, Any]] | None:
        found = listed(client, job, **wanted)
        return found if len(found) == num else None

    return until(look, what=f"{num} recorded requests")


def test_requests_are_recorded_listed_and_deleted(service: Service, client: Client, model: str):
    job = service.serve(model, request_log={})
    answer = service.predict(model, 2)
    (found,) = recorded(client, job, 1)
    assert found["inputs"] == {"x": [ROW, ROW]}
    assert found["outputs"] == answer.document["outputs"]
    assert (found["model"], found["version"], found["num_rows"]) == (model, 1, 2)
    assert found["request_id"] == answer.headers["x-request-id"]
    assert (found["job"], found["replica"], found["reference"]) == (job, job, model)
    with service.api.client(service.key) as http:
        path = f"/api/v1/models/{model}/predict"
        sent = http.post(path, json={"inputs": {"x": [[1]]}}, headers={"X-Request-Id": "mine-1"})
        assert sent.status_code == 422
        http.post(path, json={"inputs": {"x": [ROW]}}, headers={"X-Request-Id": "mine-2"})
        newest, refused, _ = recorded(client, job, 3)
        assert (refused["status"], refused["code"], refused["inputs"]) == (
            422,
            "invalid_request",
            None,
        )
        assert newest["request_id"] is refused["request_id"] is None  # what a client chose
        pages: list[str] = []
        query: dict[str, Any] = {"limit": 2}
        while True:
            page = http.get(f"/api/v1/jobs/{job}/requests", params=query).json()
            pages += [one["id"] for one in page["data"]]
            if page["next"] is None:
                break
            query["after"] = page["next"]
        assert pages == sorted(pages, reverse=True)
        assert len(pages) == 3
        wrong = http.get(f"/api/v1/jobs/{job}/requests", params={"status": "many"})
        assert wrong.status_code == 422
        assert wrong.json()["errors"][0]["pointer"] == "/query/status"
    assert recorded(client, job, 1, status=422)[0]["id"] == refused["id"]
    assert recorded(client, job, 2, model=model, status=[200], limit=2)
    assert listed(client, job, model="other") == []
    until(lambda: client.jobs.get(job).serving["request_log"])
    assert client.jobs.get(job).serving["request_log"] == {"recorded": 3, "skipped": 0}
    client.jobs.get(job).delete_requests()
    assert listed(client, job) == []
    assert service.predict(model).version == 1
    assert len(recorded(client, job, 1)) == 1


def test_nothing_is_recorded_by_default(service: Service, client: Client, model: str):
    job = service.serve(model)
    answer = service.predict(model)
    logged = f"{model}-logged"
    service.publish(logged, service.checkpoint())
    other = service.serve(logged, request_log={"redact": ["y"]})
    again = service.predict(logged)
    assert answer.document["outputs"] == again.document["outputs"]  # the same bits, as JSON
    assert len(recorded(client, other, 1)) == 1
    assert listed(client, job) == []
    assert client.jobs.get(job).serving["request_log"] is None


def forms(values: list[float]) -> list[bytes]:
    """How values may stand in a file: as text, and as floats."""
    found = [struct.pack("<f", value) for value in values]
    found += [struct.pack("<d", value) for value in values]
    return found + [f"{value:.6f}".encode() for value in values]


def files_with(home: Path, wanted: list[bytes]) -> list[str]:
    found: list[str] = []
    for path in home.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found += [f"{path}: {form!r}" for form in wanted if form in content]
    return found


def test_a_redacted_value_is_in_no_file(service: Service, client: Client, model: str):
    """Neither in the database, nor artifacts, the attempt's directory or logs."""
    secret = [1357.26184537, 1731.90237781, 1093.55820913, 1648.71390266]
    kept = [1290.48173551, 1577.03928164, 1816.60471929, 1122.95036478]
    home = service.harness.home
    hidden = service.serve(model, request_log={"redact": ["x"]})
    shown = f"{model}-shown"
    service.publish(shown, service.checkpoint())
    other = service.serve(shown, request_log={})
    with service.api.client(service.key) as http:

        def ask(name: str, values: list[float], **changes: Any) -> int:
            body = {"inputs": {"x": [values]}, **changes}
            return http.post(f"/api/v1/models/{name}/predict", json=body).status_code

        packed = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": secret}
        assert http.post(f"/v2/models/{model}/infer", json={"inputs": [packed]}).status_code == 200
        assert ask(model, secret) == 200
        assert ask(model, secret, outputs=["fc1", "fc2"]) == 200
        assert ask(model, secret, outputs=["none"]) == 422
        assert ask(model, [*secret, "text"]) == 422
        rows = {"rows": [{"x": secret}]}
        assert http.post(f"/api/v1/models/{model}/predict", json=rows).status_code == 200
        assert ask(shown, kept) == 200
    found = recorded(client, hidden, 6)
    assert [one["status"] for one in found].count(422) == 2
    assert all(not one["inputs"] for one in found)
    assert all("x" in one["redacted"] for one in found if one["status"] == 200)
    assert any("fc1/value" in one["redacted"] for one in found)
    recorded(client, other, 1)
    assert files_with(home, forms(kept))  # the search finds what is there
    assert files_with(home, forms(secret)) == []
    service.end(hidden)
    assert files_with(home, forms(secret)) == []


def test_the_newest_are_kept_within_the_bound_and_survive_the_replica(
    service: Service, client: Client, model: str
):
    job = service.serve(model, request_log={"max_requests": 5})
    for number in range(1, 13):
        assert service.predict(model, number).status == 200
    service.harness.cancel(job)
    service.harness.wait(job)  # what was still in memory is written
    assert [one["num_rows"] for one in listed(client, job)] == [12, 11, 10, 9, 8]


def test_requests_of_a_killed_replica_are_kept(service: Service, client: Client, model: str):
    job = service.serve(model, request_log={})
    assert service.predict(model, 3).status == 200
    recorded(client, job, 1)
    os.kill(service.harness.rank_pid(job), signal.SIGKILL)
    assert service.predict(model, 4, timeout_s=60).status == 200
    assert [one["num_rows"] for one in recorded(client, job, 2)] == [4, 3]


def test_a_replica_whose_redacted_field_does_not_exist_does_not_start(
    service: Service, client: Client, model: str
):
    log = {"redact": ["nmae"]}
    with service.api.client(service.key) as http:
        spec = {"kind": "serve", "models": [model], "request_log": log}
        refused = http.post("/api/v1/jobs", json=spec)
    assert refused.status_code == 422
    (problem,) = refused.json()["errors"]
    assert problem["pointer"] == "/request_log/redact/0"
    assert "no served model has a field or column 'nmae'; they have: x, y" in problem["detail"]
    job = service.serve(model, wait=False, request_log=log)  # as if the model had changed
    ended = service.harness.wait(job)
    assert ended.state == "failed"
    assert ended.error is not None
    assert "'nmae'" in json.dumps(ended.error)
