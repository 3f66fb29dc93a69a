"""Checkpoints of format 2, which number the parameters, are resumed as those that name them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import checkpoint
from engine.checkpoint.training_state import OptimizerState, without_arguments
from engine.learner import tuning
from engine.learner.learner import learner_of
from engine.network.network import Network
from glasshouse.errors import CheckpointMismatch
from glasshouse.spec import parse_job
from tests.unit.engine.runs import losses, planned, run, spec

LAYERS = [
    {"name": "conv1", "type": "Conv2d", "args": {"out_channels": 6, "kernel_size": 3}},
    {"name": "norm", "type": "BatchNorm2d"},
    {"name": "conv2", "type": "Conv2d", "args": {"out_channels": 8, "kernel_size": 3}},
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
LAST = {"memory_format": "channels_last"}
FUSED_ADAM = {"optimizer": {"type": "Adam", "args": {"lr": 0.01, "fused": True}}}
JOBS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "fused": {**LAST, **FUSED_ADAM},
    "fused Adagrad": {
        **LAST,
        "optimizer": {"type": "Adagrad", "args": {"lr": 0.05, "fused": True}},
    },
    "window": {
        "average": {"type": "window", "min_average_window": 2, "max_average_window": 3},
        "optimizer": {"type": "AdamW", "args": {"lr": 0.01}},
    },
    "groups": {
        "network": {"layers": [{**LAYERS[0], "lr_scale": 0.5}, *LAYERS[1:]]},
        "optimizer": {"type": "Adam", "args": {"lr": 0.01}},
    },
    "frozen": {"network": {"layers": [{**LAYERS[0], "trainable": False}, *LAYERS[1:]]}},
}


def job_of(kind: str, **more: Any) -> dict[str, Any]:
    saving = {"every_steps": 1, "every_s": None, "keep_last": 20}
    return spec(**{"network": {"layers": LAYERS}, "checkpoint": saving, **JOBS[kind], **more})


def network_of(job: dict[str, Any]) -> Network:
    found = parse_job(json.dumps(planned(job)["spec"]))
    assert found.kind == "train"
    return Network(found.network, ()).to(memory_format=torch.channels_last)


def as_format_2(directory: Path, job: dict[str, Any]) -> None:
    """Rewrite a checkpoint in format 2."""
    network = network_of(job)
    trained = {name: item for name, item in network.named_parameters() if item.requires_grad}
    numbers = {name: number for number, name in enumerate(trained)}
    averaged = [name for name, _ in network.named_parameters()]
    averaged += [name for name, item in network.named_buffers() if item.is_floating_point()]
    tensors: dict[str, Tensor] = {}
    for key, value in load_file(directory / "optimizer.safetensors").items():
        item, (name, _, rest) = value, key.rpartition(".")
        if job["optimizer"]["type"] == "Adagrad" and rest == "sum":  # in the order of the memory
            like = torch.empty_like(trained[name]).copy_(item)
            item = like.as_strided((like.numel(),), (1,)).reshape(item.shape).clone()
        tensors[f"{numbers[name]}.{rest}"] = item
    _replace(directory / "optimizer.safetensors", tensors)
    if (directory / "averages.safetensors").exists():
        found = load_file(directory / "averages.safetensors")
        split = {key: key.partition(".") for key in found}
        numbered = {
            f"{a}.{averaged.index(name)}": found[key] for key, (a, _, name) in split.items()
        }
        _replace(directory / "averages.safetensors", numbered)
    state = checkpoint.read_state(directory) | {"format": 2}
    for group in state["parts"]["optimizer"]["param_groups"]:
        group["params"] = [numbers[name] for name in group["params"]]
    kept = state["parts"]["optimizer"]["numbers"]
    state["parts"]["optimizer"]["numbers"] = {str(numbers[n]): kept[n] for n in kept}
    checkpoint._write_json(directory / "state.json", state)
    files = [path for path in directory.iterdir() if path.name != "manifest.json"]
    said = {path.name: _said(path) for path in files}
    (directory / "manifest.json").write_text(json.dumps(said))


def _replace(path: Path, tensors: dict[str, Tensor]) -> None:
    path.unlink()
    save_file({name: item.contiguous() for name, item in tensors.items()}, path)


def _said(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.long
def test_a_numbered_checkpoint_is_resumed_bit_for_bit(digits, tmp_path, kind):
    job = job_of(kind)
    whole = losses(run(tmp_path / "whole", job, digits))
    old = tmp_path / "whole" / "checkpoints" / "step-4"
    as_format_2(old, job)
    rest = run(tmp_path / "rest", job, digits, resume={"dir": str(old), "step": 4})
    assert losses(rest) == whole[4:]
    mine, theirs = (tmp_path / name / "checkpoints" / "step-10" for name in ("rest", "whole"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name


@pytest.mark.parametrize("is_old", [False, True])
def test_the_run_of_a_numbered_checkpoint_is_continued_by_another_job(digits, tmp_path, is_old):
    job = job_of("groups")
    run(tmp_path / "whole", job, digits)
    there = tmp_path / "whole" / "checkpoints" / "step-4"
    if is_old:
        as_format_2(there, job)
    init = {"init": {"checkpoint": str(there), "load": "all"}}
    named = {"checkpoint": {"dir": str(there)}}
    other = job_of("groups", optimizer={"type": "Adam", "args": {"lr": 0.005}}, **init)
    records = run(tmp_path / str(is_old), other, digits, **named)
    assert len(losses(records)) == 6
    fresh = job_of("groups", **init)  # the same arguments: it is the same run
    whole = losses(run(tmp_path / "again", job, digits))
    assert losses(run(tmp_path / "same", fresh, digits, **named)) == whole[4:]


def test_a_fork_that_trains_other_parameters_is_refused_by_name(digits, tmp_path):
    """By number, each moment would meet the weights of another parameter."""
    run(tmp_path, job_of("momentum"), digits)
    found = checkpoint.read(tmp_path / "checkpoints" / "step-4").parts["optimizer"]
    other = parse_job(json.dumps(planned(job_of("frozen"))["spec"]))
    assert other.kind == "train"
    learner = learner_of(other, torch.device("cpu"))
    part = OptimizerState(learner.optimizer, learner.network)
    with pytest.raises(CheckpointMismatch, match=r"does not train 'conv1.bias'"):
        part.restore(without_arguments(found))


@pytest.mark.parametrize("more", [LAST, {"tune": True}], ids=["memory_format", "tune"])
def test_the_state_of_a_parameter_has_its_layout_from_the_first_step_on(
    digits, tmp_path, monkeypatch, more
):
    """Adagrad makes its sums before the first step, and its fused kernel reads raw memory."""
    seen: list[bool] = []

    def spy(self: torch.optim.Optimizer, closure: None = None) -> None:
        for parameter, kept in self.state.items():
            if parameter.dim() == 4 and parameter.shape[1] > 1:
                seen.append(kept["sum"].stride() == parameter.stride())
        plain(self, closure)

    def channels_last_wins(_self: object, once: Any, _device: object) -> dict[str, float]:
        return {"contiguous_format": 1.0, "channels_last": 0.5}

    plain = torch.optim.Adagrad.step
    monkeypatch.setattr(tuning.Tuned, "_times", channels_last_wins)
    monkeypatch.setattr(torch.optim.Adagrad, "step", spy)
    run(
        tmp_path,
        job_of("fused Adagrad", **{**{"memory_format": "contiguous_format"}, **more}),
        digits,
    )
    assert seen[-10:] == [True] * 10
