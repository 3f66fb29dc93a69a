"""Activation checkpointing: the numbers of a training without it, and the memory of one with it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.losses.losses import Losses, loss_of
from engine.network.network import Network
from engine.plan.checkpointed_layers import best_posts
from engine.plan.plan import parse_spec
from engine.plan.step_memory import LiveBytes, step_peak
from tests.unit.engine.runs import errors, is_real, losses, of_type, planned, run, spec

DEEP: list[dict[str, Any]] = [{"name": "flat", "type": "Flatten"}]
for number in range(6):
    DEEP += [
        {"name": f"fc{number}", "type": "Linear", "args": {"out_features": 48}},
        {"name": f"norm{number}", "type": "BatchNorm1d"},
        {"name": f"relu{number}", "type": "ReLU", "args": {"inplace": True}},
        {"name": f"drop{number}", "type": "Dropout", "args": {"p": 0.2}},
    ]
DEEP.append({"name": "fc", "type": "Linear", "args": {"out_features": 10}})
IMAGES = [
    {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 3}},
    {"name": "norm1", "type": "BatchNorm2d"},
    {"name": "relu1", "type": "ReLU"},
    {"name": "pool1", "type": "MaxPool2d", "args": {"kernel_size": 2}},
    {"name": "conv2", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 2}},
    {"name": "elu", "type": "ELU", "args": {"inplace": True}},
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
ROWS = {"name": "rows", "type": "reshape", "args": {"shape": [-1, 8, 8]}, "inputs": ["image"]}
BLOCK = {"nhead": 2, "dim_feedforward": 32, "batch_first": True}
BLOCKS = [
    ROWS,
    {"name": "block1", "type": "TransformerEncoderLayer", "args": BLOCK},
    {"name": "block2", "type": "TransformerEncoderLayer", "args": BLOCK},
    {"name": "mean", "type": "mean", "args": {"dim": 1}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
LSTM = [
    ROWS,
    {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 12, "batch_first": True}},
    {"name": "more", "type": "LSTM", "args": {"hidden_size": 12, "batch_first": True}},
    {"name": "last", "type": "select", "args": {"dim": 1, "index": -1}, "inputs": ["more.0"]},
    {"name": "state", "type": "squeeze", "args": {"dim": 0}, "inputs": ["lstm.1.0"]},
    {"name": "both", "type": "add", "inputs": ["last", "state"]},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
SHARED = [
    {"name": "flat", "type": "Flatten"},
    {"name": "a", "type": "Linear", "args": {"out_features": 64}},
    {"name": "t", "type": "Tanh"},
    {"name": "b", "shared_with": "a"},
    {"name": "u", "type": "Tanh", "stop_gradient": False, "output_grad_clip": 0.001},
    {"name": "c", "shared_with": "a"},
    {"name": "add", "type": "add", "inputs": ["c", "t"]},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
NETWORKS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "deep": (DEEP, ["flat", "fc2", "norm3", "drop4", "fc"]),
    "between": (DEEP, ["norm1", "norm3"]),
    "chosen": (DEEP, True),
    "images": (IMAGES, ["conv1", "pool1", "conv2", "flat", "fc"]),
    "blocks": (BLOCKS, ["block1", "block2", "mean"]),
    "tuples": (LSTM, ["rows", "more", "both"]),
    "shared": (SHARED, ["a", "b", "fc"]),
}
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16", "grad_scaler": {"init_scale": 2.0**19}},
    "accumulate": {"accumulate": 2, "data": {"batch_size": 32}},
    "outputs": {"guards": {"nonfinite": {"check": ["loss", "outputs", "gradients"]}}},
    "judged": {
        "data": {"validation": {"dataset": "ds_1", "split": "test"}},
        "evaluate": {"every_steps": 2},
    },
}
EVERYTHING = {
    "layers": ["*"],
    "kinds": ["output", "input", "output_grad", "param_grad", "update"],
    "every": 1,
    "want": ["stats"],
    "max_overhead": None,
}
INSIDE = {**EVERYTHING, "layers": ["block1.*"], "kinds": ["output", "output_grad"]}


def jobs(name: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One that keeps all, and one that does not."""
    layers, kept_at = NETWORKS[name]
    whole = spec(network={"layers": layers}, stop={"steps": 6}, **more)
    return whole, whole | {"activation_checkpointing": kept_at}


