"""Answers of served models: against plain torch, inference jobs, and readers of the formats."""

import io
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load
from safetensors.torch import load_file

from engine.inference.blocks import Column
from engine.serving import responses
from engine.serving.requests import Asked
from tests.unit.engine.runs import run
from tests.unit.engine.served import Served, jsonl, served

LABELS = ["dog", "cat", "cow"]
WORDS = ["the cat sat", "a dog", "the the cat", "dog sat on a cat", "cat", "sat a dog on"]
LAYERS = [
    {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}, "inputs": ["text"]},
    {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 5, "batch_first": True}},
    {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 3}},
]
SAFETENSORS = "application/vnd.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Served:
    """Texts to classes with names; the LSTM has a value for each word."""
    directory = tmp_path_factory.mktemp("model")
    rows = [{"text": text, "label": LABELS[i % 3]} for i, text in enumerate(WORDS)]
    spec = {
        "kind": "train",
        "seed": 3,
        "network": {"layers": LAYERS},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "data": {
            "train": {"dataset": "ds_1"},
            "fields": {
                "text": {"type": "integer_sequence", "tokens": "words"},
                "label": {"type": "integer", "classes": LABELS},
            },
            "batch_size": 4,
        },
        "stop": {"steps": 3},
    }
    return served(directory / "run", spec, jsonl(directory, "train.jsonl", rows))


ROWS = [{"text": text} for text in ("the cat", "dog", "", "sat a dog on the")]


def by_hand(model: Served, text: str) -> dict[str, torch.Tensor]:
    """One row alone, with nothing of serving."""
    tokens = model.inputs.meaning.preparing.known.tokens["text"]
    ids = torch.tensor([tokens.ids(text.split())])
    batch = {"text": ids, "text.lengths": torch.tensor([ids.shape[1]])}
    with torch.inference_mode():
        return model.network(("fc", "lstm"))(batch)


def test_an_answer_in_json_is_what_torch_computes_row_by_row(model):
    body = {"rows": ROWS, "outputs": ["fc", "lstm"], "fields": ["value", "id", "prob", "top_k"]}
    head, content = model.answer({**body, "top_k": 2})
    assert head == {"content_type": "application/json"}
    found = json.loads(content)
    assert (found["model"], found["version"]) == ("m", 3)
    assert "non_finite" not in found
    outputs = found["outputs"]
    for number, row in enumerate(ROWS):
        if not row["text"]:
            assert outputs["lstm/value"][number] == outputs["lstm/id"][number] == []
            continue
        expected = by_hand(model, row["text"])
        scores = expected["fc"][0]
        torch.testing.assert_close(torch.tensor(outputs["fc/value"][number]), scores)
        assert outputs["fc/id"][number] == int(scores.argmax())
        assert outputs["fc/class"][number] == LABELS[int(scores.argmax())]
        chances = scores.softmax(-1).topk(2)
        assert outputs["fc/top_k"][number] == chances.indices.tolist()
        assert outputs["fc/top_k_class"][number] == [LABELS[i] for i in chances.indices.tolist()]
        torch.testing.assert_close(torch.tensor(outputs["fc/top_k_prob"][number]), chances.values)
        assert outputs["fc/prob"][number] == pytest.approx(float(chances.values[0]))
        steps = expected["lstm"][0]
        torch.testing.assert_close(torch.tensor(outputs["lstm/value"][number]), steps)
        assert outputs["lstm/id"][number] == steps.argmax(-1).tolist()


def test_an_answer_is_that_of_an_inference_job_over_an_uploaded_file(model, tmp_path):
    table = jsonl(tmp_path, "rows.jsonl", ROWS)
    asked = {"outputs": ["lstm", "fc"], "fields": ["value", "id", "prob"]}
    spec = {"kind": "infer", "job": "job_x", "data": {"dataset": "ds_1"}, **asked}
    more = {"trained_by": model.resolved, "checkpoint": {"dir": str(model.checkpoint)}}
    run(tmp_path / "run", spec, table, **more)
    expected = load_file(tmp_path / "run" / "artifacts" / "outputs.safetensors")
    head, content = model.answer({"rows": ROWS, **asked}, accept=SAFETENSORS)
    assert head == {"content_type": SAFETENSORS}
    found = load(content)
    assert found.keys() == expected.keys()
    for name, item in expected.items():
        assert found[name].dtype == item.numpy().dtype
        np.testing.assert_array_equal(found[name], item.numpy())
    path = tmp_path / "answer.safetensors"
    path.write_bytes(content)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"model": "m", "version": "3", "fc/classes": json.dumps(
            LABELS, separators=(",", ":")
        )}  # fmt: skip


