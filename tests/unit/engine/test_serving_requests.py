"""Requests to served models: the tensors that they become, and what is refused."""

import base64
import copy
import io
import json
import struct
import zipfile
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save

from engine.data.columns.fields import BadField
from engine.data.columns.loaded import LoadedSequence
from engine.data.sources.inline import inline_field
from engine.serving.asked import MAX_PROBLEMS
from engine.serving.requests import Asked, BadRequest, read
from tests.unit.engine.ragged import TEXTS
from tests.unit.engine.served import Served, batch_of, jsonl, served, uploaded

NPY = {"content_type": "application/x-npy"}
SAFETENSORS = {"content_type": "application/vnd.safetensors"}


def train(layers: list[dict[str, Any]], fields: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "seed": 3,
        "network": {"layers": layers},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "data": {"train": {"dataset": "ds_1"}, "fields": fields, "batch_size": 4, **data},
        "stop": {"steps": 3},
    }


FC = {"name": "fc", "type": "Linear", "args": {"out_features": 2}}


# --- tables ----------------------------------------------------------------------------------


def table_rows(num_rows: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "area": float(rng.normal(80, 30)),
            "rooms": int(rng.integers(1, 6)),
            "age": None if number % 3 == 1 else float(rng.normal(40, 9)),
            "pair": [float(rng.normal()), float(rng.normal())],
            "kind": ["flat", "house"][number % 2],
        }
        for number in range(num_rows)
    ]


@pytest.fixture(scope="module")
def houses(tmp_path_factory) -> Served:
    """Three columns side by side, filled and normalized; a column of pairs; classes with names."""
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


def assert_same(asked: Asked, expected: dict[str, torch.Tensor]) -> None:
    mine = batch_of(asked)
    assert mine.keys() <= expected.keys()
    for name, item in mine.items():
        assert item.dtype == expected[name].dtype, name
        assert torch.equal(item, expected[name]), name


def test_rows_give_the_tensors_that_an_uploaded_jsonl_file_gives(houses, tmp_path):
    rows = table_rows(7, 1)
    expected = houses.in_a_job(jsonl(tmp_path, "rows.jsonl", rows))
    assert_same(houses.read({"rows": rows}), expected)
    absent = [{key: value for key, value in row.items() if value is not None} for row in rows]
    assert_same(houses.read({"rows": absent}), expected)


def test_rows_give_the_tensors_that_an_uploaded_csv_file_gives(tmp_path):
    rows = [
        {key: value for key, value in row.items() if key != "pair"} for row in table_rows(12, 2)
    ]
    lines = [",".join(rows[0])]
    lines += [",".join("" if v is None else str(v) for v in row.values()) for row in rows]
    table = uploaded(tmp_path, "rows.csv", "\n".join(lines) + "\n", "csv")
    fields = {
        "x": {"type": "dense", "columns": ["rooms", "age"], "fill": 7.5, "scale": 0.1},
        "area": {"type": "dense", "fill": "median"},
        "label": {"type": "integer", "column": "kind", "classes": ["house", "flat"]},
    }
    flat = {"name": "flat", "type": "reshape", "args": {"shape": [-1, 1]}, "inputs": ["area"]}
    joined = {"name": "joined", "type": "cat", "args": {"dim": 1}, "inputs": ["x", "flat"]}
    model = served(tmp_path / "run", train([flat, joined, FC], fields), table)
    assert_same(model.read({"rows": rows}), model.in_a_job(table))


def test_rows_by_the_names_of_fields_and_with_nan_are_read(houses):
    rows = [{"area": 1, "rooms": 2, "age": "NaN", "both": [1, 2]}]
    again = [{"area": 1.0, "rooms": 2.0, "pair": [1.0, 2.0]}]
    first, second = batch_of(houses.read({"rows": rows})), batch_of(houses.read({"rows": again}))
    assert all(torch.equal(first[name], second[name]) for name in ("x", "both"))
    assert torch.equal(first["both"], torch.tensor([[1.0, 2.0]]) * 0.3)


def test_every_problem_of_rows_names_row_column_value_and_fix(houses):
    good = {"area": 1, "rooms": 2, "age": 3, "pair": [1, 2]}
    rows = [
        {**good, "area": "wide"},
        {**good, "pair": [1, 2, 3]},
        {**good, "pair": [[1], 2]},
        {key: value for key, value in good.items() if key != "pair"},
        {**good, "rooms": {"image": 3}},
        {**good, "age": True},
        {**good, "both": [3, 4]},
    ]
    found = houses.problems({"rows": rows})
    assert found == {
        "/rows/0/area": "row 0: column 'area' takes a number, not 'wide'",
        "/rows/1/pair": "row 1: the value of column 'pair' has shape [3]; the network takes [2]",
        "/rows/2/pair": "row 2: column 'pair' takes a regular nested list of numbers of shape [2]",
        "/rows/3/pair": "row 3: there is no value in column 'pair', and field 'both' has no fill: "
        "give one, or train with data.fields.both.fill",
        "/rows/4/rooms": 'row 4: an object is an image: {"image": {"base64": "…"}}',
        "/rows/6/both": "'both' and 'pair' are the same column: give one of them",
    }


def test_rows_of_another_kind_are_refused(houses):
    good = {"area": 1, "rooms": 2, "age": 3, "pair": [1, 2]}
    found = houses.problems({"rows": [3, {**good, "aera": 1}]})
    assert found["/rows/0"] == "a row is an object with a value for each column"
    assert found["/rows/1/aera"].endswith("did you mean area?")
    assert houses.problems({"rows": []}) == {"/rows": "rows is empty: give at least one row"}
    assert houses.problems({"rows": {}}) == {"/rows": "rows is not a list of objects"}
    found = houses.problems({"rows": [good] * 101})
    assert found == {"/rows": "the request has 101 rows: send at most 100 at once"}
    found = houses.problems({"rows": [{**good, "rooms": "Infinity"}]})
    assert found["/rows/0/rooms"].startswith("row 0: value 0 of column") or "inf" in str(found)


