"""Layers that are one module: built, counted, saved and run once for each name."""

import json

import pytest
import torch
from safetensors.torch import load_file

from engine.network.network import Network
from glasshouse.spec import Graph
from tests.unit.engine.runs import DIGITS_META, errors, of_type, planned, run, spec
from tests.unit.engine.test_kinds import layer, shared_layers


def shared(**changes):
    return spec(network={"layers": shared_layers()}, **{"stop": {"steps": 2}, **changes})


def test_a_shared_layer_takes_type_and_args_of_the_first():
    plan = planned(shared())
    layers = {item["name"]: item for item in plan["spec"]["network"]["layers"]}
    for name in ("b", "c"):
        assert layers[name]["type"] == "Linear"
        assert (
            layers[name]["args"] == layers["a"]["args"] == {"in_features": 64, "out_features": 64}
        )
        assert layers[name]["shared_with"] == "a"
    assert layers["b"]["inputs"] == ["act"]
    again = planned(plan["spec"])
    assert again["spec"] == plan["spec"]


def test_its_parameters_are_counted_once():
    plan = planned(shared(optimizer={"type": "Adam"}))
    alone = 64 * 64 + 64
    assert {item["name"]: item["parameters"] for item in plan["layers"]} == {
        **{"flat": 0, "a": alone, "act": 0, "b": 0, "c": 0, "sum": 0, "fc": 650},
    }
    assert plan["parameters"] == alone + 650
    assert plan["memory"]["parameters_bytes"] == 4 * (alone + 650)
    assert plan["memory"]["gradients_bytes"] == 4 * (alone + 650)
    assert [item["parameter_names"] for item in plan["layers"] if item["name"] == "b"] == [[]]
    assert all(
        item["flops"] == 2 * 64 * 64 * 64 for item in plan["layers"] if item["name"] in "abc"
    )


def test_a_checkpoint_has_its_parameters_once_and_infers_any_call(digits, tmp_path):
    job = shared()
    records = run(tmp_path / "train", job, digits)
    directory = tmp_path / "train" / of_type(records, "checkpoint")[-1]["dir"]
    assert load_file(directory / "model.safetensors").keys() == {
        *("a.weight", "a.bias", "fc.weight", "fc.bias")
    }
    trained_by = planned(job)["spec"]
    asked = {
        "kind": "infer",
        "checkpoint": "ckpt_1",
        "inputs": {"image": torch.rand(2, 1, 8, 8).tolist()},
        "outputs": ["a", "b"],
    }
    (found,) = of_type(
        run(
            tmp_path / "infer",
            asked,
            digits,
            trained_by=trained_by,
            checkpoint={"dir": str(directory)},
        ),
        "result",
    )
    weights = load_file(directory / "model.safetensors")
    out = {name: torch.tensor(found["result"][name]["value"]["data"]) for name in ("a", "b")}
    expected = out["a"].relu() @ weights["a.weight"].T + weights["a.bias"]
    torch.testing.assert_close(out["b"], expected)


def test_a_pruned_network_has_the_module_without_the_first_call():
    layers = [
        layer("a", "Linear", ["x"], in_features=3, out_features=3),
        {"name": "b", "shared_with": "a", "inputs": ["x"]},
    ]
    graph = Graph.model_validate_json(json.dumps({"layers": layers}))
    network = Network(graph, ("b",), prune=True)
    assert list(network.state_dict()) == ["a.weight", "a.bias"]
    assert list(network.layers) == ["b"]
    assert network({"x": torch.ones(2, 3)})["b"].shape == (2, 3)


def test_a_checkpoint_of_a_pruned_shared_layer_is_planned():
    layers = [
        layer("flat", "Flatten"),
        layer("a", "Linear", ["flat"], out_features=64),
        {"name": "b", "shared_with": "a", "inputs": ["flat"]},
        layer("sum", "add", ["a", "b"]),
        layer("fc", "Linear", out_features=10),
    ]
    trained_by = planned(spec(network={"layers": layers}))["spec"]
    asked = {"kind": "infer", "checkpoint": "ckpt_1", "data": {"dataset": "ds_1"}}
    meta = {**DIGITS_META, "splits": {"all": 9, **DIGITS_META["splits"]}}
    plan = planned({**asked, "outputs": ["b"]}, meta, network=trained_by)
    assert [item["name"] for item in plan["layers"]] == ["flat", "b"]
    assert plan["memory"]["parameters_bytes"] == 4 * (64 * 64 + 64)


@pytest.mark.parametrize(
    ("changes", "field", "word"),
    [
        ({"shared_with": "nothing"}, "/shared_with", "must name an earlier layer"),
        ({"shared_with": "b"}, "/shared_with", "must name an earlier layer"),
        ({"shared_with": "fc"}, "/shared_with", "must name an earlier layer"),
        ({"shared_with": "a", "type": "Conv2d"}, "", "omit type and args"),
        ({"shared_with": "a", "args": {"out_features": 3}}, "", "omit type and args"),
        ({"shared_with": "a", "l1": 0.1}, "/l1", "set l1 there"),
    ],
)
def test_what_cannot_be_shared_is_refused(changes, field, word):
    layers = [dict(item) for item in shared_layers()]
    layers[4] = {"name": "c", "inputs": ["act"], **changes}
    found = errors(spec(network={"layers": layers}))
    assert word in found[f"/network/layers/4{field}"]


def test_a_call_that_does_not_fit_is_named():
    layers = [
        layer("flat", "Flatten"),
        layer("a", "Linear", out_features=5),
        {"name": "b", "shared_with": "a"},
        layer("fc", "Linear", out_features=10),
    ]
    found = errors(spec(network={"layers": layers}))
    assert "'b' (Linear): cannot take input of shape [64, 5]" in found["/network/layers/2"]


def test_a_layer_without_a_type_is_refused_at_its_place():
    found = errors(spec(network={"layers": [{"name": "flat"}]}))
    assert found["/network/layers/0/type"].startswith("this field is required: A class of torch.nn")
