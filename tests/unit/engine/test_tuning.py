"""What is only faster: layouts of memory, pooling before a ReLU, and algorithms that repeat."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.core.spool import read_frames
from engine.learner import tuning
from engine.native import pooling
from engine.network.layers import Pair
from engine.network.network import Network
from engine.process import rank
from glasshouse.spec import Graph
from tests.conftest import absent
from tests.unit.engine.runs import (
    captured,
    errors,
    is_real,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_job,
)

WIDE = [
    {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 6, "kernel_size": 3}},
    {"name": "norm", "type": "BatchNorm2d"},
    {"name": "relu1", "type": "ReLU"},
    {"name": "pool1", "type": "MaxPool2d", "args": {"kernel_size": 2}},
    {"name": "conv2", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 2}},
    {"name": "relu2", "type": "ReLU", "args": {"inplace": True}},
    {"name": "flat", "type": "Flatten"},
    {"name": "drop", "type": "Dropout", "args": {"p": 0.25}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
LAST = {"memory_format": "channels_last"}


def job(**more: Any) -> dict[str, Any]:
    return spec(network={"layers": WIDE}, **more)


def channels_last_is(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide the race beforehand: a trial of two passes would be a matter of luck."""
    seconds = {"contiguous_format": 1.0, "channels_last": 0.5 if faster else 0.99}

    def times(_self: object, once: Any, _device: object) -> dict[str, float]:
        once()
        return seconds

    monkeypatch.setattr(tuning.Tuned, "_times", times)


def adjustments_of(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["what"], r["from"], r["to"], r["by"]) for r in of_type(records, "adjusted")]


def test_the_layout_changes_rounding_only(digits, tmp_path):
    usual = run(tmp_path / "usual", job(), digits)
    other = run(tmp_path / "other", job(**LAST), digits)
    assert losses(other) == pytest.approx(losses(usual), rel=1e-4)
    one, two = (
        load_file(tmp_path / name / "checkpoints" / "step-10" / "model.safetensors")
        for name in ("usual", "other")
    )
    for name, item in one.items():
        torch.testing.assert_close(two[name], item, rtol=1e-3, atol=1e-5)


def test_the_layout_is_what_was_asked_for(digits, tmp_path, monkeypatch):
    """A convolution gets its weights and its input so, and gives its output so."""
    seen: list[bool] = []
    forward = nn.Conv2d.forward

    def spy(self: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        if is_real(x) and self.in_channels > 1:
            seen.extend(
                item.is_contiguous(memory_format=torch.channels_last) for item in (x, self.weight)
            )
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", spy)
    run(tmp_path, job(**LAST, stop={"steps": 2}), digits)
    assert seen == [True] * 4


def test_a_trial_leaves_everything_as_it_was(digits, tmp_path, monkeypatch):
    """Dropout's generator, the running statistics, gradients: the job is that of its outcome."""
    channels_last_is(True, monkeypatch)
    tuned = run(tmp_path / "tuned", job(tune=True), digits)
    assert adjustments_of(tuned) == [
        ("memory_format", "contiguous_format", "channels_last", "tune")
    ]
    assert losses(tuned) == losses(run(tmp_path / "last", job(**LAST), digits))
    channels_last_is(False, monkeypatch)
    kept = run(tmp_path / "kept", job(tune=True), digits)
    assert adjustments_of(kept) == [
        ("memory_format", "contiguous_format", "contiguous_format", "tune")
    ]
    assert losses(kept) == losses(run(tmp_path / "plain", job(), digits))


def test_the_real_trial_decides_and_the_job_ends(digits, tmp_path):
    records = run(tmp_path, job(tune=True), digits)
    ((what, before, after, by),) = adjustments_of(records)
    assert (what, before, by) == ("memory_format", "contiguous_format", "tune")
    assert after in ("contiguous_format", "channels_last")


def test_a_job_that_continues_keeps_to_it_without_a_trial(digits, tmp_path, monkeypatch):
    channels_last_is(True, monkeypatch)
    whole = job(tune=True, checkpoint={"every_steps": 1})
    uninterrupted = run(tmp_path / "whole", whole, digits)
    channels_last_is(False, monkeypatch)
    there = {"dir": str(tmp_path / "whole" / "checkpoints" / "step-6"), "step": 6}
    resumed = run(tmp_path / "resumed", whole, digits, resume=there)
    assert adjustments_of(resumed) == []
    assert losses(resumed) == losses(uninterrupted)[6:]
    state = json.loads((tmp_path / "resumed/checkpoints/step-10/state.json").read_text())
    assert state["parts"]["tuned"] == {"memory_format": "channels_last"}


def test_a_network_without_convolutions_is_not_tried(digits, tmp_path):
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    assert adjustments_of(run(tmp_path, spec(network={"layers": layers}, tune=True), digits)) == []


def test_a_trial_that_fails_is_not_what_ends_the_job(digits, tmp_path):
    """The first step meets it too, and names the layer."""
    layers = [*WIDE[:5], {"name": "flat", "type": "Flatten"}]
    sizes = {"num_embeddings": 10, "embedding_dim": 10}
    layers.append({"name": "wide", "type": "Embedding", "args": sizes, "inputs": ["label"]})
    layers.append(
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}, "inputs": ["flat"]}
    )
    layers.append({"name": "both", "type": "add", "inputs": ["fc", "wide"]})
    whole = spec(
        network={"layers": layers},
        loss={"type": "CrossEntropyLoss", "inputs": ["both", "label"]},
        tune=True,
    )
    resolved = planned(whole)["spec"]
    resolved["network"]["layers"][6]["args"]["num_embeddings"] = 2  # as a plan would never have it
    assert rank.main(write_job(tmp_path, resolved, digits)) == 0
    records, _ = read_frames(tmp_path / "spool", 0, 10**6)
    error = records[-1]["error"]
    assert (error["layer"], error["step"]) == ("wide", 0)


