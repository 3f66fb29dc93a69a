"""The Open Inference Protocol of a real service, asked by Triton's own client and by plain HTTP."""

import gzip
import json
from collections.abc import Generator, Mapping
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

import glasshouse as gh
from glasshouse.client import Job
from tests.acceptance.services import LocalService, free_port, plain_environment
from tests.acceptance.specs import small
from tests.running import NO_TLS, ApiProcess
from tests.waiting import until

pytestmark = pytest.mark.long
NAME = "digits-v2"
TEXTS = ["a fine film", "dull", "a dull film but fine", "fine fine"]
Array = NDArray[Any]


@pytest.fixture(scope="module")
def trained(client: gh.Client, digits: str) -> list[Job]:
    """Versions 1 and 2 of a published model; ``production`` names the first."""
    specs = [small(digits, stop={"steps": steps}) for steps in (40, 5)]
    jobs = [job.wait(timeout=120) for job in [client.jobs.create(spec) for spec in specs]]
    client.models.publish(NAME, jobs[0], aliases=["production"])
    client.models.publish(NAME, jobs[1])
    return jobs


@pytest.fixture(scope="module")
def reviews(client: gh.Client, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A published model that reads texts."""
    rows = [{"text": text, "label": number % 2} for number, text in enumerate(TEXTS)]
    path = tmp_path_factory.mktemp("reviews") / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = client.datasets.upload(path).wait()
    layers = [
        {"name": "bag", "type": "EmbeddingBag", "args": {"embedding_dim": 4}, "inputs": ["words"]},
        {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
    ]
    data = {
        "train": {"dataset": dataset.id},
        "fields": {
            "words": {"type": "integer_sequence", "column": "text", "tokens": "words"},
            "label": {"type": "integer", "dim": 2},
        },
        "batch_size": 4,
    }
    job = client.jobs.create(small(dataset.id, network={"layers": layers}, data=data))
    job.wait(timeout=120)
    client.models.publish("reviews", job)
    return job


@pytest.fixture(scope="module")
def service(
    client: gh.Client, local_service: LocalService, trained: list[Job], reviews: Job
) -> Generator[httpx2.Client]:
    """Plain HTTP to a service that serves the models."""
    models = [NAME, f"{NAME}@production", "reviews"]
    spec = {"kind": "serve", "models": models, "devices": {"type": "cpu", "threads": 1}}
    job = client.jobs.create(spec)
    headers = {"Authorization": f"Bearer {local_service.key}"}
    with httpx2.Client(
        base_url=local_service.url, headers=headers, timeout=60, verify=NO_TLS
    ) as opened:
        until(lambda: opened.get(f"/v2/models/{NAME}/ready").status_code == 200)
        yield opened
    job.cancel()
    with pytest.raises(gh.JobCancelled):
        job.wait(timeout=60)


@pytest.fixture(scope="module")
def server(service: httpx2.Client, local_service: LocalService) -> Generator["Triton"]:
    """Triton's client."""
    with triton.InferenceServerClient(local_service.url.removeprefix("http://")) as opened:
        yield Triton(opened, local_service.key)


class Triton:
    """Triton's client with a key in each request."""

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self._headers = {"authorization": f"Bearer {key}"}  # gRPC allows no capitals

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            return method(
                *arguments, headers={**self._headers}, **options
            )  # it adds its own to them

        return call


@pytest.fixture(scope="module")
def x(client: gh.Client, digits: str) -> Array:
    """Some images."""
    rows = client.datasets.rows(digits, split="test", limit=7)
    return np.array([row["image"] for row in rows], np.float32).reshape(7, 1, 8, 8)


def by_hand(job: Job, x: Array) -> Array:
    """The scores of torch's own layer with the weights of a job."""
    state = job.state_dict()
    scores = torch.from_numpy(x).flatten(1) @ state["fc.weight"].T + state["fc.bias"]
    return scores.numpy()


def tensor(name: str, values: Array, datatype: str = "FP32", *, binary: bool = True) -> Any:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def wanted(name: str, **options: Any) -> Any:
    return triton.InferRequestedOutput(name, **options)


# --- about the server and its models ---------------------------------------------------------


def test_the_server_and_its_models_describe_themselves(server: Triton):
    assert server.is_server_live()
    assert server.is_server_ready()
    about = server.get_server_metadata()
    assert about["name"] == "glasshouse"
    assert "binary_tensor_data" in about["extensions"]
    newest = server.get_model_metadata(NAME)
    assert (newest["name"], newest["versions"]) == (NAME, ["2"])
    assert newest["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert {"name": "fc/value", "datatype": "FP32", "shape": [-1, 10]} in newest["outputs"]
    first = [server.get_model_metadata(NAME, "1"), server.get_model_metadata(NAME, "production")]
    first += [
        server.get_model_metadata(f"{NAME}@production"),
        server.get_model_metadata(f"{NAME}:1"),
    ]
    assert [one["versions"] for one in first] == [["1"]] * 4
    assert all(server.is_model_ready(NAME, version) for version in ("", "1", "2", "production"))
    assert not server.is_model_ready(NAME, "3")
    assert not server.is_model_ready("nothing")


def test_the_index_lists_versions_that_are_served(server: Triton, service: httpx2.Client):
    found = {
        (one["name"], one["version"], one["state"]) for one in server.get_model_repository_index()
    }
    ready = {(NAME, "1", "READY"), (NAME, "2", "READY"), ("reviews", "1", "READY")}
    assert ready <= found
    listed = service.post("/v2/repository/index", json={"ready": True}).json()
    assert {(one["name"], one["version"], one["state"]) for one in listed} == ready
    wrong = service.post("/v2/repository/index", json={"redy": True})
    assert (wrong.status_code, "redy" in wrong.json()["error"]) == (422, True)
    for call in (server.load_model, server.unload_model):
        with pytest.raises(InferenceServerException, match=r"\[400\] .*serve job"):
            call(NAME)


# --- inference -------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_tritons_client_gets_what_torch_computes(
    server: Triton, trained: list[Job], x: Array, *, binary: bool
):
    outputs = [wanted(name, binary_data=binary) for name in ("fc", "flat", "fc/id")]
    image = tensor("image", x, binary=binary)
    found = server.infer(NAME, [image], outputs=outputs, request_id="mine")
    expected = by_hand(trained[1], x)
    np.testing.assert_allclose(found.as_numpy("fc"), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.as_numpy("flat"), x.reshape(7, 64))
    np.testing.assert_array_equal(found.as_numpy("fc/id"), expected.argmax(1))
    about = found.get_response()
    assert (about["id"], about["model_name"], about["model_version"]) == ("mine", NAME, "2")


def test_a_version_is_chosen_by_path_or_name(server: Triton, trained: list[Job], x: Array):
    image = [tensor("image", x)]
    found = [
        server.infer(NAME, image, model_version="1"),
        server.infer(NAME, image, model_version="production"),
        server.infer(f"{NAME}@production", image),
        server.infer(f"{NAME}:1", image),
    ]
    for one in found:
        assert one.get_response()["model_version"] == "1"
        np.testing.assert_allclose(
            one.as_numpy("fc/value"), by_hand(trained[0], x), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_are_compressed_both_ways(
    server: Triton, trained: list[Job], x: Array, algorithm: str
):
    many = np.repeat(x, 100, axis=0)  # so long that it is decompressed in a thread
    found = server.infer(
        NAME,
        [tensor("image", many)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    expected = by_hand(trained[1], many)
    np.testing.assert_allclose(found.as_numpy("fc/value"), expected, rtol=1e-5, atol=1e-6)


def test_texts_are_bytes(server: Triton, reviews: Job):
    def bags(*texts: str) -> tuple[Array, Array]:
        encoded = np.array([text.encode() for text in texts], dtype=np.object_)
        outputs = [wanted("bag"), wanted("fc")]
        found = server.infer("reviews", [tensor("words", encoded, "BYTES")], outputs=outputs)
        return found.as_numpy("bag"), found.as_numpy("fc")

    state = reviews.state_dict()
    words, _ = bags("a", "fine", "film", "dull")
    for row in torch.tensor(words):
        assert (state["bag.weight"] == row).all(1).any()
    means, scores = bags("a fine film", "fine fine", "film dull")
    expected = [words[:3].mean(0), words[1], words[2:].mean(0)]
    np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-6)
    by_torch = torch.tensor(means) @ state["fc.weight"].T + state["fc.bias"]
    np.testing.assert_allclose(scores, by_torch, rtol=1e-5, atol=1e-6)


def test_classes_are_texts(server: Triton, trained: list[Job], x: Array):
    outputs = [wanted("fc", class_count=2)]
    found = server.infer(NAME, [tensor("image", x)], outputs=outputs).as_numpy("fc")
    expected = np.argsort(-by_hand(trained[1], x), axis=1)[:, :2]
    assert [[int(text.split(b":")[1]) for text in row] for row in found] == expected.tolist()


def test_plain_http(service: httpx2.Client, trained: list[Job], x: Array):
    url = f"/v2/models/{NAME}/infer"
    asked = {"name": "image", "shape": [7, 1, 8, 8], "datatype": "FP32"}
    body = {"inputs": [{**asked, "data": x.ravel().tolist()}], "outputs": [{"name": "fc"}]}
    found = service.post(url, json=body)
    assert found.status_code == 200, found.text
    assert found.headers["content-type"] == "application/json"
    assert found.headers["x-model-version"] == f"{NAME}:2"
    (output,) = found.json()["outputs"]
    assert (output["shape"], output["datatype"]) == ([7, 10], "FP32")
    scores = np.array(output["data"], np.float32).reshape(7, 10)
    np.testing.assert_allclose(scores, by_hand(trained[1], x), rtol=1e-5, atol=1e-6)
    head = json.dumps(
        {
            "inputs": [{**asked, "parameters": {"binary_data_size": x.nbytes}}],
            "outputs": [{"name": "fc", "parameters": {"binary_data": True}}],
        }
    ).encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    for usual in ({}, {"X-Request-Id": "long-way"}):  # both ways through the API
        found = service.post(url, content=head + x.tobytes(), headers=length | usual)
        assert found.headers["content-type"] == "application/octet-stream"
        size = int(found.headers["inference-header-content-length"])
        assert json.loads(found.content[:size])["outputs"][0]["shape"] == [7, 10]
        assert np.frombuffer(found.content[size:], "<f4").reshape(7, 10).tolist() == scores.tolist()


# --- gRPC ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grpc_server(
    service: httpx2.Client, local_service: LocalService, tmp_path_factory: pytest.TempPathFactory
) -> Generator["Triton"]:
    """Triton's gRPC client of another API process of the same service."""
    port = free_port()
    environment = plain_environment(
        HOME=str(local_service.home), GRPC_PORT=str(port), WARM_PLANNER="false"
    )
    api = ApiProcess(environment, tmp_path_factory.mktemp("grpc") / "api.log")
    api.start()
    try:
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as opened:
            yield Triton(opened, local_service.key)
    finally:
        assert api.stop() == 0, api.log_file.read_text()[-3000:]


def grpc_tensor(name: str, values: Array, datatype: str = "FP32") -> Any:
    made = triton_grpc.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


def grpc_wanted(name: str, **options: Any) -> Any:
    return triton_grpc.InferRequestedOutput(name, **options)


def test_grpc_gives_what_http_gives(
    grpc_server: Triton, server: Triton, trained: list[Job], x: Array
):
    assert grpc_server.is_server_live()
    assert grpc_server.is_server_ready()
    assert grpc_server.is_model_ready(NAME, "production")
    assert not grpc_server.is_model_ready("nothing")
    assert grpc_server.get_server_metadata(as_json=True) == server.get_server_metadata()
    over_http = server.get_model_metadata(NAME, "1")
    over_grpc = grpc_server.get_model_metadata(NAME, "1", as_json=True)
    for kind in ("inputs", "outputs"):  # JSON of protobuf has 64-bit integers as texts
        for tensor_ in over_grpc[kind]:
            tensor_["shape"] = [int(size) for size in tensor_.get("shape", ())]
    assert over_grpc == over_http
    listed = grpc_server.get_model_repository_index(as_json=True)["models"]
    assert listed == server.get_model_repository_index()
    outputs = [grpc_wanted(name) for name in ("fc", "flat", "fc/id")]
    found = grpc_server.infer(NAME, [grpc_tensor("image", x)], outputs=outputs, request_id="a")
    expected = by_hand(trained[1], x)
    np.testing.assert_allclose(found.as_numpy("fc"), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.as_numpy("flat"), x.reshape(7, 64))
    np.testing.assert_array_equal(found.as_numpy("fc/id"), expected.argmax(1))
    about = found.get_response()
    assert (about.id, about.model_name, about.model_version) == ("a", NAME, "2")
    strange = grpc_server.infer(NAME, [grpc_tensor("image", np.full_like(x, np.nan))])
    assert np.isnan(strange.as_numpy("fc/value")).all()
    assert "fc/value" in strange.get_response().parameters["non_finite"].string_param
    classes = grpc_server.infer(
        NAME, [grpc_tensor("image", x)], outputs=[grpc_wanted("fc", class_count=1)]
    ).as_numpy("fc")
    assert [int(text.split(b":")[1]) for text in classes[:, 0]] == expected.argmax(1).tolist()


def test_grpc_takes_typed_contents_and_texts(grpc_server: Triton, server: Triton, x: Array):
    image = grpc_tensor("image", x)
    raw = grpc_server.infer(NAME, [image]).as_numpy("fc/value")
    image._raw_content = None  # as clients do that have no numpy
    image._input.contents.fp32_contents.extend(x.ravel().tolist())
    typed = grpc_server.infer(NAME, [image]).as_numpy("fc/value")
    np.testing.assert_array_equal(typed, raw)
    texts = np.array([text.encode() for text in TEXTS], dtype=np.object_)
    found = grpc_server.infer("reviews", [grpc_tensor("words", texts, "BYTES")])
    over_http = server.infer("reviews", [tensor("words", texts, "BYTES")])
    np.testing.assert_array_equal(found.as_numpy("fc/value"), over_http.as_numpy("fc/value"))


def test_grpc_refuses_with_its_status(grpc_server: Triton, local_service: LocalService, x: Array):
    image = grpc_tensor("image", x)

    def status(*arguments: Any, **options: Any) -> str:
        return refused(grpc_server, *arguments, **options).partition(" ")[0]

    assert status("nothing", [image]) == "StatusCode.NOT_FOUND"
    assert status(NAME, [image], model_version="9") == "StatusCode.NOT_FOUND"
    assert status(NAME, [grpc_tensor("image", x[:, :, :4])]) == "StatusCode.INVALID_ARGUMENT"
    assert status(NAME, [image], timeout=1) == "StatusCode.DEADLINE_EXCEEDED"
    assert status(NAME, [image], compression_algorithm="gzip") == "StatusCode.UNIMPLEMENTED"
    assert "'img'" in refused(grpc_server, NAME, [grpc_tensor("img", x)])
    huge = np.zeros((70_000, 1, 16, 16), np.float32)
    assert status(NAME, [grpc_tensor("image", huge)]) == "StatusCode.RESOURCE_EXHAUSTED"
    nobody = Triton(grpc_server._client, "gh_nothing")
    assert refused(nobody, NAME, [image]).startswith("StatusCode.UNAUTHENTICATED")
    with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
        grpc_server._client.get_server_metadata()
    assert grpc_server._client.is_server_live()


# --- what is wrong ---------------------------------------------------------------------------


def refused(server: Triton, *arguments: Any, **options: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        server.infer(*arguments, **options)
    return f"{caught.value.status()} {caught.value.message()}"


def test_tritons_client_shows_what_is_wrong(
    server: Triton, local_service: LocalService, trained: list[Job], x: Array
):
    image = tensor("image", x)
    assert refused(server, "nothing", [image]).startswith("404 ")
    assert refused(server, NAME, [image], model_version="9").startswith("404 ")
    assert refused(server, f"{NAME}@production", [image], model_version="1").startswith("404 ")
    found = refused(server, NAME, [tensor("image", x[:, :, :4])])
    assert found.startswith("422 /inputs/0: ")
    assert "['rows', 1, 8, 8]" in found
    found = refused(server, NAME, [tensor("image", x.astype(np.int64), "INT64"), image])
    assert found.startswith("422 ")
    assert "twice" in found
    found = refused(server, NAME, [tensor("img", x)])
    assert "'img'" in found
    assert "'image'" in found
    assert "'fcc'" in refused(server, NAME, [image], outputs=[wanted("fcc")])
    assert "sequence_id" in refused(server, NAME, [image], sequence_id=3)
    found = refused(server, NAME, [image], priority=3000)
    assert found.startswith("422 /parameters/priority: ")
    with triton.InferenceServerClient(local_service.url.removeprefix("http://")) as nobody:
        assert nobody.is_server_live()
        assert nobody.is_server_ready()
        with pytest.raises(InferenceServerException, match=r"\[401\]"):
            nobody.infer(NAME, [image])
        with pytest.raises(InferenceServerException, match=r"\[401\]"):
            nobody.get_server_metadata()


@pytest.mark.parametrize(
    ("headers", "content", "status", "said"),
    [
        ({}, b"{", 400, "not JSON"),
        ({}, b"[]", 400, "object"),
        ({"Inference-Header-Content-Length": "-1"}, b"{}", 400, "number of bytes"),
        ({"Inference-Header-Content-Length": "9"}, b"{}", 400, "2 bytes"),
        ({"Content-Encoding": "gzip"}, b"{}", 400, "not gzip"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b"{}")[:-3], 400, "whole"),
        ({"Content-Encoding": "gzip"}, gzip.compress(b"{}") * 2, 400, "whole"),
        ({"Content-Encoding": "br"}, b"{}", 415, "br"),
        ({"Content-Encoding": "gzip"}, gzip.compress(bytes(65 << 20), 9), 413, "67108864"),
    ],
    ids=lambda value: value[:10] if isinstance(value, bytes) else None,
)
def test_malformed_requests(
    service: httpx2.Client, headers: Mapping[str, str], content: bytes, status: int, said: str
):
    found = service.post(f"/v2/models/{NAME}/infer", content=content, headers=headers)
    assert found.status_code == status, found.text
    assert said in found.json()["error"]
    assert found.json()["status"] == status


def test_the_timeout_of_a_request_and_a_full_queue(
    client: gh.Client, server: Triton, trained: list[Job], local_service: LocalService, x: Array
):
    client.models.publish("slow-v2", trained[0])
    spec = {"kind": "serve", "models": ["slow-v2"], "devices": {"type": "cpu", "threads": 1}}
    job = client.jobs.create(spec | {"max_queue": 1, "max_delay_ms": 5000.0})
    url = local_service.url.removeprefix("http://")
    try:
        until(lambda: server.is_model_ready("slow-v2"))
        with triton.InferenceServerClient(url, concurrency=3) as opened:
            at_once = Triton(opened, local_service.key)
            calls = [
                at_once.async_infer(
                    "slow-v2", [tensor("image", x)], outputs=[wanted(name)], timeout=3_000_000
                )
                for name in ("fc", "flat", "fc/id")
            ]
            found = sorted(_error_of(call) for call in calls)
    finally:
        job.cancel()
    # one waits for more of its kind, one in the queue, and there is no place for the third
    assert [text[:3] for text in found] == ["429", "504", "504"]
    assert "max_queue" in found[0]
    assert "timeout of the request" in found[1]
    with pytest.raises(gh.JobCancelled):
        job.wait(timeout=60)


def _error_of(call: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call.get_result()
    return f"{caught.value.status()} {caught.value.message()}"