def test_a_body_that_has_neither_inputs_nor_rows_says_so(houses):
    for body in (b"{}", b"[]", b"3", b'{"row": {}}'):
        found = houses.problems(body)
        assert found[""].startswith('the body needs "inputs", nested lists by field, or "rows"')
        assert found[""].endswith("the model reads: x, both")
    found = houses.problems(b'{"inputs": {}, "rows": []}')
    assert found == {"": "the body has both inputs and rows: give one of them"}


# --- nested lists ----------------------------------------------------------------------------


def by_hand(houses: Served, x: np.ndarray) -> torch.Tensor:
    figures = houses.inputs.meaning.preparing.known.figures["x"]
    filled = np.where(np.isnan(x), figures.fill, x)
    return torch.from_numpy(((filled - figures.shift) / figures.divisor).astype(np.float32))


def test_inputs_are_filled_and_normalized_in_float64_but_not_scaled(houses):
    x = np.random.default_rng(5).normal(50, 20, (6, 3))
    both = np.random.default_rng(6).normal(size=(6, 2))
    x[2, 1] = np.nan
    lists = x.tolist()
    lists[2][1] = "NaN"
    found = batch_of(houses.read({"inputs": {"x": lists, "both": both.tolist()}}))
    assert torch.equal(found["x"], by_hand(houses, x))
    assert torch.equal(found["both"], torch.from_numpy(both.astype(np.float32)))


@pytest.mark.parametrize("bad", [True, None, "1.5", [1.0], {}])
def test_only_numbers_are_numbers(houses, bad):
    inputs = {"x": [[1, 2, 3]], "both": [[1, bad]]}
    if bad == "1.5":  # as an inference job reads it
        assert batch_of(houses.read({"inputs": inputs}))["both"][0, 1] == 1.5
        return
    found = houses.problems({"inputs": inputs})
    assert found["/inputs/both"] == (
        "input 'both' is not a regular nested list of numbers of shape [rows, 2]"
    )


def test_only_numbers_is_seen_with_any_names_around_them(houses):
    """The characters that are counted may also be those of names and escapes."""
    body = rb'{"inputs": {"x": [[1, 2, 3]], "both": [[1, null]]}, "outp\u0075ts": ["fc"]}'
    assert "/inputs/both" in houses.problems(body)
    body = rb'{"\u0069nputs": {"x": [[1, 2, 3]], "both": [[1, true]]}, "outputs": ["hidden"]}'
    assert "/inputs/both" in houses.problems(body)
    body = b'{"inputs": {"both": [[1, true]], "both": [[1, 2]], "x": [[1, 2, 3]]}}'
    assert houses.read(body).num_rows == 1  # the last of two equal keys counts


def test_all_problems_of_inputs_are_listed_at_once(houses):
    body = {
        "inputs": {"x": [[1, 2]], "bth": [[1, 2]]},
        "outputs": ["fc", "hiden", "x", "fc.0"],
        "fields": ["value", "probability"],
        "top_k": 2,
        "output": 3,
    }
    found = houses.problems(body)
    assert found["/output"].endswith("did you mean outputs?")
    assert found["/fields/1"].endswith("top_k; did you mean prob?")
    assert found["/top_k"].startswith("top_k (2) is the size of a field that fields does not name")
    assert found["/outputs/1"].endswith("did you mean hidden?")
    assert found["/outputs/2"] == "'x' is a field that the network reads, and not a layer"
    assert found["/outputs/3"] == "there is no 'fc.0'; there is: fc"
    assert found["/inputs/x"] == "input 'x' has shape [1, 2]; the network takes ['rows', 3]"
    assert found["/inputs/bth"].endswith("did you mean both?")
    assert found["/inputs"] == "the network needs the input 'both'"


def test_options_are_checked(houses):
    inputs = {"x": [[1, 2, 3]], "both": [[1, 2]]}
    for key, value, what in (
        ("top_k", 0, "top_k is 0: give an integer from 1 to 10,000"),
        ("top_k", True, "top_k is true: give an integer from 1 to 10,000"),
        ("top_k", 3, "top_k is 3, and the last axis of 'fc' has 2 entries: set at most 2"),
        ("outputs", [], "outputs is empty: name one, or leave it out"),
        ("outputs", "fc", "outputs is not a list of names"),
        ("fields", [3], "fields is not a list of names"),
    ):
        assert houses.problems({"inputs": inputs, key: value}) == {f"/{key}": what}
    found = houses.problems({"inputs": inputs, "outputs": ["fc", "fc"]})
    assert found == {"/outputs/1": "'fc' is listed twice: remove one"}
    found = houses.problems({"inputs": {**inputs, "x": [[1, 2, 3]] * 2}})
    detail = "all inputs need the same number of rows: 'x' has 2, 'both' has 1"
    assert found == {"/inputs": detail}
    found = houses.problems({"inputs": inputs}, query={"outputs": "fc"})
    detail = "the query has 'outputs', and options of a JSON body are in the body: remove it"
    assert found == {"/query/outputs": detail}


def test_the_defaults_are_those_of_an_inference_job(houses):
    inputs = {"x": [[1, 2, 3]], "both": [[1, 2]]}
    asked = houses.read({"inputs": inputs})
    assert (asked.outputs, asked.fields) == (("fc",), (("value", "id", "prob"),))
    asked = houses.read({"inputs": inputs, "outputs": ["hidden", "fc"], "top_k": 2})
    assert asked.fields == (("value", "top_k"), ("value", "id", "prob", "top_k"))
    assert houses.inputs.fields_of(asked, "hidden") == ("value", "top_k")


def test_only_fields_that_the_outputs_depend_on_are_needed(houses):
    """A label is never needed, and may be there."""
    assert houses.inputs.needed(("fc",)) == ("x", "both")
    asked = houses.read({"inputs": {"x": [[1, 2, 3]], "both": [[1, 2]], "label": ["flat"]}})
    assert [*asked.rows] == ["x", "both"]


# --- arrays ----------------------------------------------------------------------------------


def npy(array: np.ndarray, **more: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **more)
    return file.getvalue()


