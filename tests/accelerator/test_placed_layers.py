"""Layers on two devices give what they give on one, bit for bit.

The devices draw the numbers of the CPU's generator here, so that dropout is the same.
"""

import copy
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.core.spool import read_frames
from engine.core.timing import HostClock
from engine.learner.learner import learner_of
from engine.losses.losses import loss_of
from engine.probes.watched.layer_hooks import watch_outputs
from engine.process import rank
from glasshouse.spec import TrainJob, parse_job
from tests.accelerator.test_training_there import THERE, linear, rows_of, weights
from tests.unit.engine import ragged
from tests.unit.engine.runs import CNN, captured, losses, of_type, planned, run, spec, write_job
from tests.unit.engine.test_guarding import job as guarded
from tests.unit.engine.test_guarding import table_of

module = torch.get_device_module("simulated")
TWO = {"type": "cuda", "count": 2}
PLACED = {"strategy": "placed"}
STEPS = 50


@pytest.fixture(autouse=True)
def same_numbers(as_it_was: None) -> None:
    module.draw_as_host()


def on(device: int, layer: dict[str, Any], *inputs: str) -> dict[str, Any]:
    return layer | {"device": device} | ({"inputs": [*inputs]} if inputs else {})


def named(name: str, kind: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **({"args": args} if args else {})}


CHAIN = [
    on(0, named("flat", "Flatten")),
    linear("hidden", 32),
    on(1, named("norm", "BatchNorm1d")),
    named("relu", "ReLU", inplace=True),
    on(0, named("drop", "Dropout", p=0.2)),
    on(1, linear("fc", 10)),
]
"""It goes to and fro between the devices."""
BRANCHES = [
    on(0, named("flat", "Flatten")),
    on(0, linear("left", 24), "flat"),
    on(1, linear("right", 24), "flat"),
    on(0, named("left_act", "Tanh"), "left"),
    on(1, named("right_act", "LeakyReLU"), "right"),
    on(0, named("both", "cat", dim=1), "left_act", "right_act"),
    on(1, named("drop", "Dropout", p=0.1), "both"),
    on(0, linear("fc", 10), "drop"),
]
"""Two branches on two devices, joined on the first."""


