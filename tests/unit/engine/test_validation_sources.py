"""Several validation sources: each is evaluated as it would be alone."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.process.planner import answer
from tests.unit.engine.parallel_jobs import network
from tests.unit.engine.processes import run_processes
from tests.unit.engine.runs import (
    DIGITS_META,
    captured,
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_table,
)
from tests.unit.engine.test_carrying import job as stateful
from tests.unit.engine.test_commands import train

Records = list[dict[str, Any]]
CLEAN = {"dataset": "ds_1", "split": "test"}
SEEN = {"dataset": "ds_1", "split": "train", "fraction": [0.0, 0.3]}
BOTH = {"validation": {"clean": CLEAN, "seen": SEEN}}
METRICS = [
    {"type": "accuracy", "inputs": ["fc", "label"]},
    {
        "type": "MulticlassConfusionMatrix",
        "inputs": ["fc", "label"],
        "args": {"num_classes": 10},
        "name": "confusion",
    },
    {
        "type": "MulticlassRecall",
        "inputs": ["fc", "label"],
        "args": {"num_classes": 10, "average": None},
    },
]


def job(**changes: Any) -> dict[str, Any]:
    """A job that evaluates two sources after every third step."""
    more = {"evaluate": {"every_steps": 3}, "metrics": METRICS[:1], **changes}
    return spec(**{**more, "data": {**BOTH, **changes.get("data", {})}})


def evaluations(records: Records, prefix: str) -> list[tuple[int, dict[str, float]]]:
    """The step and the values of each evaluation of one source, without the prefix."""
    found = [
        (item["step"], {name: x for name, x in item["values"].items() if name.startswith(prefix)})
        for item in of_type(records, "metrics")
    ]
    return [
        (step, {name.removeprefix(f"{prefix}/"): x for name, x in values.items()})
        for step, values in found
        if values
    ]


@pytest.fixture(scope="module")
def whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Records]:
    """A run with two sources, metrics of torchmetrics, samples and a probe of evaluations."""
    directory = tmp_path_factory.mktemp("both")
    probe = {"layers": ["fc"], "kinds": ["output"], "every": 1, "phase": "evaluate"}
    probe["want"] = ["full"]
    return directory, run(
        directory,
        job(metrics=METRICS, evaluate={"every_steps": 3, "samples": 4}, probes=[probe]),
        digits,
    )


def test_the_series_of_each_source_are_those_of_a_job_with_that_source_alone(
    whole, digits, tmp_path
):
    directory, records = whole
    names = {"clean": CLEAN, "seen": SEEN}
    for name, source in names.items():
        alone = job(metrics=METRICS, data={"validation": source})
        found = run(tmp_path / name, alone, digits)
        mine = evaluations(records, f"validation/{name}")
        assert mine == evaluations(found, "validation")
        assert [step for step, _ in mine] == [2, 5, 8, 9]
        assert {"loss", "accuracy", "MulticlassRecall/9"} < {*mine[0][1]}
        assert losses(records) == losses(found)
        both, one = (
            load_file(x / "artifacts/metrics-9.safetensors") for x in (directory, tmp_path / name)
        )
        assert torch.equal(both[f"{name}/confusion"], one["confusion"])
    others = {name for item in of_type(records, "metrics") for name in item["values"]}
    assert all(
        name.startswith(("validation/clean/", "validation/seen/"))
        for name in others
        if name.startswith("validation")
    )


def test_rows_in_files_are_evaluated_as_those_in_memory(digits, tmp_path):
    streamed = {"shuffle": {"buffer_size": 128}, "workers": 1}
    short = {"stop": {"steps": 3}, "optimizer": {"type": "SGD", "args": {"lr": 0.0}}}
    found = run(tmp_path / "a", job(data=streamed, **short), digits)
    in_memory = run(tmp_path / "b", job(**short), digits)
    for name in ("validation/clean", "validation/seen"):
        [(_, mine)], [(_, theirs)] = (evaluations(x, name) for x in (found, in_memory))
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_samples_and_probes_see_the_first_source(whole, digits):
    directory, records = whole
    samples = load_file(directory / "artifacts/samples-9.safetensors")
    rows = torch.arange(4) * 97 // 4
    assert torch.equal(samples["row"], rows)
    labels = torch.from_numpy(np.load(digits / "test" / "1.npy"))
    assert torch.equal(samples["label"], labels[rows])
    seen = captured(records, directory)
    assert [step for step, *_ in seen] == [2, 5, 8, 9]
    torch.testing.assert_close(seen[9, "fc", "output"][rows[:2]], samples["fc"][:2])


def test_a_resumed_run_evaluates_as_one_that_never_stopped(digits, tmp_path):
    early = {"metric": "validation/seen/loss", "mode": "min", "patience": 9}
    plateau = {
        "type": "ReduceLROnPlateau",
        "args": {"patience": 0, "factor": 0.5, "threshold": 0.5},
    }
    wanted = job(
        checkpoint={"every_steps": 4, "keep_last": 9},
        stop={"steps": 12, "early": early},
        scheduler={**plateau, "metric": "validation/clean/accuracy"},
    )
    records = run(tmp_path / "a", wanted, digits)
    there = {"dir": str(tmp_path / "a/checkpoints/step-8"), "step": 8}
    rest = run(tmp_path / "b", wanted, digits, resume=there)
    assert losses(rest) == losses(records)[8:]
    for name in ("validation/clean", "validation/seen"):
        assert evaluations(rest, name) == evaluations(records, name)[2:]
    rates = {item["values"]["lr"] for item in of_type(records, "metrics") if "lr" in item["values"]}
    assert len(rates) > 1  # the schedule followed the accuracy of the named source
    mine, theirs = (load_file(tmp_path / x / "checkpoints/step-12/model.safetensors") for x in "ab")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_training_ends_early_by_the_metric_of_a_named_source(digits, tmp_path):
    """Without learning, no source improves: the first evaluation stays the best."""
    early = {"metric": "validation/seen/accuracy", "mode": "max", "patience": 2}
    stuck = {"type": "SGD", "args": {"lr": 0.0}}
    records = run(tmp_path, job(optimizer=stuck, stop={"epochs": 9, "early": early}), digits)
    assert len(losses(records)) == 9
    assert "validation/seen/accuracy was not better for 2 evaluations" in records[-1]["reason"]


def test_the_best_checkpoint_is_that_of_the_first_source_unless_another_is_named(digits, tmp_path):
    resolved = planned(job())["spec"]["checkpoint"]["keep_best"]
    assert resolved == {"metric": "validation/clean/loss", "mode": "min", "count": 1}
    early = {"metric": "validation/seen/loss", "mode": "min", "patience": 2}
    asked = planned(job(stop={"epochs": 2, "early": early}))["spec"]["checkpoint"]["keep_best"]
    assert asked["metric"] == "validation/seen/loss"
    best = {"metric": "validation/seen/accuracy", "mode": "max"}
    records = run(tmp_path, job(checkpoint={"every_steps": 3, "keep_best": best}), digits)
    values = {step + 1: x["accuracy"] for step, x in evaluations(records, "validation/seen")}
    saved = {item["step"]: item["metrics"] for item in of_type(records, "checkpoint")}
    assert {step: saved[step]["validation/seen/accuracy"] for step in values} == values


def test_a_command_evaluates_every_source(digits, tmp_path):
    asked = {at: [{"id": "cmd_1", "do": "evaluate"}] for at in (2,)}
    _, records = train(tmp_path, digits, asked, **job(stop={"steps": 3}))
    for name in ("validation/clean", "validation/seen"):
        assert [step for step, _ in evaluations(records, name)] == [1, 2]


def test_each_source_begins_with_the_hidden_state_of_zeros(tmp_path):
    """The second source would otherwise continue the rows of the first."""
    x = np.random.default_rng(0).normal(size=(30, 4, 3)).astype(np.float32)
    y = x.cumsum(axis=0)[:, -1, :1].astype(np.float32)
    splits = {"train": slice(0, 30), "test": slice(0, 12)}
    table = write_table(tmp_path / "t", {"x": x, "y": y}, splits)
    sources = {"validation": {"one": CLEAN, "two": CLEAN}}
    records = run(tmp_path / "a", stateful(data=sources, stop={"epochs": 1}), table)
    [(_, one)] = evaluations(records, "validation/one")
    [(_, two)] = evaluations(records, "validation/two")
    assert one == two


def test_a_metric_that_fails_on_one_source_is_a_number_of_the_other(tmp_path, capfd):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y = np.concatenate([rng.integers(0, 2, 30), np.full(10, 7)])[:, None].astype(np.float32)
    splits = {"train": slice(0, 20), "good": slice(20, 30), "bad": slice(30, 40)}
    table = write_table(tmp_path / "t", {"x": x, "y": y}, splits)
    sources = {name: {"dataset": "ds_1", "split": name} for name in ("bad", "good")}
    fields = {"x": {"type": "dense"}, "y": {"type": "dense"}}
    wanted = spec(
        network={
            "layers": [
                {"name": "fc", "type": "Linear", "args": {"out_features": 1}, "inputs": ["x"]},
                {"name": "p", "type": "Sigmoid"},
            ]
        },
        loss={"type": "MSELoss", "inputs": ["p", "y"]},
        metrics=[{"type": "BinaryF1Score", "inputs": ["p", "y"]}],
        data={"fields": fields, "validation": sources},
        checkpoint={"keep_best": {"metric": "validation/bad/BinaryF1Score", "mode": "max"}},
        stop={"steps": 1},
    )
    records = run(tmp_path / "a", wanted, table)
    [(_, bad)] = evaluations(records, "validation/bad")
    [(_, good)] = evaluations(records, "validation/good")
    assert math.isnan(float(bad["BinaryF1Score"]))
    assert math.isfinite(good["BinaryF1Score"])
    [dropped] = of_type(records, "dropped")
    assert "metric BinaryF1Score of the evaluation of bad" in dropped["what"]
    capfd.readouterr()


def rarely(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["data", rarely("fsdp"), rarely("pipeline"), rarely("tensor")])
def test_several_processes_evaluate_each_source(strategy, server, digits, tmp_path):
    rows = 32 if strategy in ("data", "fsdp") else 64
    parallel = {"strategy": strategy, "processes": 2}
    data = {**BOTH, "batch_size": rows}
    more = {"network": network(), "metrics": METRICS, "stop": {"steps": 6}}
    several = job(parallel=parallel, **more, data=data)
    found = run_processes(server, tmp_path / "a", several, digits)
    alone = run(tmp_path / "b", job(**more), digits)
    for name in ("clean", "seen"):
        mine, theirs = (evaluations(x, f"validation/{name}") for x in (found, alone))
        assert len(mine) == len(theirs) == 2
        for (step, values), (other, expected) in zip(mine, theirs, strict=True):
            assert step == other
            assert values == pytest.approx(expected, rel=1e-4)
    saved = [load_file(tmp_path / x / "artifacts/metrics-5.safetensors") for x in "ab"]
    for name in ("clean/confusion", "seen/confusion"):
        assert torch.equal(saved[0][name], saved[1][name])


# --- before it runs --------------------------------------------------------------------------


def test_the_plan_counts_the_rows_of_every_source():
    def bytes_of(validation: Any) -> int:
        more = {} if validation else {"evaluate": None}
        return planned(job(data={"validation": validation}, **more))["memory"]["data_bytes"]

    alone = bytes_of(CLEAN) - bytes_of(None)
    assert alone == 97 * (64 + 8)
    assert bytes_of({"a": CLEAN}) == bytes_of(CLEAN)
    assert bytes_of({"a": CLEAN, "b": SEEN}) - bytes_of(None) == alone + 90 * (64 + 8)


def test_each_source_is_checked_and_named_in_its_errors():
    def found(second: dict[str, Any], **changes: Any) -> dict[str, str]:
        return errors(job(data={"validation": {"clean": CLEAN, "noisy": second}}, **changes))

    place = "/data/validation/noisy"
    assert "no split 'tset'" in found({"dataset": "ds_1", "split": "tset"})[f"{place}/split"]
    assert "ds_9" in found({"dataset": "ds_9"})[f"{place}/dataset"]
    none = {"dataset": "ds_1", "split": "test", "fraction": [0, 0.001]}
    assert "no rows" in found(none)[place]
    few = {"dataset": "ds_1", "split": "test", "fraction": [0, 0.011]}
    two = {"parallel": {"strategy": "data", "processes": 2}}
    assert "1 rows cannot be shared by 2 processes" in found(few, **two)[place]


def test_a_source_with_other_rows_is_named():
    image, label = DIGITS_META["columns"]
    other = {"columns": [{**image, "shape": [1, 9, 9]}, label], "splits": {"all": 5}}
    without = {"columns": [image], "splits": {"all": 5}}
    sources = {"clean": CLEAN, "other": {"dataset": "ds_2"}}
    wanted = job(data={"validation": sources})
    for meta, name in ((other, "image"), (without, "label")):
        datasets = {"ds_1": DIGITS_META, "ds_2": meta}
        reply = answer({"id": 1, "do": "plan", "spec": wanted, "datasets": datasets})
        [found] = [item for item in reply["errors"] if f"/data/fields/{name}" in item["pointer"]]
        assert found["detail"].startswith("in the rows of validation/other, ")


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        (
            {"stop": {"epochs": 2, "early": {"mode": "min", "patience": 1}}},
            "/stop/early/metric",
        ),
        ({"scheduler": {"type": "ReduceLROnPlateau"}}, "/scheduler/metric"),
        ({"checkpoint": {"keep_best": {"mode": "min"}}}, "/checkpoint/keep_best/metric"),
    ],
)
def test_a_metric_without_the_name_of_its_source_is_refused(changes, pointer):
    *way, last = pointer.strip("/").split("/")
    holder = changes
    for name in way:
        holder = holder[name]
    holder[last] = "validation/loss"
    detail = errors(job(**changes))[pointer]
    assert "'validation/loss'" in detail
    assert "did you mean validation/seen/loss or validation/clean/loss?" in detail


def test_a_source_named_like_a_metric_is_refused():
    named = {"accuracy": CLEAN, "seen": SEEN}
    detail = errors(job(data={"validation": named}))["/data/validation/accuracy"]
    assert "'accuracy' is also the name of a metric" in detail
    assert planned(job(data={"validation": named}, metrics=[]))


def test_a_probe_of_the_loss_of_evaluations_is_told_the_metric_of_the_first_source():
    probe = {"layers": ["loss"], "kinds": ["output"], "every": 1, "phase": "evaluate"}
    assert "validation/clean/loss" in errors(job(probes=[probe]))["/probes/0/layers/0"]


def test_no_fraction_of_a_named_source_is_read_by_a_stateful_layer():
    meta = {
        "columns": [
            {"name": "x", "dtype": "float32", "shape": [4, 3], "file": "0.npy"},
            {"name": "y", "dtype": "float32", "shape": [1], "file": "1.npy"},
        ],
        "splits": {"train": 30, "test": 12},
    }
    sources = {"clean": CLEAN, "part": SEEN}
    found = errors(stateful(data={"validation": sources}), meta)
    assert "stateful" in found["/data/validation/part/fraction"]
