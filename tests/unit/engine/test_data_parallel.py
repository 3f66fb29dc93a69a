"""Several processes train as one: the numbers of a job with one process and the same batches."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glasshouse.events import is_upkeep
from tests.unit.engine.parallel_jobs import (
    ADAM,
    ALL_KINDS,
    NETWORKS,
    SMOOTH,
    VALIDATION,
    VARIANTS,
    assert_resumes,
    assert_same_losses,
    network,
    of_tokens,
    pair,
    table_of,
    token_table,
    weights,
)
from tests.unit.engine.processes import finish, run_processes, start
from tests.unit.engine.runs import (
    DIGITS_META,
    captured,
    errors,
    losses,
    of_type,
    planned,
    run,
    write_table,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("num", "variant"),
    [*((2, variant) for variant in VARIANTS), (4, "sgd"), (4, "ignored targets")],
)
def test_the_losses_are_those_of_one_process(num, variant, server, digits, tmp_path):
    more = copy.deepcopy(VARIANTS[variant])
    more["metrics"] = [{"type": "accuracy", "inputs": ["fc", "label"]}]
    data = {**VALIDATION, **more.pop("data", {})}
    several, alone = pair(num, data=data, **more)
    found = run_processes(server, tmp_path / "a", several, digits)
    assert_same_losses(found, run(tmp_path / "b", alone, digits))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_over_tokens_learn_as_in_one_process(name, server, tmp_path):
    table = token_table(tmp_path / "t")
    several, alone = pair(2, **of_tokens(name))
    found = run_processes(server, tmp_path / "a", several, table)
    assert_same_losses(found, run(tmp_path / "b", alone, table))


@pytest.mark.parametrize(("rows", "strategy"), [(64, "data"), (148, "fsdp")])
def test_synchronized_batch_normalization_is_that_of_one_process(
    rows, strategy, server, digits, tmp_path
):
    """Also of a last batch of 2 rows for 4 processes, and of gradients through the statistics."""
    norm = [{"name": "bn", "type": "SyncBatchNorm"}]
    num, data = (2, VALIDATION) if rows == 64 else (4, {})
    layers = [SMOOTH[0], *norm, *SMOOTH[1:]]
    probes = [{"layers": ["bn", "conv1"], "kinds": ["output", "output_grad"], "every": 1}]
    more = {"network": network(*layers), "stop": {"steps": 40}, "probes": probes, "data": data}
    several, alone = pair(num, rows, strategy, **more)
    if rows == 148:
        train = {"dataset": "ds_1", "split": "train", "fraction": [0, 0.995]}  # 298 rows
        several["data"]["train"] = alone["data"]["train"] = train
    alone["network"] = copy.deepcopy(alone["network"])
    alone["network"]["layers"][1]["type"] = "BatchNorm2d"
    mine = run_processes(server, tmp_path / "a", several, digits)
    theirs = run(tmp_path / "b", alone, digits)
    assert_same_losses(mine, theirs, rel=1e-4)
    found, expected = table_of(mine), table_of(theirs)
    for key in [key for key in expected if key[0] < 4]:
        assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key
    saved, expected_weights = weights(tmp_path / "a", 40), weights(tmp_path / "b", 40)
    for name in ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked"):
        torch.testing.assert_close(saved[name], expected_weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_each_process_normalizes_its_own_rows_and_process_0_evaluates(
    strategy, server, digits, tmp_path
):
    """Batch normalization: the first loss is that of two halves, each normalized by itself."""
    layers = [SMOOTH[0], {"name": "bn", "type": "BatchNorm2d"}, *SMOOTH[1:]]
    several, alone = pair(
        2, strategy=strategy, network=network(*layers), data=VALIDATION, stop={"steps": 5}
    )
    found = run_processes(server, tmp_path / "a", several, digits)
    halves = run(tmp_path / "b", alone, digits, parts=2)
    assert losses(found)[0] == pytest.approx(losses(halves)[0], rel=1e-6)
    whole = run(tmp_path / "c", alone, digits)
    assert losses(found)[0] != pytest.approx(losses(whole)[0], rel=1e-6)
    [judged] = [
        item["values"]["validation/loss"]
        for item in of_type(found, "metrics")
        if "validation/loss" in item["values"]
    ]
    saved = weights(tmp_path / "a", 5)
    assert float(saved["bn.num_batches_tracked"]) == 5
    assert np.isfinite(judged)


def test_a_step_of_two_processes_is_that_of_two_micro_batches_bit_for_bit(server, digits, tmp_path):
    """Both add the same two gradients; a sum of two does not depend on their order."""
    several, alone = pair(2, data=VALIDATION, optimizer=ADAM, stop={"steps": 30})
    found = run_processes(server, tmp_path / "a", several, digits)
    parts = run(tmp_path / "b", alone, digits, parts=2)
    mine, theirs = weights(tmp_path / "a", 30), weights(tmp_path / "b", 30)
    assert all(torch.equal(mine[name], item) for name, item in theirs.items())
    assert losses(found) == pytest.approx(losses(parts), rel=1e-7)


def test_the_time_of_the_slowest_process_is_reported(server, digits, tmp_path):
    several, _ = pair(2, stop={"steps": 30})
    records = run_processes(server, tmp_path, several, digits)
    values = {
        name: value
        for item in of_type(records, "metrics")
        for name, value in item["values"].items()
    }
    slowest = int(values["system/ranks/slowest"])
    own = [
        sum(values[f"system/ranks/{rank}/{part}_s"] for part in ("data", "compute"))
        for rank in (0, 1)
    ]
    assert own[slowest] == max(own)
    assert 0 < values["time/collective"] < values["time/step"]
    for part in ("data", "compute", "collective", "step"):
        low, high = (values[f"system/ranks/{part}_{end}_s"] for end in ("min", "max"))
        each = {values[f"system/ranks/{rank}/{part}_s"] for rank in (0, 1)}
        assert each == {low, high}
        assert 0 < low <= high
        assert part == "step" or high < values["system/ranks/step_max_s"]


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_a_batch_with_fewer_rows_than_processes(strategy, server, digits, tmp_path):
    """300 rows in batches of 149: the last one has 2 rows, and two of four processes none."""
    several, alone = pair(4, strategy=strategy, rows=148, stop={"epochs": 3})
    train = {"dataset": "ds_1", "split": "train", "fraction": [0, 0.995]}  # 298 rows
    for job in (several, alone):
        job["data"]["train"] = train
    found = run_processes(server, tmp_path / "a", several, digits)
    expected = run(tmp_path / "b", alone, digits)
    assert len(losses(expected)) == 9
    assert_same_losses(found, expected)


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_parameters_that_no_gradient_reaches(strategy, server, digits, tmp_path):
    """A frozen layer, and one that only a metric reads: it keeps its weights."""
    layers = [
        *SMOOTH,
        {"name": "other", "type": "Linear", "args": {"out_features": 10}, "inputs": ["flat"]},
    ]
    layers[0] = {**layers[0], "trainable": False}
    metrics = [{"type": "accuracy", "inputs": ["other", "label"]}]
    decay = {"type": "AdamW", "args": {"lr": 0.01, "weight_decay": 0.1}}
    several, alone = pair(
        2,
        strategy=strategy,
        network=network(*layers),
        metrics=metrics,
        optimizer=decay,
        stop={"steps": 8},
    )
    found = run_processes(server, tmp_path / "a", several, digits)
    assert_same_losses(found, run(tmp_path / "b", alone, digits))
    mine, theirs = weights(tmp_path / "a", 8), weights(tmp_path / "b", 8)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs if "fc" not in name)


@pytest.mark.parametrize("rows", [64, 149])
def test_what_probes_see_is_what_they_see_of_one_process(rows, server, digits, tmp_path):
    """With 149 rows, the processes have different numbers of rows, and of the last batch few."""
    probes = [
        {"layers": ["*"], "kinds": ALL_KINDS, "want": ["stats", "full"], "every": 1},
        {"layers": ["*"], "kinds": ["output"], "phase": "evaluate", "every": 1},
    ]
    guards = {"memory": {}}
    several, alone = pair(
        2, rows=2 * (rows // 2), data=VALIDATION, probes=probes, stop={"epochs": 1}, guards=guards
    )
    if rows == 149:
        for job in (several, alone):
            job["data"]["train"] = {"dataset": "ds_1", "split": "train", "fraction": [0, 0.997]}
    mine = run_processes(server, tmp_path / "a", several, digits)
    theirs = run(tmp_path / "b", alone, digits)
    found, expected = table_of(mine), table_of(theirs)
    assert found.keys() == expected.keys()
    assert {key[1] for key in expected} == {"train", "evaluate"}
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=2e-4, abs=2e-6), key
    whole, theirs_whole = captured(mine, tmp_path / "a"), captured(theirs, tmp_path / "b")
    assert whole.keys() == theirs_whole.keys()
    for key, tensor in theirs_whole.items():
        torch.testing.assert_close(whole[key], tensor, rtol=2e-4, atol=2e-6, msg=str(key))


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_the_loss_and_the_losses_of_the_rows_are_those_of_one_process(
    strategy, server, digits, tmp_path
):
    """A probe of the parameters alone exchanges nothing, and does not wait."""
    probes = [
        {"layers": ["loss", "loss.*"], "kinds": ["output"], "want": ["stats", "full"], "every": 1},
        {"layers": ["fc"], "kinds": ["param"], "every": 2},
    ]
    several, alone = pair(2, strategy=strategy, probes=probes, stop={"steps": 3})
    mine = run_processes(server, tmp_path / "a", several, digits)
    theirs = run(tmp_path / "b", alone, digits)
    found, expected = captured(mine, tmp_path / "a"), captured(theirs, tmp_path / "b")
    assert {name for _, name, _ in expected} >= {"loss", "loss.samples"}
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=2e-5, atol=2e-6, msg=str(key))
    assert table_of(mine).keys() == table_of(theirs).keys()


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_histograms_are_those_of_one_process(strategy, server, digits, tmp_path):
    """The first step has the same weights, so values near a bin's edge agree as well."""
    probes = [
        {
            "layers": ["fc"],
            "kinds": ["output", "param_grad"],
            "want": ["histogram", "quantiles"],
            "every": 1,
        }
    ]
    several, alone = pair(2, strategy=strategy, probes=probes, stop={"steps": 2})
    mine = of_type(run_processes(server, tmp_path / "a", several, digits), "stats")[0]
    theirs = of_type(run(tmp_path / "b", alone, digits), "stats")[0]
    [found] = [item for item in mine["histograms"] if item[1] == "output"]
    [expected] = [item for item in theirs["histograms"] if item[1] == "output"]
    assert sum(found[3]) == sum(expected[3]) == 640
    changed = sum(
        abs(dict(zip(*found[2:], strict=True)).get(n, 0) - count)
        for n, count in zip(*expected[2:], strict=True)
    )
    assert changed <= 4  # rounding may move a value to the next bin
    for one, other in zip(mine["quantiles"], theirs["quantiles"], strict=True):
        assert one[2:] == pytest.approx(other[2:], rel=0.1, abs=1e-4)


