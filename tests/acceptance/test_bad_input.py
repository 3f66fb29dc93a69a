"""What is wrong is refused by name, and does no harm: afterwards the service works as before."""

import copy
import gzip
import io
import json
import pickle
import time
import zipfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.acceptance.services import Endpoint, LocalService
from tests.acceptance.specs import digits_example, lasting, small
from tests.running import running_api
from tests.waiting import until

BOUND_S = 90.0
"""However hostile a request is, it is answered within this time."""


@pytest.fixture(scope="module", autouse=True)
def _the_service_is_well_afterwards(local_service: LocalService, digits: str) -> Generator[None]:
    yield
    with local_service.client() as client:
        assert client.jobs.create(small(digits)).wait(timeout=200).state == "succeeded"
        assert client.ready()["status"] == "ok"


def check_problem(
    answer: httpx2.Response, status: int, code: str, pointer: str | None = None, *words: str
) -> None:
    """A problem document with this code, that points at this place and says these words."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert {"type", "title", "status", "detail", "code", "request_id"} <= problem.keys()
    assert (problem["status"], problem["code"]) == (status, code), problem
    assert "Traceback" not in answer.text
    assert 'File "' not in answer.text
    entries = problem.get("errors", [])
    if pointer is not None:
        assert pointer in {entry["pointer"] for entry in entries}, entries
        entries = [entry for entry in entries if entry["pointer"] == pointer]
    said = problem["detail"] + " ".join(entry["detail"] for entry in entries)
    for word in words:
        assert word in said, said


# --- specs that cannot run -------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """A change that spoils the job of the example."""

    path: str
    value: Any
    pointer: str
    words: tuple[str, ...] = ()
    code: str = "invalid_spec"


def change(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Put a value at a JSON Pointer of a copy."""
    changed = copy.deepcopy(spec)
    *parents, last = path.strip("/").split("/")
    place: Any = changed
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return changed


def layer(type_: str, name: str = "hidden", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type_, **more}


def source(split: str = "train", **more: Any) -> dict[str, Any]:
    return {"dataset": "THE DATASET", "split": split, **more}


def probe(**changes: Any) -> dict[str, Any]:
    return {"layers": ["conv1"], "kinds": ["output"], "every": 5} | changes


