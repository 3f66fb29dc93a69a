"""Pausing, retrying, forking and commands at the door, on both databases; no worker runs."""

from collections.abc import Generator
from typing import Any

import httpx2
import pytest

from api.schemas import documents
from glasshouse.ids import new_id
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import attempts, checkpoints, commands, leases
from models.jobs.commands import CommandChange
from models.tables import Device, now
from tests.running import Api, digits, small_job


@pytest.fixture(scope="session")
def dora(each_service: Api) -> tuple[str, str]:
    """A key of an owner, and the id of that owner's dataset."""
    key = each_service.key("dora")
    with each_service.client(key) as client:
        return key, digits(client)


@pytest.fixture
def api(each_service: Api, dora: tuple[str, str]) -> Generator[httpx2.Client]:
    with each_service.client(dora[0], headers={}) as client:
        client.base_url = f"{each_service.url}/api/v1"
        yield client


@pytest.fixture
def spec(dora: tuple[str, str]) -> dict[str, Any]:
    return small_job(dora[1])


@pytest.fixture
def job(api: httpx2.Client, spec: dict[str, Any]) -> dict[str, Any]:
    return made(api.post("/jobs", json=spec))


def made(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code == 201, answer.text
    return answer.json()


def refused(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    return answer.json()


def run(service: Api, job: dict[str, Any]) -> leases.Claim:
    """Set a job to running in the database."""
    found = [FoundDevice(id="cpu:0", kind="cpu", number=0, name="core")]
    with service.database.write() as tx:
        name = new_id("job")[-12:]
        workers.register(tx, worker=name, host="h", pid=1, version="0", info={}, devices=found)
        assert attempts.assign(tx, job["id"], name, [tx.get_one(Device, (name, "cpu:0"))], 600_000)
        taken = attempts.claim(tx, job["id"], name)
        assert taken is not None
        assert attempts.run(tx, taken[0], lease_ms=600_000)
        workers.forget(tx, name)  # or jobs of later tests would have to fit on it
    return taken[0]


def saved(service: Api, job: dict[str, Any], step: int, owner: str = "dora") -> str:
    row = {"id": new_id("ckpt"), "owner": owner, "step": step, "epoch": 0, "final": False}
    row |= {"files": {}, "size_bytes": 1, "metrics": {}, "key": "jobs/x", "created_at": now()}
    with service.database.write() as tx:
        checkpoints.add(tx, job["id"], 1, [row])
    return row["id"]


def test_a_queued_job_is_paused_and_continues(api: httpx2.Client, job: dict[str, Any]):
    path = f"/jobs/{job['id']}"
    paused = api.post(f"{path}/pause")
    assert (paused.status_code, paused.json()["state"]) == (202, "paused")
    documents.Job.model_validate_json(paused.content)
    assert paused.json()["paused_at"]
    assert paused.headers["location"] == f"/api/v1{path}"
    assert [one["id"] for one in api.get("/jobs", params={"state": "paused"}).json()["data"]] == [
        job["id"]
    ]
    refused(api.delete(path), 409, "job_not_ended")
    back = api.post(f"{path}/resume")
    assert (back.status_code, back.json()["state"]) == (202, "queued")
    assert back.json()["paused_at"] is None
    refused(api.post(f"{path}/resume"), 409, "job_not_paused")
    api.post(f"{path}/pause")
    assert api.post(f"{path}/cancel").json()["state"] == "cancelled"
    refused(api.post(f"{path}/pause"), 409, "job_ended")
    refused(api.post(f"{path}/resume"), 409, "job_ended")


def test_nobody_steers_what_belongs_to_another_owner(
    each_service: Api, api: httpx2.Client, job: dict[str, Any]
):
    command = made(api.post(f"/jobs/{job['id']}/commands", json={"do": "checkpoint"}))
    with each_service.client(each_service.key("eve")) as eve:
        for method, path, body in (
            ("POST", "/pause", None),
            ("POST", "/resume", None),
            ("POST", "/retry", {}),
            ("POST", "/fork", {}),
            ("POST", "/commands", {"do": "checkpoint"}),
            ("GET", "/commands", None),
            ("GET", f"/commands/{command['id']}", None),
        ):
            answer = eve.request(method, f"/api/v1/jobs/{job['id']}{path}", json=body)
            refused(answer, 404, "job_not_found")
    with each_service.client(each_service.key("dora", "read")) as reader:
        for path in ("/pause", "/resume", "/retry", "/fork", "/commands"):
            answer = reader.post(f"/api/v1/jobs/{job['id']}{path}", json={})
            refused(answer, 403, "scope_too_small")


def test_a_command_is_stored_once_and_can_be_read(api: httpx2.Client, job: dict[str, Any]):
    path = f"/jobs/{job['id']}/commands"
    body = {"set": {"optimizer.lr": 0.01, "stop.steps": 9}}
    headers = {"Idempotency-Key": "set-once"}
    first = api.post(path, json=body, headers=headers)
    second = api.post(path, json=body, headers=headers)
    command = made(first)
    documents.Command.model_validate_json(first.content)
    assert second.headers["idempotency-replayed"] == "true"
    assert second.json() == command
    assert first.headers["location"] == f"/api/v1{path}/{command['id']}"
    assert (command["state"], command["body"], command["by"]) == ("pending", body, "dora")
    assert api.get(f"{path}/{command['id']}").json() == command
    made(api.post(path, json={"do": "checkpoint"}))
    page = api.get(path, params={"limit": 1}).json()
    rest = api.get(path, params={"after": page["next"]}).json()
    assert [one["body"] for one in page["data"] + rest["data"]] == [body, {"do": "checkpoint"}]
    assert api.get(path, params={"state": "applied"}).json()["data"] == []


@pytest.mark.parametrize(
    ("body", "pointer", "why"),
    [
        ({"set": {"optimizer.lr": -1}}, "/set/optimizer.lr", "learning rate"),
        ({"set": {"optimizer.speed": 1}}, "/set/optimizer.speed", "optimizer.lr"),
        ({"set": {"stop.steps": 0}}, "/set/stop.steps", "at least 1"),
        ({"set": {"seed": 2}}, "/set/seed", "cannot be changed"),
        ({"set": {}}, "/set", "not be empty"),
        ({}, "/set", "exactly one"),
        ({"set": {"optimizer.lr": 0.1}, "do": "checkpoint"}, "/do", "only one"),
        ({"do": "profile"}, "/do", "yet"),
        ({"do": "dance"}, "/do", "checkpoint"),
        ({"do": "evaluate"}, "/do", "evaluate"),
        ({"done": "checkpoint"}, "/done", "no such field"),
    ],
)
def test_an_impossible_command_is_refused_with_its_place(
    api: httpx2.Client, job: dict[str, Any], body: dict[str, Any], pointer: str, why: str
):
    answer = api.post(f"/jobs/{job['id']}/commands", json=body)
    found = refused(answer, 422, "invalid_request")["errors"][0]
    assert found["pointer"] == pointer
    assert why in found["detail"]


def test_a_command_is_checked_against_what_was_set_before_it(
    api: httpx2.Client, spec: dict[str, Any]
):
    nesterov = {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}
    path = f"/jobs/{made(api.post('/jobs', json=spec | {'optimizer': nesterov}))['id']}/commands"
    found = refused(api.post(path, json={"set": {"optimizer.momentum": 0}}), 422, "invalid_request")
    assert "momentum" in found["detail"]
    made(api.post(path, json={"set": {"optimizer.momentum": 0.5}}))


def test_an_ended_job_and_an_inference_take_no_commands(
    each_service: Api, api: httpx2.Client, job: dict[str, Any]
):
    saved(each_service, job, 3)
    inputs = {"image": [[[[0.5] * 8] * 8]]}
    body = {"kind": "infer", "job": job["id"], "inputs": inputs}
    infers = made(api.post("/jobs", json=body))
    answer = api.post(f"/jobs/{infers['id']}/commands", json={"do": "checkpoint"})
    refused(answer, 422, "invalid_request")
    refused(api.post(f"/jobs/{infers['id']}/fork", json={}), 422, "invalid_request")
    assert api.post(f"/jobs/{infers['id']}/pause").json()["state"] == "paused"
    api.post(f"/jobs/{job['id']}/cancel")
    answer = api.post(f"/jobs/{job['id']}/commands", json={"do": "checkpoint"})
    refused(answer, 409, "job_ended")


def test_what_keeps_nothing_to_resume_from_cannot_be_paused(
    each_service: Api, api: httpx2.Client, job: dict[str, Any]
):
    saved(each_service, job, 3)
    inputs = {"image": [[[[0.5] * 8] * 8]]}
    infers = made(api.post("/jobs", json={"kind": "infer", "job": job["id"], "inputs": inputs}))
    run(each_service, infers)
    assert api.post(f"/jobs/{infers['id']}/pause").json()["state"] == "pausing"
    diagnoses = made(api.post("/jobs", json={"kind": "diagnose"}))
    run(each_service, diagnoses)
    found = refused(api.post(f"/jobs/{diagnoses['id']}/pause"), 409, "cannot_pause")
    assert "diagnose" in found["detail"]


def test_an_ended_job_is_retried_with_its_own_spec(
    api: httpx2.Client, spec: dict[str, Any], job: dict[str, Any]
):
    path = f"/jobs/{job['id']}"
    refused(api.post(f"{path}/retry"), 409, "job_not_ended")
    api.post(f"{path}/cancel")
    headers = {"Idempotency-Key": "again"}
    again = made(api.post(f"{path}/retry", headers=headers))
    assert made(api.post(f"{path}/retry", headers=headers))["id"] == again["id"]
    assert (again["state"], again["parent"], again["id"] != job["id"]) == (
        "queued",
        job["id"],
        True,
    )
    assert api.get(f"/jobs/{again['id']}/spec").json() == spec
    listed = api.get("/jobs", params={"parent": job["id"]}).json()["data"]
    assert [one["id"] for one in listed] == [again["id"]]


def test_a_fork_continues_from_a_checkpoint_with_another_spec(
    each_service: Api, api: httpx2.Client, job: dict[str, Any]
):
    path = f"/jobs/{job['id']}"
    refused(api.post(f"{path}/fork", json={}), 409, "checkpoint_missing")
    two, four = saved(each_service, job, 2), saved(each_service, job, 4)
    claim = run(each_service, job)
    lr = made(api.post(f"{path}/commands", json={"set": {"optimizer.lr": 0.05}}))
    with each_service.database.write() as tx:
        change = CommandChange(lr["id"], {"state": "applied", "step": 3})
        commands.note(tx, claim.job, [change])
    patch = {"optimizer": {"args": {"momentum": 0.5}}, "name": "forked", "stop": {"steps": 9}}
    newest = made(api.post(f"{path}/fork", json={"spec": patch}))
    assert (newest["parent"], newest["name"]) == (job["id"], "forked")
    resolved = api.get(f"/jobs/{newest['id']}/spec?resolved=true").json()
    assert (resolved["init"]["checkpoint"], resolved["init"]["load"]) == (four, "all")
    assert resolved["optimizer"]["args"] == {"lr": 0.05, "momentum": 0.5}
    assert resolved["stop"]["steps"] == 9
    older = made(api.post(f"{path}/fork", json={"step": 2}))
    resolved = api.get(f"/jobs/{older['id']}/spec?resolved=true").json()
    assert resolved["init"]["checkpoint"] == two
    assert resolved["optimizer"]["args"] == {"lr": 0.1}  # as it was then
    refused(api.delete(f"/checkpoints/{two}"), 409, "checkpoint_in_use")
    with each_service.database.write() as tx:
        assert attempts.finish(tx, claim, "succeeded", exit_kind="succeeded")
    refused(api.delete(path), 409, "checkpoint_in_use")
    headers = {"Idempotency-Key": "fork"}
    body = {"checkpoint": two}
    once = made(api.post(f"{path}/fork", json=body, headers=headers))
    assert made(api.post(f"{path}/fork", json=body, headers=headers))["id"] == once["id"]


@pytest.mark.parametrize(
    ("patch", "load"),
    [
        ({"optimizer": {"type": "Adam", "args": {"lr": 0.1}}}, "model"),
        ({"data": {"batch_size": 50}}, "model"),
        ({"seed": 5}, "model"),
        ({"optimizer": {"args": {"lr": 0.5}}}, "all"),
        ({"loss": {"args": {"label_smoothing": 0.1}}}, "all"),
    ],
)
def test_a_fork_loads_the_whole_run_only_where_it_can_continue(
    each_service: Api, api: httpx2.Client, job: dict[str, Any], patch: dict[str, Any], load: str
):
    saved(each_service, job, 2)
    forked = made(api.post(f"/jobs/{job['id']}/fork", json={"spec": patch}))
    assert api.get(f"/jobs/{forked['id']}/spec").json()["init"]["load"] == load
    if load == "model":
        body = {"spec": patch, "load": "all"}
        found = refused(api.post(f"/jobs/{job['id']}/fork", json=body), 422, "invalid_spec")
        assert found["errors"][0]["pointer"] == "/spec/init/load"


def test_an_impossible_fork_is_refused_with_its_place(
    each_service: Api, api: httpx2.Client, job: dict[str, Any], spec: dict[str, Any]
):
    saved(each_service, job, 4)
    other = made(api.post("/jobs", json=spec))
    foreign = saved(each_service, other, 4)
    path = f"/jobs/{job['id']}/fork"
    layers = [{"name": "flat", "type": "Flatten"}]
    layers += [{"name": "fc", "type": "Linear", "args": {"out_features": 11}}]
    for body, status, code, pointer in (
        ({"step": 3}, 404, "checkpoint_not_found", None),
        ({"checkpoint": foreign}, 422, "invalid_request", "/checkpoint"),
        ({"checkpoint": new_id("ckpt")}, 404, "checkpoint_not_found", None),
        ({"checkpoint": foreign, "step": 3}, 422, "invalid_request", "/step"),
        ({"spec": {"init": {}}}, 422, "invalid_request", "/spec/init"),
        ({"optimizer": {}}, 422, "invalid_request", "/optimizer"),
        ({"spec": {"stop": {"steps": 4}}}, 422, "invalid_spec", "/spec/stop"),
        ({"spec": {"stop": {"epochs": 4}}}, 422, "invalid_spec", "/spec/stop/steps"),
        ({"spec": {"seeed": 4}}, 422, "invalid_spec", "/spec/seeed"),
        (
            {"spec": {"optimizer": {"args": {"lr": -1}}}},
            422,
            "invalid_spec",
            "/spec/optimizer/args/lr",
        ),
        ({"spec": {"network": {"layers": layers}}}, 422, "invalid_spec", "/spec/init/checkpoint"),
    ):
        found = refused(api.post(path, json=body), status, code)
        if pointer is not None:
            assert found["errors"][0]["pointer"] == pointer, found


@pytest.mark.parametrize(
    ("stop", "advice"), [({"steps": 4}, "stop.steps=8"), ({"epochs": 2}, "stop.epochs=4")]
)
def test_a_fork_of_an_ended_job_says_how_much_longer_to_train(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any], stop: Any, advice: str
):
    """And what it advises is taken."""
    job = made(api.post("/jobs", json=spec | {"stop": stop}))
    saved(each_service, job, api.post("/plan", json=spec | {"stop": stop}).json()["num_steps"])
    path = f"/jobs/{job['id']}/fork"
    found = refused(api.post(path, json={}), 422, "invalid_spec")
    (problem,) = found["errors"]
    assert problem["pointer"] == "/spec/stop"
    assert problem["detail"].endswith(f"add {advice}, for one"), problem
    assert found["detail"] == f"/spec/stop: {problem['detail']}"
    name, _, value = advice.removeprefix("stop.").partition("=")
    made(api.post(path, json={"spec": {"stop": {name: int(value)}}}))


def test_a_spec_may_say_what_it_begins_with(
    each_service: Api, api: httpx2.Client, job: dict[str, Any], spec: dict[str, Any]
):
    start = saved(each_service, job, 4)
    begun = made(api.post("/jobs", json=spec | {"init": {"checkpoint": start}}))
    resolved = api.get(f"/jobs/{begun['id']}/spec?resolved=true").json()
    assert (resolved["init"]["checkpoint"], resolved["init"]["load"]) == (start, "model")
    missing = spec | {"init": {"checkpoint": new_id("ckpt")}}
    found = refused(api.post("/jobs", json=missing), 422, "invalid_spec")
    assert found["errors"][0]["pointer"] == "/init/checkpoint"
    with each_service.client(each_service.key("eve")) as eve:
        mine = small_job(digits(eve)) | {"init": {"checkpoint": start}}
        found = refused(eve.post("/api/v1/jobs", json=mine), 422, "invalid_spec")
        assert found["errors"][0]["code"] == "checkpoint_not_found"