def series(records: list[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """The values of all metrics but those of the machine, by step and name."""
    return {
        (item["step"], name): value
        for item in of_type(records, "metrics")
        for name, value in item["values"].items()
        if not is_upkeep(name)
    }


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_metrics_of_evaluations_and_of_steps_are_exact(strategy, server, digits, tmp_path):
    """97 validation rows in batches of 64: the processes have different numbers of them."""
    metrics = [
        {"type": "accuracy", "inputs": ["fc", "label"]},
        {"type": "accuracy", "inputs": ["fc", "label"], "top_k": 3, "name": "top3"},
        {"type": "MulticlassF1Score", "inputs": ["fc", "label"], "args": {"num_classes": 10}},
        {"type": "MulticlassAUROC", "inputs": ["fc", "label"], "args": {"num_classes": 10}},
        {"type": "l2", "inputs": ["flat"], "every": 1},
        {"type": "correct_fraction", "inputs": ["fc", "label"], "every": 2},
        {"type": "l2_ratio", "inputs": ["fc.weight/update", "fc.weight/param"], "every": 1},
    ]
    several, alone = pair(
        2, strategy=strategy, data=VALIDATION, metrics=metrics, stop={"steps": 12}
    )
    found = series(run_processes(server, tmp_path / "a", several, digits))
    expected = series(run(tmp_path / "b", alone, digits))
    assert len({name for _, name in expected}) == 12
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_a_bad_row_of_another_process_is_found(strategy, server, tmp_path):
    """Row 21 of 32 is in the second process's share; process 0 reports it."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(32, 6)).astype(np.float32)
    x[21, 3] = np.nan
    label = generator.integers(0, 3, 32).astype(np.int64)
    bad = write_table(tmp_path / "t", {"x": x, "label": label}, {"train": slice(0, 32)})
    fields = {"x": {"type": "dense", "fill": "NaN"}, "label": {"type": "integer", "dim": 4}}
    data = {"fields": fields, "shuffle": {"enabled": False}}
    layers = network({"name": "fc", "type": "Linear", "args": {"out_features": 4}})
    several, _ = pair(2, strategy=strategy, rows=32, network=layers, data=data, stop={"steps": 3})
    several["guards"] = {"nonfinite": {"action": "fail"}}
    records = finish(start(server, tmp_path / "a", several, bad), tmp_path / "a")
    [finding] = of_type(records[0], "finding")
    assert (finding["layer"], finding["kind"], finding["bad_samples"]) == ("x", "input", [21])
    assert finding["samples"] == [*range(32)]
    assert [item[-1]["error"]["code"] for item in records] == ["non_finite"] * 2


@pytest.mark.parametrize("strategy", ["data", "fsdp"])
def test_a_skipped_step_is_skipped_by_all(strategy, server, digits, tmp_path):
    """A loss that overflows in one process only makes no process update."""
    several, alone = pair(
        2, strategy=strategy, stop={"steps": 6}, optimizer={"type": "SGD", "args": {"lr": 1e30}}
    )
    for job in (several, alone):
        job["guards"] = {"nonfinite": {"action": "skip_step", "max_skipped": 100}}
    found = run_processes(server, tmp_path / "a", several, digits)
    expected = run(tmp_path / "b", alone, digits)
    skipped = [
        [
            item["values"]["skipped_steps"]
            for item in of_type(records, "metrics")
            if "skipped_steps" in item["values"]
        ]
        for records in (found, expected)
    ]
    assert skipped[0] == skipped[1] != []


@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("second", [1, 2, 4])
def test_a_job_resumes_with_another_number_of_processes(first, second, server, digits, tmp_path):
    """Bit for bit with as many processes, dropout included; else up to rounding."""
    has_dropout = first == second
    drop = [{"name": "drop", "type": "Dropout", "args": {"p": 0.25}}] * has_dropout
    layers = [*SMOOTH[:-1], *drop, SMOOTH[-1]]
    more = {"network": network(*layers), "optimizer": ADAM, "stop": {"steps": 20}}
    more["checkpoint"] = {"every_steps": 7}  # within an epoch of 5 steps

    def at(directory: Path, is_second: bool, **more_of_run: Any) -> list[dict[str, Any]]:
        num = second if is_second else first
        several, alone = pair(num, **copy.deepcopy(more))
        if num == 1:
            return run(directory, alone, digits, **more_of_run)
        return run_processes(server, directory, several, digits, **more_of_run)

    assert_resumes(at, tmp_path, is_alike=first == second)


def test_the_plan_says_what_processes_share():
    flat, last = {"name": "flat", "type": "Flatten"}, SMOOTH[-1]
    several, alone = pair(4, network=network(flat, last))
    assert planned(alone)["parallel"] is None
    shown = planned(several)["parallel"]
    memory = planned(several)["memory"]
    # one of four processes writes checkpoints
    together = 4 * (memory["total_bytes"] - memory["checkpoint_bytes"]) + memory["checkpoint_bytes"]
    shown.pop("strategies")
    assert shown == {
        "strategy": "data",
        "processes": 4,
        "axes": {"data": 4},
        "global_batch_size": 64,
        "exchanged_bytes": 2 * 3 * 4 * (64 * 10 + 10) // 4,  # a ring of four, float32
        "host_bytes": together,
        "cpu_offload": False,
        "divided": [],
    }
    activations = [planned(job)["memory"]["activations_bytes"] for job in (several, alone)]
    assert activations[0] < activations[1] / 2


def test_a_loss_whose_mean_is_not_known_before_the_step_is_refused():
    """The targets are computed by a layer with parameters: only the forward pass knows them."""
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
        {"name": "other", "type": "Linear", "args": {"out_features": 10}, "inputs": ["flat"]},
        {"name": "target", "type": "argmax", "args": {"dim": 1}, "inputs": ["other"]},
    ]
    loss = {"type": "CrossEntropyLoss", "inputs": ["fc", "target"], "args": {"ignore_index": 3}}
    several, alone = pair(2, network=network(*layers), loss=loss)
    assert planned(alone)["parallel"] is None
    assert "several processes" in errors(several)["/loss"]


def test_batch_normalization_is_warned_of_shares_of_one_row():
    """300 rows in batches of 149 leave two rows, one for each process."""
    layers = [SMOOTH[0], {"name": "bn", "type": "BatchNorm2d"}, *SMOOTH[1:]]
    several, alone = pair(2, rows=298, network=network(*layers))
    codes = [[item["code"] for item in planned(job)["warnings"]] for job in (several, alone)]
    assert codes == [["single_row"], []]


def test_the_log_of_a_resumed_job_names_another_number_of_processes(server, digits, tmp_path):
    several, alone = pair(2, stop={"steps": 6}, checkpoint={"every_steps": 3})
    run(tmp_path / "one", alone, digits)
    resume = {"dir": str(tmp_path / "one/checkpoints/step-3"), "step": 3}
    run_processes(server, tmp_path / "two", several, digits, resume=resume)
    log = (tmp_path / "two/logs/rank-0.stderr").read_text()
    assert "resumed with processes 2, and the checkpoint was made with 1" in log


def test_fewer_validation_rows_than_processes_are_refused():
    several, _ = pair(4, data=VALIDATION)
    few = {**DIGITS_META, "splits": {"train": 300, "test": 3}}
    assert "3 rows" in errors(several, few)["/data/validation"]


def test_each_row_of_an_evaluation_counts_once(server, digits, tmp_path):
    """65 rows in batches of 64: the last row is in one process, and in no other."""
    metrics = [{"type": "accuracy", "inputs": ["fc", "label"]}]
    data = {"validation": {"dataset": "ds_1", "split": "test", "fraction": [0, 0.675]}}
    several, alone = pair(4, data=data, metrics=metrics, stop={"steps": 5})
    found = run_processes(server, tmp_path / "a", several, digits)
    assert_same_losses(found, run(tmp_path / "b", alone, digits))


def test_the_plan_advises_on_the_learning_rate_of_larger_steps():
    """Steps of 512 rows continue a job of 64: lr 0.1 becomes 0.8 for SGD, 0.283 for Adam."""
    before = planned(pair(1)[1])["spec"]
    several, _ = pair(4, rows=256, accumulate=2)
    several["init"] = {"checkpoint": "ckpt_1", "load": "all"}
    [warning] = [
        item
        for item in planned(several, network=before)["warnings"]
        if item["pointer"] == "/optimizer/args/lr"
    ]
    assert "a step has 512 rows, the checkpoint's job had 64" in warning["detail"]
    assert "0.8 for SGD (linear) and 0.283 for Adam" in warning["detail"]
    several["optimizer"] = {"type": "SGD", "args": {"lr": 0.8}}
    assert planned(several, network=before)["warnings"] == []


def test_one_number_cannot_be_sharded():
    layers = [{"name": "p", "type": "Parameter", "args": {"shape": []}}, *SMOOTH[3:]]
    several, _ = pair(2, strategy="fsdp", network=network(*layers))
    several["network"]["layers"][1]["inputs"] = ["image"]
    found = errors(several)["/parallel/strategy"]
    assert "'p.weight' is one number, which fsdp cannot shard" in found
