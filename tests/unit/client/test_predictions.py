"""Requests to served models, and what becomes of the answers, against a real server."""

import asyncio
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import glasshouse as gh
from glasshouse.client.aio import AsyncModel
from glasshouse.spec import ServedModel
from tests.stub_api import answer, job, problem
from tests.unit.client.test_transport import Scripted

Connect = Callable[..., gh.Client]
PATH = "/api/v1/models/m@production/predict"
HEADERS = {"x-model-version": "m:3", "server-timing": "queue;dur=0.25, compute;dur=1.5"}
SAFETENSORS = "application/vnd.safetensors"
NETWORK = {
    "network": {"layers": [{"name": "fc", "type": "Linear", "inputs": ["text"]}]},
    "fields": {"text": {"type": "integer_sequence"}, "label": {"type": "integer"}},
}


def predicted(outputs: dict[str, Any], **more: Any) -> Response:
    body = {"outputs": outputs, "model": "m", "version": 3, **more}
    return Response(json.dumps(body), headers=HEADERS, media_type="application/json")


def tensors(
    arrays: dict[str, Any], about: dict[str, str] | None = None, **headers: str
) -> Response:
    content = save({name: np.asarray(array) for name, array in arrays.items()}, about)
    return Response(content, headers={**HEADERS, **headers}, media_type=SAFETENSORS)


def looked_up(network: dict[str, Any] = NETWORK) -> list[Route]:
    """The routes by which the client finds out what the network reads."""

    async def version(request: Request) -> Response:
        return answer({"checkpoint": "ckpt_1"})

    async def trained(request: Request) -> Response:
        return answer(network)

    return [
        Route("/api/v1/models/m/versions/production", version),
        Route("/api/v1/checkpoints/ckpt_1/network", trained),
    ]


def test_an_array_is_sent_as_npy_and_answered_in_tensors(connect: Connect):
    scores = np.array([[1.0, 2.0], [4.0, 3.0]], np.float32)
    arrays = {"fc/value": scores, "fc/id": np.array([1, 0])}
    script = Scripted(tensors(arrays, {"fc/classes": '["cat", "dog"]'}))
    client = connect(script.route(PATH, "POST"))
    x = np.arange(6.0).reshape(2, 3)
    found = client.predict("m@production", x, outputs="fc", fields=["value", "id"], priority=4)
    (sent,) = script.requests
    assert sent.headers["content-type"] == "application/x-npy"
    assert sent.headers["accept"] == SAFETENSORS
    assert dict(sent.query_params) == {"outputs": "fc", "fields": "value,id", "priority": "4"}
    given = np.load(io.BytesIO(script.bodies[0]), allow_pickle=False)
    assert given.dtype == np.float32
    np.testing.assert_array_equal(given, x)
    assert isinstance(found, gh.Prediction)
    assert (found.model, found.version, found.non_finite) == ("m", 3, ())
    assert found.timing == {"queue_ms": 0.25, "compute_ms": 1.5}
    np.testing.assert_array_equal(found["fc"], scores)
    assert found.classes.tolist() == found["fc/class"].tolist() == ["dog", "cat"]
    assert repr(found).startswith("Prediction(m:3, fc/class [2], ")
    with pytest.raises(KeyError, match="there are: fc/class, fc/id, fc/value"):
        found["relu"]


def test_arrays_by_field_are_sent_as_safetensors(connect: Connect):
    script = Scripted(tensors({"fc/value": [[0.5]]}, glasshouse_non_finite=""))
    client = connect(script.route(PATH, "POST"))
    found = client.predict("m@production", {"a": [[1, 2]], "b": np.ones((1, 3))})
    sent = load(script.bodies[0])
    assert script.requests[0].headers["content-type"] == SAFETENSORS
    assert {name: (array.dtype.name, array.shape) for name, array in sent.items()} == {
        "a": ("int64", (1, 2)),
        "b": ("float32", (1, 3)),
    }
    with pytest.raises(AttributeError, match="ask for fields=\\['id'\\]"):
        found.classes  # noqa: B018


def test_rows_of_several_lengths_come_back_without_padding(connect: Connect):
    values = np.arange(12.0, dtype=np.float32).reshape(2, 3, 2)
    binary = tensors({"lstm/value": values, "lstm/lengths": [3, 1]})
    nested = predicted({"lstm/value": [values[0].tolist(), values[1, :1].tolist()]})
    script = Scripted(binary, nested)
    client = connect(script.route(PATH, "POST"))
    for inputs in ({"x": np.ones((2, 3, 4))}, {"x": [[[1.0] * 4] * 3, [[1.0] * 4]]}):
        first, second = client.predict("m@production", inputs)["lstm"]
        np.testing.assert_array_equal(first, values[0])
        np.testing.assert_array_equal(second, values[1, :1])
    ragged = json.loads(script.bodies[1])
    assert [len(row) for row in ragged["inputs"]["x"]] == [3, 1]


