"""The Open Inference Protocol in the API: paths, codings, the index, and the messages of gRPC."""

import asyncio
import gzip
import json
import struct
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from api.__main__ import refuse_to_start
from api.http.problems import answer
from api.serving import grpc_messages, grpc_translation
from api.serving.connection import Reply
from api.serving.inference_protocol import decoded, encoded, head_of, reference_of, wanted_coding
from api.serving.served_models import index_of
from glasshouse.errors import (
    BadRequest,
    InvalidHeader,
    ModelNotServed,
    NotFound,
    PayloadTooLarge,
    UnsupportedMedia,
)
from glasshouse.spec.jobs.serve_job import IDLE
from models.jobs.replicas import Route
from models.settings import Settings

CLASSES = grpc_messages.message_classes()


# --- HTTP ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "reference"),
    [
        ("m", None, "m"),
        ("m@prod", None, "m@prod"),
        ("m:3", None, "m:3"),
        ("m", "3", "m:3"),
        ("m", "007", "m:7"),
        ("m", "prod", "m@prod"),
        ("m", "latest", "m"),
    ],
)
def test_the_reference_of_a_path(name: str, version: str | None, reference: str):
    assert reference_of(name, version) == reference


@pytest.mark.parametrize(
    ("name", "version"),
    [("", None), ("a/b", None), ("m@a@b", None), ("m", ""), ("m", "1" * 40), ("m", "²"),
     ("m", "a@b"), ("m:3", "3"), ("m@prod", "latest"), ("job_x", None)],
)  # fmt: skip
def test_other_paths_name_no_model(name: str, version: str | None):
    with pytest.raises(NotFound):
        reference_of(name, version)


def test_the_length_of_the_json_is_a_number():
    assert head_of({}) == {"protocol": "v2"}
    header = b"inference-header-content-length"
    assert head_of({header: b"12"}) == {"protocol": "v2", "json_bytes": 12}
    for text in (b"", b"-1", b"1.5", b"x", b"9" * 30, "²".encode()):
        with pytest.raises(InvalidHeader):
            head_of({header: text})


@pytest.mark.parametrize("size", [0, 10, 1_000_000])
def test_bodies_are_decoded_and_coded(size: int):
    body = np.random.default_rng(0).bytes(size)
    for coding, of_python in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        assert asyncio.run(decoded(of_python(body), f" {coding.upper()} ", size)) == body
        assert asyncio.run(decoded(asyncio.run(encoded(body, coding)), coding, size)) == body
        if size:
            with pytest.raises(PayloadTooLarge):
                asyncio.run(decoded(of_python(body), coding, size - 1))
    assert asyncio.run(decoded(body, "identity", size)) is body
    assert gzip.decompress(asyncio.run(encoded(body, "gzip"))) == body
    with pytest.raises(UnsupportedMedia):
        asyncio.run(decoded(body, "gzip, gzip", size))


def test_a_small_body_cannot_become_a_large_one():
    bomb = gzip.compress(bytes(200 << 20), 9)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    with pytest.raises(PayloadTooLarge):
        asyncio.run(decoded(bomb, "gzip", 1 << 20))
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_only_a_client_that_asks_for_one_coding_gets_it():
    assert [wanted_coding(text) for text in ("gzip", "Deflate ")] == ["gzip", "deflate"]
    others = ("", "gzip, deflate", "gzip;q=0", "br", "*", "identity")
    assert [wanted_coding(text) for text in others] == [None] * 6


def test_errors_below_v2_have_the_text_of_the_protocol():
    error = ModelNotServed("No serve job serves it.")
    of_v2 = json.loads(bytes(answer(error, {"path": "/v2/models/m"}).body))
    assert of_v2["error"] == f"No serve job serves it. {error.hint}"
    assert of_v2["code"] == "model_not_served"
    for path in ("/api/v1/models/m", "/v2x"):
        assert "error" not in json.loads(bytes(answer(error, {"path": path}).body))


def route(models: list[str], served: list[tuple[str, int]] | None, **changes: Any) -> Route:
    made = Route("job_1", "ada", "running", None, {"models": models}, 1, "a", "t", (), None)
    found = [{"reference": "", "model": name, "version": version} for name, version in served or ()]
    if served is None:
        made = made._replace(attempt=None, state="queued")
    return made._replace(models=tuple(found), **changes)


def test_the_index_lists_what_is_served_and_what_will_be():
    routes = [
        route(["m", "m:1"], [("m", 2), ("m", 1)]),
        route(["m:2", "m:4", "m@new"], None),
        route(["late", {"model": "late@x"}], None, state="paused", state_reason=IDLE),
    ]
    found = {(one["name"], one.get("version")): one for one in index_of(routes)}
    states = {key: one["state"] for key, one in found.items()}
    assert states == {
        ("m", "1"): "READY",
        ("m", "2"): "READY",
        ("m", "4"): "UNAVAILABLE",
        ("late", None): "UNAVAILABLE",
    }
    assert found["m", "4"]["reason"] == "its serve job (job_1) is queued"
    assert found["late", None]["reason"].endswith(f"is paused: {IDLE}")


# --- gRPC ------------------------------------------------------------------------------------


def test_the_messages_are_those_of_triton():
    for name, mine in CLASSES.items():
        theirs = getattr(service_pb2, name).DESCRIPTOR
        assert repr_of(mine.DESCRIPTOR) == repr_of(theirs), name


