"""What the engine promises, on a real CUDA device: ``make test-gpu``.

So that they do not rot where there is none, ``ENGINE_DEVICE=simulated`` runs them on the simulated
accelerator, as ``make test`` does; ``tests/accelerator/exclusions.py`` has those that need CUDA.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from engine.core.snapshot import take
from engine.core.timing import DeviceClock
from engine.data.augmentation.augmenting import Augmenting
from engine.data.columns.loaded import gathered
from glasshouse.spec.augmentation import Augment
from tests.unit.engine import ragged
from tests.unit.engine.conftest import digits  # noqa: F401 - a fixture
from tests.unit.engine.runs import captured, losses, run, spec
from tests.unit.engine.test_augmenting import EACH

KIND = os.environ.get("ENGINE_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND == "cuda" and not torch.cuda.is_available(), reason="no CUDA device"),
]
CPU = {"device": {"type": "cpu", "threads": 1}}
THERE = {"device": {"type": KIND, "threads": 1}}
EVERYTHING = [
    {
        "layers": ["*", "*.*", "loss*"],
        "kinds": [
            *("output", "input", "output_grad"),
            *("param", "param_grad", "update", "optim_state"),
        ],
        "every": 1,
        "want": ["stats", "full"],
        "max_overhead": None,
    }
]


def last_weights(directory: Path) -> dict[str, torch.Tensor]:
    steps = sorted((directory / "checkpoints").iterdir(), key=lambda path: int(path.name[5:]))
    return load_file(steps[-1] / "model.safetensors")


def keep_busy() -> None:
    """Queue work that takes a while."""
    size = 4000 if KIND == "cuda" else 100
    busy = torch.randn(size, size, device=KIND)
    for _ in range(20):
        busy = busy @ busy


def test_watching_everything_changes_no_bit(digits: Path, tmp_path: Path, monkeypatch: Any):  # noqa: F811
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    job = spec(deterministic=True)
    try:
        plain = run(tmp_path / "plain", job, digits, **THERE)
        watched = run(tmp_path / "watched", {**job, "probes": EVERYTHING}, digits, **THERE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses(plain) == losses(watched)
    for name, tensor in last_weights(tmp_path / "plain").items():
        assert torch.equal(tensor, last_weights(tmp_path / "watched")[name]), name


@pytest.mark.parametrize("rows", [slice(3, 40), torch.tensor([5, 1, 1, 63])])
def test_rows_come_to_the_device_as_they_are_while_it_is_busy(rows: Any):
    """Copies are asynchronous; the pinned memory of one is not reused before it was read."""
    values = torch.randn(64, 1000)
    keep_busy()
    for _ in range(20):
        assert gathered(values, rows, torch.device(KIND)).device.type == KIND
    several = [gathered(values + n, rows, torch.device(KIND)) for n in range(20)]
    for n, found in enumerate(several):
        assert torch.equal(found.cpu(), (values + n)[rows])


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_tf32_is_used_where_the_spec_says_so(precision: str, digits: Path, tmp_path: Path):  # noqa: F811
    before = torch.get_float32_matmul_precision()
    try:
        run(tmp_path, spec(matmul_precision=precision), digits, **THERE)
        assert torch.backends.cuda.matmul.allow_tf32 == (precision == "high")
    finally:
        torch.set_float32_matmul_precision(before)


def test_losses_are_near_those_of_the_cpu(digits: Path, tmp_path: Path):  # noqa: F811
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    job = spec(network={"layers": layers})
    on_cpu = losses(run(tmp_path / "cpu", job, digits, **CPU))
    on_device = losses(run(tmp_path / "cuda", job, digits, **THERE))
    assert on_device == pytest.approx(on_cpu, rel=1e-3)


def test_the_figures_of_a_tensor_are_numpys(digits: Path, tmp_path: Path):  # noqa: F811
    records = run(tmp_path, spec(stop={"steps": 2}, probes=EVERYTHING), digits, **THERE)
    captures = captured(records, tmp_path)
    rows = [
        (record["step"], row) for record in records if record["type"] == "stats"
        for row in record["rows"]
    ]  # fmt: skip
    assert rows
    for step, (layer, kind, *figures) in rows:
        tensor = captures[step, layer, kind].double().numpy()
        wanted = [tensor.mean(), tensor.std(), tensor.min(), tensor.max()]
        wanted += [math.sqrt((tensor**2).sum()), np.abs(tensor).max(), (tensor == 0).mean(), 0, 0]
        assert figures == pytest.approx(wanted, rel=1e-6, abs=1e-9), (step, layer, kind)


def test_the_governor_measures_with_the_devices_clock(digits: Path, tmp_path: Path):  # noqa: F811
    """Watching forty tiny layers costs more than computing them: it is found out and held."""
    layers = [{"name": "flat", "type": "Flatten"}]
    layers += [{"name": f"tanh{number}", "type": "Tanh"} for number in range(40)]
    layers.append({"name": "fc", "type": "Linear", "args": {"out_features": 10}})
    governed = {**EVERYTHING[0], "want": ["stats"], "max_overhead": 0.03}
    job = spec(network={"layers": layers}, stop={"steps": 300})
    plain = run(tmp_path / "plain", job, digits, **THERE)
    records = run(tmp_path / "watched", {**job, "probes": [governed]}, digits, **THERE)
    (first, *_) = [item for item in records if item["type"] == "adjusted"]
    assert first["from"] == 1
    assert first["step"] <= 100
    told = [item for item in records if item["type"] == "overhead"][-1]
    assert told["probes"]["0"] > 0
    assert losses(plain) == losses(records)


def test_a_clock_of_events_measures_what_the_device_does():
    clock = DeviceClock(device=torch.device(KIND, 0))
    keep_busy()
    clock.mark("forward")
    clock.end_step(1)
    laps = clock.take(wait=True)
    assert laps["num_steps"] == 1
    assert laps["forward"] > 1e5


def test_the_rest_of_a_run_is_bit_for_bit_what_it_would_have_been(
    digits: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: Any,
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    adam = {"type": "AdamW", "args": {"lr": 0.01}}
    job = spec(optimizer=adam, checkpoint={"every_steps": 1}, deterministic=True)
    try:
        whole = losses(run(tmp_path / "whole", job, digits, **THERE))
        for step in (3, 5):
            there = {"dir": str(tmp_path / "whole" / "checkpoints" / f"step-{step}"), "step": step}
            out = tmp_path / str(step)
            assert losses(run(out, job, digits, resume=there, **THERE)) == whole[step:]
            for name, tensor in last_weights(tmp_path / "whole").items():
                assert torch.equal(tensor, last_weights(out)[name]), name
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_copy_is_of_the_moment_at_which_it_was_asked_for():
    """The copy is queued behind a slow kernel, and the change behind the copy."""

    class Part:
        def __init__(self) -> None:
            self.value = torch.zeros(2**20, device=KIND)

        def state(self) -> dict[str, Any]:
            return {"value": self.value}

        def restore(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    part = Part()
    keep_busy()
    part.value.fill_(1.0)
    snapshot = take({"part": part}, {})
    part.value.fill_(2.0)
    assert snapshot.device == KIND
    snapshot.wait()
    assert (snapshot.tensors["part"]["value"] == 1.0).all()


def test_what_was_saved_on_the_device_continues_without_it(
    digits: Path,  # noqa: F811
    tmp_path: Path,
    capfd: Any,
):
    job = spec(checkpoint={"every_steps": 5})
    on_device = losses(run(tmp_path / "cuda", job, digits, **THERE))
    there = {"dir": str(tmp_path / "cuda" / "checkpoints" / "step-5"), "step": 5}
    on_cpu = losses(run(tmp_path / "cpu", job, digits, resume=there, **CPU))
    assert len(on_cpu) == len(on_device) - 5
    assert "resumed with device cpu" in capfd.readouterr().err


def test_rows_from_files_give_on_a_device_what_they_give_on_the_cpu(
    digits: Path,  # noqa: F811
    tmp_path: Path,
):
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    for workers in (0, 2):
        data = {"shuffle": {"buffer_size": 100}, "cache": "memory", "workers": workers}
        job = spec(network={"layers": layers}, data=data)
        on_cpu = losses(run(tmp_path / f"cpu-{workers}", job, digits, **CPU))
        on_device = losses(run(tmp_path / f"cuda-{workers}", job, digits, **THERE))
        assert np.allclose(on_cpu, on_device, rtol=1e-4)


def test_batches_by_length_are_the_same_on_a_device(tmp_path: Path):
    table = ragged.texts(tmp_path)
    for number, more in enumerate(({"max_tokens": 20}, {"width": 2})):
        job = ragged.job(data={"bucket_by_length": more, "workers": number})
        on_cpu = losses(run(tmp_path / f"cpu-{number}", job, table, **CPU))
        on_device = losses(run(tmp_path / f"cuda-{number}", job, table, **THERE))
        assert np.allclose(on_cpu, on_device, rtol=1e-4)


ONE_MATRIX = [
    {"name": "flat", "type": "Flatten"},
    {"name": "hidden", "type": "Linear", "args": {"out_features": 32}},
    {"name": "drop", "type": "Dropout"},
    {"name": "relu", "type": "ReLU"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]


@pytest.mark.parametrize("fused", [False, True])
def test_float16_is_scaled_on_the_device_and_continues_where_it_was(
    fused: bool,
    digits: Path,  # noqa: F811
    tmp_path: Path,
):
    job = spec(
        network={"layers": ONE_MATRIX},
        precision="float16",
        grad_scaler={"init_scale": 2.0**20, "growth_interval": 3},
        optimizer={"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "fused": fused}},
        checkpoint={"every_steps": 1},
    )
    records = run(tmp_path / "whole", job, digits, **THERE)
    told = [r["values"] for r in records if r["type"] == "metrics" and "loss" in r["values"]]
    assert 0 < told[-1]["overflowed_steps"] < len(told) / 2
    assert all(math.isfinite(item["loss"]) for item in told)
    there = {"dir": str(tmp_path / "whole/checkpoints/step-4"), "step": 4}
    rest = run(tmp_path / "rest", job, digits, resume=there, **THERE)
    assert losses(rest) == losses(records)[4:]


def test_activations_that_are_computed_again_are_the_same_bits(
    digits: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: Any,
):
    """Dropout draws from the device's generator."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    whole = spec(network={"layers": ONE_MATRIX}, deterministic=True)
    less = whole | {"activation_checkpointing": ["hidden", "relu", "fc"]}
    try:
        found = [
            run(tmp_path / str(n), job, digits, **THERE) for n, job in enumerate((whole, less))
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses(found[0]) == losses(found[1])
    for name, tensor in last_weights(tmp_path / "0").items():
        assert torch.equal(tensor, last_weights(tmp_path / "1")[name]), name


def test_images_are_augmented_there_as_on_the_cpu():
    rows = torch.arange(9) * 7
    x = torch.rand(9, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    for item in EACH:
        mine = TypeAdapter(Augment).validate_json(json.dumps(item))
        change = Augmenting(3, {"image": (mine,)}).changes(rows, 2)["image"]
        there = change(x.to(KIND))
        assert there.device.type == KIND
        is_other = (there.cpu() - change(x)).abs() > 1e-4
        assert float(is_other.float().mean()) < 0.01  # a nearest pixel may be the other of two
