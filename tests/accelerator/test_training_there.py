"""Training on the simulated accelerator gives what it gives on the CPU, bit for bit.

The device draws the numbers of the CPU's generator here, so that dropout is the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.unit.engine import ragged
from tests.unit.engine.runs import captured, losses, of_type, run, spec
from tests.unit.engine.test_guarding import job as guarded
from tests.unit.engine.test_guarding import table_of

module = torch.get_device_module("simulated")
CPU = {"device": {"type": "cpu", "threads": 1}}
THERE = {"device": {"type": "simulated"}}
Records = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def same_numbers(as_it_was: None) -> None:
    module.draw_as_host()


def linear(name: str, size: int) -> dict[str, Any]:
    return {"name": name, "type": "Linear", "args": {"out_features": size}}


MLP = [
    {"name": "flat", "type": "Flatten"},
    linear("hidden", 32),
    {"name": "norm", "type": "BatchNorm1d"},
    {"name": "relu", "type": "ReLU"},
    {"name": "drop", "type": "Dropout", "args": {"p": 0.2}},
    linear("fc", 10),
]
EVERYTHING = [
    {
        "layers": ["*", "*.*", "loss*"],
        "kinds": [
            *("output", "input", "output_grad"),
            *("param", "param_grad", "update", "optim_state"),
        ],
        "every": 1,
        "want": ["stats", "histogram", "full"],
        "max_overhead": None,
    }
]


def weights(directory: Path, name: str = "model") -> dict[str, torch.Tensor]:
    steps = sorted((directory / "checkpoints").iterdir(), key=lambda path: int(path.name[5:]))
    return load_file(steps[-1] / f"{name}.safetensors")


def both(tmp_path: Path, job: dict[str, Any], table: Path) -> tuple[Records, Records]:
    """Run a job on the CPU and on the accelerator; losses and weights must be the same bits."""
    on_cpu = run(tmp_path / "cpu", job, table, **CPU)
    there = run(tmp_path / "there", job, table, **THERE)
    assert losses(there) == losses(on_cpu)
    assert len(losses(there)) > 3
    same_weights(tmp_path)
    return on_cpu, there


def same_weights(tmp_path: Path, **tolerance: float) -> None:
    expected, found = weights(tmp_path / "cpu"), weights(tmp_path / "there")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **{"rtol": 0, "atol": 0, **tolerance})


def transformer() -> dict[str, Any]:
    args = {"text": "ids", "num_layers": 1, "width": 8, "num_heads": 2}
    network = {"type": "preset", "preset": "transformer_classifier", "args": args}
    return ragged.job() | {"network": network}


def on_digits(**changes: Any) -> Callable[[Path, Path], tuple[dict[str, Any], Path]]:
    return lambda _tmp_path, table: (spec(**changes), table)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(on_digits(network={"layers": MLP}), id="mlp"),
        pytest.param(on_digits(), id="cnn"),
        pytest.param(
            on_digits(optimizer={"type": "Adam", "args": {"lr": 0.01, "fused": True}}),
            id="fused",
        ),
        pytest.param(on_digits(optimizer={"type": "AdamW", "args": {"lr": 0.01}}), id="foreach"),
        pytest.param(on_digits(grad_clip={"type": "global_norm", "max": 0.5}), id="clipped"),
        pytest.param(on_digits(data={"workers": 2}), id="prefetched"),
    ],
)
def test_losses_and_weights_are_those_of_the_cpu(
    case: Any,
    digits: Path,
    tmp_path: Path,
):
    both(tmp_path, *case(tmp_path, digits))


@pytest.mark.parametrize("of", ["lstm", "transformer"])
def test_sequences_are_trained_as_on_the_cpu(of: str, tmp_path: Path):
    """Cells and attention are other operations there, which round differently."""
    job = ragged.job(ragged.LSTM) if of == "lstm" else transformer()
    table = ragged.texts(tmp_path / "texts")
    on_cpu = run(tmp_path / "cpu", job, table, **CPU)
    there = run(tmp_path / "there", job, table, **THERE)
    assert losses(there) == pytest.approx(losses(on_cpu), rel=1e-6)
    same_weights(tmp_path, rtol=1e-5, atol=1e-6)


STATISTICS = [{**EVERYTHING[0], "kinds": ["output", "output_grad", "update"], "want": ["stats"]}]
ACCURACY = {"type": "accuracy", "inputs": ["fc", "label"]}
FUSED = {"optimizer": {"type": "SGD", "args": {"lr": 0.1, "momentum": 0.9, "fused": True}}}


@pytest.mark.parametrize(
    ("changes", "waits_each_step"),
    [
        pytest.param({}, False, id="plain"),
        pytest.param({"probes": STATISTICS}, False, id="statistics"),
        pytest.param({"metrics": [ACCURACY]}, False, id="metrics"),
        pytest.param({"grad_clip": {"type": "global_norm", "max": 1.0}}, False, id="clipped"),
        pytest.param({"precision": "bfloat16", "average": {"type": "ema"}}, False, id="bfloat16"),
        pytest.param({"precision": "float16", **FUSED}, False, id="float16"),
        pytest.param({"guards": {"nonfinite": {"action": "fail"}}}, False, id="fail"),
        pytest.param({"guards": {"nonfinite": {"action": "skip_step"}}, **FUSED}, False, id="skip"),
        pytest.param({"guards": {"nonfinite": {"action": "skip_step"}}}, True, id="not fused"),
        pytest.param({"data": {"workers": 2}}, False, id="prefetched"),
    ],
)
def test_a_step_waits_for_the_device_only_where_documented(
    changes: dict[str, Any],
    waits_each_step: bool,
    digits: Path,
    tmp_path: Path,
):
    """Ten more steps wait no more often, up to the waits of the thread that saves."""
    waits = []
    for batch_size in (30, 15):
        before = module.num_waits()
        data = {**changes.get("data", {}), "batch_size": batch_size}
        job = spec(**{**changes, "data": data}, stop={"epochs": 1})
        records = run(tmp_path / str(batch_size), job, digits, **THERE)
        assert len(losses(records)) == 300 // batch_size
        waits.append(module.num_waits() - before)
    assert (waits[1] - waits[0] >= 5) == waits_each_step, waits


def test_watching_everything_is_the_same_and_changes_nothing(
    digits: Path,
    tmp_path: Path,
):
    job = spec(network={"layers": MLP}, probes=EVERYTHING, stop={"steps": 4})
    on_cpu, there = both(tmp_path, job, digits)
    expected, found = captured(on_cpu, tmp_path / "cpu"), captured(there, tmp_path / "there")
    assert expected.keys() == found.keys()
    assert len(expected) > 50
    for place, tensor in expected.items():
        assert torch.equal(found[place], tensor), place
    assert rows_of(there).keys() == rows_of(on_cpu).keys()
    for place, figures in rows_of(on_cpu).items():
        assert rows_of(there)[place] == pytest.approx(figures, rel=1e-9, nan_ok=True), place
    assert [item["rows"] for item in of_type(there, "histograms")] == [
        item["rows"] for item in of_type(on_cpu, "histograms")
    ]


def rows_of(records: Records) -> dict[tuple[int, str, str], list[float]]:
    return {
        (record["step"], layer, kind): figures
        for record in of_type(records, "stats")
        for layer, kind, *figures in record["rows"]
    }


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_step_is_skipped_on_the_device(fused: bool, tmp_path: Path):
    table = table_of(tmp_path, target={(4 * 3 + 1, 0): np.nan, (4 * 7, 0): np.nan})
    optimizer = {"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9, "fused": fused}}
    job = guarded({"action": "skip_step"}) | {"optimizer": optimizer, "stop": {"steps": 12}}
    on_cpu, there = (
        run(tmp_path / name, job, table, **device)
        for name, device in (("cpu", CPU), ("there", THERE))
    )
    for name, tensor in weights(tmp_path / "cpu").items():
        assert torch.equal(weights(tmp_path / "there")[name], tensor), name
    for records in (on_cpu, there):
        found = of_type(records, "finding")
        assert [(item["step"], item["layer"], item["kind"]) for item in found] == [
            (3, "target", "input"),
            (7, "target", "input"),
        ]


def test_the_rest_of_a_run_is_bit_for_bit_what_it_would_have_been(
    digits: Path,
    tmp_path: Path,
):
    """Dropout draws from the device's own generator, whose state the checkpoints contain."""
    module.draw_as_host(False)
    job = spec(
        network={"layers": MLP},
        optimizer={"type": "AdamW", "args": {"lr": 0.01}},
        checkpoint={"every_steps": 1},
    )
    whole = losses(run(tmp_path / "whole", job, digits, **THERE))
    for step in (3, 7):
        there = {"dir": str(tmp_path / f"whole/checkpoints/step-{step}"), "step": step}
        saved = load_file(Path(there["dir"]) / "generators.safetensors")
        assert saved.keys() == {"cpu", "simulated.0", "simulated.1"}
        rest = run(tmp_path / str(step), job, digits, resume=there, **THERE)
        assert losses(rest) == whole[step:]
        for name, tensor in weights(tmp_path / "whole").items():
            assert torch.equal(weights(tmp_path / str(step))[name], tensor), name