def repr_of(descriptor: Any) -> list[Any]:
    """What is on the wire of a message, with the messages in it."""
    return sorted(
        (
            field.number,
            field.name,
            field.type,
            field.is_repeated,
            field.containing_oneof is not None,
            repr_of(field.message_type) if field.message_type is not None else [],
        )
        for field in descriptor.fields
    )


DTYPES = {
    "BOOL": ("bool_contents", "?"), "INT8": ("int_contents", "i1"), "INT16": ("int_contents", "i2"),
    "INT32": ("int_contents", "i4"), "INT64": ("int64_contents", "i8"),
    "UINT8": ("uint_contents", "u1"), "UINT16": ("uint_contents", "u2"),
    "UINT32": ("uint_contents", "u4"), "UINT64": ("uint64_contents", "u8"),
    "FP32": ("fp32_contents", "f4"), "FP64": ("fp64_contents", "f8"),
}  # fmt: skip


def split(request: Any) -> tuple[dict[str, Any], bytes]:
    body, size = grpc_translation.body_of(request)
    return json.loads(body[:size]), body[size:]


@pytest.mark.parametrize("datatype", DTYPES)
def test_typed_contents_become_bytes(datatype: str):
    field, code = DTYPES[datatype]
    values = np.array([0, 1, 1, 0], np.dtype(code).newbyteorder("<"))
    request = CLASSES["ModelInferRequest"]()
    given = request.inputs.add(name="x", datatype=datatype, shape=[2, 2])
    getattr(given.contents, field).extend(values.tolist())
    document, binary = split(request)
    assert binary == values.tobytes()
    about = {"name": "x", "datatype": datatype, "shape": [2, 2]}
    assert document["inputs"] == [about | {"parameters": {"binary_data_size": values.nbytes}}]


def test_a_request_is_translated_with_its_parameters():
    request = CLASSES["ModelInferRequest"](id="r", raw_input_contents=[b"abcd", b"", b"xy"])
    request.parameters["priority"].uint64_param = 7
    request.parameters["timeout"].int64_param = 1000
    for name, datatype in (("a", "FP32"), ("b", "INT8"), ("c", "BYTES")):
        request.inputs.add(name=name, datatype=datatype, shape=[1])
    request.outputs.add(name="fc").parameters["classification"].int64_param = 3
    document, binary = split(request)
    assert binary == b"abcdxy"
    sizes = [one["parameters"]["binary_data_size"] for one in document["inputs"]]
    assert sizes == [4, 0, 2]
    parameters = {"priority": 7, "timeout": 1000, "binary_data_output": True}
    assert (document["id"], document["parameters"]) == ("r", parameters)
    assert document["outputs"] == [{"name": "fc", "parameters": {"classification": 3}}]
    texts = CLASSES["ModelInferRequest"]()
    contents = texts.inputs.add(name="t", datatype="BYTES", shape=[2]).contents
    contents.bytes_contents.extend([b"a b", b""])
    assert split(texts)[1] == struct.pack("<I", 3) + b"a b" + struct.pack("<I", 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"raw_input_contents": [b"", b""]}, "raw_input_contents has 2 entries"),
        ({"raw_input_contents": [b"x"], "int_contents": [1]}, "has contents, and raw"),
        ({"datatype": "INT8", "int_contents": [300]}, "as INT8"),
        ({"datatype": "FP16"}, "FP16"),
        ({"parameter": "binary_data_size"}, "parameter of HTTP"),
    ],
)
def test_what_cannot_be_translated_is_refused(changes: dict[str, Any], said: str):
    request = CLASSES["ModelInferRequest"](raw_input_contents=changes.get("raw_input_contents", []))
    given = request.inputs.add(name="x", datatype=changes.get("datatype", "INT32"), shape=[1])
    given.contents.int_contents.extend(changes.get("int_contents", []))
    if "int_contents" not in changes:
        given.ClearField("contents")
    if "parameter" in changes:
        given.parameters[changes["parameter"]].int64_param = 1
    with pytest.raises(BadRequest, match=said):
        grpc_translation.body_of(request)


def test_a_reply_is_translated():
    head = {
        "model_name": "m",
        "model_version": "3",
        "id": "r",
        "parameters": {"non_finite": ["a", "b"]},
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": [1], "parameters": parameters}
            for name, parameters in (("a", {"binary_data_size": 4}), ("b", {"binary_data_size": 2}))
        ],
    }
    text = json.dumps(head).encode()
    response = CLASSES["ModelInferResponse"]()
    grpc_translation.fill_response(response, Reply({"json_bytes": len(text)}, text + b"abcdef"))
    sent = service_pb2.ModelInferResponse.FromString(response.SerializeToString())
    assert [*sent.raw_output_contents] == [b"abcd", b"ef"]
    assert (sent.model_name, sent.model_version, sent.id) == ("m", "3", "r")
    assert sent.parameters["non_finite"].string_param == "a, b"
    assert [(one.name, one.datatype, [*one.shape]) for one in sent.outputs] == [
        ("a", "FP32", [1]),
        ("b", "FP32", [1]),
    ]


def test_grpc_without_its_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "grpc", None)  # as Python notes that there is no such package
    said = refuse_to_start(Settings(home=tmp_path, grpc_port=8421))
    assert said is not None
    assert "pip install 'glasshouse[grpc]'" in said