@pytest.mark.parametrize(
    ("dtype", "order"),
    [("<f4", "C"), (">f4", "C"), ("<f8", "F"), (">f8", "F"), ("<f2", "C"), ("i1", "F"),
     (">i8", "C"), ("<u4", "F"), ("?", "C")],
)  # fmt: skip
def test_arrays_of_any_byte_order_and_layout_mean_the_same_as_lists(digits, dtype, order):
    x = np.random.default_rng(1).integers(0, 2, (3, 1, 4, 6)).astype(dtype)
    body = npy(np.asarray(x, order=order))
    expected = torch.from_numpy(x.astype(np.float32))
    assert torch.equal(digits.read(body, **NPY).rows["image"].values, expected)
    native = x.astype(x.dtype.newbyteorder("="))
    body = save({"image": np.ascontiguousarray(native)})
    assert torch.equal(digits.read(body, **SAFETENSORS).rows["image"].values, expected)


def test_bytes_are_pixels_as_in_an_uploaded_archive(digits, photos, tmp_path):
    pixels = np.random.default_rng(3).integers(0, 256, (3, 1, 4, 6)).astype(np.uint8)
    for body, head in ((npy(pixels), NPY), (save({"image": pixels}), SAFETENSORS)):
        found = digits.read(body, **head).rows["image"].values
        assert torch.equal(found, torch.from_numpy(pixels).float() / 255)
    model, images = photos
    table = uploaded(tmp_path, "rows.images.zip", archive(images[:1]), "images.zip")
    decoded = np.asarray(Image.open(io.BytesIO(images[0])))
    asked = model.read(npy(decoded.transpose(2, 0, 1)[None]), **NPY)
    expected = model.in_a_job(table)["image"]  # normalized in float32, arrays in float64
    assert torch.allclose(batch_of(asked)["image"], expected, rtol=1e-6, atol=1e-6)


def test_arrays_are_filled_and_normalized_like_lists(houses):
    x = np.random.default_rng(5).normal(50, 20, (6, 3)).astype(np.float32)
    x[1, 2] = np.nan
    body = save({"x": x, "both": np.ones((6, 2), np.int32)})
    found = batch_of(houses.read(body, **SAFETENSORS))
    assert torch.equal(found["x"], by_hand(houses, x.astype(np.float64)))
    detail = "the network reads x, both, and application/x-npy has one array:"
    assert houses.problems(npy(x), **NPY) == {
        "/query/input": f"{detail} send application/vnd.safetensors"
    }


def test_options_of_arrays_are_in_the_query(digits):
    body = npy(np.zeros((2, 1, 4, 6), np.float32))
    query = {"outputs": "conv, fc", "fields": "id,top_k", "top_k": "2", "input": "image"}
    asked = digits.read(body, **NPY, query=query)
    assert (asked.outputs, asked.top_k) == (("conv", "fc"), 2)
    assert asked.fields == (("id", "top_k"),) * 2
    for text in ("1e3", "-1", "9" * 30, "123456789x", "", "٣"):
        found = digits.problems(body, **NPY, query={"top_k": text})
        assert "give an integer from 1 to 10,000" in found["/query/top_k"]
    found = digits.problems(body, **NPY, query={"topk": "3", "top_k": "x"})
    assert found["/query/topk"].endswith("did you mean top_k?")
    assert found["/query/top_k"] == 'top_k is "x": give an integer from 1 to 10,000'
    found = digits.problems(body, **NPY, query={"input": "imag"})
    assert found["/query/input"].endswith("did you mean image?")


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "it does not start with the magic of npy"),
        (b"\x93NUMPY\x01\x00\xff\xff", "it does not start with the magic of npy"),
        (b"\x93NUMPY\x01\x00\xff\xff" + bytes(20), "its header is damaged"),
        (npy(np.zeros((2, 2)))[:-1], "its shape [2, 2] has 32 bytes, and there are 31"),
        (npy(np.zeros(2, np.complex64)), "its dtype is <c8"),
        (npy(np.array(["a"])), "its dtype is <U1"),
        (npy(np.array([{}], object), allow_pickle=True), "its dtype is |O"),
        (npy(np.zeros(2, [("a", "f4")])), "does not describe one array of numbers"),
        (
            npy(np.zeros(2)).replace(b"(2,)", b"(9" + b"9" * 30 + b",)"),
            "more bytes than any memory",
        ),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(digits, body, what):
    (detail,) = digits.problems(body, **NPY).values()
    assert what in detail
    assert digits.status(body, **NPY) == 400