def test_an_answer_in_npy_is_one_array(model):
    body = {"rows": ROWS, "fields": ["value"]}
    head, content = model.answer(body, accept="application/x-npy")
    assert head == {"content_type": "application/x-npy"}
    found = np.load(io.BytesIO(content), allow_pickle=False)
    expected = json.loads(model.answer(body)[1])["outputs"]["fc/value"]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    assert model.status({**body, "outputs": ["lstm"]}, accept="application/x-npy") == 406
    assert model.status({"rows": ROWS, "fields": ["top_k"]}, accept="application/x-npy") == 406
    one = {"rows": ROWS[:1], "outputs": ["lstm"], "fields": ["value"]}
    _, content = model.answer(one, accept="application/x-npy")
    found = np.load(io.BytesIO(content), allow_pickle=False)
    torch.testing.assert_close(torch.from_numpy(found), by_hand(model, "the cat")["lstm"])


def with_columns(
    model: Served, columns: dict[str, Column], asked: Asked
) -> tuple[dict[str, Any], bytes]:
    return responses.write(asked, columns, model.inputs, {"model": "m", "version": 3})


VALUES = torch.tensor([[1.5, math.nan, -math.inf], [math.inf, 0.1, -0.0]])


def test_nan_and_inf_are_texts_in_json_and_flagged(model):
    asked = model.read({"rows": ROWS[:2]})
    columns = {
        "fc/value": Column(VALUES),
        "fc/prob": Column(torch.tensor([0.5, 0.25])),
        "lstm/value": Column(VALUES, torch.tensor([0, 2])),
        "half/value": Column(torch.tensor([[math.nan]], dtype=torch.float16)),
        "double/value": Column(torch.tensor([1e300, -math.inf], dtype=torch.float64)),
    }
    _, content = with_columns(model, columns, asked)
    found = json.loads(content)
    rows = [[1.5, "NaN", "-Infinity"], ["Infinity", 0.1, -0.0]]
    assert found["outputs"] == {
        "fc/value": rows,
        "fc/prob": [0.5, 0.25],
        "lstm/value": [[], rows],
        "half/value": [["NaN"]],
        "double/value": [1e300, "-Infinity"],
    }
    assert found["non_finite"] == ["fc/value", "lstm/value", "half/value", "double/value"]


def test_nan_and_inf_are_flagged_in_every_form(model):
    columns = {"fc/value": Column(VALUES)}
    body = {"rows": ROWS[:2], "fields": ["value"]}
    for accept in (SAFETENSORS, "application/x-npy"):
        head, _ = with_columns(model, columns, model.read(body, accept=accept))
        assert head["headers"] == {"Glasshouse-Non-Finite": "fc/value"}
    asked = model.read(protocol(["a", "b"], [{"name": "fc"}]), protocol="v2")
    found = json.loads(with_columns(model, columns, asked)[1])
    assert found["parameters"] == {"non_finite": ["fc"]}
    assert found["outputs"][0]["data"] == [1.5, "NaN", "-Infinity", "Infinity", 0.1, -0.0]


# --- the Open Inference Protocol -------------------------------------------------------------


