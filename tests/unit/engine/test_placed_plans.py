"""The plan of a job whose layers are on several devices."""

import json
from typing import Any

import pytest
import torch

from engine.metrics.metrics import wanted
from engine.network.network import Network
from engine.network.placement import Move, Placement
from engine.process.planner import answer
from glasshouse.spec import TrainJob, parse_job
from glasshouse.spec.placement import placed
from tests.unit.engine.runs import DIGITS_META, planned, spec

LAYERS: list[dict[str, Any]] = [
    {"name": "flat", "type": "Flatten"},
    {"name": "left", "type": "Linear", "args": {"out_features": 24}, "inputs": ["flat"]},
    {
        **{"name": "right", "type": "Linear", "args": {"out_features": 16}, "inputs": ["flat"]},
        "device": 1,
    },
    {"name": "again", "type": "Linear", "args": {"out_features": 16}, "inputs": ["flat"]},
    {"name": "act", "type": "Tanh", "inputs": ["right"]},
    {"name": "both", "type": "cat", "args": {"dim": 1}, "inputs": ["left", "act", "again"]},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}, "device": 1},
]
ROWS = 64
TWO = {"type": "cuda", "count": 2}


def job(devices: dict[str, Any] = TWO, **changes: Any) -> dict[str, Any]:
    network = {"layers": [dict(layer) for layer in LAYERS]}
    parallel = {"strategy": "placed"}
    return spec(network=network, parallel=parallel, devices=devices, **changes)


def parsed(**changes: Any) -> TrainJob:
    found = parse_job(json.dumps(planned(job(**changes))["spec"]))
    assert isinstance(found, TrainJob)
    return found


def test_a_layer_runs_where_its_first_input_runs():
    where = {"flat": 0, "left": 0, "right": 1, "again": 0, "act": 1, "both": 0, "fc": 1}
    assert placed(parsed().network.layers) == where


def test_memory_and_layers_are_those_of_each_device():
    plan = planned(job(optimizer={"type": "Adam", "args": {"lr": 0.1}}, average={"type": "ema"}))
    first, second = plan["parallel"]["devices"]
    assert first["layers"] == ["flat", "left", "again", "both"]
    assert second["layers"] == ["right", "act", "fc"]
    of_first = 4 * (64 * 24 + 24 + 64 * 16 + 16)
    of_second = 4 * (64 * 16 + 16 + 56 * 10 + 10)
    assert first["memory"]["parameters_bytes"] == of_first
    assert second["memory"]["parameters_bytes"] == of_second
    whole = plan["memory"]
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes", "averages_bytes"):
        assert first["memory"][name] + second["memory"][name] == whole[name], name
    received = 4 * ROWS * (16 + 64 + 56) + 8 * ROWS  # act; flat, both, and the labels
    activations = first["memory"]["activations_bytes"] + second["memory"]["activations_bytes"]
    assert activations - received == pytest.approx(whole["activations_bytes"], abs=1)
    assert (first["memory"]["data_bytes"], second["memory"]["data_bytes"]) == (
        whole["data_bytes"],
        0,
    )
    for part in (first, second):
        heads = dict(part["memory"])
        assert heads.pop("total_bytes") == sum(heads.values())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_bytes_between_devices_are_those_of_values_and_of_gradients_back(accumulate: int):
    plan = planned(job(accumulate=accumulate))
    forward = 4 * ROWS * (16 + 64 + 56) + 8 * ROWS
    backward = 4 * ROWS * (16 + 56)  # the data and the labels have no gradient
    assert plan["parallel"]["exchanged_bytes"] == accumulate * (forward + backward)
    assert plan["parallel"]["strategies"] == []


def test_what_is_planned_to_be_copied_is_what_the_network_copies():
    found = parsed()
    devices = (torch.device("meta", 0), torch.device("meta", 1))
    where = {name: devices[index] for name, index in placed(found.network.layers).items()}
    placement = Placement(devices, where, devices[1])
    network = Network(found.network, wanted(found), placement=placement)
    moves = [item for item in network._plan if isinstance(item, Move)]
    assert [(item.source, item.device.index) for item in moves] == [
        ("flat", 1),
        ("act", 0),
        ("both", 1),
        ("label", 1),
    ]
    freed = {name for item in network._plan for name in item.finished}
    assert freed == {"flat", "flat@1", "left", "right", "again", "act", "act@0", "both", "both@1"}


def test_a_device_without_layers_is_warned_of():
    plan = planned(job({"type": "cuda", "count": 3}))
    (warning,) = [item for item in plan["warnings"] if item["code"] == "unused_device"]
    assert "no layer is on device 2" in warning["detail"]
    assert plan["parallel"]["devices"][2]["memory"]["total_bytes"] == 0


def test_a_job_of_one_device_has_no_such_plan():
    assert planned(spec())["parallel"] is None


def test_the_planner_points_at_a_device_that_is_not_there():
    body = job({"type": "cuda", "count": 1})
    reply = answer({"id": 1, "do": "plan", "spec": body, "datasets": {"ds_1": DIGITS_META}})
    assert not reply["ok"]
    assert "device 1 of layer 'right'" in str(reply)


def test_on_a_cpu_all_layers_are_on_one_device():
    assert Placement.of(parsed(), torch.device("cpu")) is None
