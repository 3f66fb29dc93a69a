"""Jobs whose loss does not depend on the batches: evaluations, accumulate, halved batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from engine.core.spool import read_frames
from engine.process import rank
from tests.unit.engine.ragged import meta_of, write_ragged
from tests.unit.engine.runs import (
    captured,
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_job,
    write_table,
)

ROWS, IGNORED, WEIGHTS = 96, 3, [0.2, 5.0, 1.0, 1.0]
LAYERS = [
    {"name": "hidden", "type": "Linear", "args": {"out_features": 8}},
    {"name": "act", "type": "Tanh"},
    {"name": "fc", "type": "Linear", "args": {"out_features": 4}},
    {"name": "back", "type": "Linear", "args": {"out_features": 6}, "inputs": ["act"]},
]
CLASSES = {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]}
WEIGHTED = {**CLASSES, "args": {"weight": WEIGHTS, "ignore_index": IGNORED}}
SEVERAL = [
    {**WEIGHTED, "name": "classes", "weight": 2.0},
    {"type": "MSELoss", "inputs": ["back", "x"], "name": "rebuilt"},
    {"type": "L1Loss", "inputs": ["back", "x"], "args": {"reduction": "sum"}, "weight": 0.01},
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sorted by class: of the last 16 rows each target is ignored."""
    generator = np.random.default_rng(0)
    label = np.sort(generator.integers(0, 3, ROWS))
    label[80:] = IGNORED
    label[::5] = IGNORED
    x = generator.normal(size=(ROWS, 6)).astype(np.float32)
    columns = {"x": x, "label": label.astype(np.int64)}
    splits = {"train": slice(0, ROWS), "test": slice(0, ROWS)}
    return write_table(tmp_path_factory.mktemp("weighted"), columns, splits)


def job(loss: Any = WEIGHTED, **changes: Any) -> dict[str, Any]:
    data = {
        "fields": {"x": {"type": "dense"}, "label": {"type": "integer", "dim": 4}},
        "shuffle": {"enabled": False},
        "validation": {"dataset": "ds_1", "split": "test"},
        **changes.pop("data", {}),
    }
    whole = {"network": {"layers": LAYERS}, "loss": loss, "evaluate": {"every_epochs": 1}}
    return spec(**{**whole, **changes}, data=data)


def judged(records: list[dict[str, Any]], name: str = "validation/loss") -> list[float]:
    return [r["values"][name] for r in of_type(records, "metrics") if name in r["values"]]


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(directory / f"checkpoints/step-{step}/model.safetensors")


