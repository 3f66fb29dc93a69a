import re
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from api.schemas import documents
from models.fleet import workers
from models.fleet.workers import FoundDevice
from models.jobs import checkpoints
from models.tables import now
from tests.integration.store.factories import purge_deleted
from tests.running import Api, digits, small_job


@pytest.fixture(scope="session")
def cleo(each_service: Api) -> tuple[str, str]:
    """A key of an owner, and the id of that owner's dataset."""
    key = each_service.key("cleo")
    with each_service.client(key) as client:
        return key, digits(client)


@pytest.fixture
def api(each_service: Api, cleo: tuple[str, str]):
    with each_service.client(cleo[0]) as client:
        yield client


@pytest.fixture
def spec(cleo: tuple[str, str]) -> dict[str, Any]:
    return small_job(cleo[1])


def made(api: httpx2.Client, spec: dict[str, Any]) -> dict[str, Any]:
    answer = api.post("/api/v1/jobs", json=spec)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_job_is_stored_and_can_be_read(api: httpx2.Client, spec: dict[str, Any]):
    answer = api.post("/api/v1/jobs", json=spec | {"labels": {"team": "a"}, "priority": 3})
    job = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/api/v1/jobs/{job['id']}"
    assert (job["state"], job["labels"], job["priority"]) == ("queued", {"team": "a"}, 3)
    documents.Job.model_validate_json(answer.content)
    again = api.get(answer.headers["location"])
    assert again.json() == job
    assert again.headers["etag"] == answer.headers["etag"]


def test_the_resolved_spec_runs_the_same(api: httpx2.Client, spec: dict[str, Any]):
    job = made(api, spec)
    assert api.get(f"/api/v1/jobs/{job['id']}/spec").json() == spec
    resolved = api.get(f"/api/v1/jobs/{job['id']}/spec?resolved=true").json()
    assert resolved["network"]["layers"][1]["args"]["in_features"] == 64
    assert resolved["name"] == "small"
    twin = made(api, resolved)
    assert api.get(f"/api/v1/jobs/{twin['id']}/spec?resolved=true").json() == resolved


def test_a_plan_stores_nothing(api: httpx2.Client, spec: dict[str, Any]):
    before = api.get("/api/v1/jobs?limit=1").json()["data"]
    answer = api.post("/api/v1/plan", json=spec)
    plan = documents.Plan.model_validate_json(answer.content)
    assert answer.status_code == 200
    assert plan.parameters == 650
    assert [layer["output_shape"] for layer in plan.layers] == [[64], [10]]
    assert plan.memory["total_bytes"] > plan.memory["parameters_bytes"] == 2600
    assert api.get("/api/v1/jobs?limit=1").json()["data"] == before


def test_a_name_does_not_leak_from_one_plan_to_the_next(api: httpx2.Client, spec: dict[str, Any]):
    assert api.post("/api/v1/plan", json=spec | {"name": "one"}).json()["spec"]["name"] == "one"
    assert api.post("/api/v1/plan", json=spec | {"name": "two"}).json()["spec"]["name"] == "two"
    unnamed = {key: value for key, value in spec.items() if key != "name"}
    assert api.post("/api/v1/plan", json=unnamed).json()["spec"]["name"] is None


def test_lists_go_by_cursor_and_miss_nothing(api: httpx2.Client, spec: dict[str, Any]):
    ids = [made(api, spec | {"labels": {"list": "a", "n": str(n)}})["id"] for n in range(7)]
    for order, wanted in (("desc", sorted(ids)[::-1]), ("asc", sorted(ids))):
        query: dict[str, Any] = {"label": "list:a", "limit": 3, "order": order}
        found: list[str] = []
        while True:
            page = api.get("/api/v1/jobs", params=query).json()
            found += [job["id"] for job in page["data"]]
            assert page["has_more"] == (page["next"] is not None)
            if page["next"] is None:
                break
            query["after"] = page["next"]
        assert found == wanted
    one = api.get("/api/v1/jobs", params={"label": ["list:a", "n:3"]}).json()["data"]
    assert [job["id"] for job in one] == [ids[3]]
    assert api.get("/api/v1/jobs", params={"q": ids[2][4:]}).json()["data"][0]["id"] == ids[2]
    assert api.get("/api/v1/jobs", params={"label": "list:a", "kind": "infer"}).json()["data"] == []


