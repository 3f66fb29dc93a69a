"""The request log of a replica: what is recorded of which request, and within which bounds."""

import hashlib
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from engine.serving import request_log
from engine.serving.asked import Asked
from engine.serving.request_log import MAX_WAITING, RequestRecorder
from glasshouse.errors import SpecFailed
from glasshouse.spec import RequestLog
from tests.unit.engine.served import Served, jsonl, served, uploaded
from tests.unit.engine.test_serving_requests import (
    CNN,
    FC,
    NPY,
    SAFETENSORS,
    archive,
    as_row,
    png,
    table_rows,
    train,
)
from worker.attempt.request_files import read_requests

TIMING = {"queue_ms": 0.5, "compute_ms": 1.5}
SECRET = 0.123456789
ROW = {"area": 80.5, "rooms": 3, "age": SECRET, "pair": [0.5, -1]}


@pytest.fixture(scope="module")
def houses(tmp_path_factory) -> Served:
    """Three columns side by side, pairs, and classes with names; ``joined`` has no weights."""
    directory = tmp_path_factory.mktemp("houses")
    table = jsonl(directory, "train.jsonl", table_rows(20, 0))
    fields = {
        "x": {"type": "dense", "columns": ["area", "rooms", "age"], "fill": "mean"},
        "both": {"type": "dense", "column": "pair", "scale": 0.3},
        "label": {"type": "integer", "column": "kind", "classes": ["house", "flat"]},
    }
    layers = [
        {"name": "joined", "type": "cat", "args": {"dim": 1}, "inputs": ["x", "both"]},
        {"name": "hidden", "type": "Linear", "args": {"out_features": 5}},
        FC,
    ]
    spec = train(layers, fields, normalize={"x": {"type": "standard"}})
    return served(directory / "run", spec, table)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class Clock:
    """A time that passes only when a test says so."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class Log:
    """A recorder, and what the worker reads of it."""

    def __init__(self, directory: Path, **spec: Any) -> None:
        self.directory, self.clock, self.spec = (
            directory,
            Clock(),
            RequestLog.model_validate_json(json.dumps(spec)),
        )
        self.files: list[dict[str, Any]] = []
        self.recorder = RequestRecorder(self.spec, directory, self.files.append, self.clock)

    def answer(self, model: Served, body: bytes | dict[str, Any], **head: Any) -> None:
        """Answer a request as a replica does."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        whole = {"protocol": "predict", "content_type": "application/json", **head}
        whole |= {"reference": "m@live"}
        sent = self.recorder.draw(whole, content)
        asked = model.read(content, **head)
        if sent is not None:
            self.recorder.answered(model.version, [(sent, asked, model.compute(asked), TIMING)])

    def read(self) -> list[dict[str, Any]]:
        """Write everything, and return what the worker reads; deletes the files as it does."""
        self.recorder.finish()
        found: list[dict[str, Any]] = []
        for file in self.files:
            path = self.directory / file["file"]
            found += read_requests(path, file["count"], file["crc32"])
            path.unlink()
        self.files.clear()
        return [{**one, **json.loads(one["details"])} for one in found]

    def only(self, model: Served, body: bytes | dict[str, Any], **head: Any) -> dict[str, Any]:
        """The record of one request."""
        self.answer(model, body, **head)
        (found,) = self.read()
        return found


def outputs_of(model: Served, asked: Asked) -> dict[str, Any]:
    return {name: column.values.tolist() for name, column in model.compute(asked).items()}


# --- values ----------------------------------------------------------------------------------


def test_rows_are_recorded_as_they_were_sent_with_the_answer(houses: Served, tmp_path: Path):
    rows = [ROW, {"area": 1, "rooms": 2, "age": None, "pair": [0, 1], "kind": "flat"}]
    found = Log(tmp_path).only(houses, {"rows": rows}, request_id="req_1")
    assert (found["model"], found["version"], found["status"], found["code"]) == ("m", 3, 200, None)
    assert (found["form"], found["num_rows"], found["asked"]) == ("rows", 2, ["fc"])
    assert (found["request_id"], found["reference"]) == ("req_1", "m@live")
    assert (found["queue_ms"], found["compute_ms"]) == (0.5, 1.5)
    assert found["inputs"] == {
        "area": [80.5, 1],
        "rooms": [3, 2],
        "age": [SECRET, None],
        "pair": [[0.5, -1], [0, 1]],
    }
    expected = outputs_of(houses, houses.read({"rows": rows}))
    classes = [["house", "flat"][number] for number in expected["fc/id"]]
    assert found["outputs"].pop("fc/class") == classes
    assert {name: np.float32(one).tolist() for name, one in found["outputs"].items()} == expected
    assert found["redacted"] == found["too_large"] == []