def test_an_image_layout_without_images_gives_a_warning():
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    for name, more in {"tune": {"tune": True}, "memory_format": LAST}.items():
        plan = planned(spec(network={"layers": layers}, **more))
        assert [item["pointer"] for item in plan["warnings"]] == [f"/{name}"]
        assert planned(job(**more))["warnings"] == []


def test_probes_see_the_same_in_either_layout(digits, tmp_path):
    kinds = ["output", "output_grad", "param", "param_grad"]
    probe = {"layers": ["conv*", "pool1"], "kinds": kinds, "every": 1, "want": ["stats", "full"]}
    found = []
    for name, more in {"usual": {}, "other": LAST}.items():
        whole = job(probes=[probe], stop={"steps": 1}, **more)
        found.append(captured(run(tmp_path / name, whole, digits), tmp_path / name))
    assert found[0].keys() == found[1].keys()
    for key, item in found[0].items():
        torch.testing.assert_close(found[1][key], item, rtol=1e-3, atol=1e-6)


def test_tune_needs_an_unset_memory_format():
    assert "tune selects" in errors(job(tune=True, **LAST))["/tune"]
    assert list(errors(job(memory_format="NHWC"))) == ["/memory_format"]


# --- a ReLU and its pooling ------------------------------------------------------------------


def made(*layers: dict[str, Any], wanted: tuple[str, ...] = ("out",)) -> Network:
    whole = [{"inputs": [layers[n - 1]["name"] if n else "x"], **x} for n, x in enumerate(layers)]
    network = Network(Graph.model_validate_json(json.dumps({"layers": whole})), wanted)
    assert pairs(network) == []  # images lie as usual
    network.lay_out(torch.channels_last)
    return network


def pairs(network: Network) -> list[str]:
    return [item.relu.name for item in network._plan if isinstance(item, Pair)]  # pyright: ignore


RELU = {"name": "relu", "type": "ReLU"}
POOL = {"name": "pool", "type": "MaxPool2d", "args": {"kernel_size": 2}}
OUT = {"name": "out", "type": "Flatten"}


def operations(output: torch.Tensor) -> set[str]:
    """The names of all that a backward pass from here goes through."""
    found, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.add(node.name())
            left += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("inplace", [False, True])
