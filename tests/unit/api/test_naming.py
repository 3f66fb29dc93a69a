"""Which tensor a name of a request means."""

import pytest

from api.rendering.tensor_names import tensor_name
from glasshouse.errors import LayerNotFound
from models.tables import Job


def job(*, layers=()) -> Job:
    conv = {
        "name": "conv1",
        "output_shapes": {"conv1": [2, 2]},
        "parameter_shapes": {"conv1.weight": [2], "conv1.bias": [2]},
        "input_names": ["conv1"],
        "state_names": ["step", "exp_avg"],
    }
    lstm = {
        "name": "lstm",
        "output_shapes": {"lstm.0": [1], "lstm.1.0": [1], "lstm.1.1": [1]},
        "parameter_shapes": {},
        "input_names": ["lstm.0", "lstm.1.0"],
    }
    block = {
        "name": "block0",
        "output_shapes": {"block0": [3]},
        "parameter_shapes": {"block0.linear.weight": [3]},
        "input_names": ["block0"],
        "inner_inputs": ["block0.attn.0", "block0.attn.1", "block0.linear", "block0.linear:1"],
        "inner_outputs": ["block0.attn.drop", "block0.attn.0", "block0.linear", "block0.linear:1"],
        "state_names": ["momentum_buffer"],
    }
    return Job(plan={"layers": [conv, lstm, block, *layers]})


@pytest.mark.parametrize(
    ("layer", "kind", "name"),
    [
        ("conv1", "output", "conv1"),
        ("conv1", "input", "conv1"),
        ("lstm", "output", "lstm.0"),
        ("lstm.1.1", "output_grad", "lstm.1.1"),
        ("lstm", "input", "lstm.0"),
        ("conv1.weight", "update", "conv1.weight"),
        ("block0", "update", "block0.linear.weight"),
        ("block0.linear", "output", "block0.linear"),
        ("block0.linear:1", "output", "block0.linear:1"),
        ("block0.attn", "output", "block0.attn.0"),
        ("block0.attn", "input", "block0.attn.0"),
        ("block0.linear", "param_grad", "block0.linear.weight"),
        ("conv1.weight.exp_avg", "optim_state", "conv1.weight.exp_avg"),
        ("block0", "optim_state", "block0.linear.weight.momentum_buffer"),
        ("loss", "output", "loss"),
        ("loss.samples", "output", "loss.samples"),
    ],
)
def test_a_name_means_a_tensor(layer: str, kind: str, name: str) -> None:
    assert tensor_name(job(), layer, kind) == name


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ("conv9", "output"),
        ("conv1.weight", "output"),
        ("conv1", "param"),
        ("conv1.weight", "optim_state"),
        ("conv1.weight.exp", "optim_state"),
        ("block0.attn", "param"),
        ("loss", "output_grad"),
        ("loss.samples", "input"),
    ],
)
def test_an_unknown_tensor_is_reported(layer: str, kind: str) -> None:
    with pytest.raises(LayerNotFound) as refused:
        tensor_name(job(), layer, kind)
    assert kind in str(refused.value) or "several" in str(refused.value)


def test_a_layer_named_loss_is_the_layer() -> None:
    named = job(layers=[{"name": "loss", "output_shapes": {"loss": [1]}}])
    assert tensor_name(named, "loss", "output") == "loss"
    with pytest.raises(LayerNotFound):
        tensor_name(named, "loss.samples", "output")


def test_a_job_that_was_planned_before_there_were_inputs_has_none() -> None:
    with pytest.raises(LayerNotFound, match="no input"):
        tensor_name(Job(plan={"layers": [{"name": "fc"}]}), "fc", "input")
