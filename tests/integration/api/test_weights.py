"""Weights that a client sends: what becomes a checkpoint, and what is refused with nothing left."""

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load, save

from api.schemas import inspection
from engine.checkpoint.checkpoint import read
from tests.running import Api, small_job

NETWORK = {
    "type": "graph",
    "layers": [
        {"name": "flat", "type": "Flatten", "inputs": ["image"]},
        {"name": "fc", "type": "Linear", "args": {"in_features": 64, "out_features": 10}},
    ],
}
FIELDS = {"image": {"type": "dense", "shape": [1, 8, 8]}}
WEIGHTS = {"fc.weight": np.full((10, 64), 0.5, np.float32), "fc.bias": np.zeros(10, np.float32)}


@cache  # the library writes metadata in an order that it draws
def _whole() -> bytes:
    return file_of({**WEIGHTS})


def file_of(
    weights: dict[str, np.ndarray] = WEIGHTS, network: Any = NETWORK, fields: Any = FIELDS
) -> bytes:
    told = {"network": network, "fields": fields}
    metadata = {key: json.dumps(item) for key, item in told.items() if item is not None}
    return save(weights, metadata=metadata)


def sent(api: httpx2.Client, content: Any = None, **options: Any) -> dict[str, Any]:
    answer = api.post("/api/v1/checkpoints", content=content or _whole(), **options)
    assert answer.status_code == 201, answer.text
    inspection.Checkpoint.model_validate_json(answer.content)
    assert answer.headers["location"].endswith(answer.json()["id"])
    return answer.json()


@pytest.fixture
def api(each_service: Api):
    with each_service.client(each_service.key("wanda")) as client:
        yield client


def test_weights_become_a_checkpoint_that_the_engine_reads(each_service: Api, api: httpx2.Client):
    made = sent(api, params={"name": "mine"})
    assert (made["name"], made["job"], made["attempt"], made["step"]) == ("mine", None, None, 0)
    path = f"/api/v1/checkpoints/{made['id']}"
    assert api.get(path).json() == made
    found = api.get(f"{path}/weights")
    assert found.content == _whole()
    assert load(found.content)["fc.weight"][0, 0] == 0.5
    network = api.get(f"{path}/network").json()
    assert network["fields"]["image"]["shape"] == [1, 8, 8]
    assert network["network"]["layers"][1]["inputs"] == ["flat"]
    assert network["network"]["outputs"] == ["fc"]
    directory = each_service.settings.artifacts / "checkpoints" / made["id"]
    saved = read(directory)
    assert saved.step == 0
    assert saved.parts["model"]["fc.weight"].shape == (10, 64)
    sizes = {entry.name: entry.stat().st_size for entry in directory.iterdir()}
    assert sizes == {name: item["size_bytes"] for name, item in made["files"].items()}
    assert sum(sizes.values()) == made["size_bytes"]


def test_it_is_listed_found_by_its_digest_and_deleted(each_service: Api, api: httpx2.Client):
    made = sent(api)
    digest = made["files"]["model.safetensors"]["sha256"]
    by_digest = api.get("/api/v1/checkpoints", params={"sha256": digest}).json()["data"]
    assert made["id"] in [item["id"] for item in by_digest]
    listed = api.get("/api/v1/checkpoints", params={"limit": 1}).json()
    assert [item["id"] for item in listed["data"]] == [made["id"]]
    with each_service.client(each_service.key("other")) as other:
        assert other.get("/api/v1/checkpoints", params={"sha256": digest}).json()["data"] == []
        assert other.get(f"/api/v1/checkpoints/{made['id']}").status_code == 404
    assert api.get("/api/v1/checkpoints", params={"sha256": "no"}).status_code == 422
    path = f"/api/v1/checkpoints/{made['id']}"
    assert api.delete(path).status_code == 204
    assert api.get(path).status_code == 404
    assert not (each_service.settings.artifacts / "checkpoints" / made["id"]).exists()


def test_the_same_key_makes_one_and_keeps_the_files_of_one(each_service: Api, api: httpx2.Client):
    headers = {"Idempotency-Key": "once"}
    folder = each_service.settings.artifacts / "checkpoints"
    before = set(folder.iterdir()) if folder.exists() else set[Path]()
    first = sent(api, headers=headers)
    again = api.post("/api/v1/checkpoints", content=_whole(), headers=headers)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == first
    other = file_of({**WEIGHTS, "fc.bias": np.ones(10, np.float32)})
    assert api.post("/api/v1/checkpoints", content=other, headers=headers).status_code == 422
    assert {path.name for path in set(folder.iterdir()) - before} == {first["id"]}


def stored(service: Api) -> tuple[set[str], set[str]]:
    """The ids of all checkpoints that the service lists, and the folders of its checkpoints."""
    with service.client() as admin:
        listed = admin.get("/api/v1/checkpoints", params={"limit": 1000}).json()["data"]
    root = service.settings.artifacts / "checkpoints"
    folders = {path.name for path in root.iterdir()} if root.exists() else set[str]()
    return {item["id"] for item in listed}, folders


