import gzip
import io
import shutil
import signal
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from sqlalchemy import text

import glasshouse as gh
from api.schemas import documents
from models.access import quotas
from models.storage import datasets
from tests.running import Api, Postgres, reading, running_api
from tests.waiting import until
from worker.ingest import MAX_TRIES


@pytest.fixture
def api(service: Api):
    with service.client(service.key("dora")) as client:
        yield client


def uploaded(api: httpx2.Client, data: Any, kind: str, **headers: str) -> dict[str, Any]:
    answer = api.post(
        "/api/v1/datasets", params={"format": kind, "name": "mine"}, content=data, headers=headers
    )
    assert answer.status_code == 201, answer.text
    documents.Dataset.model_validate_json(answer.content)
    return api.get(answer.headers["location"], headers={"Prefer": "wait=60"}).json()


def test_a_csv_file_becomes_columns(service: Api, api: httpx2.Client):
    row = uploaded(api, b"x,y,word\n1,2.5,a\n2,,b\n3,1,a\n", "csv")
    assert row["state"] == "ready", row
    assert [(c["name"], c["dtype"]) for c in row["columns"]] == [
        ("x", "int64"),
        ("y", "float64"),
        ("word", "string"),
    ]
    assert row["splits"] == {"all": 3}
    path = f"/api/v1/datasets/{row['id']}"
    rows = api.get(f"{path}/rows", params={"offset": 1, "limit": 1}).json()
    assert rows["data"] == [{"x": 2, "y": "NaN", "word": "b"}]
    assert rows["num_rows"] == 3
    stats = api.get(f"{path}/stats").json()["splits"]["all"]
    assert stats["x"]["mean"] == 2.0
    assert stats["y"]["missing"] == 1
    assert api.get(f"{path}/rows", params={"split": "train"}).status_code == 422
    few = api.get(f"{path}/rows", params={"limit": 3, "values": 400_000}).json()
    assert (len(few["data"]), few["has_more"], few["next"]) == (2, True, "2")
    assert api.get(f"{path}/rows", params={"values": 1}).json()["data"][0] == {"x": 1}
    for wrong in (0, 1_000_001, "all"):
        refused = api.get(f"{path}/rows", params={"values": wrong})
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["pointer"] == "/query/values"
    assert not (service.settings.artifacts / "uploads" / row["id"]).exists()
    tag = api.get(path).headers["etag"]
    assert api.get(path, headers={"If-None-Match": tag}).status_code == 304
    assert api.delete(path, headers={"If-Match": '"old"'}).status_code == 412
    assert api.delete(path).status_code == 204
    assert api.get(path).status_code == 404
    assert not list((service.settings.artifacts / "datasets" / row["id"]).glob("*"))


def test_folders_of_images_are_brought_to_one_size(service: Api, api: httpx2.Client):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number, size in enumerate([(5, 4), (8, 9), (3, 3)]):
            image = io.BytesIO()
            Image.new("RGB", size, (number, 7, 9)).save(image, "PNG")
            archive.writestr(f"train/{'ab'[number % 2]}/{number}.png", image.getvalue())
    made = api.post(
        "/api/v1/datasets",
        params={"format": "images.zip", "resize": "4x6"},
        content=file.getvalue(),
    )
    row = api.get(made.headers["location"], headers={"Prefer": "wait=60"}).json()
    assert (row["state"], row["resize"], row["splits"]) == ("ready", "4x6", {"train": 3})
    columns = {column["name"]: column for column in row["columns"]}
    assert columns["image"]["shape"] == [3, 4, 6]
    assert columns["label"]["classes"] == ["a", "b"]
    for wrong in ({"format": "images.zip", "resize": "4"}, {"format": "csv", "resize": "4x6"}):
        answer = api.post("/api/v1/datasets", params=wrong, content=b"a\n1\n")
        assert answer.status_code == 422, answer.text
        assert "resize" in answer.text
    with gh.Client(service.url, service.key("dora")) as client:
        found = client.datasets.upload(file.getvalue(), format="images.zip", resize=(2, 3))
        assert next(iter(found.columns))["shape"] == [3, 2, 3]


def test_an_upload_is_read_in_chunks_without_a_length(api: httpx2.Client):
    buffer = io.BytesIO()
    np.savez(buffer, x=np.arange(200_000.0), y=np.arange(200_000))
    data = buffer.getvalue()[:]
    chunks = (data[at : at + 10_000] for at in range(0, len(data), 10_000))
    if len(data) > 3_000_000:
        answer = api.post("/api/v1/datasets", params={"format": "npz"}, content=chunks)
        assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
    small = io.BytesIO()
    np.savez(small, x=np.arange(2000.0))
    parts = (small.getvalue()[at : at + 1000] for at in range(0, len(small.getvalue()), 1000))
    assert uploaded(api, parts, "npz")["splits"] == {"all": 2000}