HIDDEN = "/network/layers/8"
WRONG = {
    "unknown field at the top": Wrong("/optimiser", {}, "/optimiser", ("did you mean optimizer?",)),
    "a text for a list": Wrong(
        "/data/fields/label/classes",
        "auto",
        "/data/fields/label/classes",
        ("give a list (got 'auto')", "in the order of their classes"),
    ),
    "more probes than a job may have": Wrong(
        "/probes", [probe()] * 10_000, "/probes", ("10,000", "globs")
    ),
    "unknown field in the network": Wrong("/network/laiers", [], "/network/laiers"),
    "unknown field in a layer": Wrong(f"{HIDDEN}/arguments", {}, f"{HIDDEN}/arguments"),
    "unknown field in the loss": Wrong("/loss/weights", 1, "/loss/weights"),
    "unknown field in the data": Wrong("/data/epochs", 1, "/data/epochs"),
    "unknown field in a source": Wrong("/data/train/rows", 1, "/data/train/rows"),
    "unknown field in a field": Wrong(
        "/data/fields/label/num_classes", 10, "/data/fields/label/num_classes"
    ),
    "unknown field in stop": Wrong("/stop/hours", 1, "/stop/hours"),
    "unknown field in a probe": Wrong("/probes/0/often", 1, "/probes/0/often"),
    "unknown field in devices": Wrong("/devices", {"gpu": 1}, "/devices/gpu"),
    "true for a whole number": Wrong("/data/batch_size", True, "/data/batch_size"),
    "text for a whole number": Wrong("/stop/epochs", "3", "/stop/epochs"),
    "an input of the wrong width": Wrong(
        f"{HIDDEN}/args", {"in_features": 99, "out_features": 64}, HIDDEN, ("hidden", "512", "99")
    ),
    "channels that do not fit": Wrong(
        "/network/layers/3/args",
        {"in_channels": 3, "out_channels": 4, "kernel_size": 3},
        "/network/layers/3",
        ("conv2", "16", "3"),
    ),
    "a layer that torch does not have": Wrong(f"{HIDDEN}/type", "Linaer", f"{HIDDEN}/type"),
    "a layer of another spelling": Wrong(
        f"{HIDDEN}/type", "LINEAR", f"{HIDDEN}/type", ("did you mean Linear?",)
    ),
    "a function in the place of a layer": Wrong(
        f"{HIDDEN}/type", "linear", f"{HIDDEN}/inputs", ("did you mean the layer Linear?",)
    ),
    "a layer that is a path into Python": Wrong(f"{HIDDEN}/type", "os.system", f"{HIDDEN}/type"),
    "a layer that holds layers": Wrong(f"{HIDDEN}/type", "Sequential", f"{HIDDEN}/type"),
    "an argument that the layer does not have": Wrong(
        f"{HIDDEN}/args/units", 3, f"{HIDDEN}/args/units", ("out_features", "bias")
    ),
    "an argument of the wrong type": Wrong(
        f"{HIDDEN}/args/out_features", "many", f"{HIDDEN}/args/out_features"
    ),
    "a missing argument": Wrong(f"{HIDDEN}/args", {}, f"{HIDDEN}/args/out_features"),
    "a negative size": Wrong(f"{HIDDEN}/args/out_features", -4, HIDDEN),
    "an input that dangles": Wrong(
        f"{HIDDEN}/inputs", ["nowhere"], f"{HIDDEN}/inputs/0", ("nowhere",)
    ),
    "a layer that reads itself": Wrong(f"{HIDDEN}/inputs", ["hidden"], f"{HIDDEN}/inputs/0"),
    "a layer that reads a later one": Wrong(f"{HIDDEN}/inputs", ["fc"], f"{HIDDEN}/inputs/0"),
    "two layers of one name": Wrong(f"{HIDDEN}/name", "fc", "/network/layers/11", ("fc",)),
    "a layer with a field's name": Wrong(f"{HIDDEN}/name", "image", HIDDEN, ("image", "rename")),
    "a slice beyond the shape": Wrong(
        "/probes/0",
        probe(want=["full"], slice="0:2,5000:6000"),
        "/probes/0/slice",
        ("5000:6000 has nothing of axis 1",),
    ),
    "an output that dangles": Wrong("/network/outputs", ["nowhere"], "/network/outputs/0"),
    "a loss that torch does not have": Wrong("/loss/type", "CrossEntropy", "/loss/type"),
    "a loss of another shape": Wrong(
        "/loss/type", "BCEWithLogitsLoss", "/loss", ("fc", "label", "[32, 10]")
    ),
    "an optimizer that torch does not have": Wrong("/optimizer/type", "Adamm", "/optimizer/type"),
    "an argument that the optimizer does not have": Wrong(
        "/optimizer/args/rate", 0.1, "/optimizer/args/rate", ("lr", "betas")
    ),
    "an argument that the optimizer refuses": Wrong("/optimizer/args/lr", -1, "/optimizer/args"),
    "fewer scores than classes": Wrong("/network/layers/11/args/out_features", 9, "/loss/inputs/1"),
    "a column that the dataset does not have": Wrong(
        "/data/fields/label/column", "digit", "/data/fields/label/column", ("image", "label")
    ),
    "a shape that the column does not have": Wrong(
        "/data/fields/image/shape", [1, 28, 28], "/data/fields/image/shape", ("28", "8")
    ),
    "a split that the dataset does not have": Wrong(
        "/data/train", source("training"), "/data/train/split", ("train", "validation", "test")
    ),
    "a fraction that is none": Wrong("/data/train", source(fraction=[0.8, 0.2]), "/data/train"),
    "a dataset that is not there": Wrong(
        "/data/train/dataset", "ds_00000000000000000000000000", "/data/train/dataset"
    ),
    "evaluation without rows": Wrong("/data/validation", None, ""),
    "two ways to stop": Wrong("/stop", {"epochs": 1, "steps": 1}, "/stop"),
    "a probe that matches nothing": Wrong(
        "/probes/0", probe(layers=["dense*"]), "/probes/0/layers/0", ("dense*",)
    ),
    "a kind that the layer does not have": Wrong(
        "/probes/0", probe(layers=["relu1"], kinds=["param"]), "/probes/0/kinds/0"
    ),
    "a kind that nothing has": Wrong("/probes/0", probe(kinds=["thoughts"]), "/probes/0/kinds/0"),
    "a probe without steps": Wrong("/probes/0", probe(every=None), "/probes/0"),
    "a GPU that is not there": Wrong(
        "/devices", {"type": "cuda", "ids": [0]}, "/devices/ids", code="device_unavailable"
    ),
    "a worker that is not there": Wrong(
        "/devices", {"worker": "nobody"}, "/devices/worker", code="device_unavailable"
    ),
    "more cores than there are": Wrong(
        "/devices", {"type": "cpu", "threads": 1000}, "/devices/threads", code="device_unavailable"
    ),
    "a network larger than any memory": Wrong(
        f"{HIDDEN}/args", {"out_features": 10**12}, "/network", ("GiB",)
    ),
    "a number larger than any size": Wrong(f"{HIDDEN}/args", {"out_features": 10**30}, HIDDEN),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_a_spec_that_cannot_run_is_refused_by_name(case: Wrong, http: httpx2.Client, digits: str):
    spec = change(digits_example(digits), case.path, case.value)
    body = json.dumps(spec).replace("THE DATASET", digits)
    headers = {"Content-Type": "application/json"}
    before = http.get("/jobs?limit=1").json()["data"]
    began = time.monotonic()
    answer = http.post("/jobs", content=body, headers=headers)
    assert time.monotonic() - began < BOUND_S
    check_problem(answer, 422, case.code, None, *case.words)
    pointers = [entry["pointer"] for entry in answer.json()["errors"]]
    assert any(pointer.startswith(case.pointer) for pointer in pointers), answer.json()
    assert http.post("/plan", content=body, headers=headers).json()["code"] == case.code
    assert http.get("/jobs?limit=1").json()["data"] == before, "a refused job was stored"


def send(http: httpx2.Client, body: str) -> httpx2.Response:
    return http.post("/jobs", content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_nan_or_inf_is_refused_by_its_place(
    number: str, http: httpx2.Client, digits: str
):
    body = json.dumps(digits_example(digits)).replace('"lr": 0.002', f'"lr": {number}')
    check_problem(send(http, body), 422, "invalid_spec", "/optimizer/args/lr", "finite")


@pytest.mark.parametrize(
    "body",
    ["", "{", "nonsense", "[" * 100_000, '{"kind": "train"', "\x00", '{"a": "\ud800"}'[:-2]],
    ids=["empty", "open", "text", "deep", "cut", "zero", "half a surrogate"],
)
def test_what_is_not_json_is_reported_as_such(body: str, http: httpx2.Client):
    headers = {"Content-Type": "application/json"}
    content = body.encode("utf-8", "surrogatepass")
    check_problem(http.post("/jobs", content=content, headers=headers), 400, "malformed_json")


@pytest.mark.parametrize("body", ["[]", "3", "null", '"train"', "{}", '{"kind": "sing"}'])
def test_json_that_is_no_job_is_refused(body: str, http: httpx2.Client):
    check_problem(send(http, body), 422, "invalid_spec")


def test_a_body_of_another_type_is_refused(http: httpx2.Client):
    answer = http.post("/jobs", content=b"kind: train", headers={"Content-Type": "text/yaml"})
    check_problem(answer, 415, "unsupported_media")


def test_arguments_nested_without_end_are_answered_in_time(http: httpx2.Client, digits: str):
    spec = change(digits_example(digits), f"{HIDDEN}/args/bias", "HERE")
    body = json.dumps(spec).replace('"HERE"', "[" * 150 + "1" + "]" * 150)
    began = time.monotonic()
    answer = send(http, body)
    assert time.monotonic() - began < BOUND_S
    assert answer.status_code in (400, 422), answer.text


def test_twenty_thousand_layers_are_answered_in_time(http: httpx2.Client, digits: str):
    spec = small(digits)
    many = [layer("ReLU", f"relu{number}") for number in range(20_000)]
    spec["network"]["layers"] = [*many, *spec["network"]["layers"]]
    began = time.monotonic()
    answer = send(http, json.dumps(spec))
    assert time.monotonic() - began < BOUND_S
    check_problem(answer, 422, "invalid_spec", "/network/layers")


# --- data that cannot be read ----------------------------------------------------------------


class Canary:
    """A pickle that leaves a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def upload(http: httpx2.Client, content: bytes, format_: str) -> httpx2.Response:
    headers = {"Content-Type": "application/octet-stream"}
    return http.post("/datasets", params={"format": format_}, content=content, headers=headers)


def check_is_no_dataset(http: httpx2.Client, content: bytes, format_: str, *words: str) -> None:
    """It is taken, read, and then failed, with a problem that says why."""
    made = upload(http, content, format_)
    assert made.status_code == 201, made.text
    path = f"/datasets/{made.json()['id']}"
    row = http.get(path, headers={"Prefer": "wait=60"}).json()
    assert row["state"] == "failed"
    assert row["problem"]["code"] == "invalid_dataset", row
    for word in words:
        assert word in row["problem"]["detail"], row
    spec = small(made.json()["id"])
    check_problem(http.post("/jobs", json=spec), 422, "invalid_spec", "/data/train/dataset")
    assert http.delete(path).status_code == 204


def test_a_truncated_gzip_is_no_dataset(http: httpx2.Client):
    content = gzip.compress(np.random.default_rng(0).bytes(100_000))
    check_is_no_dataset(http, content[:50_000], "idx.gz")
    check_is_no_dataset(http, content[:50_000], "mnist.json.gz")


def test_a_ragged_csv_is_no_dataset(http: httpx2.Client):
    check_is_no_dataset(http, b"a,b\n1,2\n3\n4,5\n", "csv", "3")


def test_pickled_objects_are_refused_and_not_opened(http: httpx2.Client, tmp_path: Path):
    canary = tmp_path / "canary"
    archive = io.BytesIO()
    np.savez(archive, x=np.array([Canary(canary), None], dtype=object))
    check_is_no_dataset(http, archive.getvalue(), "npz", "object")
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary))).close()  # noqa: S301 - the canary does sing
    assert canary.exists()


def test_a_zip_bomb_is_no_dataset(http: httpx2.Client):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("train-images-idx3-ubyte", bytes(200_000_000))
    began = time.monotonic()
    check_is_no_dataset(http, archive.getvalue(), "idx.zip")
    assert time.monotonic() - began < BOUND_S


def test_an_unknown_format_is_refused_with_the_known_ones(http: httpx2.Client):
    answer = upload(http, b"abc", "avro")
    check_problem(answer, 422, "invalid_request", None, "csv", "npz", "idx.zip")


def test_labels_out_of_range_fail_the_job_by_their_row(http: httpx2.Client):
    archive = io.BytesIO()
    labels = np.zeros(100, np.int64)
    labels[42] = 3
    np.savez(archive, image=np.zeros((100, 1, 8, 8), np.float32), label=labels)
    dataset = upload(http, archive.getvalue(), "npz").json()["id"]
    http.get(f"/datasets/{dataset}", headers={"Prefer": "wait=60"})
    spec = small(dataset)
    spec["data"]["train"]["split"] = "all"
    spec["data"]["fields"] = spec["data"]["fields"] | {"label": {"type": "integer", "dim": 3}}
    answer = http.post("/jobs", json=spec)
    if answer.status_code == 422:
        check_problem(answer, 422, "invalid_spec", "/data/fields/label/dim", "3")
        return
    path = f"/jobs/{answer.json()['id']}"
    job = until(lambda: ended(http, path), 60, "the end of the job")
    assert job["state"] == "failed"
    assert (job["error"]["code"], job["error"]["category"]) == ("data_failed", "data")
    assert "42" in job["error"]["message"]


def ended(http: httpx2.Client, path: str) -> dict[str, Any] | None:
    job = http.get(path).json()
    return job if job["state"] in ("succeeded", "failed", "cancelled") else None


# --- who asks --------------------------------------------------------------------------------


def test_without_a_key_nothing_is_reported(local_service: LocalService):
    with httpx2.Client(base_url=local_service.url) as nobody:
        for path in ("/api/v1/", "/api/v1/jobs", "/openapi.json", "/metrics", "/docs"):
            check_problem(nobody.get(path), 401, "key_missing")
        assert nobody.get("/livez").status_code == 200
    for secret in ("gh_wrong_000000", "x" * 5000, "gh_"):
        with Endpoint(local_service.url, secret).http() as stranger:
            check_problem(stranger.get("/jobs"), 401, "key_invalid")


def test_a_key_that_reads_submits_nothing(local_service: LocalService, digits: str):
    with local_service.another_key("ada", "read").http() as reader:
        check_problem(reader.post("/jobs", json=small(digits)), 403, "scope_too_small")
        check_problem(reader.post("/datasets", json={"builtin": "digits"}), 403, "scope_too_small")
        body = {"name": "more", "scopes": ["admin"]}
        check_problem(reader.post("/keys", json=body), 403, "scope_too_small")
        assert reader.get("/jobs").json()["data"] == []


def test_resources_of_others_are_not_found(
    local_service: LocalService, http: httpx2.Client, digits: str
):
    job = http.post("/jobs", json=small(digits)).json()["id"]
    until(lambda: ended(http, f"/jobs/{job}"), 60, "the end of the job")
    checkpoint = http.get(f"/jobs/{job}/checkpoints").json()["data"][0]["id"]
    with local_service.another_key("eve", "submit").http() as eve:
        for path in (
            "",
            "/events",
            "/stream",
            "/metrics",
            "/layers",
            "/logs",
            "/spec",
            "/captures",
        ):
            check_problem(eve.get(f"/jobs/{job}{path}"), 404, "job_not_found")
        check_problem(eve.post(f"/jobs/{job}/cancel"), 404, "job_not_found")
        check_problem(eve.delete(f"/jobs/{job}"), 404, "job_not_found")
        check_problem(eve.patch(f"/jobs/{job}", json={"name": "mine"}), 404, "job_not_found")
        check_problem(eve.get(f"/datasets/{digits}"), 404, "dataset_not_found")
        check_problem(eve.delete(f"/datasets/{digits}"), 404, "dataset_not_found")
        check_problem(eve.get(f"/checkpoints/{checkpoint}/weights"), 404, "checkpoint_not_found")
        check_problem(eve.post("/jobs", json=small(digits)), 422, "invalid_spec")
        infer = {"kind": "infer", "job": job, "inputs": {"image": [[0.0] * 64]}}
        check_problem(eve.post("/jobs", json=infer), 422, "invalid_spec", "/job")


# --- what is asked at the wrong time, or too much of -----------------------------------------


def test_a_job_and_its_data_are_not_deleted_while_it_runs(http: httpx2.Client, digits: str):
    job = http.post("/jobs", json=lasting(digits, 1_000_000)).json()["id"]
    path = f"/jobs/{job}"
    check_problem(http.delete(path), 409, "job_not_ended")
    until(lambda: http.get(path).json()["state"] == "running", 60, "the start of the job")
    check_problem(http.delete(path), 409, "job_not_ended")
    check_problem(http.delete(f"/datasets/{digits}"), 409, "dataset_in_use")
    assert http.post(f"{path}/cancel").status_code == 202
    assert until(lambda: ended(http, path))["state"] == "cancelled"
    check_problem(http.post(f"{path}/cancel"), 409, "job_ended")
    assert http.delete(path).status_code == 204
    check_problem(http.get(path), 404, "job_not_found")


def test_a_body_over_the_limit_is_not_read():
    with running_api(max_json_bytes="2000", max_upload_bytes="3000") as api, api.client() as client:
        spec = json.dumps(small("ds_00000000000000000000000000", name="x" * 3000))
        headers = {"Content-Type": "application/json"}
        answer = client.post("/api/v1/jobs", content=spec, headers=headers)
        check_problem(answer, 413, "payload_too_large", None, "2000")
        headers = {"Content-Type": "application/octet-stream"}

        def unannounced() -> Generator[bytes]:
            for _ in range(100):
                yield b"1,2\n" * 250

        path = "/api/v1/datasets?format=csv"
        answer = client.post(path, content=unannounced(), headers=headers)
        check_problem(answer, 413, "payload_too_large", None, "3000")
        assert client.get("/api/v1/datasets").json()["data"] == []