def safetensors_of(header: Any, content: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(dtype: str, shape: list[int], end: int | None = None, content: bytes = b"") -> bytes:
    offsets = {} if end is None else {"data_offsets": [0, end]}
    return safetensors_of({"image": {"dtype": dtype, "shape": shape, **offsets}}, content)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"123", "cut short"),
        (struct.pack("<Q", 2**63) + b"{}", "cut short"),
        (safetensors_of(b"[]"), "not an object"),
        (safetensors_of(b'{"a":1,"a":2}'), "a name is given twice"),
        (entry("F32", [1]), "no offsets"),
        (entry("F32", [1], 4), "after"),
        (entry("F32", [-1], 0), "shape"),
        (entry("F32", [2**40, 2**40], 0), "more bytes than any memory"),
        (entry("F32", [], 4, b"12345"), "after its last tensor"),
        (entry("F8_E4M3", [1], 1, b"1"), "is F8_E4M3"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(digits, body, what):
    (detail,) = digits.problems(body, **SAFETENSORS).values()
    assert what in detail


def test_media_types_are_checked(digits):
    body = {"inputs": {"image": np.zeros((1, 1, 4, 6)).tolist()}}
    assert digits.status(body, content_type="application/x-www-form-urlencoded") == 415
    assert digits.status(body, accept="text/csv") == 406
    assert digits.status(body, accept="application/json;q=0") == 406
    for accept, found in (
        (None, "application/json"),
        ("*/*", "application/json"),
        ("application/*;q=0.5, application/vnd.safetensors", "application/vnd.safetensors"),
        ("application/x-npy;q=0.1, application/json;q=0.2", "application/json"),
    ):
        assert digits.read(body, accept=accept).form.media_type == found
    detail = digits.problems(body, accept="application/x-npy")[""]
    assert detail.startswith("application/x-npy has one tensor, and the request returns fc/value,")
    content_type = "application/JSON; charset=utf-8"
    assert digits.read(body, content_type=content_type).num_rows == 1


def test_requests_of_any_form_can_be_computed_together(houses):
    """Rows, lists, arrays and tensors become the same fields."""
    x, both = np.array([[80.0, 2.0, np.nan]]), np.array([[1.0, 2.0]])
    row = {"area": 80, "rooms": 2, "age": None, "pair": (both / 0.3).tolist()[0]}
    given = [
        tensor("x", x, "FP64", data=[80, 2, "NaN"]),
        tensor("both", both, "FP64", data=[1, 2]),
    ]
    requests = [
        houses.read({"rows": [row, row]}),
        houses.read({"inputs": {"x": [[80, 2, "NaN"]], "both": both.tolist()}}),
        houses.read(save({"x": x, "both": both}), **SAFETENSORS),
        houses.read({"inputs": given, "outputs": [
            {"name": name} for name in ("fc", "fc/id", "fc/prob")
        ]}, protocol="v2"),
    ]  # fmt: skip
    assert len({(item.outputs, item.fields, item.top_k) for item in requests}) == 1
    found = houses.version.compute(requests)
    assert [len(item["fc/value"].values) for item in found] == [2, 1, 1, 1]
    for item in found[1:]:
        assert torch.equal(item["fc/value"].values, found[1]["fc/value"].values)
        torch.testing.assert_close(item["fc/value"].values, found[0]["fc/value"].values[:1])


# --- images ----------------------------------------------------------------------------------


def png(pixels: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def archive(images: list[bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for number, data in enumerate(images):
            made.writestr(f"{'ab'[number % 2]}/{number:02d}.png", data)
    return file.getvalue()


def as_row(data: bytes) -> dict[str, Any]:
    return {"image": {"image": {"base64": base64.b64encode(data).decode()}}}


CNN = [
    {"name": "conv", "type": "Conv2d", "args": {"out_channels": 3, "kernel_size": 3}},
    {"name": "flat", "type": "Flatten"},
    FC,
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Served:
    """Gray images of 4 x 6 pixels, not normalized."""
    directory = tmp_path_factory.mktemp("digits")
    rng = np.random.default_rng(4)
    images = [png(rng.integers(0, 256, (4, 6)).astype(np.uint8)) for _ in range(8)]
    table = uploaded(directory, "train.images.zip", archive(images), "images.zip")
    fields = {"image": {"type": "dense"}, "label": {"type": "integer"}}
    return served(directory / "run", train(CNN, fields), table)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> tuple[Served, list[bytes]]:
    """Color images, normalized by channel."""
    directory = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(4)
    images = [png(rng.integers(0, 256, (4, 6, 3)).astype(np.uint8)) for _ in range(8)]
    table = uploaded(directory, "train.images.zip", archive(images), "images.zip")
    fields = {"image": {"type": "dense"}, "label": {"type": "integer"}}
    spec = train(CNN, fields, normalize={"image": {"type": "standard"}})
    return served(directory / "run", spec, table), images


def test_images_give_the_tensors_of_an_uploaded_archive(photos, tmp_path):
    model, images = photos
    table = uploaded(tmp_path, "rows.images.zip", archive(images[:6]), "images.zip")
    expected = model.in_a_job(table)["image"]
    order = [*range(0, 6, 2), *range(1, 6, 2)]  # an archive is sorted by class
    rows = [as_row(images[number]) for number in order]
    assert torch.equal(batch_of(model.read({"rows": rows}))["image"], expected)
    url = "data:image/png;base64," + base64.b64encode(images[order[0]]).decode()
    assert torch.equal(batch_of(model.read({"rows": [{"image": url}]}))["image"], expected[:1])


def test_color_becomes_gray_for_a_network_of_gray_images(digits):
    pixels = np.random.default_rng(3).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    found = batch_of(digits.read({"rows": [as_row(png(pixels))]}))["image"]
    gray = np.asarray(Image.fromarray(pixels).convert("L"))
    assert torch.equal(found, torch.from_numpy(gray.copy())[None, None].float() / 255)


def test_images_that_do_not_fit_are_refused(digits):
    wide = png(np.zeros((4, 7), np.uint8))
    found = digits.problems({"rows": [as_row(wide)]})
    assert found == {
        "/rows/0/image": "row 0: column 'image': the image has 4 x 7 pixels, and 4 x 6 "
        "(height x width) are read: resize it"
    }
    good = png(np.zeros((4, 6), np.uint8))
    for data, what in (
        (good[:-20], "is no image that can be read"),
        (b"GIF89a" + bytes(50), "it is none of JPEG, PNG"),
        (b"", "it is none of JPEG, PNG"),
        (png(np.zeros((4, 6), np.uint8), "BMP"), "it is none of JPEG, PNG"),
    ):
        assert what in digits.problems({"rows": [as_row(data)]})["/rows/0/image"]
    rows: list[Any] = [
        {"image": {"image": {"base64": "*"}}},
        {"image": {"image": {}}},
        {"image": 3},
    ]
    found = digits.problems({"rows": [*rows, {"image": "data:image/png,abc"}]})
    assert "is not base64" in found["/rows/0/image"]
    assert "an object is an image" in found["/rows/1/image"]
    assert "has shape []; the network takes [1, 4, 6]" in found["/rows/2/image"]
    assert "needs base64" in found["/rows/3/image"]
    mixed = [as_row(good), {"image": np.zeros((4, 6)).tolist()}]
    found = digits.problems({"rows": mixed})
    assert "has images and numbers" in found["/rows/1/image"]


def test_a_picture_of_a_billion_pixels_is_not_decoded(digits):
    """Its header alone says so: the pixels need not be there."""
    head = struct.pack(">IIBBBBB", 40_000, 30_000, 8, 0, 0, 0, 0)
    chunk = b"IHDR" + head
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(head)) + chunk
    data += struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT" + bytes(8)
    detail = digits.problems({"rows": [as_row(data)]})["/rows/0/image"]
    assert "no image that can be read" in detail or "30,000 x 40,000" in detail


# --- sequences -------------------------------------------------------------------------------

WORDS = ["the cat sat", "a dog", "the the cat", "dog sat on a cat", "cat", "sat a dog on"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Served:
    """Words, of which three count at most; an LSTM, whose output has steps and leaves."""
    directory = tmp_path_factory.mktemp("texts")
    rows = [{"text": text, "label": number % 2} for number, text in enumerate(WORDS)]
    fields = {
        "words": {"type": "integer_sequence", "column": "text", "tokens": "words"},
        "label": {"type": "integer", "dim": 2},
    }
    layers = [
        {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}, "inputs": ["words"]},
        {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 5, "batch_first": True}},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        FC,
    ]
    spec = train(layers, fields, sequence={"max_length": 3})
    return served(directory / "run", spec, jsonl(directory, "train.jsonl", rows))


def test_texts_are_split_looked_up_and_truncated_as_in_training(texts, tmp_path):
    rows = [{"text": text} for text in ["cat dog zebra the a", "", "dog", "cat  sat"]]
    expected = texts.in_a_job(jsonl(tmp_path, "rows.jsonl", rows))
    assert expected["words.lengths"].tolist() == [3, 0, 1, 2]
    assert expected["words"][0, 2] == 1  # a zebra is not in the vocabulary
    assert_same(texts.read({"rows": rows}), expected)
    assert_same(texts.read({"inputs": {"words": [row["text"] for row in rows]}}), expected)
    protocol = {"name": "words", "shape": [4], "datatype": "BYTES"}
    body = {"inputs": [{**protocol, "data": [row["text"] for row in rows]}]}
    assert_same(texts.read(body, protocol="v2"), expected)


def test_leaves_of_layers_are_outputs(texts):
    asked = texts.read({"inputs": {"words": ["cat"]}, "outputs": ["lstm.0", "lstm"]})
    assert asked.fields == (("value",), ("value",))
    assert texts.inputs.steps == dict.fromkeys(("emb", "lstm", "lstm.0"), "words")
    found = texts.problems({"inputs": {"words": ["cat"]}, "outputs": ["lstm.1.0", "lstm.2"]})
    detail = "the first axis of 'lstm.1.0' is not the rows: ask for another layer"
    assert found["/outputs/0"] == detail
    assert found["/outputs/1"].startswith("there is no 'lstm.2'; there is: lstm.0, lstm.1.0")


def test_integers_of_sequences_are_checked(texts):
    dim = texts.inputs.shapes["words"].dim
    assert batch_of(texts.read({"inputs": {"words": [[2, 3], []]}}))["words"].tolist() == [
        [2, 3],
        [0, 0],
    ]
    found = texts.problems({"inputs": {"words": [[2], [dim]]}})
    assert found == {"/inputs/words": f"row 1: input 'words' takes integers in [0, {dim})"}
    found = texts.problems({"rows": [{"text": 3}, {"text": None}, {"text": [dim]}]})
    assert found["/rows/1/text"].startswith("row 1: there is no value in column 'text'")
    found = texts.problems({"rows": [{"text": "a"}, {"text": [dim]}]})
    assert found == {"/rows/1/text": f"row 1: input 'words' takes integers in [0, {dim})"}


@pytest.mark.parametrize(
    "rows",
    [
        [[2, 3, 2]],
        [[2], [], [3, 3]],
        [[]],
        [[], []],
        [[2.0, 3], [3]],
        [[2.5]],
        [[-1]],
        [[2**70]],
        [[2], 3],
        [[[2]], [[3]]],
        [[2, [3]]],
        [],
    ],
)
def test_lists_of_integers_are_read_at_once_as_one_by_one(texts, rows):
    shape = texts.inputs.shapes["words"]

    def read(only_numbers: bool) -> object:
        try:
            found = inline_field("words", rows, shape, only_numbers=only_numbers)
        except BadField as problem:
            return str(problem)
        assert isinstance(found, LoadedSequence)
        assert (found.is_integer, found.padding_value) == (True, shape.padding_value)
        return [x.tolist() for x in (found.values, found.starts, found.lengths)]

    assert read(only_numbers=True) == read(only_numbers=False)


RAGGED = [
    {"ids": row, "steps": [[i / 10, 1.0] for i in row], "pairs": [[i, i / 3] for i in set(row)],
     "label": len(row) % 2}
    for row in TEXTS
]  # fmt: skip


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> Served:
    """Every kind of list per row at once."""
    directory = tmp_path_factory.mktemp("ragged")
    fields = {
        "ids": {"type": "integer_sequence", "dim": 10},
        "steps": {"type": "dense_sequence", "dim": 2, "scale": 0.7, "fill": 0.25},
        "pairs": {"type": "sparse_float", "dim": 10},
        "places": {"type": "sparse_binary", "dim": 10, "column": "ids"},
        "label": {"type": "integer", "dim": 2},
    }
    bag = {"embedding_dim": 3, "mode": "sum"}
    layers = [
        {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}, "inputs": ["ids"]},
        {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
        {"name": "gru", "type": "GRU", "args": {"hidden_size": 3, "batch_first": True},
         "inputs": ["steps"]},
        {"name": "last", "type": "SequencePool", "args": {"mode": "last"}},
        {"name": "bag", "type": "EmbeddingBag", "args": bag, "inputs": ["pairs"]},
        {"name": "set", "type": "EmbeddingBag", "args": bag, "inputs": ["places"]},
        {"name": "joined", "type": "cat", "args": {"dim": 1},
         "inputs": ["pool", "last", "bag", "set"]},
        FC,
    ]  # fmt: skip
    spec = train(layers, fields, normalize={"steps": {"type": "standard"}})
    return served(directory / "run", spec, jsonl(directory, "train.jsonl", RAGGED))


def test_lists_give_the_tensors_that_an_uploaded_file_gives(ragged, tmp_path):
    rows = [{**row, "steps": [["NaN", 2], *row["steps"]]} for row in RAGGED[:5]]
    asked = ragged.read({"rows": rows})
    assert_same(asked, ragged.in_a_job(jsonl(tmp_path, "rows.jsonl", rows)))
    assert {*batch_of(asked)} >= {"ids", "ids.lengths", "steps", "pairs.values", "places.lengths"}


def padded(rows: list[Any], item: tuple[int, ...], dtype: Any) -> np.ndarray:
    made = np.full((len(rows), max(map(len, rows)), *item), 7, dtype)
    for number, row in enumerate(rows):
        if row:
            made[number, : len(row)] = row
    return made


def test_padded_arrays_with_lengths_mean_the_same_as_lists(ragged):
    rows = RAGGED[:6]
    lists = {
        "ids": [row["ids"] for row in rows],
        "places": [row["ids"] for row in rows],
        "steps": [row["steps"] for row in rows],
        "pairs": [row["pairs"] for row in rows],
    }
    arrays = {
        "ids": padded(lists["ids"], (), np.int64),
        "places": padded(lists["places"], (), np.int32),
        "steps": padded(lists["steps"], (2,), np.float64),
        "pairs": padded(lists["pairs"], (2,), np.float64),
    }
    lengths = {f"{k}.lengths": np.array([len(row) for row in v]) for k, v in lists.items()}
    expected = dict(batch_of(ragged.read({"inputs": lists})))
    assert_same(ragged.read(save({**arrays, **lengths}), **SAFETENSORS), expected)
    wrong = {**arrays, **lengths, "ids.lengths": np.array([9, 1, 1, 1, 1, 1])}
    found = ragged.problems(save(wrong), **SAFETENSORS)
    assert found == {"/ids": "'ids.lengths' has 9 in row 0, and 'ids' has 7 steps"}
    found = ragged.problems(save({**arrays, "ids": np.zeros((6, 2, 2))}), **SAFETENSORS)
    assert found == {"/ids": "input 'ids' has shape [6, 2, 2]; the network takes ['rows', 'steps']"}


def test_steps_of_rows_are_checked(ragged):
    rows = [{**RAGGED[0], "steps": [[1, 2], [3]]}, {**RAGGED[0], "steps": 3}]
    found = ragged.problems({"rows": rows})
    assert found["/rows/0/steps"].startswith("row 0: column 'steps' takes a regular nested list")
    assert found["/rows/1/steps"].startswith(
        "row 1: column 'steps' takes a list of steps, each of 2"
    )
    found = ragged.problems({"rows": [{**RAGGED[0], "steps": [[1, "Infinity"]]}]})
    assert "normalised, which takes finite values" in found["/rows/0/steps"]
    found = ragged.problems({"rows": [{**RAGGED[0], "pairs": [[10, 1]]}]})
    assert found["/rows/0/pairs"].endswith("takes places in [0, 10)")


# --- the Open Inference Protocol -------------------------------------------------------------


def tensor(name: str, array: np.ndarray, datatype: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [*array.shape], "datatype": datatype, **more}


def test_tensors_in_json_and_in_binary_mean_the_same(houses):
    x = np.random.default_rng(5).normal(50, 20, (3, 3))
    both = np.arange(6, dtype=np.int16).reshape(3, 2)
    expected = {"x": by_hand(houses, x), "both": torch.from_numpy(both).float()}
    given = [
        tensor("x", x, "FP64", data=x.tolist()),
        tensor("both", both, "INT16", data=both.reshape(-1).tolist()),
    ]
    assert_same(houses.read({"inputs": given}, protocol="v2"), expected)
    given = [
        tensor("x", x, "FP64", parameters={"binary_data_size": x.nbytes}),
        tensor("both", both, "INT16", parameters={"binary_data_size": both.nbytes}),
    ]
    text = json.dumps({"inputs": given}).encode()
    body = text + x.tobytes() + both.tobytes()
    assert_same(houses.read(body, protocol="v2", json_bytes=len(text)), expected)


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [("BOOL", "?"), ("UINT8", "u1"), ("UINT16", "<u2"), ("UINT32", "<u4"), ("UINT64", "<u8"),
     ("INT8", "i1"), ("INT16", "<i2"), ("INT32", "<i4"), ("INT64", "<i8"), ("FP16", "<f2"),
     ("FP32", "<f4"), ("FP64", "<f8"), ("BF16", None)],
)  # fmt: skip
def test_every_datatype_is_read(digits, datatype, dtype):
    x = np.random.default_rng(1).integers(0, 2, (2, 1, 4, 6))
    divisor = 255 if datatype == "UINT8" else 1  # as a column of bytes
    expected = {"image": torch.from_numpy(x).float() / divisor}
    content = (
        torch.from_numpy(x).bfloat16().view(torch.int16).numpy().tobytes()
        if dtype is None
        else x.astype(dtype).tobytes()
    )
    item = tensor("image", x, datatype, parameters={"binary_data_size": len(content)})
    text = json.dumps({"inputs": [item]}).encode()
    asked = digits.read(text + content, protocol="v2", json_bytes=len(text))
    assert_same(asked, expected)
    values: list[Any] = (x > 0).tolist() if datatype == "BOOL" else x.tolist()
    body = {"inputs": [tensor("image", x, datatype, data=values)]}
    assert_same(digits.read(body, protocol="v2"), expected)


def test_lengths_are_an_input_of_the_protocol(texts):
    ids = np.array([[2, 3, 9], [4, 9, 9]])
    given = [
        tensor("words", ids, "INT64", data=[[2, 3, 9], [4, 9, 9]]),
        {"name": "words.lengths", "shape": [2], "datatype": "INT64", "data": [2, 1]},
    ]
    asked = texts.read({"inputs": given}, protocol="v2")
    assert batch_of(asked)["words"].tolist() == [[2, 3], [4, 0]]
    assert batch_of(asked)["words.lengths"].tolist() == [2, 1]


def test_what_tritonclient_sends_is_read(digits):
    """Bytes of tritonclient 2.73.0, ``InferenceServerClient.generate_request_body``."""
    x = np.linspace(0, 1, 24, dtype=np.float32).reshape(1, 1, 4, 6)
    text = (
        b'{"id":"7","inputs":[{"name":"image","shape":[1,1,4,6],"datatype":"FP32","parameters":'
        b'{"binary_data_size":96}}],"outputs":[{"name":"fc/value","parameters":'
        b'{"binary_data":true}},{"name":"fc","parameters":{"classification":2,"binary_data":true}}]}'
    )
    asked = digits.read(text + x.tobytes(), protocol="v2", json_bytes=len(text))
    assert_same(asked, {"image": torch.from_numpy(x)})
    assert [item.num_classes for item in asked.form.tensors] == [None, 2]
    text = (
        b'{"inputs":[{"name":"image","shape":[1,1,4,6],"datatype":"FP32","parameters":'
        b'{"binary_data_size":96}}],"parameters":{"binary_data_output":true}}'
    )
    asked = digits.read(text + x.tobytes(), protocol="v2", json_bytes=len(text))
    assert all(item.is_binary for item in asked.form.tensors)


GOOD = {"name": "image", "shape": [1, 1, 4, 6], "datatype": "FP32", "data": [0] * 24}


@pytest.mark.parametrize(
    ("changes", "pointer", "what"),
    [
        ({"shape": [2, 1, 4, 6]}, "/inputs/0", "has 48 values, and data 24"),
        ({"shape": [1, 1, -4, 6]}, "/inputs/0", "shape is not a list of at most 16 sizes"),
        ({"shape": [2**61, 2**61]}, "/inputs/0", "values, and data 24"),
        ({"shape": [24]}, "/inputs/0", "has shape [24]; the network takes"),
        ({"datatype": "FLOAT"}, "/inputs/0", "datatype is FLOAT; there are: BOOL"),
        ({"datatype": "INT32", "data": [0.5] * 24}, "/inputs/0", "data has 0.5, which is no INT32"),
        ({"datatype": "UINT8", "data": [256] * 24}, "/inputs/0", "outside [0, 255]"),
        ({"data": ["a"] * 24}, "/inputs/0", "data has 'a', which is no FP32"),
        ({"data": [True] * 24}, "/inputs/0", "data has True, which is no FP32"),
        ({"data": [None] * 24}, "/inputs/0", "data has None, which is no FP32"),
        ({"data": 3}, "/inputs/0", "data is not a list"),
        ({"datatype": "BYTES", "shape": [24], "data": ["a"] * 24}, "/inputs/0", "it has texts"),
        ({"name": "imag"}, "/inputs/0", "did you mean image?"),
        ({"parameters": {"binary_data_size": 96}}, "/inputs/0/parameters/binary_data_size",
         "0 bytes are left"),
        ({"parameters": {"shared_memory_region": "a"}}, "/inputs/0/parameters/shared_memory_region",
         "there is no key"),
    ],
)  # fmt: skip
def test_inputs_of_the_protocol_that_do_not_fit_are_refused(digits, changes, pointer, what):
    found = digits.problems({"inputs": [{**GOOD, **changes}]}, protocol="v2")
    assert what in found[pointer]


@pytest.mark.parametrize(
    ("outputs", "pointer", "what"),
    [
        ([{"name": "fcc"}], "/outputs/0/name", "did you mean fc?"),
        ([{"name": "fc/valeu"}], "/outputs/0/name", "did you mean value?"),
        ([{"name": "fc"}, {"name": "fc"}], "/outputs/1", "listed twice"),
        ([{"name": "fc/lengths"}], "/outputs/0/name", "one value for each row"),
        ([{"name": "conv/class"}], "/outputs/0/name", "have no names"),
        ([{"name": "fc", "parameters": {"classification": 3}}],
         "/outputs/0/parameters/classification", "has 2 entries: set at most 2"),
        ([{"name": "fc/id", "parameters": {"classification": 1}}],
         "/outputs/0/parameters/classification", "ask for fc/value"),
        ([{"name": "fc", "parameters": {"binary_data": 1}}],
         "/outputs/0/parameters/binary_data", "is not true or false"),
        ({}, "/outputs", "is not a list"),
        ([3], "/outputs/0", "an object with a name"),
    ],
)  # fmt: skip
def test_outputs_of_the_protocol_that_do_not_exist_are_refused(digits, outputs, pointer, what):
    found = digits.problems({"inputs": [GOOD], "outputs": outputs}, protocol="v2")
    assert what in found[pointer]


@pytest.mark.parametrize(
    ("parameters", "priority", "timeout_s"),
    [
        ({}, None, None),
        ({"priority": 0, "timeout": 0}, None, None),
        ({"priority": 1}, 999, None),
        ({"priority": 2000}, -1000, None),
        ({"timeout": 1500}, None, 0.0015),
    ],
)
def test_a_request_of_the_protocol_has_a_priority_and_a_timeout(
    digits, parameters, priority, timeout_s
):
    asked = digits.read({"inputs": [GOOD], "parameters": parameters}, protocol="v2")
    assert (asked.priority, asked.timeout_s) == (priority, timeout_s)


@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None, 2**64])
@pytest.mark.parametrize("key", ["priority", "timeout"])
def test_other_priorities_and_timeouts_are_refused(digits, key, value):
    found = digits.problems({"inputs": [GOOD], "parameters": {key: value}}, protocol="v2")
    assert "not an integer from 0 to" in found[f"/parameters/{key}"]