def weights(directory: Path) -> bytes:
    return (directory / "checkpoints/step-6/model.safetensors").read_bytes()


def reports_of(records: Any) -> list[Any]:
    """What is said of the steps, without times."""
    kinds = ("metrics", "stats", "finding")
    kept = [r for kind in kinds for r in of_type(records, kind)]
    names = ("loss", "validation/loss", "grad_norm", "output_grad_clip/u", "l2(fc0/output_grad)")
    return [
        {
            **{k: v for k, v in r.items() if k not in ("at", "values")},
            "values": {k: v for k, v in r.get("values", {}).items() if k in names},
        }
        for r in kept
        if r["type"] != "metrics" or {*names} & {*r["values"]}
    ]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.long
def test_not_one_bit_differs_whatever_is_kept(name, how, digits, tmp_path):
    """Dropout, running statistics, layers in place, tuples and shared layers among them."""
    usual, less = jobs(name, **HOWS[how])
    all_kept = run(tmp_path / "usual", usual, digits)
    not_kept = run(tmp_path / "less", less, digits)
    assert losses(not_kept) == losses(all_kept)
    assert reports_of(not_kept) == reports_of(all_kept)
    assert weights(tmp_path / "less") == weights(tmp_path / "usual")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
@pytest.mark.long
def test_every_layer_is_seen_once_and_as_it_is(name, layout, digits, tmp_path):
    probes = [EVERYTHING, *([INSIDE] if name == "blocks" else [])]
    metrics = [{"type": "l2", "inputs": ["fc0/output_grad"]}] if name == "deep" else []
    usual, less = jobs(name, probes=probes, metrics=metrics, memory_format=layout)
    all_kept = run(tmp_path / "usual", usual, digits)
    not_kept = run(tmp_path / "less", less, digits)
    assert reports_of(not_kept) == reports_of(all_kept)
    assert of_type(not_kept, "stats")
    assert not of_type(not_kept, "dropped")
    unwatched = run(tmp_path / "unwatched", less | {"probes": [], "metrics": []}, digits)
    assert losses(unwatched) == losses(all_kept)
    assert weights(tmp_path / "unwatched") == weights(tmp_path / "usual")


def test_layers_do_run_twice(digits, tmp_path, monkeypatch):
    """The control: else nothing above would show anything."""
    calls: list[str] = []
    forward = torch.nn.Linear.forward

    def counted(self: torch.nn.Linear, x: Tensor) -> Tensor:
        if is_real(x):
            calls.append(str(self.out_features))
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    run(tmp_path / "less", jobs("between")[1], digits)
    kept = len(calls)
    calls.clear()
    run(tmp_path / "usual", jobs("between")[0], digits)
    assert kept - len(calls) == 6 * 2  # between norm1 and norm3 there are two


def test_a_layer_that_goes_bad_is_found_as_ever(digits, tmp_path):
    """The guard runs the batch once more; nothing of it is counted twice."""
    usual, less = jobs("deep", optimizer={"type": "SGD", "args": {"lr": 1e30}})
    found = [
        of_type(run(tmp_path / str(n), job, digits), "finding")
        for n, job in enumerate((usual, less))
    ]
    for records in found:
        for record in records:
            del record["at"]
    assert found[0] == found[1] != []


@pytest.mark.parametrize("step", [2, 5])
def test_a_run_resumes_bit_for_bit(step, digits, tmp_path):
    job = jobs("deep", checkpoint={"every_steps": 1})[1]
    records = run(tmp_path / "whole", job, digits)
    there = {"dir": str(tmp_path / f"whole/checkpoints/step-{step}"), "step": step}
    rest = run(tmp_path / "rest", job, digits, resume=there)
    assert losses(rest) == losses(records)[step:]
    assert weights(tmp_path / "rest") == weights(tmp_path / "whole")


# --- memory ---------------------------------------------------------------------------------------


def batch_of(size: int, device: str) -> dict[str, Tensor]:
    image = torch.zeros(size, 1, 8, 8, device=device)
    return {"image": image, "label": torch.zeros(size, dtype=torch.int64, device=device)}