def protocol(texts: list[str], outputs: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    item = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    asked = {} if outputs is None else {"outputs": outputs}
    return {"inputs": [item], **asked, **more}


def decoded(head: dict[str, Any], content: bytes) -> dict[str, Any]:
    """Outputs by name as a client reads them, by the protocol's own words."""
    size = head.get("json_bytes", len(content))
    document, rest = json.loads(content[:size]), content[size:]
    dtypes = {"FP32": "<f4", "INT64": "<i8"}
    found: dict[str, Any] = {}
    for output in document["outputs"]:
        shape, datatype = output["shape"], output["datatype"]
        num_bytes = output.get("parameters", {}).get("binary_data_size")
        if num_bytes is None:
            values = output["data"]
        elif datatype == "BYTES":
            values, at = [], 0
            while at < num_bytes:
                (length,) = struct.unpack_from("<I", rest, at)
                values.append(rest[at + 4 : at + 4 + length].decode())
                at += 4 + length
        else:
            values = np.frombuffer(rest[:num_bytes], dtypes[datatype])
        rest = rest[num_bytes or 0 :]
        dtype = object if datatype == "BYTES" else dtypes[datatype]
        found[output["name"]] = np.array(values, dtype).reshape(shape)
    assert not rest
    return found


@pytest.mark.parametrize("is_binary", [False, True])
def test_outputs_of_the_protocol_are_those_of_predict(model, is_binary):
    texts = [row["text"] for row in ROWS]
    parameters = {"binary_data_output": is_binary}
    head, content = model.answer(protocol(texts, parameters=parameters, id="7"), protocol="v2")
    document = json.loads(content[: head.get("json_bytes", len(content))])
    assert {k: v for k, v in document.items() if k != "outputs"} == {
        "model_name": "m", "model_version": "3", "id": "7",
    }  # fmt: skip
    kind = "application/octet-stream" if is_binary else "application/json"
    assert head["content_type"] == kind
    expected = json.loads(model.answer({"rows": ROWS})[1])["outputs"]
    found = decoded(head, content)
    assert {*found} == {"fc/value", "fc/id", "fc/prob", "fc/class"} == {*expected}
    for name, item in found.items():
        np.testing.assert_array_equal(item, np.array(expected[name], item.dtype))


def test_each_output_may_have_its_own_form(model):
    texts = [row["text"] for row in ROWS]
    outputs = [
        {"name": "lstm", "parameters": {"binary_data": True}},
        {"name": "fc/top_k_class"},
        {"name": "fc/class", "parameters": {"binary_data": True}},
        {"name": "fc", "parameters": {"classification": 2}},
        {"name": "fc/top_k_prob", "parameters": {"binary_data": True}},
    ]
    body = protocol(texts, outputs, parameters={"top_k": 2})
    found = decoded(*model.answer(body, protocol="v2"))
    assert [*found] == [*(item["name"] for item in outputs), "lstm/lengths"]
    plain = json.loads(model.answer({"rows": ROWS, "top_k": 2, "outputs": ["fc", "lstm"]})[1])
    expected = plain["outputs"]
    assert found["lstm/lengths"].tolist() == [2, 1, 0, 5]
    assert found["lstm"].shape == (4, 5, 5)
    for number, steps in enumerate(expected["lstm/value"]):
        end = len(steps)
        np.testing.assert_array_equal(
            found["lstm"][number, :end], np.array(steps, np.float32).reshape(end, 5)
        )
        assert not found["lstm"][number, end:].any()
    assert found["fc/class"].tolist() == expected["fc/class"]
    assert found["fc/top_k_class"].tolist() == expected["fc/top_k_class"]
    np.testing.assert_array_equal(
        found["fc/top_k_prob"], np.array(expected["fc/top_k_prob"], np.float32)
    )
    for number, row in enumerate(found["fc"]):
        for place, text in enumerate(row):
            value, index, name = text.split(":")
            assert int(index) == expected["fc/top_k"][number][place]
            assert LABELS[int(index)] == name
            assert np.float32(value) == np.float32(expected["fc/value"][number][int(index)])


def test_classes_of_steps_end_with_their_rows(model):
    outputs = [{"name": "lstm", "parameters": {"classification": 1}}]
    body = protocol(["the cat", "dog"], outputs)
    found = decoded(*model.answer(body, protocol="v2"))
    assert found["lstm"].shape == (2, 2, 1)
    assert found["lstm"][1, 1, 0] == ""
    assert found["lstm"][1, 0, 0].count(":") == 1


def test_metadata_names_what_a_model_takes_and_returns(model):
    found = responses.metadata(model.inputs, "m", [1, 3])
    assert found == {
        "name": "m",
        "versions": ["1", "3"],
        "platform": "glasshouse_torch",
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [
            {"name": "fc/value", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "fc/id", "datatype": "INT64", "shape": [-1]},
            {"name": "fc/class", "datatype": "BYTES", "shape": [-1]},
            {"name": "fc/prob", "datatype": "FP32", "shape": [-1]},
        ],
    }
    found = decoded(*model.answer(protocol(["the cat", "dog"]), protocol="v2"))
    described = responses.metadata(model.inputs, "m", [1])["outputs"]
    assert [*found] == [item["name"] for item in described]
    for item in described:
        assert len(item["shape"]) == found[item["name"]].ndim