def test_sizes_of_binary_tensors_must_add_up(digits):
    text = json.dumps({"inputs": [{**GOOD, "data": [0] * 24}]}).encode()
    found = digits.problems(text + bytes(5), protocol="v2", json_bytes=len(text))
    assert found == {
        "/inputs": "the binary_data_size of all inputs is 0, and after the JSON there are 5 bytes"
    }
    for size in (-1, 2**70, len(text) + 1, "3"):
        assert digits.status(text, protocol="v2", json_bytes=size) == 400
    assert digits.status(text, protocol="v2", json_bytes=3) == 400
    twice = {"inputs": [GOOD, GOOD]}
    assert digits.problems(twice, protocol="v2")["/inputs/1"] == (
        "'image' is given twice: remove one"
    )


# --- hostile requests ------------------------------------------------------------------------


def fits_or_is_refused(model: Served, head: dict[str, Any], body: bytes) -> None:
    try:
        asked = read(head, body, model.inputs, 10)
    except BadRequest as error:
        refusal = error
    else:
        batch_of(asked)
        return
    assert refusal.problems
    assert refusal.status in {400, 406, 413, 415, 422}


def good_requests(houses: Served, texts: Served, digits: Served) -> list[Any]:
    image = np.zeros((1, 1, 4, 6), np.float32)
    v2 = json.dumps(
        {
            "inputs": [
                {**GOOD, "data": None, "parameters": {"binary_data_size": 96}},
            ],
            "outputs": [{"name": "fc", "parameters": {"classification": 1}}],
        }
    ).encode()
    rows = {"rows": [{"area": 1, "rooms": 2, "age": None, "pair": [1, 2.5]}], "top_k": 1}
    words = {"name": "words", "shape": [2], "datatype": "BYTES", "data": ["cat", "a dog"]}
    return [
        (houses, {"protocol": "predict"}, json.dumps(rows).encode()),
        (houses, {}, b'{"inputs":{"x":[[1,2,3]],"both":[[1,"NaN"]]},"fields":["value","id"]}'),
        (texts, {"protocol": "v2"}, json.dumps({"inputs": [words]}).encode()),
        (texts, {}, b'{"inputs":{"words":["cat sat",[2,3],[]]},"outputs":["lstm"]}'),
        (digits, {"protocol": "v2", "json_bytes": len(v2)}, v2 + image.tobytes()),
        (digits, {**NPY, "query": {"outputs": "fc"}}, npy(image)),
        (digits, SAFETENSORS, save({"image": image})),
        (digits, {}, json.dumps({"rows": [as_row(png(np.zeros((4, 6), np.uint8)))]}).encode()),
    ]