def placed(layers: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    network = {"layers": copy.deepcopy(layers)}
    job = {"network": network, "parallel": PLACED, "devices": TWO, "stop": {"steps": STEPS}}
    return spec(**{**job, **changes})


def on_one(job: dict[str, Any]) -> dict[str, Any]:
    """The same job on one device."""
    without = copy.deepcopy({k: v for k, v in job.items() if k not in ("parallel", "devices")})
    for layer in without["network"]["layers"]:
        layer.pop("device", None)
    return without


def both(
    tmp_path: Path, job: dict[str, Any], table: Path, atol: float = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run a job on one device and on two; losses, metrics and weights must be the same bits."""
    one = run(tmp_path / "one", on_one(job), table, **THERE)
    torch.accelerator.reset_peak_memory_stats(1)
    before = torch.accelerator.max_memory_allocated(1)
    two = run(tmp_path / "two", job, table, **THERE)
    assert torch.accelerator.max_memory_allocated(1) > before
    assert len(losses(two)) == job["stop"]["steps"]
    assert losses(two) == losses(one)
    assert metrics_of(two) == metrics_of(one)
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=name)
    return one, two


def metrics_of(records: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """All metrics but times."""
    found = []
    for record in of_type(records, "metrics"):
        values = {
            name: value
            for name, value in record["values"].items()
            if not name.startswith(("time/", "throughput/"))
        }
        if values:
            found.append((record["step"], values))
    return found


ADAM = {"type": "Adam", "args": {"lr": 0.01}}


CLIPS = [
    {"type": "global_norm", "max": 0.5},
    {"type": "norm", "max": 0.1},
    {"type": "value", "max": 0.01},
    {"type": "value", "min": -0.01, "max": 0.02},
]
VALIDATION = {"validation": {"dataset": "ds_1", "split": "test"}}
ACCURACY = {"type": "accuracy", "inputs": ["fc", "label"]}
DERIVED = [
    {"type": "l2_ratio", "inputs": ["hidden.weight/param", "fc.weight/param_grad"], "every": 1},
    {"type": "mean_abs_diff", "inputs": ["hidden", "norm"], "every": 1},
    {"type": "l2_ratio", "inputs": ["fc.weight/update", "hidden.weight/param"], "every": 2},
    {"type": "l2", "inputs": ["norm/output_grad"], "every": 1},
    {"type": "MulticlassF1Score", "args": {"num_classes": 10}, "inputs": ["fc", "label"]},
]


@pytest.mark.parametrize("layers", [CHAIN, BRANCHES], ids=["chain", "branches"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="SGD"),
        pytest.param({"optimizer": ADAM}, id="Adam"),
    ],
)
def test_fifty_steps_are_those_of_one_device(
    layers: Any,
    changes: Any,
    digits: Path,
    tmp_path: Path,
):
    both(tmp_path, placed(layers, **changes), digits)


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param({"grad_clip": x}, id=f"{x['type']}{x.get('min', '')}") for x in CLIPS),
        pytest.param({"optimizer": {**ADAM, "args": {"lr": 0.01, "fused": True}}}, id="fused"),
        pytest.param({"optimizer": {**ADAM, "args": {"lr": 0.01, "foreach": True}}}, id="foreach"),
        pytest.param({"optimizer": {**ADAM, "type": "AdamW", "l1": 1e-4}}, id="l1"),
        pytest.param({"average": {"type": "ema"}, "data": VALIDATION}, id="ema"),
        pytest.param({"average": {"type": "window"}, "data": VALIDATION}, id="window"),
        pytest.param({"accumulate": 3}, id="accumulate"),
        pytest.param({"metrics": [ACCURACY, *DERIVED], "data": VALIDATION}, id="metrics"),
        pytest.param({"guards": {"nonfinite": {"action": "fail"}}}, id="fail"),
        pytest.param({"data": {"workers": 2}}, id="prefetched"),
        pytest.param(
            {"guards": {"nonfinite": {"check": ["loss", "gradients", "outputs", "parameters"]}}},
            id="all checked",
        ),
        pytest.param({"precision": "bfloat16"}, id="bfloat16"),
        pytest.param({"precision": "float16"}, id="float16"),
        pytest.param({"activation_checkpointing": ["hidden", "fc"]}, id="recomputed"),
        pytest.param({"memory_format": "channels_last"}, id="channels_last"),
        pytest.param({"deterministic": True}, id="deterministic"),
    ],
)
def test_whatever_a_job_does_is_what_it_does_on_one_device(
    changes: Any,
    digits: Path,
    tmp_path: Path,
):
    both(tmp_path, placed(CHAIN, **{"stop": {"steps": 8}, **changes}), digits)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_gradients_of_outputs_are_clipped_on_every_device(
    precision: str,
    digits: Path,
    tmp_path: Path,
):
    layers = copy.deepcopy(CHAIN)
    for layer, most in ((layers[1], 0.001), (layers[2], 0.002)):
        layer["output_grad_clip"] = most
    one, _ = both(tmp_path, placed(layers, precision=precision, stop={"steps": 4}), digits)
    assert any(values.get("output_grad_clip/norm") for _, values in metrics_of(one))


EVERYTHING = [
    {
        "layers": ["*", "*.*", "loss*"],
        "kinds": [
            *("output", "input", "output_grad"),
            *("param", "param_grad", "update", "optim_state"),
        ],
        "every": 1,
        "want": ["stats", "histogram", "quantiles", "full"],
        "max_overhead": None,
    }
]


@pytest.mark.parametrize("layers", [CHAIN, BRANCHES], ids=["chain", "branches"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_probes_of_every_kind_see_the_same(
    layers: Any,
    precision: str,
    digits: Path,
    tmp_path: Path,
):
    job = placed(
        layers, probes=EVERYTHING, stop={"steps": 4}, optimizer=ADAM, precision=precision,
        grad_clip={"type": "global_norm", "max": 0.5},
    )  # fmt: skip
    one, two = both(tmp_path, job, digits)
    expected, found = captured(one, tmp_path / "one"), captured(two, tmp_path / "two")
    assert expected.keys() == found.keys()
    assert {kind for _, _, kind in found} == set(EVERYTHING[0]["kinds"])
    for place, tensor in expected.items():
        assert torch.equal(found[place], tensor), place
    assert rows_of(two).keys() == rows_of(one).keys()
    for place, figures in rows_of(one).items():
        assert rows_of(two)[place] == pytest.approx(figures, rel=0, abs=0, nan_ok=True), place
    for kind in ("histograms", "quantiles"):
        assert [r["rows"] for r in of_type(two, kind)] == [r["rows"] for r in of_type(one, kind)]
    without = run(tmp_path / "without", {**job, "probes": []}, digits, **THERE)
    assert losses(without) == losses(two)


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_step_is_skipped_on_all_devices(fused: bool, tmp_path: Path):
    table = table_of(tmp_path, target={(4 * 3 + 1, 0): np.nan, (4 * 7, 0): np.nan})
    optimizer = {"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9, "fused": fused}}
    job = guarded({"action": "skip_step"}) | {"optimizer": optimizer, "stop": {"steps": 12}}
    layers = copy.deepcopy(job["network"]["layers"])
    layers[-1]["device"] = 1
    job |= {"network": {"layers": layers}, "parallel": PLACED, "devices": TWO}
    one = run(tmp_path / "one", on_one(job), table, **THERE)
    two = run(tmp_path / "two", job, table, **THERE)
    for name, tensor in weights(tmp_path / "one").items():
        assert torch.equal(weights(tmp_path / "two")[name], tensor), name
    for records in (one, two):
        found = of_type(records, "finding")
        assert [(item["step"], item["layer"], item["kind"]) for item in found] == [
            (3, "target", "input"),
            (7, "target", "input"),
        ]


@pytest.mark.parametrize("then_on_two", [False, True])
def test_a_checkpoint_resumes_on_one_device_and_on_two(
    then_on_two: bool,
    digits: Path,
    tmp_path: Path,
):
    job = placed(
        CHAIN, optimizer=ADAM, average={"type": "ema"}, checkpoint={"every_steps": 5},
        stop={"steps": 10},
    )  # fmt: skip
    first, second = (on_one(job), job) if then_on_two else (job, on_one(job))
    whole = losses(run(tmp_path / "whole", first, digits, **THERE))
    saved = {"dir": str(tmp_path / "whole/checkpoints/step-5"), "step": 5}
    assert losses(run(tmp_path / "rest", second, digits, resume=saved, **THERE)) == whole[5:]
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "rest")[name], tensor), name


def test_each_device_draws_its_own_numbers_and_continues_them(
    digits: Path,
    tmp_path: Path,
):
    module.draw_as_host(False)
    drops = [
        on(0, named("flat", "Flatten")),
        on(0, named("left", "Dropout"), "flat"),
        on(1, named("right", "Dropout"), "flat"),
        on(1, named("both", "cat", dim=1), "left", "right"),
        linear("fc", 10),
    ]
    probes = [{"layers": ["left", "right"], "kinds": ["output"], "want": ["full"], "every": 1}]
    job = placed(drops, probes=probes, checkpoint={"every_steps": 3}, stop={"steps": 6})
    whole = run(tmp_path / "whole", job, digits, **THERE)
    found = captured(whole, tmp_path / "whole")
    assert not torch.equal(found[0, "left", "output"] == 0, found[0, "right", "output"] == 0)
    saved = {"dir": str(tmp_path / "whole/checkpoints/step-3"), "step": 3}
    rest = run(tmp_path / "rest", job, digits, resume=saved, **THERE)
    assert losses(rest) == losses(whole)[3:]
    again = captured(rest, tmp_path / "rest")
    for place, tensor in again.items():
        assert torch.equal(found[place], tensor), place


def test_a_step_waits_for_the_device_only_to_copy(
    digits: Path,
    tmp_path: Path,
):
    """The simulated device waits in each copy between devices, as hardware does not."""
    network = [on(0, named("flat", "Flatten")), on(1, linear("fc", 10))]
    job = placed(network, probes=EVERYTHING, grad_clip=CLIPS[0], optimizer=ADAM)
    copies = 2  # of the field and the target; no gradient goes back
    waits = []
    for steps in (4, 8):
        before = module.num_waits()
        run(tmp_path / str(steps), {**job, "stop": {"steps": steps}}, digits, **THERE)
        waits.append(module.num_waits() - before)
    assert waits[1] - waits[0] <= 4 * 2 * (copies + 2)


def test_sequences_with_lengths_are_trained_on_two_devices(tmp_path: Path):
    job = ragged.job(ragged.LSTM)
    table = ragged.texts(tmp_path / "texts")
    job = copy.deepcopy(job) | {"parallel": PLACED, "devices": TWO}
    for number, layer in enumerate(job["network"]["layers"]):
        layer["device"] = number % 2
    one = run(tmp_path / "one", on_one(job), table, **THERE)
    two = run(tmp_path / "two", job, table, **THERE)
    assert losses(two) == losses(one)
    assert len(losses(two)) > 3


def test_two_losses_and_ignored_targets_are_brought_together(
    digits: Path,
    tmp_path: Path,
):
    """The denominators of a step are computed from the targets, where the data is."""
    entropy = {"type": "CrossEntropyLoss", "args": {"ignore_index": 3, "weight": [1.0, 2.0] * 5}}
    heads = [
        {**entropy, "inputs": [name, "label"], "name": name, "weight": weight}
        for name, weight in (("early", 0.3), ("fc", 1.0))
    ]
    layers = [*CHAIN[:2], on(0, linear("early", 10)), on(1, CHAIN[2], "hidden"), *CHAIN[3:]]
    job = placed(
        layers, loss=heads, accumulate=2, data={**VALIDATION, "batch_size": 30},
        stop={"steps": 8},
    )  # fmt: skip
    one, _ = both(tmp_path, job, digits)
    assert any("validation/loss/early" in values for _, values in metrics_of(one))


@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_images_are_convolved_on_two_devices(
    memory_format: str,
    digits: Path,
    tmp_path: Path,
):
    layers = copy.deepcopy(CNN)
    for layer in layers[2:]:
        layer["device"] = 1
    job = placed(layers, memory_format=memory_format, stop={"steps": 8})
    # The thread that waits for a simulated device runs its kernels. The last step is run by the
    # one that saves, with as many threads as the machine has cores: convolutions round otherwise.
    both(tmp_path, job, digits, atol=1e-7)


def test_a_hidden_state_stays_on_the_device_of_its_layer(tmp_path: Path):
    table = ragged.texts(tmp_path / "texts")
    job = ragged.job(stop={"steps": 6}, data={"shuffle": {"enabled": False}, "batch_size": 4})
    layers = copy.deepcopy(ragged.LSTM)
    layers[1] |= {"stateful": True, "device": 1}
    layers[3]["device"] = 0
    job |= {"network": {"layers": layers}, "parallel": PLACED, "devices": TWO}
    both(tmp_path, job, table)


def test_inference_runs_on_one_device(
    digits: Path,
    tmp_path: Path,
):
    job = placed(CHAIN, stop={"steps": 4})
    both(tmp_path, job, digits)
    data = {"dataset": "ds_1", "split": "test", "batch_size": 40}
    infer = {"kind": "infer", "job": "job_x", "data": data, "outputs": ["hidden", "fc"]}
    torch.accelerator.reset_peak_memory_stats(1)
    before = torch.accelerator.max_memory_allocated(1)
    found: list[dict[str, torch.Tensor]] = []
    for name, trained in (("one", on_one(job)), ("two", job)):
        resolved = planned(trained)["spec"]
        saved = {"dir": str(tmp_path / name / "checkpoints/step-4")}
        here = tmp_path / f"infer-{name}"
        run(here, infer, digits, trained_by=resolved, checkpoint=saved, **THERE)
        found.append(load_file(here / "artifacts" / "outputs.safetensors"))
    assert torch.accelerator.max_memory_allocated(1) == before
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name


def test_a_process_that_sees_too_few_devices_says_so(
    digits: Path,
    tmp_path: Path,
):
    job = placed(CHAIN, devices={"type": "cuda", "count": 3}, stop={"steps": 1})
    resolved = planned(job)["spec"]
    assert rank.main(write_job(tmp_path / "job", resolved, digits, **THERE)) == 0
    records, _ = read_frames(tmp_path / "job/spool", 0, 10**6)
    assert records[-1]["error"]["code"] == "device_failed"
    assert "3 devices, and its process sees 2" in records[-1]["error"]["message"]


def test_memory_is_capped_on_all_devices(
    digits: Path,
    tmp_path: Path,
):
    guards = {"memory": {"cap_fraction": 0.5}}
    run(tmp_path / "job", placed(CHAIN, guards=guards, stop={"steps": 1}), digits, **THERE)
    assert [module.get_per_process_memory_fraction(index) for index in (0, 1)] == [0.5, 0.5]


def test_layers_that_are_all_on_the_second_device(
    digits: Path,
    tmp_path: Path,
):
    layers = [on(1, layer) for layer in CHAIN]
    both(tmp_path, placed(layers, probes=EVERYTHING, stop={"steps": 4}), digits)


def test_hooks_of_the_backward_pass_run_one_after_the_other():
    """With a thread for each device, two of them could run at once."""
    job = parse_job(json.dumps(planned(placed(BRANCHES))["spec"]))
    assert isinstance(job, TrainJob)
    learner = learner_of(job, torch.device("simulated", 0))
    assert {x.device.index for x in learner.network.parameters()} == {0, 1}
    threads: set[int] = set()

    def watch(_layer: str, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _gradient: threads.add(threading.get_ident()))

    watch_outputs(learner.network, watch)
    image = torch.rand(8, 1, 8, 8).to("simulated:0")
    values = learner.network({"image": image, "label": torch.zeros(8).long().to("simulated:0")})
    learner.backward(loss_of(learner.loss_fn, values).total, HostClock(), is_last=True)
    assert threads == {threading.get_ident()}