def test_what_was_saved_there_continues_on_the_cpu(
    digits: Path,
    tmp_path: Path,
):
    job = spec(checkpoint={"every_steps": 5}, network={"layers": [MLP[0], MLP[5]]})
    whole = losses(run(tmp_path / "there", job, digits, **THERE))
    saved = {"dir": str(tmp_path / "there/checkpoints/step-5"), "step": 5}
    assert losses(run(tmp_path / "cpu", job, digits, resume=saved, **CPU)) == whole[5:]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_is_near_that_of_the_cpu(
    precision: str,
    digits: Path,
    tmp_path: Path,
):
    more = {"grad_scaler": {"init_scale": 2.0**24, "growth_interval": 3}}
    job = spec(network={"layers": MLP}, precision=precision)
    job |= more if precision == "float16" else {}
    on_cpu, there = (
        run(tmp_path / name, job, digits, **device)
        for name, device in (("cpu", CPU), ("there", THERE))
    )
    assert losses(there) == pytest.approx(losses(on_cpu), rel=0.05)
    plain = spec(network={"layers": MLP})
    assert losses(there) != losses(run(tmp_path / "float32", plain, digits, **THERE))
    if precision == "float16":
        figures = [item["values"] for item in of_type(there, "metrics")]
        assert max(item.get("overflowed_steps", 0) for item in figures) > 0