PIECES = [
    b"", b"null", b"true", b"-1", b"1e400", b"99999999999999999999", b'"NaN"', b"[", b"]", b"{",
    b"}", b"[]", b"{}", b'"', b"\\", b"\xff", b"\x00", b"[" * 1500, b'"\\ud800"', b"1.5", b",",
]  # fmt: skip


@pytest.mark.long
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_changed_request_fits_or_is_refused(data, houses, texts, digits):
    model, head, body = data.draw(st.sampled_from(good_requests(houses, texts, digits)))
    for _ in range(data.draw(st.integers(1, 3))):
        first = data.draw(st.integers(0, len(body)))
        last = data.draw(st.integers(first, min(len(body), first + 12)))
        piece = data.draw(st.sampled_from(PIECES) | st.binary(max_size=4))
        body = body[:first] + piece + body[last:]
    size = data.draw(st.sampled_from([None, 0, -1, len(body), 2**70, 50]))
    fits_or_is_refused(model, head, body)
    fits_or_is_refused(model, {**head, "json_bytes": size}, body)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["NaN", "fc", "value", "image", "words", "cat", "FP32", "é", "data:image/"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["x", "both", "area", "image", "words", "text", "base64", "name", "shape"]),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(
    document=st.dictionaries(
        st.sampled_from(["inputs", "rows", "outputs", "fields", "top_k", "id", "parameters"]),
        JSON_VALUES,
    ),
    protocol=st.sampled_from(["predict", "v2"]),
)
def test_any_json_fits_or_is_refused(document, protocol, houses, texts, digits):
    body = json.dumps(document).encode()
    for model in (houses, texts, digits):
        fits_or_is_refused(model, {"protocol": protocol}, body)