def test_all_forms_of_a_request_are_recorded_by_field(houses: Served, tmp_path: Path):
    x = np.array([[80, 3, np.nan], [1, 2, np.inf]], np.float32)
    both = np.array([[1, 2], [3, 4]], np.int64)
    wanted = {"x": [[80.0, 3.0, "NaN"], [1.0, 2.0, "Infinity"]], "both": [[1, 2], [3, 4]]}
    log = Log(tmp_path)
    tensors = save({"x": x, "both": both})
    assert log.only(houses, tensors, **SAFETENSORS)["inputs"] == wanted
    inputs = [
        {"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [80, 3, 5, 1, 2, 4]},
        {
            "name": "both",
            "shape": [2, 2],
            "datatype": "INT64",
            "parameters": {"binary_data_size": 32},
        },
    ]
    text = json.dumps({"inputs": inputs}).encode()
    head = {"protocol": "v2", "json_bytes": len(text)}
    found = log.only(houses, text + both.tobytes(), **head)
    assert found["inputs"] == {"x": [[80, 3, 5], [1, 2, 4]], "both": [[1, 2], [3, 4]]}
    body = {"inputs": {"both": [[1, 2]], "x": [[1, 2, 3]], "label": ["flat"]}}
    assert log.only(houses, body)["inputs"] == {"both": [[1, 2]], "x": [[1, 2, 3]]}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Served:
    """Gray images of 40 x 40 pixels: more numbers than are recorded of one row."""
    directory = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(4)
    images = [png(rng.integers(0, 256, (40, 40)).astype(np.uint8)) for _ in range(4)]
    table = uploaded(directory, "train.images.zip", archive(images), "images.zip")
    fields = {"image": {"type": "dense"}, "label": {"type": "integer"}}
    return served(directory / "run", train(CNN, fields), table)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_large_values_are_recorded_as_shape_and_digest(pictures: Served, tmp_path: Path):
    log = Log(tmp_path, max_request_bytes=2**20)
    images = np.random.default_rng(0).random((2, 1, 40, 40)).astype(np.float32)
    digests = [digest(one.tobytes()) for one in images]
    shape = {"shape": [1, 40, 40], "dtype": "float32"}
    found = log.only(pictures, npy(images), **NPY)
    assert found["inputs"] == {"image": [shape | {"sha256": one} for one in digests]}
    found = log.only(pictures, {"inputs": {"image": images.tolist()}, "outputs": ["conv", "fc"]})
    assert found["inputs"] == {"image": [shape | {"sha256": one} for one in digests]}
    assert found["outputs"]["conv/value"] == {"shape": [2, 3, 38, 38]}
    assert len(found["outputs"]["fc/value"]) == 2
    big = png((images[0, 0] * 255).astype(np.uint8))
    found = log.only(pictures, {"rows": [as_row(big)]})
    about = {"size_bytes": len(big), "sha256": digest(big)}
    assert found["inputs"] == {"image": [{"image": about}]}


def test_a_small_image_is_recorded_whole(pictures: Served, tmp_path: Path):
    row = as_row(png(np.zeros((40, 40), np.uint8)))
    assert Log(tmp_path).only(pictures, {"rows": [row]})["inputs"] == {"image": [row["image"]]}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Served:
    """Words; the output of the LSTM has steps."""
    directory = tmp_path_factory.mktemp("texts")
    fields = {
        "words": {"type": "integer_sequence", "column": "text", "tokens": "words"},
        "label": {"type": "integer", "dim": 2},
    }
    layers = [
        {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}, "inputs": ["words"]},
        {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 3, "batch_first": True}},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        FC,
    ]
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(["a cat", "the dog sat", "b"])]
    return served(directory / "run", train(layers, fields), jsonl(directory, "train.jsonl", rows))


def test_texts_are_recorded_as_texts_and_steps_by_row(texts: Served, tmp_path: Path):
    log = Log(tmp_path)
    rows = [{"text": "a dog"}, {"text": "data:image/none,cat sat the"}]
    found = log.only(texts, {"rows": rows, "outputs": ["lstm.0"]})
    assert found["inputs"] == {"text": [row["text"] for row in rows]}
    assert [len(one) for one in found["outputs"]["lstm.0/value"]] == [2, 3]
    assert log.only(texts, {"inputs": {"words": ["a cat"]}})["inputs"] == {"words": ["a cat"]}
    ids = np.array([[2, 3], [1, 0]])
    tensors = save({"words": ids, "words.lengths": np.array([2, 1])})
    found = log.only(texts, tensors, **SAFETENSORS)
    assert found["inputs"] == {"words": [[2, 3], [1, 0]], "words.lengths": [2, 1]}


# --- redaction -------------------------------------------------------------------------------