def test_a_file_that_cannot_be_read_says_why(api: httpx2.Client):
    images = np.zeros((10, 4, 4), np.uint8)
    header = bytes([0, 0, 8, 3]) + np.array(images.shape, ">i4").tobytes()
    whole = gzip.compress(header + images.tobytes())
    for data, kind in (
        (whole[: len(whole) // 2], "idx.gz"),
        (b"not an npz", "npz"),
        (b"a,b\n1\n", "csv"),
    ):
        row = uploaded(api, data, kind)
        assert row["state"] == "failed"
        assert row["problem"]["code"] == "invalid_dataset"
        assert row["problem"]["detail"]
        refused = api.get(f"/api/v1/datasets/{row['id']}/rows")
        assert (refused.status_code, refused.json()["code"]) == (409, "dataset_not_ready")


@pytest.mark.parametrize(
    ("query", "body", "status", "code"),
    [
        ("", b"x", 422, "invalid_request"),
        ("format=exe", b"x", 422, "invalid_request"),
        ("format=../csv", b"x", 422, "invalid_request"),
        ("format=csv&name=%0d%0a", b"x", 422, "invalid_request"),
        ("format=csv", b"", 422, "invalid_dataset"),
        ("format=csv", b"x" * 3_100_000, 413, "payload_too_large"),
    ],
)
def test_an_upload_that_is_wrong_leaves_nothing(
    service: Api, api: httpx2.Client, query: str, body: bytes, status: int, code: str
):
    answer = api.post(f"/api/v1/datasets?{query}", content=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    uploads = service.settings.artifacts / "uploads"
    assert not uploads.exists() or not [p for p in uploads.iterdir() if "incoming" in p.name]


@pytest.mark.parametrize("body", [{"builtin": "mnist"}, {}, {"builtin": "digits", "x": 1}, []])
def test_a_builtin_that_is_not_there_is_refused(api: httpx2.Client, body: Any):
    answer = api.post("/api/v1/datasets", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


def test_the_same_upload_twice_is_one_dataset(service: Api, api: httpx2.Client):
    headers = {"Idempotency-Key": "upload"}
    send = {"params": {"format": "csv"}, "headers": headers}
    first = api.post("/api/v1/datasets", content=b"a\n1\n", **send)
    again = api.post("/api/v1/datasets", content=b"a\n1\n", **send)
    other = api.post("/api/v1/datasets", content=b"a\n2\n", **send)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.content == first.content
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    api.get(first.headers["location"], headers={"Prefer": "wait=60"})
    uploads = service.settings.artifacts / "uploads"
    until(lambda: not [path for path in uploads.iterdir() if path.is_file()])


def write_source(api: Api, dataset: str, text: bytes = b"b\n2\n") -> None:
    source = api.settings.artifacts / "uploads" / dataset
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_bytes(text)


def left_unread(api: Api, name: str = "lost") -> str:
    """A dataset that some worker began to read and never ended."""
    with api.database.write() as tx:
        row = datasets.add(tx, owner="admin", name=name, format="csv", size_bytes=4, sha256=None)
        row.reads, row.reader, row.reading_until_ms = 1, "gone", 1
        made = row.id
    write_source(api, made)
    return made


def test_a_file_that_a_lost_worker_left_unread_is_read_by_another(service: Api):
    made = left_unread(service)
    half = service.settings.artifacts / "datasets" / made / "half"
    half.mkdir(parents=True)  # its files were there, and its row was not
    with service.client() as client:
        row = client.get(f"/api/v1/datasets/{made}", headers={"Prefer": "wait=60"}).json()
        assert row["state"] == "ready", row
    with service.database.read() as tx:
        found = datasets.get(tx, made, None)
        assert (found.reader, found.reads) == ("reader", 2)
    until(lambda: not half.exists())
    until(lambda: not (service.settings.artifacts / "uploads" / made).exists())


def test_a_file_at_which_every_worker_dies_is_not_retried_forever(service: Api):
    made = left_unread(service)
    with service.database.write() as tx:
        row = datasets.get(tx, made, None)
        row.reads, row.reading_until_ms = MAX_TRIES, 1
    with service.client() as client:
        told = client.get(f"/api/v1/datasets/{made}", headers={"Prefer": "wait=60"}).json()
    assert (told["state"], told["problem"]["code"]) == ("failed", "invalid_dataset")
    assert f"{MAX_TRIES} times" in told["problem"]["detail"]


def test_a_database_that_is_unavailable_when_the_file_was_read_costs_nothing(
    own_postgres: Postgres,
):
    """It is killed after the file was read and before that is stored, and comes back later."""
    with running_api(own_postgres.url) as api:
        table = b"a\n" + b"1\n" * 300_000
        with api.client() as client:
            made = client.post("/api/v1/datasets", params={"format": "csv"}, content=table)
        until(lambda: [*(api.settings.work / "reader" / "reading").glob("ds_*")])
        own_postgres.kill()
        until(lambda: [*(api.settings.artifacts / "datasets").glob("ds_*/*/meta.json")])
        own_postgres.start()
        until(lambda: is_ready(api, made.json()["id"]))
        until(lambda: len([*(api.settings.artifacts / "datasets").glob("ds_*/*")]) == 1)


def is_ready(api: Api, dataset: str) -> bool:
    try:
        with api.database.read() as tx:
            row = datasets.get(tx, dataset, None)
    except gh.errors.DatabaseUnavailable:
        return False
    assert row.state != "failed", row.problem
    return row.state == "ready"


def test_a_worker_that_stops_gives_back_what_it_reads(tmp_path: Path):
    home = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    api = Api(home, "")  # never started: the readers need its database only
    try:
        with api.database.write() as tx:
            row = datasets.add(tx, owner="a", name="d", format="csv", size_bytes=4, sha256=None)
            made = row.id
        write_source(api, made, b"a\n" + b"1\n" * 2_000_000)
        with reading(api, "first"):
            until(lambda: [*(home / "work" / "first" / "reading").glob("ds_*")])
        with api.database.read() as tx:
            left = datasets.get(tx, made, None)
            assert (left.state, left.reads, left.reading_until_ms) == ("pending", 0, None)
        assert not [*(home / "work" / "first" / "reading").glob("*")]
        write_source(api, made)  # a short one, to be quick
        with reading(api, "second"):
            until(lambda: is_ready(api, made))
    finally:
        api.database.close()
        shutil.rmtree(home, ignore_errors=True)


def test_an_upload_waits_while_no_worker_reads_and_any_api_may_end(tmp_path: Path):
    home = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    api = Api(home, "")
    try:
        api.start()
        with api.client() as client:
            made = client.post("/api/v1/datasets", params={"format": "csv"}, content=b"a\n1\n")
            assert made.json()["state"] == "pending"
        api.stop(signal.SIGKILL)
        with reading(api):
            until(lambda: is_ready(api, made.json()["id"]))
    finally:
        api.kill()
        api.database.close()
        shutil.rmtree(home, ignore_errors=True)


REVIEWS = b"text,sentiment\na fine film,pos\ndull,neg\nI laughed,pos\n"


def test_a_header_is_found_or_asked_for(service: Api, api: httpx2.Client):
    row = uploaded(api, REVIEWS, "csv")
    assert [column["name"] for column in row["columns"]] == ["text", "sentiment"]
    assert (row["header"], row["splits"]) == (None, {"all": 3})
    assert row["notes"][0]["code"] == "header_guessed"
    for header, names in (("false", ["c0", "c1"]), ("true", ["text", "sentiment"])):
        made = api.post(
            "/api/v1/datasets", params={"format": "csv", "header": header}, content=REVIEWS
        )
        row = api.get(made.headers["location"], headers={"Prefer": "wait=60"}).json()
        assert [column["name"] for column in row["columns"]] == names
        assert (row["header"], row["notes"]) == (header == "true", [])
    for wrong in ({"format": "jsonl", "header": "true"}, {"format": "csv", "header": "perhaps"}):
        answer = api.post("/api/v1/datasets", params=wrong, content=b'{"a": 1}\n')
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["pointer"] == "/query/header"
    with gh.Client(service.url, service.key("dora")) as client:
        found = client.datasets.upload(REVIEWS, name="r", format="csv", header=False)
        assert (found.header, found.splits, found.notes) == (False, {"all": 4}, [])


def test_an_idempotency_key_counts_the_header(api: httpx2.Client):
    key = {"Idempotency-Key": "header-1"}
    query = {"format": "csv", "header": "true"}
    first = api.post("/api/v1/datasets", params=query, content=REVIEWS, headers=key)
    assert first.status_code == 201
    other = query | {"header": "false"}
    again = api.post("/api/v1/datasets", params=other, content=REVIEWS, headers=key)
    assert again.status_code == 422


def test_a_built_in_dataset_exists_once(each_service: Api):
    with each_service.client(each_service.key("twice")) as api:
        first, again = (api.post("/api/v1/datasets", json={"builtin": "digits"}) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 201)
        assert again.json()["id"] == first.json()["id"]
        assert again.headers["location"] == first.headers["location"]
        other = api.post("/api/v1/datasets?name=mine", json={"builtin": "digits"})
        assert other.json()["id"] != first.json()["id"]
        ready = api.get(first.headers["location"], headers={"Prefer": "wait=60"}).json()
        assert ready["state"] == "ready"
        assert api.post("/api/v1/datasets", json={"builtin": "digits"}).json() == ready
        with each_service.database.write() as tx:
            row = datasets.get(tx, ready["id"], None)
            row.state = "failed"
        new = api.post("/api/v1/datasets", json={"builtin": "digits"}).json()
        assert new["id"] != ready["id"]
    with each_service.client(each_service.key("another")) as api:
        assert api.post("/api/v1/datasets", json={"builtin": "digits"}).json()["id"] != new["id"]


def test_two_requests_at_once_make_one_built_in_dataset(each_service: Api):
    """Both have come in before the first may look which datasets there are."""
    owner = "both"
    key = each_service.key(owner)
    with (
        ThreadPoolExecutor(2) as pool,
        each_service.client(key) as one,
        each_service.client(key) as two,
    ):
        with each_service.database.write() as tx:  # what creates one takes this lock first
            tx.execute(text("SELECT 1"))  # on SQLite the transaction is the lock
            quotas.lock(tx, owner)
            both = [
                pool.submit(client.post, "/api/v1/datasets", json={"builtin": "digits"})
                for client in (one, two)
            ]
            with pytest.raises(FutureTimeout):
                both[0].result(1)  # it waits: nothing was looked up before the lock
        answers = [future.result(60) for future in both]
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.json()["id"] for answer in answers}) == 1
        listed = one.get("/api/v1/datasets", params={"name": "digits"}).json()["data"]
        assert len(listed) == 1


def test_a_dataset_has_a_name_wherever_an_id_is_read(service: Api):
    with service.client(service.key("eve")) as api:
        row = uploaded(api, b"a,b\n1,2\n3,4\n", "csv")  # called "mine"
        assert api.get("/api/v1/datasets/mine").json() == row
        assert api.get("/api/v1/datasets/mine", headers={"Prefer": "wait=1"}).json() == row
        assert len(api.get("/api/v1/datasets/mine/rows").json()["data"]) == 2
        assert api.get("/api/v1/datasets/mine/stats").status_code == 200
        assert api.get("/api/v1/datasets", params={"name": "other"}).json()["data"] == []
        job = {
            "kind": "train",
            "network": {"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 1}}]},
            "loss": {"type": "MSELoss", "inputs": ["fc", "b"]},
            "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
            "data": {
                "train": {"dataset": "mine"},
                "fields": {
                    "a": {"type": "dense", "shape": [1]},
                    "b": {"type": "dense", "shape": [1]},
                },
                "batch_size": 2,
            },
            "stop": {"epochs": 1},
        }
        made = api.post("/api/v1/jobs", json=job)
        assert made.status_code == 201, made.text
        for resolved in ("true", "false"):  # a name may mean another dataset tomorrow
            path = f"/api/v1/jobs/{made.json()['id']}/spec"
            spec = api.get(path, params={"resolved": resolved}).json()
            assert spec["data"]["train"]["dataset"] == row["id"]
        newest = uploaded(api, b"a,b\n1,2\n3,4\n", "csv")
        assert api.get("/api/v1/datasets/mine").json()["id"] == newest["id"]  # the same content
        other = uploaded(api, b"a,b\n1,2\n3,5\n", "csv")
        refused = api.get("/api/v1/datasets/mine")
        assert refused.status_code == 404
        assert other["id"] in refused.json()["detail"]
        problem = api.post("/api/v1/jobs", json=job).json()["errors"][0]
        assert problem["pointer"] == "/data/train/dataset"
        assert "Several datasets have the name 'mine'" in problem["detail"]
    with service.client(service.key("mallory")) as api:
        assert api.get("/api/v1/datasets/mine").status_code == 404


def test_a_built_in_dataset_that_is_missing_says_how_to_get_it(service: Api):
    with service.client(service.key("nobody-yet")) as api:
        detail = api.get("/api/v1/datasets/digits").json()["detail"]
        assert 'Create it: POST /datasets with {"builtin": "digits"}' in detail
    with gh.Client(service.url, service.key("nobody-yet")) as client:
        found = client.datasets.named("digits")
        assert found.state == "ready"
        assert client.datasets.get("digits").id == client.datasets.named("digits").id == found.id