def test_a_patch_merges_and_honours_if_match(api: httpx2.Client, spec: dict[str, Any]):
    job = made(api, spec | {"labels": {"a": "1", "b": "2"}})
    path = f"/api/v1/jobs/{job['id']}"
    tag = api.get(path).headers["etag"]
    merge = {"Content-Type": "application/merge-patch+json"}
    body = '{"name":"new","labels":{"b":null,"c":"3"},"priority":5}'
    changed = api.patch(path, content=body, headers=merge | {"If-Match": tag})
    assert changed.status_code == 200
    assert changed.json()["labels"] == {"a": "1", "c": "3"}
    assert (changed.json()["name"], changed.json()["priority"]) == ("new", 5)
    stale = api.patch(path, json={"name": "other"}, headers={"If-Match": tag})
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")
    assert re.fullmatch(r"train-\d+", api.patch(path, json={"name": None}).json()["name"])
    assert api.patch(path, json={"state": "failed"}).status_code == 422
    assert api.get(path, headers={"If-None-Match": tag}).status_code == 200
    newest = api.get(path).headers["etag"]
    assert api.get(path, headers={"If-None-Match": newest}).status_code == 304


def test_a_queued_job_is_cancelled_at_once_and_then_deleted(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    job = made(api, spec)
    path = f"/api/v1/jobs/{job['id']}"
    refused = api.delete(path)
    assert (refused.status_code, refused.json()["code"]) == (409, "job_not_ended")
    cancelled = api.post(f"{path}/cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (202, "cancelled")
    again = api.post(f"{path}/cancel", params={"force": "true"})
    assert (again.status_code, again.json()["code"]) == (409, "job_ended")
    kept = each_service.settings.artifacts / "jobs" / job["id"] / "1"
    kept.mkdir(parents=True)
    assert api.delete(path).status_code == 204
    assert api.get(path).status_code == 404
    purge_deleted(each_service.database, each_service.home)
    assert not kept.exists()
    assert api.get(path).status_code == 404
    assert api.get(f"{path}/commands/cmd_x").status_code == 404


def test_fifty_posts_with_one_key_make_one_job(
    each_service: Api, cleo: tuple[str, str], spec: dict[str, Any]
):
    named = spec | {"labels": {"once": "yes"}}
    headers = {"Idempotency-Key": '"fifty"'}

    def post(_: int) -> httpx2.Response:
        with each_service.client(cleo[0], headers=headers) as client:
            return client.post("/api/v1/jobs", json=named)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(post, range(50)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert len({answer.headers["location"] for answer in answers}) == 1
    replayed = [a for a in answers if a.headers.get("idempotency-replayed") == "true"]
    assert len(replayed) == 49
    with each_service.client(cleo[0], headers=headers) as client:
        found = client.get("/api/v1/jobs", params={"label": "once:yes"}).json()["data"]
        other = client.post("/api/v1/jobs", json=spec)
    assert len(found) == 1
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


def test_an_idempotency_key_belongs_to_its_owner_and_route(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    headers = {"Idempotency-Key": "shared"}
    first = api.post("/api/v1/jobs", json=spec, headers=headers)
    with each_service.client(headers=headers) as admin:
        second = admin.post("/api/v1/jobs", json=spec)
        third = admin.post("/api/v1/datasets", json={"builtin": "digits"})
    assert first.json()["id"] != second.json()["id"]
    assert third.status_code == 201
    for bad in ("", '""', '" "', "x" * 256, "é"):
        answer = api.post("/api/v1/jobs", json=spec, headers={"Idempotency-Key": bad.encode()})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_header")


def test_a_wait_ends_when_the_job_changes(
    each_service: Api, cleo: tuple[str, str], api: httpx2.Client, spec: dict[str, Any]
):
    job = made(api, spec)
    path = f"/api/v1/jobs/{job['id']}"
    tag = api.get(path).headers["etag"]
    held: list[httpx2.Response] = []

    def wait() -> None:
        with each_service.client(cleo[0]) as client:
            headers = {"Prefer": "wait=60", "If-None-Match": tag}
            held.append(client.get(path, headers=headers))

    waiter = threading.Thread(target=wait)
    began = time.monotonic()
    waiter.start()
    api.patch(path, json={"name": "changed"})
    waiter.join(120)
    assert time.monotonic() - began < 50
    assert held[0].json()["name"] == "changed"
    assert held[0].headers["preference-applied"] == "wait=60"
    newest = held[0].headers["etag"]
    unchanged = api.get(path, headers={"Prefer": "wait=1", "If-None-Match": newest})
    assert unchanged.status_code == 304
    assert api.get(path, headers={"Prefer": "wait=soon"}).status_code == 400
    api.post(f"{path}/cancel")
    ended = api.get(path, headers={"Prefer": "wait=60"})
    assert ended.json()["state"] == "cancelled"


def test_nobody_finds_what_belongs_to_another_owner(
    each_service: Api, api: httpx2.Client, cleo: tuple[str, str], spec: dict[str, Any]
):
    job = made(api, spec)
    with each_service.client(each_service.key("a-stranger")) as eve:
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("PATCH", ""),
            ("POST", "/cancel"),
            ("GET", "/spec"),
            ("GET", "/commands/cmd_x"),
        ):
            answer = eve.request(method, f"/api/v1/jobs/{job['id']}{path}", json={})
            assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found"), path
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/rows"), ("GET", "/stats")):
            answer = eve.request(method, f"/api/v1/datasets/{cleo[1]}{path}")
            assert (answer.status_code, answer.json()["code"]) == (404, "dataset_not_found")
        assert eve.get("/api/v1/jobs").json()["data"] == []
        assert eve.get("/api/v1/datasets").json()["data"] == []
        refused = eve.post("/api/v1/jobs", json=spec)
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["pointer"] == "/data/train/dataset"
        infer = {"kind": "infer", "job": job["id"], "inputs": {"image": [[0.0]]}}
        assert eve.post("/api/v1/jobs", json=infer).json()["errors"][0]["pointer"] == "/job"
    with each_service.client() as admin:
        assert admin.get(f"/api/v1/jobs/{job['id']}").status_code == 200


def test_a_dataset_in_use_stays(api: httpx2.Client, cleo: tuple[str, str], spec: dict[str, Any]):
    made(api, spec)
    refused = api.delete(f"/api/v1/datasets/{cleo[1]}")
    assert (refused.status_code, refused.json()["code"]) == (409, "dataset_in_use")


def test_each_of_several_sources_is_in_use(api: httpx2.Client, spec: dict[str, Any]):
    other = digits(api)
    source = spec["data"]["train"]
    spec["data"]["train"] = [source, {**source, "dataset": other}]
    job = made(api, spec)
    resolved = api.get(f"/api/v1/jobs/{job['id']}/spec?resolved=true").json()
    assert [item["dataset"] for item in resolved["data"]["train"]] == [source["dataset"], other]
    refused = api.delete(f"/api/v1/datasets/{other}")
    assert (refused.status_code, refused.json()["code"]) == (409, "dataset_in_use")
    spec["data"]["train"][1]["dataset"] = "ds_nothing"
    refused = api.post("/api/v1/jobs", json=spec)
    assert refused.json()["errors"][0]["pointer"] == "/data/train/1/dataset"


def test_each_validation_source_is_found_held_and_checked(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    with each_service.client(each_service.key("a-stranger")) as eve:
        hers = digits(eve)
    other = digits(api)
    source = {**spec["data"]["train"], "split": "test"}
    held = {"clean": source, "noisy": {**source, "dataset": other}}
    spec["data"]["validation"] = held
    job = made(api, spec)
    resolved = api.get(f"/api/v1/jobs/{job['id']}/spec?resolved=true").json()
    found = resolved["data"]["validation"]
    assert [*found] == ["clean", "noisy"]
    assert [item["dataset"] for item in found.values()] == [source["dataset"], other]
    assert resolved["checkpoint"]["keep_best"]["metric"] == "validation/clean/loss"
    refused = api.delete(f"/api/v1/datasets/{other}")
    assert (refused.status_code, refused.json()["code"]) == (409, "dataset_in_use")
    for wrong, at in (
        ({**source, "dataset": hers}, "noisy/dataset"),
        ({**source, "split": "tset"}, "noisy/split"),
        ({"datset": other}, "noisy/datset"),
    ):
        spec["data"]["validation"] = {**held, "noisy": wrong}
        answer = api.post("/api/v1/plan", json=spec)
        assert answer.status_code == 422
        pointers = [item["pointer"] for item in answer.json()["errors"]]
        assert f"/data/validation/{at}" in pointers


def test_an_inference_needs_a_checkpoint(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    job = made(api, spec)
    body = {"kind": "infer", "job": job["id"], "inputs": {"image": [[[[0.5] * 8] * 8]]}}
    refused = api.post("/api/v1/jobs", json=body)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["code"] == "checkpoint_missing"
    row = {
        "id": "ckpt_00000000000000000000000001"[:31],
        "owner": "cleo",
        "step": 5,
        "epoch": 0,
        "final": True,
        "files": {},
        "size_bytes": 1,
        "metrics": {},
        "key": "jobs/x",
        "created_at": now(),
    }
    with each_service.database.write() as tx:
        checkpoints.add(tx, job["id"], 1, [row])
    found = made(api, body)
    assert found["kind"] == "infer"
    assert found["result"] is None
    resolved = api.get(f"/api/v1/jobs/{found['id']}/spec?resolved=true").json()
    assert resolved["checkpoint"] == row["id"]


def test_a_device_that_no_worker_has_is_refused(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    assert made(api, spec)["warnings"][0]["code"] == "waits"
    found = [
        FoundDevice(id="cpu:0", kind="cpu", number=0, name="core"),
        FoundDevice(id="cpu:1", kind="cpu", number=1, name="core"),
        FoundDevice(id="cuda:1", kind="cuda", number=1, name="a card", healthy=False, reason="hot"),
    ]
    with each_service.database.write() as tx:
        workers.register(tx, worker="host-a", host="a", pid=1, version="0", info={}, devices=found)
    try:
        for devices, pointer in (
            ({"type": "cuda"}, "/devices"),
            ({"type": "cuda", "ids": [1]}, "/devices"),
            ({"type": "cuda", "ids": [7]}, "/devices/ids"),
            ({"type": "cpu", "threads": 3}, "/devices/threads"),
            ({"worker": "host-b"}, "/devices/worker"),
        ):
            answer = api.post("/api/v1/jobs", json=spec | {"devices": devices})
            assert (answer.status_code, answer.json()["code"]) == (422, "device_unavailable")
            assert answer.json()["errors"][0]["pointer"] == pointer
        several = {"strategy": "data", "processes": 2}
        for devices, processes, pointer in (
            ({"type": "cpu", "threads": 2}, 2, "/devices/threads"),
            ({"type": "cpu"}, 3, "/parallel/processes"),
            ({"type": "cuda", "ids": [1, 2]}, 2, "/devices"),
        ):
            body = spec | {"devices": devices, "parallel": several | {"processes": processes}}
            answer = api.post("/api/v1/jobs", json=body)
            assert (answer.status_code, answer.json()["code"]) == (422, "device_unavailable")
            assert answer.json()["errors"][0]["pointer"] == pointer
        fits = spec | {"devices": {"type": "cpu", "threads": 1}, "parallel": several}
        assert made(api, fits)["warnings"] == []
        assert made(api, spec | {"devices": {"type": "cpu", "threads": 2}})["warnings"] == []
        plan = api.post("/api/v1/plan", json=spec).json()
        placed = [entry for entry in plan["devices"] if entry["worker"] == "host-a"]
        assert [entry["id"] for entry in placed] == ["cpu:0", "cpu:1"]
    finally:
        with each_service.database.write() as tx:
            workers.forget(tx, "host-a")


def test_columns_of_very_different_scale_give_a_warning_unless_normalized(
    api: httpx2.Client,
):
    rows = "".join(f"{i % 9},{4000 + i},{i % 2}\n" for i in range(40))
    sent = api.post(
        "/api/v1/datasets?name=uneven&format=csv",
        content=f"depth,mass,kind\n{rows}",
        headers={"Content-Type": "application/octet-stream"},
    )
    dataset = api.get(sent.headers["location"], headers={"Prefer": "wait=60"}).json()
    assert dataset["state"] == "ready", dataset
    spec = small_job(dataset["id"])
    spec["network"]["layers"] = [
        {"name": "fc", "type": "Linear", "args": {"out_features": 2}, "inputs": ["x"]}
    ]
    spec["loss"]["inputs"] = ["fc", "kind"]
    spec["data"] |= {
        "train": {"dataset": dataset["id"]},
        "fields": {
            "x": {"type": "dense", "columns": ["depth", "mass"]},
            "kind": {"type": "integer", "dim": 2},
        },
    }

    def scale_warnings(spec: dict[str, Any]) -> list[str]:
        answer = api.post("/api/v1/plan", json=spec)
        assert answer.status_code == 200, answer.text
        found = [one for one in answer.json()["warnings"] if one["code"] == "uneven_scale"]
        return [one["detail"] for one in found]

    (detail,) = scale_warnings(spec)
    assert "'mass' has values of about 4.02e+03, and 'depth'" in detail
    assert "uneven_scale" in [one["code"] for one in made(api, spec)["warnings"]]
    normalized = {"normalize": {"x": {"type": "standard"}}}
    assert scale_warnings(spec | {"data": spec["data"] | normalized}) == []


@contextmanager
def two_cards(service: Api, memory: int) -> Generator[None]:
    """A worker with two GPUs of ``memory`` bytes each, the only GPUs of the service."""
    found = [
        FoundDevice(f"cuda:{number}", "cuda", number, "a card", memory_bytes=memory)
        for number in range(2)
    ]
    with service.database.write() as tx:
        workers.register(tx, worker="host-c", host="c", pid=1, version="0", info={}, devices=found)
    try:
        yield
    finally:
        with service.database.write() as tx:
            workers.forget(tx, "host-c")


def test_a_job_on_gpus_is_refused_threads_that_their_host_does_not_have(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    cores = [FoundDevice(f"cpu:{n}", "cpu", n, "core") for n in range(5)]
    cards = [FoundDevice(f"cuda:{n}", "cuda", n, "a card") for n in range(2)]
    hosts = {"host-d": [*cores[:3], *cards], "host-e": cores}
    with each_service.database.write() as tx:
        for name, found in hosts.items():
            workers.register(tx, worker=name, host="d", pid=1, version="0", info={}, devices=found)
    try:
        two = {"strategy": "data", "processes": 2}
        for devices, more in (
            ({"type": "cuda", "threads": 4}, {}),
            ({"type": "cuda", "threads": 2}, {"parallel": two}),
        ):
            answer = api.post("/api/v1/jobs", json=spec | {"devices": devices} | more)
            assert (answer.status_code, answer.json()["code"]) == (422, "device_unavailable")
            (problem,) = answer.json()["errors"]
            assert problem["pointer"] == "/devices/threads"
            assert "has 4 CPU cores; the most is 3: set fewer threads" in problem["detail"]
        made(api, spec | {"devices": {"type": "cuda", "threads": 3}})
        loading = spec["data"] | {"workers": 8}
        job = made(api, spec | {"data": loading, "devices": {"type": "cuda"}, "parallel": two})
        (queued,) = [
            one for one in api.get("/api/v1/queue").json()["data"] if one["job"] == job["id"]
        ]
        assert (queued["devices"]["processes"], queued["devices"]["data_workers"]) == (2, 8)
    finally:
        with each_service.database.write() as tx:
            for name in hosts:
                workers.forget(tx, name)


def test_the_rows_of_a_job_on_a_gpu_fit_into_the_memory_of_its_host(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    card = FoundDevice("cuda:0", "cuda", 0, "a card", memory_bytes=1 << 30)
    on_card = spec | {"devices": {"type": "cuda"}}

    def planned(memory: int) -> httpx2.Response:
        info = {"memory_bytes": memory}
        with each_service.database.write() as tx:
            workers.register(
                tx, worker="host-f", host="f", pid=1, version="0", info=info, devices=[card]
            )
        return api.post("/api/v1/plan", json=on_card)

    try:
        plan = planned(1 << 40).json()
        documents.Plan.model_validate(plan)
        assert plan["devices"][0]["host_memory_bytes"] == 1 << 40
        needed = plan["memory"]["data_bytes"] + plan["memory"]["checkpoint_bytes"]
        assert planned(needed).status_code == 200
        answer = planned(needed - 1)
        assert answer.status_code == 422
        (problem,) = answer.json()["errors"]
        assert (problem["pointer"], problem["code"]) == ("/data", "too_large")
        assert "set data.shuffle.buffer_size" in problem["detail"]
    finally:
        with each_service.database.write() as tx:
            workers.forget(tx, "host-f")


def test_auto_is_the_first_strategy_that_fits_into_the_memory_of_the_devices(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    """Two devices with less memory than ``data`` needs, and enough for ``fsdp``; then with more."""
    layers = [*spec["network"]["layers"]]
    layers[1:1] = [
        {"name": f"wide{number}", "type": "Linear", "args": {"out_features": 1000}}
        for number in range(6)
    ]
    optimizer = {"type": "Adam", "args": {"lr": 0.001}}
    auto = spec | {"network": {"layers": layers}, "optimizer": optimizer}
    auto |= {"parallel": {"strategy": "auto", "processes": 2}, "devices": {"type": "cuda"}}
    with two_cards(each_service, 1 << 40):
        plan = api.post("/api/v1/plan", json=auto).json()
    documents.Plan.model_validate(plan)
    heads = [one["memory"] for one in plan["parallel"]["strategies"]]
    data, fsdp, offloaded = (
        one["total_bytes"] - one["checkpoint_bytes"] - one.get("offloaded_bytes", 0)
        for one in heads
    )
    assert offloaded < fsdp < data
    for memory, fits, expected in (
        ((data + fsdp) // 2, [False, True, True], "fsdp"),
        (data, [True, True, True], "data"),
    ):
        with two_cards(each_service, memory):
            job = made(api, auto)
            resolved = api.get(f"/api/v1/jobs/{job['id']}/spec?resolved=true").json()
            assert resolved["parallel"]["strategy"] == expected
            assert api.get(f"/api/v1/jobs/{job['id']}/spec").json()["parallel"] == auto["parallel"]
            shown = api.post("/api/v1/plan", json=auto).json()["parallel"]
            assert [one["fits"] for one in shown["strategies"]] == fits
            assert shown["strategy"] == expected
            if expected == "fsdp":
                named = auto | {"parallel": {"strategy": "data", "processes": 2}}
                answer = api.post("/api/v1/jobs", json=named)
                assert answer.status_code == 422
                assert "set parallel.strategy to fsdp" in answer.json()["detail"]


def test_the_stages_of_a_pipeline_are_planned_and_fit_into_the_memory_of_the_devices(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    staged = spec | {"parallel": {"strategy": "pipeline", "processes": 2}}
    staged |= {"devices": {"type": "cuda"}}
    with two_cards(each_service, 1 << 40):
        plan = api.post("/api/v1/plan", json=staged).json()
        documents.Plan.model_validate(plan)
        named = [layer["name"] for layer in plan["spec"]["network"]["layers"]]
        assert [name for one in plan["parallel"]["stages"] for name in one["layers"]] == named
        assert [one["fits"] for one in plan["parallel"]["strategies"]] == [True]
        job = made(api, staged)
        resolved = api.get(f"/api/v1/jobs/{job['id']}/spec?resolved=true").json()
        assert resolved == plan["spec"] | {"name": resolved["name"]}
        assert {layer["stage"] for layer in resolved["network"]["layers"]} == {0, 1}
        made(api, {**resolved, "name": None})
    on_host = plan["memory"]["checkpoint_bytes"] + plan["memory"]["data_bytes"]
    needed = plan["memory"]["total_bytes"] - on_host
    assert plan["memory"]["data_bytes"] > needed // 4, "else the rows are moved to the device"
    with two_cards(each_service, needed):
        made(api, staged)
    with two_cards(each_service, needed - 1):
        answer = api.post("/api/v1/jobs", json=staged)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["code"] == "too_large"


def test_layers_are_placed_on_devices_that_are_large_enough(
    each_service: Api, api: httpx2.Client, spec: dict[str, Any]
):
    layers = [*spec["network"]["layers"]]
    layers[-1] = layers[-1] | {"device": 1}
    two = {"type": "cuda", "count": 2}
    placed = spec | {"network": {"layers": layers}, "devices": two}
    placed |= {"parallel": {"strategy": "placed"}}
    for change, pointer, said in (
        ({"parallel": {"strategy": "none"}, "devices": {}}, f"/{len(layers) - 1}/device", "remove"),
        ({"devices": {"type": "cpu"}}, "/devices/type", "one device for torch"),
        ({"devices": two | {"count": 1}}, f"/{len(layers) - 1}/device", "ask for more"),
        ({"parallel": {"strategy": "placed", "processes": 2}}, "/parallel/processes", "remove"),
    ):
        answer = api.post("/api/v1/jobs", json=placed | change)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec"), change
        (problem,) = answer.json()["errors"]
        assert problem["pointer"].endswith(pointer)
        assert said in problem["detail"]
    with two_cards(each_service, 1 << 40):
        plan = api.post("/api/v1/plan", json=placed).json()
        documents.Plan.model_validate(plan)
        job = made(api, placed)
        parts = plan["parallel"]["devices"]
        needed = [part["memory"]["total_bytes"] for part in parts]
        assert plan["parallel"]["strategy"] == "placed"
        assert sum(len(part["layers"]) for part in parts) == len(layers)
        resolved = api.get(f"/api/v1/jobs/{job['id']}/spec?resolved=true").json()
        assert resolved["network"]["layers"][-1]["device"] == 1
        three = placed | {"devices": two | {"count": 3}}
        answer = api.post("/api/v1/jobs", json=three)
        assert answer.json()["code"] == "device_unavailable"
        assert "3 healthy devices" in answer.json()["detail"]
    with two_cards(each_service, max(needed)):
        made(api, placed)
    with two_cards(each_service, max(needed) - 1):
        answer = api.post("/api/v1/jobs", json=placed)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["code"] == "too_large"
        assert f"the layers on device {needed.index(max(needed))} need" in answer.json()["detail"]