@pytest.mark.parametrize("rows", [["a film", "dull"], [[1, 2, 3], [4]]], ids=["texts", "ragged"])
def test_what_is_no_array_gets_the_name_of_the_only_field(connect: Connect, rows: Any):
    script = Scripted(predicted({"fc/id": [1, 0]}), predicted({"fc/id": [1, 0]}))
    client = connect(script.route(PATH, "POST"), *looked_up())
    assert client.predict("m@production", rows, top_k=2).classes.tolist() == [1, 0]
    assert json.loads(script.bodies[0]) == {"inputs": {"text": rows}, "top_k": 2}
    client.predict("m@production", rows=rows)
    assert json.loads(script.bodies[1]) == {"rows": [{"text": row} for row in rows]}


def test_a_network_with_several_fields_needs_names(connect: Connect):
    layer = {"name": "fc", "type": "Bilinear", "inputs": ["text", "label"]}
    client = connect(*looked_up({**NETWORK, "network": {"layers": [layer]}}))
    with pytest.raises(ValueError, match=r"reads several fields \(text, label\): pass inputs as"):
        client.predict("m@production", ["a film"])


def test_values_of_rows_become_json(connect: Connect, tmp_path: Path):
    file = tmp_path / "x.png"
    image = Image.new("CMYK", (2, 1), (0, 0, 0, 255))
    Image.new("L", (2, 1), 7).save(file)
    script = Scripted(predicted({"fc/value": [[0.0]]}))
    client = connect(script.route(PATH, "POST"))
    row = {"a": np.float32(0.5), "b": np.arange(2), "c": None, "d": "x", "e": (1, np.int64(2))}
    client.predict("m@production", rows=[row | {"f": file, "g": file.read_bytes(), "h": image}])
    (sent,) = json.loads(script.bodies[0])["rows"]
    plain = {"a": 0.5, "b": [0, 1], "c": None, "d": "x", "e": [1, 2]}
    assert {name: sent[name] for name in plain} == plain
    pixels = {
        name: np.asarray(Image.open(io.BytesIO(base64.b64decode(sent[name]["image"]["base64"]))))
        for name in "fgh"
    }
    assert pixels["f"].tolist() == pixels["g"].tolist() == [[7, 7]]
    assert pixels["h"].shape == (1, 2, 3)
    with pytest.raises(TypeError, match="row 0: a value is of type object: pass a number"):
        client.predict("m@production", rows=[{"a": object()}])
    with pytest.raises(TypeError, match="rows is of type dict: pass a list"):
        client.predict("m@production", rows={"a": 1})


def test_a_data_frame_is_rows_and_its_missing_values_are_null(connect: Connect):
    pandas = pytest.importorskip("pandas")
    script = Scripted(predicted({"fc/value": [[0.0], [0.0]]}))
    client = connect(script.route(PATH, "POST"))
    frame = pandas.DataFrame({"rooms": [3.0, np.nan], "city": ["Bern", None]})
    client.predict("m@production", rows=frame)
    expected = [{"rooms": 3.0, "city": "Bern"}, {"rooms": None, "city": None}]
    assert json.loads(script.bodies[0]) == {"rows": expected}
    with pytest.raises(TypeError, match="inputs is a data frame: pass it as rows"):
        client.predict("m@production", frame)


def test_nan_and_inf_are_numbers_in_both_forms(connect: Connect):
    values = np.array([[np.nan, -np.inf, 1.5]], np.float32)
    named = predicted({"fc/value": [["NaN", "-Infinity", 1.5]]}, non_finite=["fc/value"])
    binary = tensors({"fc/value": values})
    binary.headers["Glasshouse-Non-Finite"] = "fc/value"
    client = connect(Scripted(named, binary).route(PATH, "POST"))
    for given in ({"rows": [{"a": 1}]}, {"inputs": np.ones((1, 1))}):
        found = client.predict("m@production", **given)
        np.testing.assert_array_equal(found["fc"], values)
        assert found["fc"].dtype == np.float32
        assert found.non_finite == ("fc/value",)
        assert found.as_json()["non_finite"] == ["fc/value"]


def test_retries_share_the_time_of_the_request(connect: Connect):
    full = problem(429, "queue_full", headers={"Retry-After": "1"})
    script = Scripted(full, predicted({"fc/value": [[1.0]]}))
    client = connect(script.route(PATH, "POST"))
    client.predict("m@production", np.ones((1, 1)), timeout=9)
    first, second = (float(sent.query_params["timeout_s"]) for sent in script.requests)
    assert 0 < second < first <= 9


def test_a_retry_that_would_come_too_late_is_not_waited_for(connect: Connect):
    script = Scripted(problem(429, "queue_full", headers={"Retry-After": "5"}))
    client = connect(script.route(PATH, "POST"))
    with pytest.raises(gh.RateLimitError):
        client.predict("m@production", np.ones((1, 1)), timeout=2)
    assert len(script.requests) == 1


