"""Batches that are run in parts, and limits on memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.core.spool import read_frames
from engine.data.batches.division import Division, sizes_of_parts
from engine.training.memory import cap_process
from glasshouse.errors import SpecFailed
from tests.unit.engine.runs import CNN, errors, losses, of_type, planned, run, spec, write_job

PLAIN = {"layers": [layer for layer in CNN if layer["type"] != "Dropout"]}
HALVING = {"memory": {"on_oom": "halve_batch"}}
GROWING = [
    {"name": "up", "type": "Upsample", "args": {"scale_factor": 64}},
    {"name": "a", "type": "ReLU"},
    {"name": "b", "type": "Sigmoid"},
    {"name": "pool", "type": "AdaptiveAvgPool2d", "args": {"output_size": 2}},
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]
"""One row of the digits takes a MiB in each of the first three."""


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / f"checkpoints/step-{step}/model.safetensors")


def test_parts_are_alike_and_none_is_empty():
    assert sizes_of_parts(64, 4) == [16, 16, 16, 16]
    assert sizes_of_parts(44, 8) == [6, 6, 6, 6, 5, 5, 5, 5]
    assert sizes_of_parts(3, 8) == [1, 1, 1]
    assert sizes_of_parts(7, 1) == [7]
    assert [*Division(parts=2).own(slice(10, 17))] == [slice(10, 14), slice(14, 17)]


def test_a_batch_in_parts_is_the_update_of_as_many_small_batches_bit_for_bit(digits, tmp_path):
    job = spec(network=PLAIN, stop={"steps": 4})
    small = {"data": {"batch_size": 16}, "accumulate": 4}
    parts = run(tmp_path / "a", job, digits, parts=4)
    batches = run(tmp_path / "b", spec(network=PLAIN, stop={"steps": 4}, **small), digits)
    assert losses(parts) == losses(batches)
    mine, theirs = weights(tmp_path / "a", 4), weights(tmp_path / "b", 4)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"shuffle": {"enabled": False}},
        {"shuffle": {"buffer_size": 128}},
        {"shuffle": {"buffer_size": 128}, "cache": "memory"},
        {"workers": 2},
        {"drop_last": True},
    ],
    ids=["memory", "stored order", "pool", "cache", "workers", "drop_last"],
)
def test_a_step_in_parts_is_that_of_the_whole_batch(data, digits, tmp_path):
    """300 rows in batches of 64: the last one has 44, in seven parts of different sizes."""
    job = spec(network=PLAIN, data=data, optimizer={"type": "SGD", "args": {"lr": 0.1}})
    whole = run(tmp_path / "a", job, digits)
    parts = run(tmp_path / "b", job, digits, parts=7)
    assert losses(parts) == pytest.approx(losses(whole), rel=2e-5)
    assert of_type(parts, "progress")[-1]["samples"] == of_type(whole, "progress")[-1]["samples"]


def test_steps_evaluations_and_checkpoints_come_when_they_would(digits, tmp_path):
    validation = {"dataset": "ds_1", "split": "test"}
    job = spec(
        network=PLAIN,
        data={"validation": validation},
        evaluate={"every_epochs": 1},
        metrics=[{"type": "accuracy", "inputs": ["fc", "label"]}],
        optimizer={"type": "SGD", "args": {"lr": 0.1}},
    )
    whole, parts = run(tmp_path / "a", job, digits), run(tmp_path / "b", job, digits, parts=2)

    def judged(records: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
        found = of_type(records, "metrics")
        return [(r["step"], r["values"]) for r in found if "validation/loss" in r["values"]]

    assert [step for step, _ in judged(parts)] == [step for step, _ in judged(whole)] == [4, 9]
    for (_, mine), (_, theirs) in zip(judged(parts), judged(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    saved = [item["step"] for item in of_type(parts, "checkpoint")]
    assert saved == [item["step"] for item in of_type(whole, "checkpoint")]


def test_what_was_begun_with_whole_batches_continues_in_parts(digits, tmp_path):
    """In the middle of an epoch: the parts to come are those of the batches to come."""
    sgd = {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9}}
    job = spec(network=PLAIN, optimizer=sgd, checkpoint={"every_steps": 3, "keep_last": 9})
    whole = run(tmp_path / "a", job, digits)
    resume = {"dir": str(tmp_path / "a/checkpoints/step-3"), "step": 3}
    rest = run(tmp_path / "b", job, digits, resume=resume, parts=2)
    assert losses(rest) == pytest.approx(losses(whole)[3:], rel=2e-5)
    assert [(r["from"], r["to"], r["step"]) for r in of_type(rest, "adjusted")] == [(64, 32, 3)]
    again = {"dir": str(tmp_path / "b/checkpoints/step-6"), "step": 6}
    same = run(tmp_path / "c", job, digits, resume=again, parts=2)
    assert not of_type(same, "adjusted"), "the log has it already"
    fewer = run(tmp_path / "d", job, digits, resume=again, parts=4)
    assert [(r["from"], r["to"], r["step"]) for r in of_type(fewer, "adjusted")] == [(32, 16, 6)]


def test_a_job_with_micro_batches_reports_them(digits, tmp_path):
    records = run(tmp_path, spec(network=PLAIN, stop={"steps": 1}), digits, parts=8)
    [adjusted] = of_type(records, "adjusted")
    told = {name: adjusted[name] for name in ("what", "from", "to", "by", "step")}
    by = "guards.memory"
    assert told == {"what": "batch_size", "from": 64, "to": 8, "by": by, "step": 0}
    assert not of_type(run(tmp_path / "b", spec(stop={"steps": 1}), digits), "adjusted")


def in_a_process(directory: Path, job: dict[str, Any], table: Path, **more: Any) -> dict[str, Any]:
    """How a job ends in a process of its own, whose limits are its own."""
    meta = json.loads((table / "meta.json").read_text())
    write_job(directory, planned(job, meta)["spec"], table, **more)
    main = "import sys; from engine.process.rank import main; from pathlib import Path; "
    main += "main(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", main, str(directory)], check=True, timeout=120)
    records, _ = read_frames(directory / "spool", 0, 10**6)
    return records[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(("parts", "state"), [(1, "failed"), (16, "succeeded")])
@pytest.mark.long
def test_more_than_the_cap_is_out_of_memory_and_parts_need_less(parts, state, digits, tmp_path):
    """A step of 64 rows needs 128 MiB, by plan, and may take 100; one of four rows needs 8."""
    cap = 100 * 2**20 / psutil.virtual_memory().total
    guards = {"memory": {"on_oom": "halve_batch", "cap_fraction": cap}}
    job = spec(network={"layers": GROWING}, stop={"steps": 2}, guards=guards)
    end = in_a_process(tmp_path, job, digits, parts=parts)
    assert end["state"] == state
    if state == "failed":
        assert (end["error"]["code"], end["error"]["step"]) == ("out_of_memory", 0)
        assert end["error"]["memory"]["where"] == "host"


def test_a_system_that_cannot_cap_memory_refuses_to(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.training.memory._STATUS", tmp_path / "none")  # as on macOS
    with pytest.raises(SpecFailed, match="cap_fraction"):
        cap_process(0.5)


@pytest.mark.long
@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 does not tell"
)
def test_torch_reads_the_settings_of_its_allocator_as_they_were_given():
    ask = """