@pytest.mark.parametrize("name", ["deep", "blocks"])
@pytest.mark.long
def test_a_step_needs_what_the_plan_says_and_less_than_with_all_kept(name):
    peaks: list[int] = []
    for job in jobs(name, data={"batch_size": 256}):
        whole: Any = parse_spec(planned(job)["spec"])
        counted = step_peak(whole, ("fc",), lambda: batch_of(256, "meta"))
        torch.backends.mha.set_fastpath_enabled(False)
        network = Network(whole.network, ("fc",), kept_at=whole.activation_boundaries)
        loss_fn, live = Losses.of(whole), LiveBytes()
        with live:
            batch = batch_of(256, "cpu")
            loss = loss_of(loss_fn, network(batch)).total
            del batch
            loss.backward()
        assert counted == pytest.approx(live.peak, rel=0.03)
        peaks.append(live.peak)
    assert peaks[1] < 0.8 * peaks[0]


def test_the_plan_chooses_and_says_which():
    usual, less = jobs("chosen", data={"batch_size": 300})
    plan = planned(less)
    chosen = plan["spec"]["activation_checkpointing"]
    names = [layer["name"] for layer in DEEP]
    assert chosen == sorted(chosen, key=names.index)
    assert plan["memory"]["activations_bytes"] < 0.5 * planned(usual)["memory"]["activations_bytes"]
    assert planned(plan["spec"])["spec"] == plan["spec"]


@pytest.mark.parametrize("count", [9, 16, 100])
def test_of_equal_layers_a_root_of_them_is_kept(count):
    """Chen and others, 2016: with n layers alike it is the root of n."""
    posts = best_posts([1000] * count, [0, *[1000] * (count - 1)])
    assert len(posts) == pytest.approx(count**0.5, abs=1)


@pytest.mark.parametrize(
    ("saved", "taken"), [([5], [1]), ([10, 10], [0, 10]), ([0, 0, 0], [0, 4, 4])]
)
def test_where_nothing_is_gained_all_is_kept(saved: Sequence[int], taken: Sequence[int]):
    assert best_posts(saved, taken) == []


def test_a_network_with_nothing_to_gain_is_reported():
    layers = [{"name": "flat", "type": "Flatten"}, DEEP[-1]]
    plan = planned(spec(network={"layers": layers}, activation_checkpointing=True))
    assert plan["spec"]["activation_checkpointing"] is None
    assert [item["pointer"] for item in plan["warnings"]] == ["/activation_checkpointing"]


STATEFUL = [
    ROWS,
    {**LSTM[1], "stateful": True},
    {"name": "mean", "type": "mean", "args": {"dim": 1}, "inputs": ["lstm.0"]},
    DEEP[-1],
]


@pytest.mark.parametrize(
    ("layers", "asked", "pointer", "words"),
    [
        (DEEP, ["flat", "nothing"], "/activation_checkpointing/1", "there is no layer 'nothing'"),
        (DEEP, ["fc3", "fc1"], "/activation_checkpointing/1", "in order"),
        (DEEP, ["fc1", "fc1"], "/activation_checkpointing/1", "in order"),
        (DEEP, ["fc1"], "/activation_checkpointing", "at least 2"),
        (DEEP, [], "/activation_checkpointing", "at least 2"),
        (DEEP, False, "/activation_checkpointing", "give true or a list (got"),
        (DEEP, 4, "/activation_checkpointing", "give true or a list (got"),
        (DEEP, "fc1", "/activation_checkpointing", "give true or a list (got"),
        (DEEP, ["fc1", "*"], "/activation_checkpointing/1", "letters, digits"),
        (IMAGES, ["conv1", "elu", "fc"], "/activation_checkpointing/1", "works in place"),
        (STATEFUL, ["rows", "fc"], "/activation_checkpointing", "stateful"),
        (STATEFUL, True, "/activation_checkpointing", "stateful"),
    ],
)
def test_an_invalid_option_is_refused_with_its_place(layers, asked, pointer, words):
    data = {"shuffle": {"enabled": False}}
    found = errors(spec(network={"layers": layers}, activation_checkpointing=asked, data=data))
    assert pointer in found
    assert words in found[pointer]
    assert json.dumps(found)