def test_deep_nesting_is_refused(houses):
    deep = b"[" * 1000 + b"]" * 1000
    for key in (b"x", b"both", b"label"):
        body = b'{"inputs":{"x":[[1,2,3]],"both":[[1,2]],"' + key + b'":' + deep + b"}}"
        fits_or_is_refused(houses, {}, body)
    for key in (b"outputs", b"fields", b"top_k", b"rows"):
        fits_or_is_refused(houses, {}, b'{"' + key + b'":' + deep + b"}")
    fits_or_is_refused(houses, {}, b'{"rows":[{"area":' + deep + b',"pair":' + deep + b"}]}")
    fits_or_is_refused(houses, {"protocol": "v2"}, b'{"inputs":' + deep + b"}")


def test_no_more_problems_are_looked_for_than_can_be_read(houses):
    with pytest.raises(BadRequest) as error:
        houses.read({"rows": [3] * 90})
    assert len(error.value.problems) == MAX_PROBLEMS
    names = {f"name{number}": 1 for number in range(100_000)}
    assert len(houses.problems({"inputs": names})) == MAX_PROBLEMS
    assert len(houses.problems({"rows": [names]})) == MAX_PROBLEMS


def test_padding_is_bounded(texts):
    """A few bytes for each row must not become gigabytes."""
    lists = [[2] * 70_000, *([2] for _ in range(99))]
    long = Served(texts.resolved, texts.trained_by, texts.checkpoint, copy.copy(texts.version))
    long.version.inputs = replace(texts.inputs, most=None)
    assert long.problems({"inputs": {"words": lists}}) == {
        "/inputs": "100 rows padded to the 70,000 steps of the longest row of 'words' have more "
        "than 4,194,304 steps: send fewer rows at once"
    }
    assert texts.read({"inputs": {"words": lists}}).num_rows == 100  # truncated to three


def test_sizes_are_not_multiplied_without_end(digits):
    big = {**GOOD, "shape": [2**62] * 100_000}
    found = digits.problems({"inputs": [big]}, protocol="v2")
    assert "shape is not a list of at most 16 sizes" in found["/inputs/0"]
