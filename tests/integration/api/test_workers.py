"""Workers that were stopped, and how operators remove them, on both databases."""

from collections.abc import Generator
from typing import Any

import httpx2
import pytest

from api.schemas import inspection
from glasshouse.ids import new_id
from models.fleet import workers
from models.fleet.workers import FoundDevice
from tests.running import Api, digits, small_job


@pytest.fixture
def root(each_service: Api) -> Generator[httpx2.Client]:
    with each_service.client(each_service.key("root", "admin")) as client:
        yield client


@pytest.fixture
def stopped(each_service: Api) -> Generator[str]:
    """The name of a worker that was stopped."""
    name = new_id("job")[-12:]
    device = FoundDevice("cpu:0", "cpu", 0, "core")
    with each_service.database.write() as tx:
        workers.register(tx, worker=name, host="h", pid=1, version="0", info={}, devices=[device])
        workers.retire(tx, name)
    yield name
    with each_service.database.write() as tx:
        workers.forget(tx, name)


def entry_of(client: httpx2.Client, name: str) -> dict[str, Any] | None:
    listed = client.get("/api/v1/workers").json()
    inspection.WorkerList.model_validate(listed)
    return next((one for one in listed["data"] if one["id"] == name), None)


def test_a_stopped_worker_has_no_healthy_devices(root: httpx2.Client, stopped: str):
    entry = entry_of(root, stopped)
    assert entry is not None
    assert entry["state"] == "stopped"
    assert entry["stopped_at"]
    (device,) = [
        one for one in root.get("/api/v1/devices").json()["data"] if one["worker"] == stopped
    ]
    assert (device["healthy"], device["state"]) == (False, "unavailable")
    assert device["reason"] == "its worker was stopped"


def test_a_job_for_a_stopped_worker_is_refused_and_says_why(root: httpx2.Client, stopped: str):
    spec = small_job(digits(root)) | {"devices": {"type": "cpu", "worker": stopped}}
    answer = root.post("/api/v1/jobs", json=spec)
    assert (answer.status_code, answer.json()["code"]) == (422, "device_unavailable")
    (problem,) = answer.json()["errors"]
    assert problem["pointer"] == "/devices/worker"
    assert f"the worker {stopped!r} was stopped" in problem["detail"]


def test_a_stopped_worker_is_removed_and_one_that_runs_is_not(
    each_service: Api, root: httpx2.Client, stopped: str
):
    assert root.delete(f"/api/v1/workers/{stopped}").status_code == 204
    assert entry_of(root, stopped) is None
    assert root.delete(f"/api/v1/workers/{stopped}").json()["code"] == "worker_not_found"
    with each_service.database.write() as tx:
        workers.register(tx, worker=stopped, host="h", pid=1, version="0", info={}, devices=[])
    answer = root.delete(f"/api/v1/workers/{stopped}")
    assert (answer.status_code, answer.json()["code"]) == (409, "worker_running")
    with each_service.client(each_service.key("ada")) as ada:
        refused = ada.delete(f"/api/v1/workers/{stopped}")
    assert (refused.status_code, refused.json()["code"]) == (403, "scope_too_small")