def by_hand(table: Path, kept: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The three losses over all rows at once, in float64."""
    x, label = (torch.from_numpy(np.load(table / "test" / f"{n}.npy")) for n in range(2))

    def linear(name: str, item: torch.Tensor) -> torch.Tensor:
        return F.linear(item, kept[f"{name}.weight"].double(), kept[f"{name}.bias"].double())

    act = linear("hidden", x.double()).tanh()
    weight = torch.tensor(WEIGHTS).double()
    classes = F.cross_entropy(linear("fc", act), label, weight, ignore_index=IGNORED)
    back = linear("back", act)
    return [classes, F.mse_loss(back, x.double()), F.l1_loss(back, x.double(), reduction="sum")]


@pytest.mark.parametrize("size", [1, 4, 8, 16, 32, 96])
def test_the_loss_of_an_evaluation_is_that_of_all_its_rows(size, table, tmp_path):
    """With the same weights, which a rate of 0 keeps: class weights, ignored rows, three losses."""
    still = {"type": "SGD", "args": {"lr": 0.0}}
    data = {"batch_size": size}
    records = run(tmp_path, job(SEVERAL, optimizer=still, data=data, stop={"steps": 1}), table)
    classes, rebuilt, summed = map(float, by_hand(table, weights(tmp_path, 1)))
    expected = {
        "validation/loss/classes": classes,
        "validation/loss/rebuilt": rebuilt,
        "validation/loss/L1Loss": summed,
        "validation/loss": 2 * classes + rebuilt + 0.01 * summed,
    }
    for name, value in expected.items():
        assert judged(records, name)[-1] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("loss", [WEIGHTED, SEVERAL], ids=["weighted", "several"])
@pytest.mark.parametrize(("parts", "accumulate"), [(1, 4), (4, 1), (2, 3)])
@pytest.mark.long
def test_micro_batches_are_the_large_batch(loss, parts, accumulate, shuffles, table, tmp_path):
    """Not shuffled, the last step has micro-batches in which every target is ignored."""
    order = {"shuffle": {"enabled": shuffles}}
    whole = job(loss, data={**order, "batch_size": 36}, stop={"epochs": 4})
    size = 36 // accumulate
    few = job(loss, data={**order, "batch_size": size}, stop={"epochs": 4}, accumulate=accumulate)
    large = run(tmp_path / "large", whole, table)
    small = run(tmp_path / "small", few, table, parts=parts)
    assert losses(small) == pytest.approx(losses(large), rel=1e-5)
    assert judged(small) == pytest.approx(judged(large), rel=1e-5)
    mine, theirs = weights(tmp_path / "small", 12), weights(tmp_path / "large", 12)
    for name, item in theirs.items():
        torch.testing.assert_close(mine[name], item, rtol=2e-5, atol=2e-6)


def test_a_step_of_ignored_targets_is_torchs_as_well(table, tmp_path):
    """The loss is NaN, as torch's; its gradients are zeros: the weights stay what they were."""
    data = {"batch_size": 16}
    plain = {"type": "SGD", "args": {"lr": 0.1}}
    large = run(tmp_path / "a", job(data=data, optimizer=plain, stop={"steps": 6}), table)
    data = {"batch_size": 4}
    small = job(data=data, optimizer=plain, accumulate=4, stop={"steps": 6})
    found = run(tmp_path / "b", small, table)
    assert losses(large)[:5] == pytest.approx(losses(found)[:5], rel=1e-5)
    assert [losses(item)[5] for item in (large, found)] == ["NaN", "NaN"]
    mine, theirs = weights(tmp_path / "b", 6), weights(tmp_path / "a", 6)
    for name, item in theirs.items():
        torch.testing.assert_close(mine[name], item, rtol=2e-5, atol=2e-6)


def test_a_micro_batch_without_targets_is_no_finding(table, tmp_path):
    """One step of all rows: ten micro-batches have targets, two have none."""
    guards = {"nonfinite": {"action": "fail", "check": ["loss", "gradients", "outputs"]}}
    train = {"dataset": "ds_1", "split": "train"}
    data = {"batch_size": 8, "train": train}
    records = run(tmp_path, job(data=data, accumulate=12, guards=guards, stop={"epochs": 2}), table)
    assert not of_type(records, "finding")
    assert all(np.isfinite(losses(records)))


def test_a_bad_row_is_found_behind_micro_batches_without_targets(table, tmp_path):
    """A replay that took the mean of an empty micro-batch would blame its loss."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(32, 6)).astype(np.float32)
    x[21, 3] = np.nan
    label = np.where(np.arange(32) < 16, IGNORED, generator.integers(0, 3, 32)).astype(np.int64)
    bad = write_table(tmp_path / "t", {"x": x, "label": label}, {"train": slice(0, 32)})
    fields = {"x": {"type": "dense", "fill": "NaN"}, "label": {"type": "integer", "dim": 4}}
    whole = job(
        data={"fields": fields, "batch_size": 8, "validation": None},
        evaluate=None,
        accumulate=4,
        guards={"nonfinite": {"action": "fail"}},
        stop={"steps": 1},
    )
    resolved = planned(whole, json.loads((bad / "meta.json").read_text()))["spec"]
    assert rank.main(write_job(tmp_path, resolved, bad)) == 0
    records, _ = read_frames(tmp_path / "spool", 0, 10**6)
    [finding] = of_type(records, "finding")
    assert (finding["layer"], finding["kind"], finding["bad_samples"]) == ("x", "input", [21])
    assert finding["samples"] == [*range(16, 24)]


def test_probes_see_gradients_of_the_steps_loss_and_change_no_bit(table, tmp_path):
    kinds = ["output", "output_grad", "param_grad"]
    probe = {"layers": ["fc", "loss.samples", "loss.rows"], "kinds": kinds, "every": 1}
    probes = [probe | {"want": ["full"], "max_overhead": None}]
    large = job(data={"batch_size": 32}, probes=probes, stop={"steps": 3})
    few = {"data": {"batch_size": 8}, "accumulate": 4, "stop": {"steps": 3}}
    seen = run(tmp_path / "seen", job(probes=probes, **few), table)
    unseen = run(tmp_path / "unseen", job(**few), table)
    assert losses(seen) == losses(unseen)
    for name, item in weights(tmp_path / "unseen", 3).items():
        assert torch.equal(weights(tmp_path / "seen", 3)[name], item), name
    whole = captured(run(tmp_path / "large", large, table), tmp_path / "large")
    found = captured(seen, tmp_path / "seen")
    for step in range(3):
        name = (step, "fc.weight", "param_grad")
        torch.testing.assert_close(found[name], whole[name], rtol=1e-4, atol=1e-6)
        name = (step, "fc", "output_grad")  # of the last micro-batch, by the step's loss
        torch.testing.assert_close(found[name], whole[name][24:], rtol=1e-4, atol=1e-7)
        rows = found[step, "loss.rows", "output"]
        assert torch.equal(rows, whole[step, "loss.rows", "output"][24:])


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_fewer_bits_have_the_step_of_the_large_batch_too(precision, table, tmp_path):
    large = job(data={"batch_size": 32}, precision=precision, stop={"steps": 6})
    few = job(data={"batch_size": 8}, precision=precision, accumulate=4, stop={"steps": 6})
    expected = run(tmp_path / "a", large, table)
    found = run(tmp_path / "b", few, table)
    assert losses(found) == pytest.approx(losses(expected), rel=2e-2)
    mine, theirs = weights(tmp_path / "b", 6), weights(tmp_path / "a", 6)
    for name, item in theirs.items():
        torch.testing.assert_close(mine[name], item, rtol=5e-2, atol=5e-3)


def test_gradients_by_outputs_are_clipped_as_those_of_the_large_batch(table, tmp_path):
    clipped = [{**layer} for layer in LAYERS]
    clipped[2]["output_grad_clip"] = 0.004
    network = {"layers": clipped}
    large = run(tmp_path / "a", job(data={"batch_size": 32}, network=network), table)
    few = job(data={"batch_size": 8}, accumulate=4, network=network)
    assert losses(run(tmp_path / "b", few, table)) == pytest.approx(losses(large), rel=1e-5)
    parts = judged(large, "output_grad_clip/fc")
    assert max(parts) > 0.05


def test_rows_that_are_read_from_files_wait_as_batches_do_in_memory(table, tmp_path):
    """Streamed, with threads: the rows of each micro-batch are known when its turn comes."""
    streamed = {"buffer_size": 48, "min_buffer_size": 48}
    probe = {"layers": ["loss.rows"], "kinds": ["output"], "every": 1, "want": ["full"]}
    probes = [probe | {"max_overhead": None}]
    for workers in (0, 2):
        data = {"batch_size": 8, "shuffle": streamed, "workers": workers}
        large = job(data={**data, "batch_size": 24}, stop={"steps": 8})
        few = job(data={**data, "batch_size": 24}, probes=probes, stop={"steps": 8})
        at = tmp_path / str(workers)
        expected = losses(run(at / "a", large, table))
        found = run(at / "b", few, table, parts=3)
        assert losses(found) == pytest.approx(expected, rel=1e-5)
        seen = captured(found, at / "b")
        assert all(len(seen[step, "loss.rows", "output"]) == 8 for step in range(8))


def test_a_run_that_was_stopped_resumes_bit_for_bit(table, tmp_path):
    many = job(SEVERAL, data={"batch_size": 7}, accumulate=3, checkpoint={"every_steps": 1})
    whole = run(tmp_path / "a", many, table)
    there = {"dir": str(tmp_path / "a/checkpoints/step-3"), "step": 3}
    again = run(tmp_path / "b", many, table, resume=there)
    assert losses(again) == losses(whole)[3:]
    assert judged(again) == judged(whole)


# --- sequences ---------------------------------------------------------------------------------

LSTM = [
    {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 5, "batch_first": True},
     "inputs": ["seq"]},
    {"name": "scores", "type": "Linear", "args": {"out_features": 4}},
    {"name": "turned", "type": "permute", "args": {"dims": [0, 2, 1]}},
    {"name": "two", "type": "Linear", "args": {"out_features": 2}, "inputs": ["lstm.0"]},
    {"name": "long", "type": "reshape", "args": {"shape": [-1, 4]}, "inputs": ["scores"]},
    {"name": "longer", "type": "reshape", "args": {"shape": [-1]}, "inputs": ["tags"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 rows of 0 to 11 steps, from short to long."""
    generator = np.random.default_rng(2)
    rows = [
        {
            "seq": generator.normal(size=(length, 2)).round(4).tolist(),
            "tags": generator.integers(0, 4, length).tolist(),
        }
        for length in sorted(generator.integers(0, 12, 45).tolist())
    ]
    return write_ragged(tmp_path_factory.mktemp("ragged"), rows)


def on_sequences(loss: Any, *, padding: int = 0, **changes: Any) -> dict[str, Any]:
    tags = {"type": "integer_sequence", "dim": 4, "padding_value": padding}
    data = {
        "train": {"dataset": "ds_1"},
        "validation": {"dataset": "ds_1"},
        "fields": {"seq": {"type": "dense_sequence", "dim": 2}, "tags": tags},
        "shuffle": {"enabled": False},
        "batch_size": 5,
        **changes.pop("data", {}),
    }
    return {
        "kind": "train",
        "seed": 3,
        "network": {"layers": LSTM},
        "loss": loss,
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "stop": {"epochs": 1},
        "data": data,
        **changes,
    }


TAGS = {"type": "CrossEntropyLoss", "inputs": ["turned", "tags"]}
STEPS = {"type": "MSELoss", "inputs": ["two", "seq"]}
LONG = {"type": "CrossEntropyLoss", "inputs": ["long", "longer"]}
OVER_STEPS: dict[str, tuple[Any, int]] = {
    "classes": (TAGS, 0),
    "weighted classes": ({**TAGS, "args": {"weight": WEIGHTS}}, 0),
    "classes, -100": (TAGS, -100),
    "targets of a layer": (LONG, -100),
    "vectors": (STEPS, 0),
    "a row's own values": ({"type": "SmoothL1Loss", "inputs": ["two", "seq"]}, 0),
    "both": ([TAGS, {**STEPS, "weight": 3.0}], 0),
}


def of_each_row(ragged: Path, kept: dict[str, torch.Tensor], kind: str) -> float:
    """A second path: each row by itself, which nothing pads."""
    lines = (ragged.parent / "rows.jsonl").read_text().splitlines()
    lstm = nn.LSTM(2, 5, batch_first=True).double()
    lstm.load_state_dict({n.removeprefix("lstm."): x for n, x in kept.items() if n[:4] == "lstm"})
    heads = {
        n: lambda x, n=n: F.linear(x, kept[f"{n}.weight"].double(), kept[f"{n}.bias"].double())
        for n in ("scores", "two")
    }
    weight = torch.tensor(WEIGHTS if kind == "weighted classes" else [1.0] * 4).double()
    above = np.zeros(3)
    below = np.zeros(3)
    for line in lines:
        row = json.loads(line)
        if not row["tags"]:
            continue
        x, tags = torch.tensor(row["seq"]).double(), torch.tensor(row["tags"])
        hidden = lstm(x[None])[0][0]
        scores, two = heads["scores"](hidden), heads["two"](hidden)
        above += [
            F.cross_entropy(scores, tags, weight, reduction="sum").item(),
            F.mse_loss(two, x, reduction="sum").item(),
            F.smooth_l1_loss(two, x, reduction="sum").item(),
        ]
        below += [weight[tags].sum().item(), x.numel(), x.numel()]
    classes, squares, absolute = above / below
    if kind == "both":
        return float(classes + 3 * squares)
    return float({"vectors": squares, "a row's own values": absolute}.get(kind, classes))


@pytest.mark.parametrize("kind", OVER_STEPS)
@pytest.mark.long
def test_padding_does_not_count_in_the_loss_of_an_evaluation(kind, ragged, tmp_path):
    loss, padding = OVER_STEPS[kind]
    still = {"type": "SGD", "args": {"lr": 0.0}}
    found: list[float] = []
    for size in (4, 8, 16, 32):
        whole = on_sequences(loss, padding=padding, optimizer=still, data={"batch_size": size})
        at = tmp_path / str(size)
        found.append(judged(run(at, {**whole, "stop": {"steps": 1}}, ragged))[-1])
    expected = of_each_row(ragged, weights(tmp_path / "4", 1), kind)
    assert found == pytest.approx([expected] * 4, rel=1e-6)


@pytest.mark.parametrize("kind", OVER_STEPS)
@pytest.mark.long
def test_micro_batches_of_sequences_are_the_large_batch(kind, ragged, tmp_path):
    """Rows come from short to long: the first micro-batches have no step at all."""
    loss, padding = OVER_STEPS[kind]
    large = on_sequences(loss, padding=padding, data={"batch_size": 15}, stop={"epochs": 3})
    few = on_sequences(loss, padding=padding, accumulate=5, stop={"epochs": 3})
    few["data"] = {**few["data"], "batch_size": 3}
    expected = run(tmp_path / "a", large, ragged)
    found = run(tmp_path / "b", few, ragged)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    mine, theirs = weights(tmp_path / "b", 9), weights(tmp_path / "a", 9)
    for name, item in theirs.items():
        torch.testing.assert_close(mine[name], item, rtol=2e-5, atol=2e-6)


def test_the_resolved_spec_names_the_lengths_of_a_loss(ragged):
    def resolved(loss: Any, padding: int = 0) -> Any:
        return planned(on_sequences(loss, padding=padding), meta_of(ragged))["spec"]["loss"]

    assert resolved(TAGS)["lengths"] == "tags.lengths"
    assert resolved(TAGS, -100)["lengths"] is None  # which that loss passes over
    assert resolved(STEPS)["lengths"] == "seq.lengths"
    assert resolved({**STEPS, "lengths": False})["lengths"] is False
    assert resolved({**STEPS, "lengths": "tags"})["lengths"] == "tags.lengths"
    assert resolved([TAGS, STEPS])[1]["lengths"] == "seq.lengths"
    again = planned(on_sequences(resolved(STEPS)), meta_of(ragged))
    assert again["spec"]["loss"]["lengths"] == "seq.lengths"


def test_lengths_false_compares_the_padding_as_torch_does(ragged, tmp_path):
    """One batch of all rows: the mean is over its places, padding included."""
    still = {"optimizer": {"type": "SGD", "args": {"lr": 0.0}}, "data": {"batch_size": 45}}
    padded = run(tmp_path / "a", on_sequences({**STEPS, "lengths": False}, **still), ragged)
    masked = run(tmp_path / "b", on_sequences(STEPS, **still), ragged)
    assert judged(padded)[-1] < 0.9 * judged(masked)[-1]
    assert losses(padded)[0] == pytest.approx(judged(padded)[-1], rel=1e-6)


def test_each_row_is_seen_with_the_mean_of_its_own_steps(ragged, tmp_path):
    names = {"layers": ["loss", "loss.samples", "two"], "kinds": ["output"], "every": 1}
    probes = [{**names, "want": ["full"], "max_overhead": None}]
    whole = on_sequences(STEPS, probes=probes, stop={"steps": 1}, data={"batch_size": 45})
    seen = captured(run(tmp_path, whole, ragged), tmp_path)
    lines = (ragged.parent / "rows.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        row = torch.tensor(json.loads(line)["seq"])
        two = seen[0, "two", "output"][number, : len(row)]
        expected = (two - row).square().mean() if len(row) else torch.zeros(())
        torch.testing.assert_close(seen[0, "loss.samples", "output"][number], expected)


SPOKEN = [
    {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 5, "batch_first": True},
     "inputs": ["seq"]},
    {"name": "scores", "type": "Linear", "args": {"out_features": 4}},
    {"name": "logs", "type": "LogSoftmax", "args": {"dim": 2}},
    {"name": "turned", "type": "permute", "args": {"dims": [1, 0, 2]}},
]  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_is_that_of_all_rows_too(reduction, tmp_path):
    """The rows are on axis 1 of the scores, and the lengths are inputs."""
    generator = np.random.default_rng(5)
    lengths = sorted(generator.integers(3, 14, 30).tolist())
    table = write_ragged(
        tmp_path / "t",
        [
            {
                "seq": generator.normal(size=(length, 2)).round(4).tolist(),
                "tags": generator.integers(1, 4, 1 + length // 4).tolist(),
            }
            for length in lengths
        ],
    )
    loss = {
        "type": "CTCLoss",
        "inputs": ["turned", "tags", "seq.lengths", "tags.lengths"],
        "args": {"reduction": reduction, "zero_infinity": True},
    }
    rate = {"type": "SGD", "args": {"lr": 0.1 if reduction == "mean" else 0.001}}
    more = {"network": {"layers": SPOKEN}, "optimizer": rate, "stop": {"epochs": 2}}
    large = on_sequences(loss, **more, data={"batch_size": 15})
    small = on_sequences(loss, **more, accumulate=3)
    assert "/loss" not in warning_codes(large, table)
    expected = run(tmp_path / "a", large, table)
    found = run(tmp_path / "b", small, table)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert judged(found) == pytest.approx(judged(expected), rel=1e-5)


HALF = [
    *LSTM[:1],
    {"name": "cut", "type": "permute", "args": {"dims": [0, 2, 1]}},
    {"name": "conv", "type": "Conv1d", "args": {"out_channels": 2, "kernel_size": 3, "padding": 1,
     "stride": 2}},
    {"name": "two", "type": "permute", "args": {"dims": [0, 2, 1]}},
    {"name": "pairs", "type": "permute", "args": {"dims": [0, 2, 1]}, "inputs": ["seq"]},
    {"name": "pooled", "type": "MaxPool1d", "args": {"kernel_size": 1, "stride": 2}},
    {"name": "wanted", "type": "permute", "args": {"dims": [0, 2, 1]}},
    {"name": "more", "type": "add", "inputs": ["seq.lengths"], "args": {"other": 1}},
    {"name": "half", "type": "div", "inputs": ["more"],
     "args": {"other": 2, "rounding_mode": "floor"}},
]  # fmt: skip


def test_lengths_may_be_those_of_a_layer(ragged, tmp_path):
    """A strided convolution halves the steps; its lengths are computed from those of the field."""
    loss = {"type": "MSELoss", "inputs": ["two", "wanted"]}
    network = {"network": {"layers": HALF}, "stop": {"epochs": 2}}
    named = {**loss, "lengths": "half"}
    large = on_sequences(named, **network, data={"batch_size": 15})
    small = on_sequences(named, **network, accumulate=3)
    assert "/accumulate" not in warning_codes(small, ragged)
    expected = run(tmp_path / "a", large, ragged)
    found = run(tmp_path / "b", small, ragged)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert judged(found) == pytest.approx(judged(expected), rel=1e-5)


def test_lengths_that_are_longer_than_the_steps_fail_the_job_and_say_so(ragged, tmp_path):
    loss = {"type": "MSELoss", "inputs": ["two", "wanted"], "lengths": "more"}
    whole = on_sequences(loss, network={"layers": HALF})
    resolved = planned(whole, meta_of(ragged))["spec"]
    assert rank.main(write_job(tmp_path, resolved, ragged)) == 0
    error = read_frames(tmp_path / "spool", 0, 10**6)[0][-1]["error"]
    assert error["layer"] == "loss"
    assert "its lengths reach" in error["message"]


def test_what_a_step_was_made_of_is_counted_in_batches_that_wait(ragged, tmp_path):
    """Steps of a summed loss do not wait for targets; those of a mean do."""
    still = {"optimizer": {"type": "SGD", "args": {"lr": 0.0}}, "accumulate": 2}
    told: list[Any] = []
    for reduction in ("sum", "mean"):
        loss = {**TAGS, "args": {"reduction": reduction}}
        whole = on_sequences(loss, padding=-100, **still)
        found = run(tmp_path / reduction, whole, ragged)
        told.append(judged(found, "padding/seq") + judged(found, "padding/tags"))
    assert told[0] == told[1]
    assert len(set(told[0])) > 3


def test_what_goes_by_the_loss_of_evaluations_goes_alike_in_halves(table, tmp_path):
    """A rate that falls on a plateau, the best checkpoint and an early end, in four parts each."""
    best = {"metric": "validation/loss", "mode": "min"}
    falls = {"type": "ReduceLROnPlateau", "args": {"patience": 0, "threshold": 0.05}}
    more = {
        "optimizer": {"type": "SGD", "args": {"lr": 2.0}},
        "scheduler": {**falls, "metric": "validation/loss"},
        "checkpoint": {"keep_best": best, "keep_last": 1},
        "stop": {"epochs": 20, "early": {**best, "patience": 4}},
        "data": {"batch_size": 32},
    }
    whole = run(tmp_path / "a", job(**more), table)
    parts = run(tmp_path / "b", job(**more), table, parts=4)
    assert judged(parts, "lr") == judged(whole, "lr")
    assert len(set(judged(whole, "lr"))) > 2
    assert judged(parts) == pytest.approx(judged(whole), rel=1e-4)
    assert parts[-1]["reason"] == whole[-1]["reason"]


# --- what a plan says ----------------------------------------------------------------------------


def warning_codes(whole: dict[str, Any], table: Path) -> dict[str, str]:
    plan = planned(whole, json.loads((table / "meta.json").read_text()))
    return {item["pointer"]: item["code"] for item in plan["warnings"]}


def test_a_plan_says_where_padding_is_compared(ragged):
    assert "/loss" not in warning_codes(on_sequences(TAGS), ragged)
    assert "/loss" not in warning_codes(on_sequences(STEPS), ragged)
    assert "/loss" not in warning_codes(on_sequences(LONG, padding=-100), ragged)
    assert warning_codes(on_sequences(LONG), ragged)["/loss"] == "padding"
    assert warning_codes(on_sequences([STEPS, LONG]), ragged)["/loss/1"] == "padding"
    assert "/loss" not in warning_codes(on_sequences({**LONG, "lengths": False}), ragged)


PAIRS = [
    {"name": "a", "type": "Linear", "args": {"out_features": 8}},
    {"name": "b", "type": "Linear", "args": {"out_features": 8}, "inputs": ["x"]},
    {"name": "b_t", "type": "permute", "args": {"dims": [1, 0]}},
    {"name": "pairs", "type": "matmul", "inputs": ["a", "b_t"]},
    {"name": "place", "type": "positions", "args": {"dim": 0}, "inputs": ["label"]},
]


@pytest.mark.parametrize("size", [8, 6])
def test_a_plan_says_that_rows_are_compared_with_each_other(size, table):
    """Of a contrastive loss; not of one that has as many classes as a batch has rows."""
    loss = {"type": "CrossEntropyLoss", "inputs": ["pairs", "place"]}
    contrastive = job(loss, network={"layers": PAIRS}, data={"batch_size": size})
    assert warning_codes(contrastive, table)["/loss/inputs"] == "rows_compared"
    usual = job({"type": "MSELoss", "inputs": ["back", "x"]}, data={"batch_size": size})
    assert "/loss/inputs" not in warning_codes(usual, table)


def test_a_plan_says_that_a_loss_compares_each_row_with_every_other(table):
    """[rows] beside [rows, 1] broadcasts; torch itself warns for other losses only."""
    layers = [
        {"name": "one", "type": "Linear", "args": {"out_features": 1}},
        {"name": "flat", "type": "reshape", "args": {"shape": [-1]}},
    ]
    loss = {"type": "PoissonNLLLoss", "inputs": ["one", "flat"]}
    whole = job(loss, network={"layers": layers}, data={"batch_size": 16})
    assert warning_codes(whole, table)["/loss/inputs"] == "rows_compared"


def test_a_plan_says_that_targets_are_not_known_before_a_step(table, tmp_path):
    layers = [
        *LAYERS,
        {"name": "guess", "type": "argmax", "args": {"dim": 1}, "inputs": ["fc"]},
    ]
    loss = {"type": "CrossEntropyLoss", "args": {"weight": [0.1] * 4}, "inputs": ["fc", "guess"]}
    network = {"layers": layers}
    assert "/accumulate" not in warning_codes(job(loss, network=network), table)
    assert (
        warning_codes(job(loss, network=network, accumulate=2), table)["/accumulate"] == "by_rows"
    )
    guards = {"memory": {"on_oom": "halve_batch"}}
    found = warning_codes(job(loss, network=network, guards=guards), table)
    assert found["/guards/memory/on_oom"] == "by_rows"
    records = run(tmp_path, job(loss, network=network, accumulate=2, stop={"steps": 2}), table)
    assert all(np.isfinite(losses(records)))


PEAKS = [3, 0, 1, 0, 3, 1, 3, 3, 3]
"""The largest entry of the rows of each micro-batch of 8: class 3 does not count."""


@pytest.mark.parametrize(
    "args",
    [{"ignore_index": 3}, {"weight": [1.0, 2.0, 1.0, 0.0, 1.0, 1.0]}],
    ids=["ignored", "weightless"],
)
def test_a_micro_batch_without_targets_that_nobody_knows_before_it_adds_nothing(args, tmp_path):
    """Three steps of three: the first or second is empty; then all are, which is torch's NaN."""
    x = np.random.default_rng(1).random((72, 6)).astype(np.float32)
    x[np.arange(72), np.repeat(PEAKS, 8)] += 3.0
    x[12:16, 1] += 5.0  # two classes in one micro-batch
    splits = {"train": slice(0, 72), "test": slice(8, 48)}
    table = write_table(tmp_path / "table", {"x": x, "label": np.zeros(72, np.int64)}, splits)
    layers = [
        {"name": "fc", "type": "Linear", "args": {"out_features": 6}, "inputs": ["x"]},
        {"name": "drawn", "type": "Dropout", "args": {"p": 0.0}, "inputs": ["x"]},
        {"name": "peak", "type": "argmax", "args": {"dim": 1}},
    ]
    loss = {"type": "CrossEntropyLoss", "args": args, "inputs": ["fc", "peak"]}
    more = {"network": {"layers": layers}, "data": {"batch_size": 8}, "accumulate": 3}
    still = {"type": "SGD", "args": {"lr": 0.0}}
    run(tmp_path / "still", job(loss, optimizer=still, stop={"steps": 1}, **more), table)
    moving = {"type": "SGD", "args": {"lr": 0.5}}
    records = run(tmp_path / "job", job(loss, optimizer=moving, stop={"steps": 3}, **more), table)

    began = weights(tmp_path / "still", 1)
    weight, bias = (began[f"fc.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    given = {k: torch.tensor(v) if k == "weight" else v for k, v in args.items()}
    expected: list[float] = []
    for step in torch.from_numpy(x).split(24)[:2]:
        parts = [(F.linear(part, weight, bias), part.argmax(1)) for part in step.split(8)]
        counted = [both for both in parts if (both[1] != 3).any()]
        whole = sum(F.cross_entropy(*both, **given) for both in counted) / 3
        assert isinstance(whole, torch.Tensor)
        assert len(counted) == 2
        grads = torch.autograd.grad(whole, (weight, bias))
        expected.append(whole.item())
        with torch.no_grad():
            for item, grad in zip((weight, bias), grads, strict=True):
                item.sub_(0.5 * grad)
    found = losses(records)
    assert found[:2] == pytest.approx(expected, rel=1e-6)
    assert found[2] == "NaN"
    assert F.cross_entropy(torch.randn(4, 6), torch.full((4,), 3), **given).isnan()
    ended = weights(tmp_path / "job", 3)
    torch.testing.assert_close(ended["fc.weight"], weight.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ended["fc.bias"], bias.detach(), rtol=1e-5, atol=1e-7)
    rows = torch.from_numpy(x[8:48])
    scores = F.linear(rows, ended["fc.weight"], ended["fc.bias"])
    of_all = F.cross_entropy(scores, rows.argmax(1), **given).item()
    assert judged(records)[-1] == pytest.approx(of_all, rel=1e-6)


def test_a_plan_says_that_micro_batches_are_normalized_by_themselves(table):
    layers = [{"name": "norm", "type": "BatchNorm1d"}, *LAYERS]
    network = {"layers": layers}
    assert "/accumulate" not in warning_codes(job(network=network), table)
    assert warning_codes(job(network=network, accumulate=2), table)["/accumulate"] == "batch_norm"


def test_a_plan_counts_the_batches_that_wait_for_their_step(table):
    """Class weights: the targets of all four are read before the first is run."""
    meta = json.loads((table / "meta.json").read_text())

    def activations(loss: Any, accumulate: int) -> int:
        whole = job(loss, data={"batch_size": 8}, accumulate=accumulate)
        return planned(whole, meta)["memory"]["activations_bytes"]

    one_batch = 8 * (6 * 4 + 8)
    assert activations(WEIGHTED, 4) - activations(CLASSES, 4) == 3 * one_batch
    assert activations(WEIGHTED, 1) == activations(CLASSES, 1)
    assert activations(WEIGHTED, 100) - activations(CLASSES, 100) == 11 * one_batch


def test_torchs_usual_divergence_is_a_loss_like_others(table, tmp_path):
    """torch warns of its mean reduction, which is no reason to refuse it."""
    layers = [
        *LAYERS,
        {"name": "logs", "type": "LogSoftmax", "args": {"dim": 1}, "inputs": ["back"]},
        {"name": "shares", "type": "Softmax", "args": {"dim": 1}, "inputs": ["x"]},
    ]
    loss = {"type": "KLDivLoss", "inputs": ["logs", "shares"]}
    with pytest.warns(UserWarning, match="reduction"):
        records = run(tmp_path, job(loss, network={"layers": layers}, stop={"steps": 1}), table)
    assert np.isfinite(losses(records)[0])


@pytest.mark.parametrize(
    ("lengths", "code"),
    [("nothing.lengths", "unknown_input"), ("two", "shape"), ("seq", None), ("tags.lengths", None)],
)
def test_lengths_that_a_loss_names_are_checked(lengths, code, ragged):
    whole = on_sequences({**STEPS, "lengths": lengths})
    if code is None:
        assert "/loss" not in warning_codes(whole, ragged)
        return
    found = errors(whole, meta_of(ragged))
    assert [*found] == ["/loss/lengths"]


def test_a_loss_without_steps_takes_no_lengths(ragged):
    pooled = [*LSTM, {"name": "pool", "type": "SequencePool", "args": {"mode": "sum"}}]
    pooled[-1]["inputs"] = ["two"]
    loss = {"type": "MSELoss", "inputs": ["pool", "pool"], "lengths": "seq.lengths"}
    found = errors(on_sequences(loss, network={"layers": pooled}), meta_of(ragged))
    assert "/loss/lengths" in found
