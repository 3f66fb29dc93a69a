import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from glasshouse import errors, ids, jsonio
from glasshouse.spec import InferJob, TrainJob, parse_job

MINIMAL: dict[str, Any] = {
    "kind": "train",
    "network": {"type": "graph", "layers": [{"name": "fc", "type": "Linear"}]},
    "loss": {"type": "MSELoss", "inputs": ["fc", "y"]},
    "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
    "data": {
        "train": {"dataset": "ds_x"},
        "fields": {"x": {"type": "dense"}, "y": {"type": "dense"}},
        "batch_size": 4,
    },
    "stop": {"epochs": 1},
}


def changed(path: str, value: Any) -> str:
    spec = json.loads(json.dumps(MINIMAL))
    at = spec
    *heads, last = path.split(".")
    for head in heads:
        at = at[int(head)] if isinstance(at, list) else at[head]
    if value is ...:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(spec)


def test_a_minimal_spec_is_read_and_written_back_the_same():
    job = parse_job(json.dumps(MINIMAL))
    assert isinstance(job, TrainJob)
    assert parse_job(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("surprise", 1, "surprise"),
        ("network.layers.0.surprise", 1, "network.Graph.layers.0.surprise"),
        ("seed", True, "seed"),
        ("seed", -1, "seed"),
        ("seed", 1.5, "seed"),
        ("kind", "sweep", ""),
        ("optimizer.args", {"lr": math.inf}, "optimizer.args"),
        ("network.layers.0.name", "1st", "network.Graph.layers.0.name"),
        ("network.layers.0.name", "a.b", "network.Graph.layers.0.name"),
        ("network.layers.0.name", "x", ""),
        ("network.layers", [{"name": "a", "type": "ReLU"}] * 2, "network"),
        ("data.batch_size", 0, "data.batch_size"),
        ("data.batch_size", "4", "data.batch_size"),
        ("data.fields.x", {"type": "sparse", "dim": 3}, "data.fields.x"),
        ("data.fields.y", {"type": "integer", "dim": 0}, "data.fields.y.integer.dim"),
        ("data.fields.y", {"type": "integer", "classes": ["a", 1]}, "data.fields.y.integer"),
        ("data.normalize", {"x": {"type": "zscore"}}, "data.normalize.x.type"),
        ("data.windows", {"type": "cbow", "tokens": "words", "length": 3}, "data.windows.cbow"),
        ("data.on_bad_row", "skip", "data.on_bad_row"),
        ("data.train.fraction", [0.5, 0.2], "data.train"),
        ("stop", {}, "stop"),
        ("stop", {"epochs": 1, "steps": 2}, "stop"),
        ("evaluate", {"every_epochs": 1}, ""),
        ("devices", {"type": "cpu", "ids": [0]}, "devices"),
        ("devices", {"type": "cuda", "count": 0}, "devices.count"),
        ("probes", [{"layers": ["*"], "kinds": ["output"]}], "probes.0"),
        ("probes", [{"layers": ["*"], "kinds": ["weights"], "every": 1}], "probes.0.kinds.0"),
        ("labels", {"a": 1}, "labels.a"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(path: str, value: Any, where: str):
    with pytest.raises(ValidationError) as caught:
        parse_job(changed(path, value))
    places = [".".join(str(part) for part in error["loc"]) for error in caught.value.errors()]
    assert any(place.removeprefix("train").strip(".").startswith(where) for place in places)


def test_a_number_that_overflows_is_refused():
    for literal in ("1e999", "NaN", "-Infinity"):
        body = json.dumps(MINIMAL).replace("0.1", literal)
        with pytest.raises(ValidationError):
            parse_job(body)


def test_an_inference_names_one_network_and_one_source_of_rows():
    parse_job('{"kind":"infer","job":"job_x","inputs":{"x":[[1.0]]}}')
    for wrong in (
        '{"kind":"infer","inputs":{"x":[[1.0]]}}',
        '{"kind":"infer","job":"j","checkpoint":"c","inputs":{"x":[1]}}',
        '{"kind":"infer","job":"j"}',
        '{"kind":"infer","job":"j","inputs":{"x":[1]},"flatten":true}',
        '{"kind":"infer","job":"j","inputs":{"x":[1e999]}}',
    ):
        with pytest.raises(ValidationError):
            parse_job(wrong)
    job = parse_job('{"kind":"infer","job":"j","inputs":{"x":[1]},"flatten":{"axis":1}}')
    assert isinstance(job, InferJob)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_carries_every_value_with_nonfinite_numbers_by_name(value: Any):
    text = jsonio.dumps(value)
    assert jsonio.loads(text) == jsonio.named(value)
    assert jsonio.loads(text.encode()) == jsonio.loads(text)


@pytest.mark.parametrize("text", ["NaN", "[1, Infinity]", '{"a": 1e999}', "-1e400", "{"])
def test_bare_nonfinite_numbers_are_not_json(text: str):
    with pytest.raises(ValueError, match=r".+"):
        jsonio.loads(text)


def test_ids_sort_by_time_and_have_the_prefix_of_their_resource():
    early, late = ids.new_id("job", at_ms=1_000), ids.new_id("job", at_ms=1_001)
    assert early < late
    assert len(early) == len("job_") + 26
    assert ids.is_id(early, "job")
    assert not ids.is_id(early, "ds")
    assert not ids.is_id(early + "x", "job")
    with pytest.raises(ValueError, match="prefix"):
        ids.new_id("run")
    assert len({ids.new_id("ds") for _ in range(1000)}) == 1000


def every(cls: type[errors.GlasshouseError]) -> list[type[errors.GlasshouseError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in every(child))]


def test_every_error_has_its_own_code_and_a_sentence():
    for family in (errors.ServiceError, errors.RunFailure):
        found = every(family)
        names = [cls.__name__ for cls in found]
        assert len(names) == len(set(names))
        for cls in found:
            assert (cls.__doc__ or "").strip().endswith(".")


def test_the_tree_in_the_file_is_the_tree():
    text = (errors.__doc__ or "").replace("\n", " ")
    for family in (errors.ServiceError, errors.RunFailure):
        for cls in every(family):
            assert cls.__name__ in text


def test_the_client_has_a_class_for_every_status():
    statuses = {
        cls.status for cls in every(errors.ServiceError) if issubclass(cls, errors.ServiceError)
    }
    for status in statuses:
        problem = {"code": "x", "detail": "d", "errors": [{"pointer": "/a", "detail": "b"}]}
        error = errors.APIStatusError.of(status, problem)
        assert isinstance(error, errors.APIError)
        assert (error.status_code, error.code) == (status, "x")
        assert "/a: b" in str(error)