def test_pooling_first_gives_the_same_bits_forward_and_backward(inplace, natively, monkeypatch):
    if not natively:
        monkeypatch.setattr(pooling, "LOADED", None)
    elif pooling.LOADED is None:
        absent("the native pooling (python -m engine.native)")
    relu = {**RELU, "args": {"inplace": inplace}}
    scale = {"name": "scale", "type": "mul", "args": {"other": 1.0}}
    paired = made(scale, relu, POOL, OUT)
    apart = made(scale, relu, POOL, OUT, wanted=("out", "relu"))
    assert (pairs(paired), pairs(apart)) == (["relu"], [])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 8, 8, generator=generator).round(decimals=1)  # with ties and zeros
    x[0, 0, 0, 0] = float("nan")
    results = []
    for network in (paired, apart):
        leaf = x.clone().requires_grad_()
        out = network({"x": leaf})["out"]
        assert ("_PoolReluBackward" in operations(out)) == (natively and network is paired)
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        (out * weights).sum().backward()
        results.append((out.detach(), leaf.grad))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(9.0), two.nan_to_num(9.0))


def test_what_is_watched_runs_as_it_stands():
    network = made(RELU, POOL, OUT)
    seen: list[torch.Size] = []
    x = {"x": torch.randn(2, 1, 4, 4)}
    handle = network.layers["relu"].register_forward_hook(lambda *a: seen.append(a[2].shape))
    watched = network(x)["out"]
    handle.remove()
    assert seen == [torch.Size([2, 1, 4, 4])]
    assert torch.equal(network(x)["out"], watched)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "layers",
    [
        (RELU, POOL, {**OUT, "type": "cat", "inputs": ["wide", "other"]}),
        (RELU, {**POOL, "args": {"kernel_size": 2, "return_indices": True}}, OUT),
        (RELU, POOL, OUT, {"name": "act", "type": "ReLU", "args": {"inplace": True}}),
        ({**RELU, "stop_gradient": True}, POOL, OUT),
        ({**RELU, "output_grad_clip": 1.0}, POOL, OUT),
        ({**RELU, "type": "Tanh"}, POOL, OUT),
        ({**RELU, "type": "ReLU6"}, POOL, OUT),
    ],
)
def test_other_layers_run_as_they_stand(layers):
    if layers[-1]["type"] == "cat":
        layers = (
            *layers[:2],
            {"name": "wide", "type": "Flatten"},
            {"name": "other", "type": "Flatten", "inputs": ["relu"]},
            layers[-1],
        )
    assert pairs(made(*layers, wanted=("out",))) == []


def test_a_relu_in_place_whose_input_others_read_stays_first():
    conv = {"name": "conv", "type": "Conv2d", "args": {"in_channels": 1, "out_channels": 1}}
    conv["args"]["kernel_size"] = 1
    relu = {**RELU, "args": {"inplace": True}}
    both = {"name": "out", "type": "cat", "inputs": ["flat", "raw"], "args": {"dim": 1}}
    flat = {"name": "flat", "type": "Flatten"}
    raw = {"name": "raw", "type": "Flatten", "inputs": ["conv"]}
    assert pairs(made(conv, relu, POOL, flat, raw, both)) == []
    assert pairs(made(conv, RELU, POOL, flat, raw, both)) == ["relu"]
    assert pairs(made(conv, relu, POOL, OUT, wanted=("out", "conv"))) == []
    assert pairs(made(conv, relu, POOL, OUT)) == ["relu"]


# --- deterministic ---------------------------------------------------------------------------


def test_steps_are_not_compiled_and_why_is_reported():
    assert "different bits" in errors(spec(compile=True))["/compile"]
    assert planned(spec(compile=False))["spec"]["compile"] is False
    assert list(errors(spec(compile="yes"))) == ["/compile"]


def test_deterministic_has_torch_refuse_what_does_not_repeat(digits, tmp_path, monkeypatch):
    asked: list[bool] = []
    wanted = torch.use_deterministic_algorithms

    def note(mode: bool) -> None:
        asked.append(mode)
        wanted(mode)

    monkeypatch.setattr(torch, "use_deterministic_algorithms", note)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        records = run(tmp_path / "yes", spec(deterministic=True, stop={"steps": 2}), digits)
        assert torch.are_deterministic_algorithms_enabled()
        assert losses(records) == losses(run(tmp_path / "no", spec(stop={"steps": 2}), digits))
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        wanted(False)
    assert asked == [True, False]