@pytest.mark.parametrize("glob", ["age", "a?e", "x"])
def test_a_redacted_column_is_recorded_in_no_form(houses: Served, tmp_path: Path, glob: str):
    log = Log(tmp_path, redact=[glob])
    rows = log.only(houses, {"rows": [ROW]})
    kept = {"both"} if glob == "x" else {"area", "rooms"}
    assert rows["inputs"].keys() == kept - {"both"} | {"pair"}
    assert "age" in rows["redacted"]
    x = [[80.5, 3, SECRET]]
    inputs = {"x": np.array(x, np.float32), "both": np.array([[1, 2]])}
    for found in (
        log.only(houses, {"inputs": {"x": x, "both": [[1, 2]]}}),
        log.only(houses, save(inputs), **SAFETENSORS),
    ):
        assert (found["inputs"], found["redacted"]) == ({"both": [[1, 2]]}, ["x"])
    assert str(SECRET)[:7] not in str(rows)


def test_outputs_from_which_a_redacted_value_can_be_read_are_not_recorded(
    houses: Served, tmp_path: Path
):
    log = Log(tmp_path, redact=["both"])
    asked = {"rows": [ROW], "outputs": ["joined", "hidden", "fc"], "fields": ["value"]}
    found = log.only(houses, asked)
    assert found["redacted"] == ["pair", "joined/value", "hidden/value"]
    assert found["outputs"].keys() == {"fc/value"}
    found = Log(tmp_path, redact=["kind"]).only(houses, asked)  # no input of the network
    assert found["outputs"].keys() == {"joined/value", "hidden/value", "fc/value"}


def test_an_output_of_the_network_that_a_field_reaches_without_weights_is_redacted(
    tmp_path: Path,
):
    table = jsonl(tmp_path, "train.jsonl", table_rows(8, 0))
    fields = {
        "pair": {"type": "dense"},
        "area": {"type": "dense", "column": "rooms"},
        "label": {"type": "integer", "column": "kind", "classes": ["house", "flat"]},
    }
    layers = [
        {"name": "two", "type": "Linear", "args": {"out_features": 2}, "inputs": ["pair"]},
        {"name": "fc", "type": "add", "inputs": ["two", "pair"]},
    ]
    model = served(
        tmp_path / "run", train(layers, {k: fields[k] for k in ("pair", "label")}), table
    )
    found = Log(tmp_path, redact=["pair"]).only(model, {"inputs": {"pair": [[1, 2]]}})
    assert found["outputs"] == {}
    assert found["redacted"] == ["pair", "fc/value", "fc/id", "fc/prob"]


def test_versions_without_a_redacted_field_are_refused(houses: Served, tmp_path: Path):
    recorder = Log(tmp_path, redact=["area", "roms"]).recorder
    with pytest.raises(SpecFailed, match=r"/request_log/redact/1: .*'roms'.*did you mean rooms\?"):
        recorder.check([houses.version])


# --- bounds ----------------------------------------------------------------------------------


def test_what_is_too_large_is_recorded_without_values(houses: Served, tmp_path: Path):
    log = Log(tmp_path, max_request_bytes=256)
    found = log.only(houses, {"rows": [ROW] * 5})
    assert (found["inputs"], found["num_rows"], found["too_large"]) == (
        None,
        5,
        ["inputs", "outputs"],
    )
    x, both = np.zeros((6, 3), np.uint8), np.full((6, 2), 255, np.uint8)
    small = save({"x": x, "both": both})
    assert len(small) <= 256
    found = log.only(houses, small, **SAFETENSORS)
    assert found["too_large"] == ["outputs"]
    assert found["inputs"]["both"] == both.tolist()


@pytest.mark.parametrize(("part", "other"), [("inputs", "outputs"), ("outputs", "inputs")])
def test_inputs_and_outputs_can_be_left_out(houses: Served, tmp_path: Path, part: str, other: str):
    found = Log(tmp_path, **{part: False}).only(houses, {"rows": [ROW]})
    assert found[part] is None
    assert found[other]
    assert found["too_large"] == []


def test_a_share_of_the_requests_is_recorded(houses: Served, tmp_path: Path):
    log = Log(tmp_path, share=0.25)
    drawn = [log.recorder.draw({}, b"{}") is not None for _ in range(4000)]
    assert 850 < sum(drawn) < 1150  # 1000, and 5.5 standard deviations
    assert log.recorder.counts == {"recorded": 0, "skipped": 0}


def test_requests_beyond_the_queue_of_the_recorder_are_counted(houses: Served, tmp_path: Path):
    log = Log(tmp_path)
    for _ in range(MAX_WAITING + 7):
        log.answer(houses, {"rows": [ROW]})
    ids = [one["id"] for one in log.read()]
    assert len(ids) == MAX_WAITING
    assert ids == sorted(ids)
    assert log.recorder.counts == {"recorded": MAX_WAITING, "skipped": 7}


