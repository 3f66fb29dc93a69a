"""Probes of phase ``evaluate``: the first batch of an evaluation, the same rows each time."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from glasshouse.spec import Probe
from tests.unit.engine.runs import captured, cnn, errors, losses, of_type, planned, run, spec

LAYERS = ("conv1", "relu1", "pool1", "flat", "drop", "fc")


def job(*probes, **changes):
    changes.setdefault("evaluate", {"every_steps": 2})
    validation = {"validation": {"dataset": "ds_1", "split": "test"}}
    return spec(probes=list(probes), data=validation, stop={"steps": 7}, **changes)


def looking(**changes):
    body = {"layers": ["*"], "kinds": ["output"], "every": 1, "phase": "evaluate"}
    return {**body, **changes}


def seen(records, kind="stats"):
    return [(item["step"], item["phase"]) for item in of_type(records, kind)]


def by_hand(state, digits):
    """Outputs of the network in evaluation, for the first 64 rows of the split."""
    network = cnn()
    names = {"conv1": "0", "fc": "5"}
    network.load_state_dict(
        {
            f"{names[k.partition('.')[0]]}.{k.partition('.')[2]}": v.contiguous()
            for k, v in state.items()
        }
    )
    network.eval()
    x = torch.from_numpy(np.load(digits / "test" / "0.npy"))[:64].float() / 255
    found = {}
    with torch.inference_mode():
        for name, layer in zip(LAYERS, network, strict=True):
            x = layer(x.clone())
            found[name] = x.clone()
    found["conv1"] = network[0](torch.from_numpy(np.load(digits / "test" / "0.npy"))[:64] / 255)
    return found


def test_an_evaluation_is_seen_as_it_is_computed_by_hand(digits, tmp_path):
    probe = looking(kinds=["output", "param"], want=["stats", "full"])
    records = run(tmp_path, job(probe, checkpoint={"every_steps": 2, "keep_last": 9}), digits)
    steps = [1, 3, 5, 6]  # after every second update, and at the end
    assert seen(records) == [(step, "evaluate") for step in steps]
    states = {
        item["step"]: load_file(tmp_path / item["dir"] / "model.safetensors")
        for item in of_type(records, "checkpoint")
    }
    every = captured(records, tmp_path)
    kept = {(step, layer): item for (step, layer, _), item in every.items()}
    assert {item["phase"] for item in of_type(records, "captures")} == {"evaluate"}
    for step in steps:
        expected = by_hand(states[step + 1], digits)
        for name in LAYERS:
            assert torch.equal(kept[step, name], expected[name]), (step, name)
        for name, value in states[step + 1].items():
            assert torch.equal(kept[step, name], value)
    for item in of_type(records, "stats"):
        means = {row[0]: row[2] for row in item["rows"] if row[1] == "output"}
        for name in LAYERS:
            assert means[name] == pytest.approx(
                float(kept[item["step"], name].double().mean()), rel=1e-6
            )


def test_every_counts_evaluations_and_at_names_their_steps(digits, tmp_path):
    second = looking(layers=["fc"], every=2)
    records = run(tmp_path / "a", job(second), digits)
    assert [step for step, _ in seen(records)] == [1, 5]
    listed = looking(layers=["fc"], at=[3, 4], every=None)
    assert [step for step, _ in seen(run(tmp_path / "b", job(listed), digits))] == [3]
    window = looking(layers=["fc"], start=2, stop=6)
    assert [step for step, _ in seen(run(tmp_path / "c", job(window), digits))] == [3, 5]


def test_both_phases_keep_apart_and_no_number_changes(digits, tmp_path):
    training = {"layers": ["fc"], "kinds": ["output"], "every": 3}
    records = run(tmp_path / "a", job(looking(layers=["conv1"]), training), digits)
    of_training = [item for item in of_type(records, "stats") if item["phase"] == "train"]
    assert [item["step"] for item in of_training] == [0, 3, 6]
    assert {row[0] for item in of_training for row in item["rows"]} == {"fc"}
    plain = run(tmp_path / "b", job(), digits)
    assert losses(records) == losses(plain)

    def judged(found):
        return [
            item["values"]
            for item in of_type(found, "metrics")
            if "validation/loss" in item["values"]
        ]

    assert judged(records) == judged(plain)
    overhead = of_type(records, "overhead")[-1]
    assert set(overhead["probes"]) == {"0", "1"}


def test_what_an_evaluation_cannot_show_is_refused_with_the_reason():
    meta_job = job(looking(kinds=["output", "output_grad", "param_grad"]))
    found = errors(meta_job)
    assert set(found) == {"/probes/0/kinds/1", "/probes/0/kinds/2"}
    assert "computes no gradient" in found["/probes/0/kinds/1"]
    assert "evaluate" in errors(job(looking(), evaluate=None))["/probes/0/phase"]
    assert "validation/loss" in errors(job(looking(layers=["fc", "loss*"])))["/probes/0/layers/1"]
    assert planned(job(looking(kinds=["output", "param"])))["probes"][0]["bytes_per_step"] > 0


def test_a_budget_that_could_not_be_held_is_refused():
    for changes in ({"phase": "evaluate", "every": 1}, {"at": (1,)}):
        with pytest.raises(ValidationError, match="max_overhead"):
            Probe(layers=("*",), kinds=("output",), max_overhead=0.1, **changes)