def test_an_evaluation_there_is_that_of_the_cpu(
    digits: Path,
    tmp_path: Path,
):
    job = spec(
        data={"validation": {"dataset": "ds_1", "split": "test"}},
        evaluate={"every_epochs": 1},
        metrics=[
            {"type": "accuracy", "inputs": ["fc", "label"]},
            {"type": "l2", "inputs": ["conv1"], "name": "norm"},
        ],
        optimizer={"type": "SGD", "args": {"lr": 0.1}},
    )
    on_cpu, there = both(tmp_path, job, digits)
    expected, found = (told(records) for records in (on_cpu, there))
    assert found.keys() == expected.keys()
    assert any(name.startswith("val") for _, name in expected)
    for place, value in expected.items():
        assert found[place] == pytest.approx(value, rel=1e-6), place


def told(records: Records) -> dict[tuple[int, str], float]:
    return {
        (record["step"], name): value
        for record in of_type(records, "metrics")
        for name, value in record["values"].items()
        if not name.startswith(("time/", "throughput/", "system/"))
    }


def test_inference_there_is_that_of_the_cpu(
    digits: Path,
    tmp_path: Path,
):
    from tests.unit.engine.runs import planned

    resolved = planned(spec())["spec"]
    records = run(tmp_path / "trained", spec(), digits, **THERE)
    saved = {"dir": str(tmp_path / "trained" / of_type(records, "checkpoint")[-1]["dir"])}
    data = {"dataset": "ds_1", "split": "test", "batch_size": 40}
    job = {"kind": "infer", "job": "job_x", "data": data, "outputs": ["conv1", "fc"]}
    found = []
    for name, device in (("cpu", CPU), ("there", THERE)):
        run(tmp_path / name, job, digits, trained_by=resolved, checkpoint=saved, **device)
        found.append(load_file(tmp_path / name / "artifacts" / "outputs.safetensors"))
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name