def test_what_cannot_be_sent_is_refused_before_a_request(connect: Connect):
    client = connect()
    for given in ({}, {"inputs": [[1]], "rows": [{}]}):
        with pytest.raises(TypeError, match="exactly one of inputs and rows"):
            client.predict("m", **given)
    found = AsyncModel(None, {"name": "m"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown options topk; there are: outputs"):
        asyncio.run(found.predict(np.ones((1, 1)), topk=3))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="'a/b' is no reference to a model"):
        client.predict("a/b", np.ones((1, 1)))


def test_what_is_no_prediction_says_so(connect: Connect):
    client = connect(Scripted(answer({"object": "list"})).route(PATH, "POST"))
    with pytest.raises(gh.APIError, match="is not a prediction"):
        client.predict("m@production", np.ones((1, 1)))


def test_models_and_versions_predict_and_are_served(connect: Connect):
    asked: list[str] = []

    async def predict(request: Request) -> Response:
        asked.append(request.path_params["name"])
        return predicted({"fc/value": [[1.0]]})

    submitted = Scripted(answer(job(kind="serve"), 201))
    model = {"object": "model", "id": "mdl_1", "name": "m"}
    version = {"object": "model_version", "model": "m", "version": 2}
    routes = [
        Route("/api/v1/models/{name}/predict", predict, methods=["POST"]),
        Route("/api/v1/models/m", lambda _: answer(model)),
        Route("/api/v1/models/m/versions/2", lambda _: answer(version)),
        submitted.route("/api/v1/jobs", "POST"),
    ]
    client = connect(*routes)
    found, one = client.models.get("m"), client.models.version("m:2")
    x = np.ones((1, 1))
    found.predict(x)
    one.predict(x)
    client.predict(found, x)
    client.predict(one, x)
    assert asked == ["m", "m:2", "m", "m:2"]
    canary = ServedModel.model_validate({"model": "m", "canary": {"model": "m:2", "share": 0.5}})
    client.serve([found, one, "other@x", canary], device="cpu", idle_s=5, replicas={"min": 0})
    assert json.loads(submitted.bodies[0]) == {
        "kind": "serve",
        "models": ["m", "m:2", "other@x", {"model": "m", "canary": {"model": "m:2", "share": 0.5}}],
        "idle_s": 5,
        "replicas": {"min": 0},
        "devices": {"type": "cpu"},
    }
    with pytest.raises(TypeError, match="pass a model, a version or a reference instead of int"):
        client.serve(3)


def test_a_service_is_ready_once_it_serves_something(connect: Connect):
    nothing = {"models": []}
    something = {"models": [{"reference": "m", "model": "m", "version": 1}]}
    states = [
        job(kind="serve", state="starting", serving=nothing),
        job(kind="serve", state="running", serving=something),
        job(kind="serve", state="failed", serving=nothing, error={"message": "no memory"}),
        job(),
    ]
    client = connect(Scripted(*map(answer, states)).route("/api/v1/jobs/job_1"))
    waiting = client.jobs._job("job_1")
    waiting.data["kind"] = "serve"
    assert waiting.wait_ready(timeout=30).serving == something
    with pytest.raises(gh.JobFailed, match="no memory"):
        waiting.wait_ready(timeout=30)
    with pytest.raises(ValueError, match="only serve jobs get ready"):
        waiting.refresh().wait_ready()


# --- training jobs -------------------------------------------------------------------------------


def answered_by_job(outputs: dict[str, Any]) -> Response:
    body = {"outputs": outputs, "job": "job_1", "step": 120}
    headers = {"x-job-step": "job_1:120", "server-timing": "queue;dur=0.25, compute;dur=1.5"}
    return Response(json.dumps(body), headers=headers, media_type="application/json")


def test_a_training_job_answers_with_its_step(connect: Connect):
    async def found(_request: Request) -> Response:
        return answer(job(id="job_1"))

    async def spec(_request: Request) -> Response:
        return answer({"network": NETWORK["network"], "data": {"fields": NETWORK["fields"]}})

    script = Scripted(*(answered_by_job({"fc/id": [1, 0]}) for _ in range(2)))
    client = connect(
        Route("/api/v1/jobs/job_1", found),
        Route("/api/v1/jobs/job_1/spec", spec),
        script.route("/api/v1/jobs/job_1/predict", "POST"),
    )
    one = client.jobs.get("job_1")
    predicted_ids = one.predict(rows=["a", "b"], fields="id", timeout=5, priority=2)
    assert json.loads(script.bodies[0]) == {
        "rows": [{"text": "a"}, {"text": "b"}],
        "fields": ["id"],
    }
    assert dict(script.requests[0].query_params)["priority"] == "2"
    assert isinstance(predicted_ids, gh.JobPrediction)
    assert (predicted_ids.job, predicted_ids.step) == ("job_1", 120)
    assert predicted_ids.classes.tolist() == [1, 0]
    assert predicted_ids.as_json()["step"] == 120
    assert repr(predicted_ids) == "JobPrediction(job_1:120, fc/id [2])"
    assert one.predict({"text": ["a"]}).step == 120
    with pytest.raises(TypeError, match="exactly one"):
        one.predict()
