import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.network.network import Network
from glasshouse.spec import parse_job
from tests.unit.engine.runs import CNN, errors, of_type, planned, run, spec


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """A trained job: its resolved spec, its checkpoint's directory and its network."""
    directory = tmp_path_factory.mktemp("trained")
    layers = [
        *copy.deepcopy(CNN),
        {"name": "soft", "type": "Softmax", "args": {"dim": 1}},
        {"name": "log", "type": "log_softmax", "args": {"dim": 1}, "inputs": ["fc"]},
        {"name": "width", "type": "mean", "args": {"dim": 1}, "inputs": ["fc"]},
        {"name": "total", "type": "sum", "inputs": ["fc"]},
    ]
    job = spec(network={"layers": layers, "outputs": ["fc"]})
    resolved = planned(job)["spec"]
    records = run(directory, job, digits)
    checkpoint = directory / of_type(records, "checkpoint")[-1]["dir"]
    graph = parse_job(json.dumps(resolved)).network
    network = Network(graph, [layer.name for layer in graph.layers])
    network.load_state_dict(load_file(checkpoint / "model.safetensors"))
    return resolved, checkpoint, network.eval()


def infer(**changes):
    data = {"dataset": "ds_1", "split": "test", "batch_size": 40}
    return {"kind": "infer", "job": "job_x", "data": data, **changes}


def inline(**changes):
    return {"kind": "infer", "job": "job_x", **changes}


def _run(tmp_path, trained, digits, job):
    resolved, checkpoint, _ = trained
    records = run(tmp_path, job, digits, trained_by=resolved, checkpoint={"dir": str(checkpoint)})
    return records, load_file(tmp_path / "artifacts" / "outputs.safetensors")


def _expected(trained, digits):
    images = torch.from_numpy(np.load(digits / "test" / "0.npy")).float() / 255
    network = copy.deepcopy(trained[2])
    network.layers["relu1"].inplace = False  # it would overwrite the output of conv1
    with torch.inference_mode():
        return network({"image": images})


def test_several_layers_come_back_in_one_pass_in_the_order_of_the_data(tmp_path, trained, digits):
    job = infer(outputs=["conv1", "fc"], fields=["value", "id", "prob"])
    records, tensors = _run(tmp_path, trained, digits, job)
    expected = _expected(trained, digits)
    probabilities = expected["fc"].softmax(1)
    assert torch.allclose(tensors["fc/value"], expected["fc"], atol=1e-6)
    assert torch.allclose(tensors["conv1/value"], expected["conv1"], atol=1e-6)
    assert torch.equal(tensors["fc/id"], expected["fc"].argmax(1))
    assert torch.allclose(tensors["fc/prob"], probabilities.max(1).values, atol=1e-6)
    assert tensors["conv1/id"].shape == (97, 6, 6)
    assert len(tensors) == 6
    artifact = of_type(records, "artifact")[0]
    assert artifact["name"] == "outputs.safetensors"
    assert artifact["size_bytes"] == (tmp_path / artifact["file"]).stat().st_size
    (told,) = of_type(records, "result")  # the whole is too large, the classes are not
    assert list(told["result"]) == ["fc"]
    assert sorted(told["result"]["fc"]) == ["classes", "id", "prob"]
    assert of_type(records, "progress")[-1]["samples"] == 97


def test_probabilities_of_a_softmax_are_taken_as_they_are(tmp_path, trained, digits):
    job = infer(outputs=["soft", "log", "fc"], fields=["prob"])
    _, tensors = _run(tmp_path, trained, digits, job)
    highest = _expected(trained, digits)["soft"].max(1).values
    for name in ("soft", "log", "fc"):
        assert torch.allclose(tensors[f"{name}/prob"], highest, atol=1e-6)


def test_small_results_also_come_as_json(tmp_path, trained, digits):
    images = np.load(digits / "test" / "0.npy")[:3].astype(float) / 255
    job = inline(inputs={"image": images.tolist()}, fields=["value", "id"])
    records, tensors = _run(tmp_path, trained, digits, job)
    result = of_type(records, "result")[0]["result"]
    assert result["fc"]["id"] == {
        "dtype": "int64",
        "shape": [3],
        "data": tensors["fc/id"].tolist(),
    }
    assert result["fc"]["value"]["data"] == tensors["fc/value"].tolist()
    assert torch.allclose(tensors["fc/value"], _expected(trained, digits)["fc"][:3], atol=1e-6)


@pytest.mark.parametrize(("axis", "shape"), [(0, [194, 10]), (1, [97, 20])])
def test_flatten_joins_the_layers_per_field(tmp_path, trained, digits, axis, shape):
    job = infer(outputs=["fc", "soft"], fields=["value", "id"], flatten={"axis": axis})
    _, tensors = _run(tmp_path, trained, digits, job)
    assert list(tensors["value"].shape) == shape
    assert list(tensors["id"].shape) == [shape[0], shape[1] // 10]
    first = tensors["value"][:97, :10]
    assert torch.allclose(first, _expected(trained, digits)["fc"], atol=1e-6)


def test_layers_and_columns_that_are_not_needed_need_not_be_there(trained, digits):
    meta = json.loads((digits / "meta.json").read_text())
    meta["columns"] = meta["columns"][:1]
    plan = planned(infer(outputs=["pool1"]), meta, network=trained[0])
    assert [item["name"] for item in plan["layers"]] == ["conv1", "relu1", "pool1"]
    assert list(plan["spec"]["data"]["fields"]) == ["image"]
    assert plan["num_steps"] == 3
    assert plan["memory"]["gradients_bytes"] == 0


ONE = [[[[0.0] * 8] * 8]]
BAD = {
    "a layer that is not there": (infer(outputs=["fc", "zz"]), "/outputs/1", "'zz'"),
    "a leaf that is not there": (infer(outputs=["fc.1"]), "/outputs/0", "fc"),
    "an id without classes": (
        infer(outputs=["width"], fields=["value", "id"]), "/fields/1", "class axis"),
    "an output without rows": (infer(outputs=["total"]), "/outputs/0", "rows"),
    "widths that differ below each other": (
        infer(outputs=["fc", "pool1"], flatten={"axis": 0}), "/flatten/axis", "'pool1' has 54"),
    "a split that is not there": (
        infer(data={"dataset": "ds_1", "split": "x"}), "/data/split", "train, test"),
    "an input of the wrong shape": (inline(inputs={"image": [[1, 2]]}), "/inputs/image", "[1, 2]"),
    "an input that is ragged": (
        inline(inputs={"image": [[1, 2], [3]]}), "/inputs/image", "regular"),
    "an input the network has not": (
        inline(inputs={"image": ONE, "colour": [1]}), "/inputs/colour", "image"),
    "an input that is missing": (inline(inputs={"label": [1]}), "/inputs", "'image'"),
    "a field the network has not": (
        infer(data={"dataset": "ds_1", "split": "test", "fields": {"q": {"type": "dense"}}}),
        "/data/fields/q", "image"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_inference_is_refused_with_the_place_and_the_reason(trained, case):
    job, pointer, words = BAD[case]
    found = errors(job, network=trained[0])
    assert pointer in found, found
    assert words in found[pointer]