def test_the_bytes_that_wait_are_bounded(houses: Served, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 3000)
    log = Log(tmp_path)
    body = json.dumps({"rows": [ROW]}).encode()
    for _ in range(100):
        log.answer(houses, body)
    assert 20 < len(log.read()) < 3000 / len(body) + 1
    assert log.recorder.counts["skipped"] > 60


def test_files_that_are_not_stored_yet_are_bounded(houses: Served, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 5000)
    log = Log(tmp_path)

    def write() -> int:
        log.answer(houses, {"rows": [ROW]})
        log.recorder.finish()
        return sum(path.stat().st_size for path in tmp_path.glob("requests-*"))

    sizes = [write() for _ in range(40)]
    assert max(sizes) <= 5000
    written = log.recorder.num_recorded
    assert log.recorder.num_skipped == 40 - written > 20
    assert len(log.read()) == written  # the worker deletes the files
    write()
    assert log.recorder.num_recorded == written + 1


def test_a_full_disk_does_not_fail_requests(houses: Served, tmp_path: Path):
    log = Log(tmp_path / "gone")
    log.answer(houses, {"rows": [ROW]})
    assert log.read() == []
    assert log.recorder.counts == {"recorded": 0, "skipped": 1}


def test_a_busy_replica_spends_one_percent_of_its_time(
    houses: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = Log(tmp_path)
    clock, record = log.clock, log.recorder._record

    def slow(finished: Any) -> dict[str, Any]:
        clock.at += 0.0004
        return record(finished)

    monkeypatch.setattr(log.recorder, "_record", slow)
    began, spent = clock.at, 0.0
    for _ in range(2000):
        for _ in range(3):
            log.answer(houses, {"rows": [ROW]})
        before = clock.at
        log.recorder.work(is_idle=False)
        assert clock.at - before < 0.0015  # what a request may wait for it
        spent += clock.at - before
        clock.at += 0.01
    assert 0.008 * (clock.at - began) < spent < 0.1 + 0.01 * (clock.at - began)
    log.recorder.finish()
    assert sum(log.recorder.counts.values()) == 6000
    assert log.recorder.num_recorded > 500


# --- refusals, damage ------------------------------------------------------------------------


def test_refused_requests_have_a_code_and_no_values(houses: Served, tmp_path: Path):
    log = Log(tmp_path)
    sent = log.recorder.draw({"reference": "m", "query": {"secret": "1"}}, b'{"rows": "secret"}')
    assert sent is not None
    log.recorder.refused(sent, houses.version, 422, "invalid_request")
    (found,) = log.read()
    assert (found["status"], found["code"], found["version"]) == (422, "invalid_request", 3)
    assert found["inputs"] is found["outputs"] is found["num_rows"] is None
    assert "secret" not in str(found)


def test_a_failure_of_recording_is_counted_and_quotes_nothing(
    houses: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    log = Log(tmp_path)
    sent = log.recorder.draw({}, b'{"inputs": {"secret": 1}}')
    asked = houses.read({"rows": [ROW]})
    assert sent is not None
    log.recorder.answered(houses.version, [(sent, asked, houses.compute(asked), TIMING)])
    assert log.read() == []
    assert log.recorder.num_skipped == 1
    error = capfd.readouterr().err
    assert "request log: KeyError" in error
    assert "secret" not in error


def test_a_damaged_file_is_refused(houses: Served, tmp_path: Path):
    log = Log(tmp_path)
    log.answer(houses, {"rows": [ROW]})
    log.recorder.finish()
    (file,) = log.files
    path, checksum = tmp_path / file["file"], file["crc32"]
    content = path.read_bytes()
    for damaged in (content[:-1], content.replace(b"rec_", b"rex_"), b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="the file is damaged"):
            read_requests(path, 1, checksum)
    path.write_bytes(content)
    with pytest.raises(ValueError, match="1 requests, not 2"):
        read_requests(path, 2, checksum)
    for wrong in (b"{}", b"[]", b"3", content.replace(b"rec_", b"rex_")):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="entry"):
            read_requests(path, 1, zlib.crc32(wrong))


def test_recording_changes_no_prediction(houses: Served, tmp_path: Path):
    asked = houses.read({"rows": [ROW] * 3, "outputs": ["hidden", "fc"]})
    before = houses.compute(asked)
    log = Log(tmp_path)
    log.answer(houses, {"rows": [ROW] * 3, "outputs": ["hidden", "fc"]})
    log.recorder.finish()
    after = houses.compute(asked)
    for name, column in before.items():
        assert column.values.numpy().tobytes() == after[name].values.numpy().tobytes(), name