import torch
from engine.training.memory import guard_memory
from glasshouse.spec import MemoryGuard
allocator = {"expandable_segments": True, "max_split_size_mb": 64}
allocator["garbage_collection_threshold"] = 0.5
guard_memory(MemoryGuard.model_validate({"allocator": allocator}), torch.device("cpu"))
print(torch._C._accelerator_getAllocatorSettings())
"""
    found = subprocess.run(
        [sys.executable, "-c", ask], check=True, capture_output=True, text=True, timeout=60
    )
    settings = "expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.5"
    assert found.stdout.strip() == settings


def test_what_cannot_be_run_in_parts_is_refused_and_what_differs_is_reported():
    rnn = {"name": "rnn", "type": "GRU", "args": {"hidden_size": 4}, "stateful": True}
    flat = {"name": "rows", "type": "Flatten", "args": {"start_dim": 1, "end_dim": 2}}
    last = [{"name": "flat", "type": "Flatten"}, CNN[-1]]
    job = spec(network={"layers": [flat, rnn, *last]}, guards=HALVING)
    job["data"]["shuffle"] = {"enabled": False}
    found = errors(job)
    assert "micro-batches of a batch would share states" in found["/guards/memory/on_oom"]

    norm = {"name": "norm", "type": "BatchNorm2d"}
    found = planned(spec(network={"layers": [norm, *PLAIN["layers"]]}, guards=HALVING))
    assert ["/guards/memory/on_oom", "batch_norm"] in [
        [item["pointer"], item["code"]] for item in found["warnings"]
    ]


@pytest.mark.parametrize(
    ("memory", "place"),
    [
        ({"on_oom": "shrink"}, "/guards/memory/on_oom"),
        ({"cap_fraction": 0}, "/guards/memory/cap_fraction"),
        ({"cap_fraction": 1.5}, "/guards/memory/cap_fraction"),
        ({"allocator": {}}, "/guards/memory/allocator"),
        ({"allocator": {"max_split_size_mb": 20}}, "/guards/memory/allocator/max_split_size_mb"),
    ],
)
def test_bad_settings_are_refused_by_name(memory, place):
    job = spec(guards={"memory": memory}, devices={"type": "cuda"})
    assert place in errors(job)


def test_settings_of_cuda_devices_want_one():
    job = spec(guards={"memory": {"allocator": {"expandable_segments": True}}})
    assert "set devices.type to cuda" in next(iter(errors(job).values()))
