"""Jobs that begin with a checkpoint of another job, and going on in a terminal."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from engine.__main__ import main
from engine.core.spool import read_frames
from engine.data.batches.rows import shuffled
from engine.network.network import Network
from engine.plan.plan import parse_spec
from tests.unit.engine.runs import CNN, cnn, errors, losses, of_type, planned, run, spec

EACH = {"checkpoint": {"every_steps": 1}}


@pytest.fixture(scope="module")
def first(digits, tmp_path_factory):
    """A job of ten steps with dropout and momentum, saved after each."""
    directory = tmp_path_factory.mktemp("first")
    return directory, losses(run(directory, spec(**EACH), digits))


def _init(directory: Path, step: int, load: str) -> dict[str, Any]:
    return {"checkpoint": str(directory / "checkpoints" / f"step-{step}"), "load": load}


def _begun(out: Path, job: dict[str, Any], table: Path) -> list[dict[str, Any]]:
    """Run a job as a worker would, which hands it the checkpoint that its spec names."""
    return run(out, job, table, checkpoint={"dir": job["init"]["checkpoint"]})


def test_a_longer_job_continues_with_the_run_of_another(digits, tmp_path, first):
    whole = losses(run(tmp_path / "whole", spec(stop={"epochs": 4}), digits))
    for step in (7, 10):  # in the middle, and where the other one had ended
        job = spec(stop={"epochs": 4}, init=_init(first[0], step, "all"))
        records = _begun(tmp_path / str(step), job, digits)
        assert losses(records) == whole[step:]
        assert of_type(records, "metrics")[0]["step"] == step
        assert of_type(records, "progress")[-1]["samples"] == 4 * 300


def test_the_arguments_of_the_optimizer_are_those_of_the_new_job(digits, tmp_path, first):
    """Against a second path: the first job with its learning rate set at that step."""
    setting = {"id": "cmd_1", "set": {"optimizer.lr": 0.01}, "step": 7, "old": {}, "new": {}}
    expected = losses(run(tmp_path / "set", spec(), digits, commands=[setting]))
    slower = {"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9}}
    job = spec(optimizer=slower, init=_init(first[0], 7, "all"))
    found = losses(_begun(tmp_path / "forked", job, digits))
    assert found == expected[7:]
    assert found[0] == first[1][7], "the weights are those of the checkpoint"
    assert found[1:] != first[1][8:]


def test_a_fork_may_watch_and_judge_what_it_likes(digits, tmp_path, first):
    probe = {"layers": ["fc"], "kinds": ["output"], "every": 1, "max_overhead": None}
    metric = {"type": "l2", "inputs": ["fc"], "name": "size"}
    job = spec(probes=[probe], metrics=[metric], init=_init(first[0], 7, "all"))
    records = _begun(tmp_path, job, digits)
    assert losses(records) == first[1][7:]
    assert [record["step"] for record in of_type(records, "stats")] == [7, 8, 9]
    assert all("size" in r["values"] for r in of_type(records, "metrics") if "loss" in r["values"])


def test_the_weights_alone_begin_with_the_first_step(digits, tmp_path, first):
    layers = [
        {**layer, "args": {"p": 0.0}} if layer["name"] == "drop" else layer
        for layer in spec()["network"]["layers"]
    ]
    job = spec(network={"layers": layers}, init=_init(first[0], 7, "model"))
    records = _begun(tmp_path, job, digits)
    network = cnn()
    saved = load_file(first[0] / "checkpoints" / "step-7" / "model.safetensors")
    names = {"conv1": "0", "fc": "5"}
    network.load_state_dict(
        {f"{names[k.split('.')[0]]}.{k.split('.')[1]}": saved[k] for k in saved}
    )
    rows = shuffled(300, 3, 0)[:64]
    x = torch.from_numpy(np.load(digits / "train" / "0.npy"))[rows].to(torch.float32) / 255
    y = torch.from_numpy(np.load(digits / "train" / "1.npy"))[rows]
    assert losses(records)[0] == functional.cross_entropy(network.eval()(x), y).item()
    assert len(losses(records)) == 10
    assert of_type(records, "metrics")[0]["step"] == 0


def test_what_a_job_has_saved_itself_comes_before_what_it_began_with(digits, tmp_path, first):
    job = spec(init=_init(first[0], 7, "model"), **EACH)
    begun = losses(_begun(tmp_path / "a", job, digits))
    there = {"dir": str(tmp_path / "a" / "checkpoints" / "step-4"), "step": 4}
    again = {"checkpoint": {"dir": job["init"]["checkpoint"]}, "resume": there}
    assert losses(run(tmp_path / "b", job, digits, **again)) == begun[4:]


WIDER = [*CNN, {"name": "more", "type": "Linear", "args": {"out_features": 10}}]
ENDS = {"loss": {"type": "CrossEntropyLoss", "inputs": ["more", "label"]}, "stop": {"steps": 1}}


@pytest.mark.parametrize("missing", ["init", "zero"])
def test_parameters_that_the_checkpoint_has_not_are_drawn_or_zero(digits, tmp_path, first, missing):
    network = {"layers": WIDER}
    drawn = run(tmp_path / "drawn", spec(network=network, **ENDS, **EACH), digits)
    begins = {**_init(first[0], 7, "model"), "missing": missing}
    still = {"type": "SGD", "args": {"lr": 0.0}}
    job = spec(network=network, init=begins, optimizer=still, **ENDS)
    _begun(tmp_path / "begun", job, digits)
    found = load_file(tmp_path / "begun" / "checkpoints" / "step-1" / "model.safetensors")
    saved = load_file(first[0] / "checkpoints" / "step-7" / "model.safetensors")
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    if missing == "zero":
        assert not found["more.weight"].any()
        return
    assert of_type(drawn, "checkpoint")
    torch.manual_seed(3)
    built = Network(parse_spec(planned(job)["spec"]).network, ("more",))
    assert torch.equal(found["more.weight"], built.state_dict()["more.weight"])


def test_what_does_not_fit_is_refused_by_the_planner():
    trained = planned(spec())["spec"]
    begins = {"checkpoint": "ckpt_1", "load": "model"}
    wider = {"network": {"layers": WIDER}, **ENDS}
    found = errors(spec(**wider, init=begins), network=trained)
    assert "more.weight" in found["/init/checkpoint"]
    planned(spec(**wider, init={**begins, "missing": "zero"}), network=trained)
    narrow = [*CNN[:-1], {**CNN[-1], "args": {"out_features": 11}}]
    job = spec(network={"layers": narrow}, init={**begins, "missing": "init"})
    assert "fc.weight" in errors(job, network=trained)["/init/checkpoint"]
    whole = spec(init={**begins, "load": "all", "missing": "zero"})
    assert "applies to load model only" in errors(whole)["/init/missing"]


# --- in a terminal -------------------------------------------------------------------------------


def _terminal(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["engine", *map(str, arguments)])
    return main()


def _losses(out: Path) -> list[float]:
    return losses(read_frames(out / "spool", 0, 10**6)[0])


@pytest.fixture
def job(digits, tmp_path):
    def write(**changes: Any) -> Path:
        data = {"train": {"dataset": str(digits), "split": "train"}}
        devices = {"type": "cpu", "threads": 1}
        path = tmp_path / "job.json"
        path.write_text(json.dumps(spec(data=data, devices=devices, **changes)))
        return path

    return write


def test_a_terminal_continues_from_a_checkpoint(job, tmp_path, monkeypatch, capsys):
    path = job(checkpoint={"every_steps": 3, "keep_last": 9})
    assert _terminal(monkeypatch, path, "--out", tmp_path / "a") == 0
    saved = tmp_path / "a" / "checkpoints" / "step-6"
    assert _terminal(monkeypatch, path, "--out", tmp_path / "b", "--resume", saved) == 0
    assert _losses(tmp_path / "b") == _losses(tmp_path / "a")[6:]
    # the job.json that the first one wrote will do as well
    written = tmp_path / "a" / "job.json"
    assert _terminal(monkeypatch, written, "--out", tmp_path / "c", "--resume", saved) == 0
    assert _losses(tmp_path / "c") == _losses(tmp_path / "b")
    capsys.readouterr()


def test_a_terminal_says_what_is_wrong_with_a_checkpoint(job, tmp_path, monkeypatch, capsys):
    assert _terminal(monkeypatch, job(), "--out", tmp_path / "a") == 0
    saved = tmp_path / "a" / "checkpoints" / "step-5"
    other = job(optimizer={"type": "Adam"})
    assert _terminal(monkeypatch, other, "--out", tmp_path / "b", "--resume", saved) == 3
    assert "Adam" in capsys.readouterr().err
    (saved / "model.pt").write_bytes(b"")
    assert _terminal(monkeypatch, job(), "--out", tmp_path / "b", "--resume", saved) == 2
    assert "model.pt" in capsys.readouterr().err


def test_a_terminal_begins_with_a_checkpoint(job, tmp_path, monkeypatch, capsys):
    assert _terminal(monkeypatch, job(), "--out", tmp_path / "a") == 0
    longer = job(stop={"epochs": 3}, init=_init(tmp_path / "a", 10, "all"))
    assert _terminal(monkeypatch, longer, "--out", tmp_path / "b") == 0
    assert len(_losses(tmp_path / "b")) == 5
    capsys.readouterr()


def test_a_terminal_keeps_the_best(job, tmp_path, monkeypatch, capsys):
    best = {"metric": "loss", "mode": "min", "count": 2}
    path = job(checkpoint={"every_steps": 1, "keep_last": 1, "keep_best": best})
    assert _terminal(monkeypatch, path, "--out", tmp_path / "a") == 0
    records, _ = read_frames(tmp_path / "a" / "spool", 0, 10**6)
    by_loss = {r["step"]: r["metrics"]["loss"] for r in of_type(records, "checkpoint")}
    expected = {*sorted(by_loss, key=lambda step: by_loss[step])[:2], 10}
    kept = {int(path.name[5:]) for path in (tmp_path / "a" / "checkpoints").iterdir()}
    assert kept == expected
    capsys.readouterr()