@pytest.fixture
def nothing_stays(service: Api):
    """What is stored after the test is what was before: other tests share the service."""
    before = stored(service)
    yield
    assert stored(service) == before


def test_a_job_can_start_from_it_and_keeps_it_in_use(each_service: Api, api: httpx2.Client):
    made = api.post("/api/v1/datasets", json={"builtin": "digits"}).json()
    row = api.get(f"/api/v1/datasets/{made['id']}", headers={"Prefer": "wait=60"}).json()
    checkpoint = sent(api)["id"]
    begins = {"init": {"checkpoint": checkpoint}}
    plan = api.post("/api/v1/plan", json=small_job(row["id"], **begins))
    assert plan.status_code == 200, plan.text
    whole = api.post(
        "/api/v1/plan", json=small_job(row["id"], init={"checkpoint": checkpoint, "load": "all"})
    ).json()
    assert whole["errors"][0]["pointer"] == "/init/load"
    assert "weights only" in whole["detail"]
    wider = small_job(row["id"], **begins)
    wider["network"]["layers"][1]["args"]["out_features"] = 12
    refused = api.post("/api/v1/plan", json=wider).json()
    assert refused["errors"][0]["pointer"] == "/init/checkpoint"
    job = api.post("/api/v1/jobs", json=small_job(row["id"], **begins)).json()["id"]
    assert api.delete(f"/api/v1/checkpoints/{checkpoint}").status_code == 409
    api.post(f"/api/v1/jobs/{job}/cancel")
    assert api.delete(f"/api/v1/checkpoints/{checkpoint}").status_code == 204


def test_an_inference_is_planned_by_the_fields_that_came_with_it(api: httpx2.Client):
    checkpoint = sent(api)["id"]
    spec = {"kind": "infer", "checkpoint": checkpoint, "inputs": {"image": [[[[0.0] * 8] * 8]]}}
    plan = api.post("/api/v1/plan", json=spec)
    assert plan.status_code == 200, plan.text
    assert plan.json()["layers"][1]["output_shape"] == [10]
    none = sent(api, file_of(fields=None))["id"]
    refused = api.post("/api/v1/plan", json=spec | {"checkpoint": none}).json()
    assert refused["errors"][0]["code"] == "unknown_field"


