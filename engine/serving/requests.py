"""Read requests: check them against a model, and convert their rows to the network's fields.

Everything in a request is hostile until it is checked: sizes are compared with the bytes that are
there before memory is allocated, and nothing is unpickled.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from engine.data.batches.rows import Loaded
from engine.data.columns.fields import BadField
from engine.data.sources.inline import inline_field
from engine.serving import inference_protocol, media_types, tensor_formats
from engine.serving.asked import (
    JSON,
    NPY,
    SAFETENSORS,
    Asked,
    BadRequest,
    PredictForm,
    Problems,
    ProtocolForm,
    bad,
    listed,
    parsed,
    similar,
    token,
)
from engine.serving.field_arrays import check_names, from_arrays, same_rows, too_many
from engine.serving.model_inputs import ModelInputs, OutputShape, Wanted
from engine.serving.raw_rows import read_rows
from engine.serving.wanted import wanted

__all__ = [
    "Asked",
    "BadRequest",
    "ModelInputs",
    "OutputShape",
    "PredictForm",
    "ProtocolForm",
    "read",
]

DEFAULT_MAX_ROWS = 4096
_KEYS = ("inputs", "rows", "outputs", "fields", "top_k")
_QUERY = ("input", "outputs", "fields", "top_k")
_PLAIN = bytes(code for code in range(ord("e") + 1) if code != ord('"'))
"""Numbers and lists of JSON have no other characters; texts, objects, ``true`` do."""


def read(
    head: Mapping[str, Any],
    body: bytes | memoryview,
    inputs: ModelInputs,
    max_rows: int = DEFAULT_MAX_ROWS,
) -> Asked:
    """Read a request.

    Args:
        head: ``protocol`` (``predict`` or ``v2``), ``content_type``, ``accept``, ``query`` and
            ``json_bytes``, as far as the client gave them.
        body: the body of the request.
        inputs: what the model reads.
        max_rows: the most rows of one request.

    Raises:
        BadRequest: it is malformed, or does not fit the model.
    """
    try:
        if head.get("protocol") == "v2":
            return inference_protocol.read(head, body, inputs, max_rows)
        return _predict(head, body, inputs, max_rows)
    except RecursionError:
        raise bad("the body is nested too deeply", "json", status=400) from None


def _predict(
    head: Mapping[str, Any], body: bytes | memoryview, inputs: ModelInputs, max_rows: int
) -> Asked:
    content_type = media_types.base_of(head.get("content_type"))
    media_type = media_types.accepted(head.get("accept"), (JSON, NPY, SAFETENSORS))
    query = head.get("query") or {}
    if content_type in ("", JSON):
        asked = _json(body, query, inputs, max_rows)
    elif content_type in (NPY, SAFETENSORS):
        asked = _tensors(content_type, body, query, inputs, max_rows)
    else:
        listed = f"{JSON}, {NPY} or {SAFETENSORS}"
        detail = f"a body of type {content_type[:100]!r} cannot be read: send {listed}, and say so"
        raise bad(f"{detail} in Content-Type", "media_type", status=415)
    form = PredictForm(media_type)
    if media_type == NPY:
        _check_one_tensor(asked, inputs)
    return Asked(asked.rows, asked.num_rows, asked.outputs, asked.fields, asked.top_k, form)


def _check_one_tensor(asked: Asked, inputs: ModelInputs) -> None:
    """Check that the answer is one array."""
    names = [
        f"{name}/{field}"
        for name, own in zip(asked.outputs, asked.fields, strict=True)
        for field in own
    ]
    fix = f"ask for one output and one of the fields, or accept {SAFETENSORS}"
    if len(names) > 1 or names[0].endswith("/top_k"):
        names = [item for name in names for item in _columns_of(name)]
        detail = f"{NPY} has one tensor, and the request returns {', '.join(names[:20])}: {fix}"
        raise bad(detail, "not_acceptable", status=406)
    if asked.outputs[0] in inputs.steps and asked.num_rows > 1:
        detail = f"{NPY} has no place for the lengths of the rows of {asked.outputs[0]!r}:"
        raise bad(f"{detail} accept {SAFETENSORS} or {JSON}", "not_acceptable", status=406)


def _columns_of(name: str) -> tuple[str, ...]:
    return (name, f"{name}_prob") if name.endswith("/top_k") else (name,)


# --- JSON ------------------------------------------------------------------------------------


def _json(
    body: bytes | memoryview, query: Mapping[str, str], inputs: ModelInputs, max_rows: int
) -> Asked:
    document = parsed(body)
    problems = Problems()
    if not isinstance(document, dict):
        raise bad(_no_inputs(inputs), "type")
    for name in document:
        if name not in _KEYS:
            detail = f"there is no key {name[:100]!r}; there are: {', '.join(_KEYS)}"
            problems.problem(f"/{token(name)}", detail + similar(name, _KEYS), "unknown")
    for name in query:
        detail = f"the query has {name[:100]!r}, and options of a JSON body are in the body"
        problems.problem(f"/query/{token(name)}", f"{detail}: remove it", "unknown")
    found = wanted(inputs, document, problems)
    has_rows, has_inputs = "rows" in document, "inputs" in document
    if has_rows is has_inputs:
        detail = "the body has both inputs and rows: give one of them"
        problems.problem("", detail if has_rows else _no_inputs(inputs), "missing")
        problems.refuse()
    if has_rows:
        rows, num_rows = _raw(document["rows"], found, inputs, max_rows, problems)
    else:
        rows, num_rows = _nested(body, document, found, inputs, max_rows, problems)
    return Asked(rows, num_rows, *found)


def _no_inputs(inputs: ModelInputs) -> str:
    names = listed(inputs.needed(inputs.default_outputs))
    detail = 'the body needs "inputs", nested lists by field, or "rows", a list of objects;'
    return f"{detail} the model reads: {names}"


def _raw(
    rows: Any, found: Wanted, inputs: ModelInputs, max_rows: int, problems: Problems
) -> tuple[dict[str, Loaded], int]:
    if not isinstance(rows, list):
        problems.problem("/rows", "rows is not a list of objects", "type")
    elif not rows:
        problems.problem("/rows", "rows is empty: give at least one row", "empty")
    elif len(rows) > max_rows:
        problems.problem("/rows", too_many(len(rows), max_rows), "too_many_rows")
    problems.refuse()
    return read_rows(rows, inputs, inputs.needed(found.outputs), problems), len(rows)


def _nested(
    body: bytes | memoryview,
    document: dict[str, Any],
    found: Wanted,
    inputs: ModelInputs,
    max_rows: int,
    problems: Problems,
) -> tuple[dict[str, Loaded], int]:
    given = document["inputs"]
    if not isinstance(given, dict):
        problems.problem(
            "/inputs", f"inputs is not an object of fields. {_no_inputs(inputs)}", "type"
        )
        problems.refuse()
    check_names(given, inputs, inputs.needed(found.outputs), problems, {"": "/inputs"})
    only_numbers = _has_only_numbers(body, document)
    loaded: dict[str, Loaded] = {}
    for name in inputs.needed(found.outputs):
        if name not in given:
            continue
        value = given[name]
        if isinstance(value, list) and len(value) > max_rows:
            detail = too_many(len(value), max_rows)
            problems.problem(f"/inputs/{token(name)}", detail, "too_many_rows")
            continue
        try:
            loaded[name] = inline_field(
                name,
                value,
                inputs.shapes[name],
                inputs.meaning,
                inputs.most,
                only_numbers=only_numbers,
            )
        except BadField as cause:
            problems.problem(f"/inputs/{token(name)}", str(cause), "shape")
    return loaded, same_rows(loaded, max_rows, problems, "/inputs")


def _has_only_numbers(body: bytes | memoryview, document: dict[str, Any]) -> bool:
    """Return whether the lists of ``inputs`` hold numbers and nothing else.

    Numpy would convert ``true``, ``null`` and texts to numbers. Looking at each value takes as long
    as converting it, so characters are counted instead: without the lists, the body must have as
    many quotes and letters as before.
    """
    outline = {**document, "inputs": dict.fromkeys(document["inputs"], 0)}
    text = bytes(body)
    return b"\\" not in text and _num_marks(text) == _num_marks(orjson.dumps(outline))


def _num_marks(text: bytes) -> int:
    """Return how many quotes and letters after ``e`` a text has."""
    return len(text.translate(None, _PLAIN))


# --- binary ----------------------------------------------------------------------------------


def _tensors(
    content_type: str,
    body: bytes | memoryview,
    query: Mapping[str, str],
    inputs: ModelInputs,
    max_rows: int,
) -> Asked:
    """Read a body of arrays. Their values mean the same as those of JSON ``inputs``."""
    problems = Problems()
    found = wanted(inputs, _options(query, problems), problems, "/query")
    needed = inputs.needed(found.outputs)
    arrays = (
        {_only_input(query, inputs, needed, problems): tensor_formats.read_npy(body)}
        if content_type == NPY
        else tensor_formats.read_safetensors(body)
    )
    if content_type != NPY and "input" in query:
        detail = f"input names the array of {NPY}; in {SAFETENSORS} they have names: remove it"
        problems.problem("/query/input", detail, "unknown")
    pointers = {"": "", **dict.fromkeys(arrays if "input" in query else (), "/query/input")}
    rows, num_rows = from_arrays(arrays, needed, inputs, max_rows, problems, pointers)
    return Asked(rows, num_rows, *found)


def _options(query: Mapping[str, str], problems: Problems) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in query.items():
        if name not in _QUERY:
            detail = f"there is no option {name[:100]!r}; there are: {', '.join(_QUERY)}"
            detail += similar(name, _QUERY)
            problems.problem(f"/query/{token(name)}", detail, "unknown")
        elif name in ("outputs", "fields"):
            options[name] = [part.strip() for part in text.split(",")]
        elif name == "top_k":
            options[name] = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else text[:100]
    return options


def _only_input(
    query: Mapping[str, str], inputs: ModelInputs, needed: tuple[str, ...], problems: Problems
) -> str:
    """Return the field that the only array of a request is for."""
    given = query.get("input")
    if given is not None or len(needed) == 1:
        return needed[0] if given is None else given
    detail = f"the network reads {', '.join(needed)}, and {NPY} has one array: send {SAFETENSORS}"
    problems.problem("/query/input", detail, "missing_input")
    problems.refuse()
    raise AssertionError