HEADER = {"fc.bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def raw(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"fc.bias": HEADER["fc.bias"] | changes}


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no safetensors file"),
    "five bytes": (b"12345", "no safetensors file"),
    "a header longer than the file": (raw(HEADER, length=10_000), "cut short"),
    "a header of exabytes": (raw(HEADER, length=2**63), "cut short"),
    "a header larger than may be": (raw(b" " * 1_000_001), "are the most"),
    "no JSON": (raw(b"{nope}"), "not JSON"),
    "no UTF-8": (raw(b"\xff\xfe"), "not JSON"),
    "deep": (raw(b"[" * 100_000), "nested too deeply"),
    "a list": (raw([]), "no object"),
    "NaN": (raw(b'{"a":NaN}'), "cannot be read"),
    "a name twice": (raw(b'{"a":1,"a":1}'), "a name twice"),
    "metadata that are numbers": (raw({"__metadata__": {"a": 1}}), "an object of texts"),
    "no offsets": (raw({"fc.bias": {"dtype": "F32", "shape": [2]}}), "must have dtype"),
    "another key": (raw(entry(more=1)), "must have dtype"),
    "a type of no kind": (raw(entry(dtype="F33")), "has the type 'F33'"),
    "a shape below zero": (raw(entry(shape=[-2])), "whole numbers"),
    "a shape of truths": (raw(entry(shape=[True, 2])), "whole numbers"),
    "an enormous shape": (raw(entry(shape=[2**52, 2**52])), "does not take 8 bytes"),
    "offsets backwards": (raw(entry(data_offsets=[8, 0])), "does not take -8 bytes"),
    "bytes that nobody has": (raw(HEADER, bytes(16)), "there are 16 bytes of them"),
    "too few bytes": (raw(HEADER, bytes(4)), "there are 4 bytes of them"),
    "two in one place": (raw({**HEADER, "b": HEADER["fc.bias"]}), "begin at 0"),
    "a gap": (
        raw({**HEADER, "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, bytes(16)),
        "begin at 12",
    ),
    "a name without end": (raw({"n" * 600: HEADER["fc.bias"]}), "is named"),
    "no network": (save(WEIGHTS), "does not say which network"),
    "a network that is no JSON": (save(WEIGHTS, metadata={"network": "{"}), "The metadata"),
}


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("name", BAD_FILES)
def test_an_invalid_file_is_refused_and_nothing_of_it_is_kept(service: Api, name: str):
    content, detail = BAD_FILES[name]
    with service.client(service.key("wanda")) as api:
        answer = api.post("/api/v1/checkpoints", content=content)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_checkpoint"), answer.text
    assert detail in answer.json()["detail"]


def with_layer(**layer: Any) -> dict[str, Any]:
    return {"type": "graph", "layers": [NETWORK["layers"][0], {"name": "fc", **layer}]}


LINEAR = {"in_features": 64, "out_features": 10}
Change = Callable[[], bytes]
BAD_WEIGHTS: dict[str, tuple[Change, str, str]] = {
    "one is missing": (
        lambda: file_of({"fc.weight": WEIGHTS["fc.weight"]}), "/tensors/fc.bias", "missing"),
    "one is too many": (
        lambda: file_of({**WEIGHTS, "../../etc/passwd": WEIGHTS["fc.bias"]}),
        "/tensors/../../etc/passwd", "unknown_tensor"),
    "another shape": (
        lambda: file_of({**WEIGHTS, "fc.bias": np.zeros(11, np.float32)}),
        "/tensors/fc.bias", "shape"),
    "another type": (
        lambda: file_of({**WEIGHTS, "fc.bias": np.zeros(10, np.float64)}),
        "/tensors/fc.bias", "dtype"),
    "a layer that there is not": (
        lambda: file_of(network=with_layer(type="Linnear", args=LINEAR)),
        "/network/layers/1/type", "unknown_layer"),
    "a layer that takes code": (
        lambda: file_of(network=with_layer(type="Sequential")),
        "/network/layers/1/type", "unknown_layer"),
    "an argument that there is not": (
        lambda: file_of(network=with_layer(type="Linear", args={**LINEAR, "size": 3})),
        "/network/layers/1/args/size", "unknown_argument"),
    "a missing size": (
        lambda: file_of(network=with_layer(type="Linear", args={"out_features": 10})),
        "/network/layers/1/args/in_features", "missing"),
    "a size below zero": (
        lambda: file_of(network=with_layer(type="Linear", args={**LINEAR, "out_features": -1})),
        "/network/layers/1/args", "args"),
    "an input that there is not": (
        lambda: file_of(network=with_layer(type="Linear", args=LINEAR, inputs=["nowhere"])),
        "/network/layers/1/inputs/0", "unknown_input"),
    "an output that there is not": (
        lambda: file_of(network=NETWORK | {"outputs": ["nowhere"]}),
        "/network/outputs/0", "unknown_layer"),
    "an unknown field of the graph": (
        lambda: file_of(network=NETWORK | {"code": "import os"}),
        "/network/code", "extra_forbidden"),
    "a field of no type": (
        lambda: file_of(fields={"image": {"type": "pickle"}}), "/fields/image/type",
        "union_tag_invalid"),
    "no graph": (lambda: file_of(network=3), "/network", "model_type"),
}  # fmt: skip


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_of_another_network_are_refused_by_their_place(service: Api, name: str):
    make, pointer, code = BAD_WEIGHTS[name]
    with service.client(service.key("wanda")) as api:
        answer = api.post("/api/v1/checkpoints", content=make())
    assert answer.status_code == 422, answer.text
    found = answer.json()["errors"][0]
    assert (found["pointer"], found["code"]) == (pointer, code), answer.text


def test_a_network_that_would_take_all_memory_is_refused(service: Api):
    huge = with_layer(type="Linear", args={"in_features": 2**40, "out_features": 2**40})
    with service.client(service.key("wanda")) as api:
        answer = api.post("/api/v1/checkpoints", content=file_of(network=huge))
        assert answer.status_code == 422, answer.text
        assert sent(api)["state"] == "complete"


@pytest.mark.usefixtures("nothing_stays")
def test_a_pickle_is_refused_whatever_it_is_called(service: Api):
    with service.client(service.key("wanda")) as api:
        answer = api.post("/api/v1/checkpoints", content=b"\x80\x04K\x01." + bytes(300))
    assert (answer.status_code, answer.json()["code"]) == (422, "unsafe_format")


@pytest.mark.usefixtures("nothing_stays")
def test_more_bytes_than_an_upload_may_have_are_refused(service: Api):
    with service.client(service.key("wanda")) as api:
        answer = api.post("/api/v1/checkpoints", content=bytes(3_000_001))
    assert answer.status_code == 413


def test_what_is_stored_counts_and_a_full_quota_refuses_more(service: Api):
    owner = "wilma"
    with service.client() as admin, service.client(service.key(owner)) as api:
        made = sent(api)
        before = stored(service)
        used = api.get("/api/v1/quotas").json()["used"]["storage_bytes"]
        assert used == made["size_bytes"]
        limits = {"owner": owner, "storage_bytes": used + 10}
        assert admin.put("/api/v1/quotas", json=limits).status_code == 200
        refused = api.post("/api/v1/checkpoints", content=file_of())
        assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
        assert stored(service) == before
        api.delete(f"/api/v1/checkpoints/{made['id']}")
        sent(api)


def test_a_key_that_only_reads_sends_nothing(service: Api):
    with service.client(service.key("wanda", "read")) as api:
        assert api.post("/api/v1/checkpoints", content=file_of()).status_code == 403
