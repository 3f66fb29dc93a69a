"""Evaluation jobs: their numbers against torch and closed forms, and what they refuse."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchmetrics.functional import classification as reference

from engine.evaluation.calibration import Calibration
from engine.evaluation.curves import NUM_THRESHOLDS, ScoreCounts
from engine.evaluation.evaluate import bounded
from engine.network.network import Network
from glasshouse import jsonio
from glasshouse.spec import parse_job
from tests.unit.engine.ragged import job as of_sequences
from tests.unit.engine.ragged import meta_of, texts, write_ragged
from tests.unit.engine.runs import errors, of_type, planned, run, spec, write_table

CPU = torch.device("cpu")
VALIDATION = {"validation": {"dataset": "ds_1", "split": "test"}}
ACCURACY = {"type": "accuracy", "inputs": ["fc", "label"]}
F1 = {"type": "MulticlassF1Score", "args": {"num_classes": 10}, "inputs": ["fc", "label"]}
Trained = tuple[dict[str, Any], Path, Path, dict[str, float]]


def train(folder: Path, body: dict[str, Any], table: Path) -> Trained:
    """Train a job: its resolved spec, its checkpoint, its rows, and its last evaluation."""
    resolved = planned(body, meta_of(table))["spec"]
    records = run(folder, resolved, table)
    checkpoint = folder / of_type(records, "checkpoint")[-1]["dir"]
    found: dict[str, float] = {}
    for record in of_type(records, "metrics"):
        found |= {name: jsonio.number(value) for name, value in record["values"].items()}
    return resolved, checkpoint, table, found


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    body = spec(data=VALIDATION, metrics=[ACCURACY])
    return train(tmp_path_factory.mktemp("trained"), body, digits)


def body_of(**changes: Any) -> dict[str, Any]:
    data = {"dataset": "ds_1", "split": "test", "batch_size": 40} | changes.pop("data", {})
    return {"kind": "evaluate", "job": "job_x", "data": data, **changes}


def evaluate(folder: Path, trained: Trained, **changes: Any) -> dict[str, Any]:
    """Run an evaluation; returns what it writes into its file."""
    resolved, checkpoint, table, _ = trained
    more = {"trained_by": resolved, "checkpoint": {"dir": str(checkpoint)}}
    records = run(folder, body_of(**changes), table, **more)
    (result,) = of_type(records, "result")
    found = jsonio.loads((folder / "artifacts" / "evaluation.json").read_bytes())
    assert jsonio.dumps(bounded(found)) == jsonio.dumps(result["result"])
    return found


@torch.inference_mode()
def outputs(trained: Trained, split: str = "test") -> tuple[Tensor, Tensor]:
    """Scores and labels of a split of the digits, from torch alone."""
    resolved, checkpoint, table, _ = trained
    network = Network(parse_job(json.dumps(resolved)).network, ["fc"])
    network.load_state_dict(load_file(checkpoint / "model.safetensors"))
    network.eval()
    images = torch.from_numpy(np.load(table / split / "0.npy")).float() / 255
    labels = torch.from_numpy(np.load(table / split / "1.npy"))
    return network({"image": images})["fc"], labels


def test_the_loss_and_metrics_are_those_of_the_training_jobs_evaluation(
    trained: Trained, tmp_path: Path
):
    found = evaluate(tmp_path, trained, data={"batch_size": 64}, metrics=[F1, ACCURACY])
    assert found["metrics"]["loss"] == trained[3]["validation/loss"]
    assert found["metrics"]["accuracy"] == trained[3]["validation/accuracy"]
    scores, labels = outputs(trained)
    expected = reference.multiclass_f1_score(scores, labels, num_classes=10)
    assert found["metrics"]["MulticlassF1Score"] == pytest.approx(float(expected))
    assert [*found["metrics"]].count("accuracy") == 1
    assert (found["rows"], found["step"]) == (97, 10)


def test_a_metric_that_is_a_matrix_is_a_file(trained: Trained, tmp_path: Path):
    metric = {**F1, "type": "MulticlassConfusionMatrix", "name": "matrix"}
    found = evaluate(tmp_path, trained, want=["confusion"], metrics=[metric])
    kept = load_file(tmp_path / "artifacts" / f"metrics-{found['step']}.safetensors")
    assert kept["matrix"].tolist() == found["confusion"]
    assert "matrix" not in found["metrics"]


def test_confusion_counts_targets_by_prediction(trained: Trained, tmp_path: Path):
    found = evaluate(tmp_path, trained, want=["confusion"])
    scores, labels = outputs(trained)
    expected = [[0] * 10 for _ in range(10)]
    for true, best in zip(labels.tolist(), scores.argmax(1).tolist(), strict=True):
        expected[true][best] += 1
    assert found["confusion"] == expected
    assert {"pr_curve", "worst_samples"}.isdisjoint(found)
    with (tmp_path / "artifacts" / "confusion.csv").open() as file:
        lines = [*csv.reader(file)]
    assert lines[0] == ["true class", *map(str, range(10))]
    assert lines[4] == ["3", *map(str, expected[3])]


def test_curves_and_calibration_agree_with_torchmetrics(trained: Trained, tmp_path: Path):
    found = evaluate(tmp_path, trained, want=["pr_curve", "roc_curve", "calibration"])
    scores, labels = outputs(trained)
    prob = scores.softmax(1)
    precision, recall, _ = reference.multiclass_precision_recall_curve(
        prob, labels, num_classes=10, thresholds=NUM_THRESHOLDS
    )
    mine = torch.tensor(found["pr_curve"]["recall"])
    torch.testing.assert_close(mine, recall[:, :-1], atol=2e-6, rtol=0)
    is_some = (prob[:, :, None] >= torch.linspace(0, 1, NUM_THRESHOLDS)).any(0)
    mine = torch.tensor(found["pr_curve"]["precision"])
    torch.testing.assert_close(mine[is_some], precision[:, :-1][is_some], atol=2e-6, rtol=0)
    assert (mine[~is_some] == 1).all()
    false, true, _ = reference.multiclass_roc(
        prob, labels, num_classes=10, thresholds=NUM_THRESHOLDS
    )
    curve = found["roc_curve"]
    mine = torch.tensor([curve["false_positive_rate"], curve["true_positive_rate"]])
    torch.testing.assert_close(mine.flip(2), torch.stack([false, true]), atol=2e-6, rtol=0)
    error = reference.multiclass_calibration_error(prob, labels, num_classes=10, n_bins=15)
    calibration = found["calibration"]
    assert calibration["expected_calibration_error"] == pytest.approx(float(error), abs=1e-6)
    one_hot = nn.functional.one_hot(labels, 10)
    brier = float(((prob - one_hot) ** 2).sum(1).mean())
    assert calibration["brier_score"] == pytest.approx(brier, abs=1e-6)
    assert sum(part["count"] for part in calibration["bins"]) == 97


def test_the_area_under_the_roc_curve_is_the_fraction_of_ordered_pairs():
    positives, negatives = [0.1, 0.4, 0.4, 0.9], [0.0, 0.1, 0.4, 0.2, 1.0]
    counts = ScoreCounts(1, CPU)
    target = torch.tensor([1] * 4 + [0] * 5)
    prob = torch.tensor([*positives, *negatives])
    counts.add(prob[:3], target[:3])
    counts.add(prob[3:], target[3:])
    pairs = [(p > n) + 0.5 * (p == n) for p in positives for n in negatives]
    assert counts.roc_curve()["auroc"] == [pytest.approx(sum(pairs) / 20)]


def test_a_class_without_rows_has_no_recall():
    counts = ScoreCounts(3, CPU)
    counts.add(torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25]]), torch.tensor([0, 1]))
    found = counts.pr_curve()
    assert math.isnan(found["average_precision"][2])
    assert not math.isnan(found["mean_average_precision"])


def test_calibration_of_a_few_probabilities_by_hand():
    """Bins of 1/15: 0.9 and 0.92 share one, 0.5 and a certain 1.0 are in others."""
    found = Calibration(CPU)
    found.add(torch.tensor([0.9, 0.92, 0.5, 1.0]), torch.tensor([1, 0, 1, 1]))
    result = found.result()
    assert [part["count"] for part in result["bins"]] == [1, 2, 1]
    error = (abs(0.9 + 0.92 - 1) + 0.5 + 0) / 4
    assert result["expected_calibration_error"] == pytest.approx(error)
    assert result["maximum_calibration_error"] == pytest.approx(0.5)
    squares = 0.1**2 + 0.92**2 + 0.5**2 + 0
    assert result["brier_score"] == pytest.approx(squares / 4)


def test_worst_samples_are_the_rows_with_the_largest_loss(trained: Trained, tmp_path: Path):
    found = evaluate(tmp_path, trained, worst=7, want=["worst_samples"])["worst_samples"]
    scores, labels = outputs(trained)
    loss = nn.functional.cross_entropy(scores, labels, reduction="none")
    order = loss.argsort(descending=True)[:7]
    assert [one["row"] for one in found] == order.tolist()
    assert [one["loss"] for one in found] == pytest.approx(loss[order].tolist())
    assert [one["target"] for one in found] == labels[order].tolist()
    assert [one["prediction"] for one in found] == scores[order].argmax(1).tolist()
    with (tmp_path / "artifacts" / "worst_samples.csv").open() as file:
        lines = [*csv.DictReader(file)]
    assert [int(line["row"]) for line in lines] == order.tolist()


def test_values_of_a_column_have_their_own_losses_and_metrics(trained: Trained, tmp_path: Path):
    found = evaluate(tmp_path, trained, by="label", metrics=[F1], want=[])
    scores, labels = outputs(trained)
    assert [*found["by"]["label"]] == [str(number) for number in range(10)]
    for number, own in enumerate(found["by"]["label"].values()):
        mine = labels == number
        loss = nn.functional.cross_entropy(scores[mine], labels[mine])
        right = (scores[mine].argmax(1) == number).double().mean()
        f1 = reference.multiclass_f1_score(scores[mine], labels[mine], num_classes=10)
        assert own["rows"] == int(mine.sum())
        assert own["loss"] == pytest.approx(float(loss))
        assert own["accuracy"] == pytest.approx(float(right))
        assert own["MulticlassF1Score"] == pytest.approx(float(f1))


def test_a_fraction_has_the_rows_that_it_has_in_training(digits: Path, tmp_path: Path):
    judged = {"dataset": "ds_1", "split": "train", "fraction": [0.8, 1.0]}
    train_rows = {"dataset": "ds_1", "split": "train", "fraction": [0.0, 0.8]}
    body = spec(data={"train": train_rows, "validation": judged}, stop={"steps": 2})
    found = train(tmp_path / "job", body, digits)
    mine = evaluate(tmp_path / "eval", found, data={**judged, "batch_size": 64}, want=[])
    assert mine["metrics"]["loss"] == found[3]["validation/loss"]
    assert mine["rows"] == 60


def test_several_weighted_losses_and_regression(tmp_path: Path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    columns = {"x": x, "y": x[:, :1] * 2, "site": np.arange(60) % 3, "age": x[:, 1]}
    table = write_table(tmp_path / "data", columns, {"train": slice(0, 60)})
    losses = [
        {"type": "MSELoss", "inputs": ["fc", "y"], "weight": 0.5},
        {"type": "L1Loss", "inputs": ["fc", "y"]},
    ]
    body = spec(
        network={"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 1}}]},
        loss=losses,
        optimizer={"type": "SGD", "args": {"lr": 0.01}},
        data={
            "validation": {"dataset": "ds_1", "split": "train"},
            "fields": {"x": {"type": "dense"}, "y": {"type": "dense"}},
        },
        stop={"steps": 3},
    )
    found = train(tmp_path / "job", body, table)
    split = {"split": "train", "batch_size": 64}
    mine = evaluate(tmp_path / "eval", found, data=split, by=["site"])
    assert mine["metrics"] == {
        name: found[3][f"validation/{name}"] for name in ("loss", "loss/MSELoss", "loss/L1Loss")
    }
    weights = load_file(found[1] / "model.safetensors")
    predicted = nn.functional.linear(torch.from_numpy(x), weights["fc.weight"], weights["fc.bias"])
    error = (predicted - torch.from_numpy(columns["y"]))[:, 0]
    loss = 0.5 * error**2 + error.abs()
    assert "confusion" not in mine
    worst = mine["worst_samples"]
    assert len(worst) == 20
    order = loss.argsort(descending=True)[:20]
    assert [one["row"] for one in worst] == order.tolist()
    assert worst[0]["target"] == pytest.approx(columns["y"][order[0]].tolist())
    assert worst[0]["prediction"] == pytest.approx(predicted[order[0]].tolist())
    by = mine["by"]["site"]
    own = [float(loss[site::3].mean()) for site in range(3)]
    assert [by[str(site)]["loss"] for site in range(3)] == pytest.approx(own)
    meta, more = meta_of(table), {"network": found[0]}
    asked = body_of(data=split, want=["confusion"], by="age")
    problems = errors(asked, meta, **more)
    assert "float32" in problems["/by"]
    problems = errors({**asked, "by": "site"}, meta, **more)
    assert "MSELoss, L1Loss" in problems["/want/0"]


def test_a_binary_loss_has_two_classes(tmp_path: Path):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 3)).astype(np.float32)
    columns = {"x": x, "y": (x[:, :1] > 0).astype(np.float32)}
    table = write_table(tmp_path / "data", columns, {"train": slice(0, 50)})
    body = spec(
        network={"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 1}}]},
        loss={"type": "BCEWithLogitsLoss", "inputs": ["fc", "y"]},
        data={"fields": {"x": {"type": "dense"}, "y": {"type": "dense"}}},
        stop={"steps": 3},
    )
    found = train(tmp_path / "job", body, table)
    mine = evaluate(tmp_path / "eval", found, data={"split": "train"})
    weights = load_file(found[1] / "model.safetensors")
    logits = nn.functional.linear(torch.from_numpy(x), weights["fc.weight"], weights["fc.bias"])
    prob, target = logits.sigmoid()[:, 0], torch.from_numpy(columns["y"][:, 0]).long()
    expected = reference.binary_confusion_matrix(prob, target)
    assert mine["confusion"] == expected.tolist()
    error = reference.binary_calibration_error(prob, target, n_bins=15)
    assert mine["calibration"]["expected_calibration_error"] == pytest.approx(
        float(error), abs=1e-6
    )
    pairs = (prob[target == 1][:, None] > prob[target == 0]).double().mean()
    assert mine["roc_curve"]["auroc"][0] == pytest.approx(float(pairs), abs=0.01)


def test_sequences_are_evaluated_without_their_padding(tmp_path: Path):
    found = train(tmp_path / "job", of_sequences(), texts(tmp_path / "few"))
    split = next(iter(meta_of(found[2])["splits"]))
    mine = evaluate(tmp_path / "eval", found, data={"split": split, "batch_size": 3})
    assert math.isfinite(mine["metrics"]["loss"])
    losses = [one["loss"] for one in mine["worst_samples"]]
    assert losses == sorted(losses, reverse=True)
    if mine["rows"] <= 20:
        assert sum(losses) / len(losses) == pytest.approx(mine["metrics"]["loss"], rel=1e-5)


def test_a_tagger_counts_the_steps_of_all_rows(tmp_path: Path):
    rows = [{"ids": [(row + k) % 5 for k in range(row % 4 + 1)]} for row in range(30)]
    for row in rows:
        row["tags"] = [number % 3 for number in row["ids"]]
    table = write_ragged(tmp_path / "data", rows)
    split = next(iter(meta_of(table)["splits"]))
    layers = [
        {"name": "emb", "type": "Embedding", "args": {"num_embeddings": 5, "embedding_dim": 4}},
        {"name": "fc", "type": "Linear", "args": {"out_features": 3}},
        {"name": "scores", "type": "permute", "args": {"dims": [0, 2, 1]}},
    ]
    fields = {
        "ids": {"type": "integer_sequence", "dim": 5},
        "tags": {"type": "integer_sequence", "dim": 3, "padding_value": -100},
    }
    body = spec(
        network={"layers": layers},
        loss={"type": "CrossEntropyLoss", "inputs": ["scores", "tags"]},
        data={
            "train": {"dataset": "ds_1", "split": split},
            "validation": {"dataset": "ds_1", "split": split},
            "fields": fields,
        },
        stop={"steps": 4},
    )
    found = train(tmp_path / "job", body, table)
    mine = evaluate(tmp_path / "eval", found, data={"split": split, "batch_size": 64})
    assert mine["metrics"]["loss"] == found[3]["validation/loss"]
    tags = [tag for row in rows for tag in row["tags"]]
    assert [sum(row) for row in mine["confusion"]] == [tags.count(tag) for tag in range(3)]
    assert sum(part["count"] for part in mine["calibration"]["bins"]) == len(tags)


def language_model(**changes: Any) -> dict[str, Any]:
    """Characters of a text, with their scores as [rows, steps, classes] in ``fc``."""
    windows = {"type": "language_model", "tokens": "characters", "length": 4, "stride": 4}
    layers = [
        {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}, "inputs": ["input"]},
        {"name": "gru", "type": "GRU", "args": {"hidden_size": 6, "batch_first": True}},
        {"name": "fc", "type": "Linear", "args": {"out_features": 40}},
        {"name": "classes", "type": "permute", "args": {"dims": [0, 2, 1]}},
    ]
    layers[1] |= changes
    fields = {"input": {"type": "integer_sequence"}, "target": {"type": "integer_sequence"}}
    rows = {"dataset": "ds_1"}
    return spec(
        network={"layers": layers},
        loss={"type": "CrossEntropyLoss", "inputs": ["classes", "target"]},
        data={"train": rows, "validation": rows, "windows": windows, "fields": fields}
        | {"batch_size": 8, "shuffle": {"enabled": not changes}},
        stop={"steps": 3},
    )


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"text": f"the quick brown fox {number} jumps"} for number in range(12)]
    return write_ragged(tmp_path_factory.mktemp("lines"), rows)


def test_a_language_model_has_the_perplexity_of_its_loss(lines: Path, tmp_path: Path):
    found = train(tmp_path / "job", language_model(), lines)
    metric = {"type": "Perplexity", "inputs": ["fc", "target"]}
    split = {"split": "all", "batch_size": 8}
    mine = evaluate(tmp_path / "eval", found, data=split, metrics=[metric])
    assert mine["metrics"]["loss"] == found[3]["validation/loss"]
    assert mine["metrics"]["Perplexity"] == pytest.approx(math.exp(mine["metrics"]["loss"]))
    assert sum(map(sum, mine["confusion"])) == 4 * mine["rows"]
    problems = errors(body_of(data=split, by="text"), meta_of(lines), network=found[0])
    assert "windows" in problems["/by"]


def test_a_network_with_a_hidden_state_needs_the_batch_size_of_training(
    lines: Path, tmp_path: Path
):
    found = train(tmp_path / "job", language_model(stateful=True), lines)
    mine = evaluate(tmp_path / "eval", found, data={"split": "all", "batch_size": 8}, want=[])
    assert mine["metrics"]["loss"] == found[3]["validation/loss"]
    asked = body_of(data={"split": "all", "batch_size": 9})
    problems = errors(asked, meta_of(lines), network=found[0])
    assert "set 8" in problems["/data/batch_size"]


def test_rows_that_do_not_fit_are_left_out_and_listed(trained: Trained, tmp_path: Path):
    images = np.load(trained[2] / "test" / "0.npy")[:20]
    labels = np.load(trained[2] / "test" / "1.npy")[:20].copy()
    labels[[3, 7]] = 10
    columns = {"image": images, "label": labels}
    table = write_table(tmp_path / "data", columns, {"test": slice(0, 20)})
    flawed = (trained[0], trained[1], table, {})
    mine = evaluate(tmp_path / "eval", flawed, data={"on_bad_row": "drop"}, worst=18)
    assert mine["rows"] == 18
    rows = {one["row"] for one in mine["worst_samples"]}
    assert rows == {*range(20)} - {3, 7}
    bad = (tmp_path / "eval" / "artifacts" / "bad_rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in bad] == [3, 7]
    scores, _ = outputs((trained[0], trained[1], table, {}))
    kept = sorted(rows)
    loss = nn.functional.cross_entropy(scores[kept], torch.from_numpy(labels[kept]))
    assert mine["metrics"]["loss"] == pytest.approx(float(loss))


def test_class_names_are_those_of_the_training_data(tmp_path: Path):
    names = ("fig", "apple", "pear")
    rows = [{"x": [float(n), n % 3 * 1.0], "fruit": names[n % 3]} for n in range(30)]
    table = write_ragged(tmp_path / "data", rows)
    listed = sorted(names)
    fields = {"x": {"type": "dense"}, "fruit": {"type": "integer", "classes": listed}}
    body = spec(
        network={"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 3}}]},
        loss={"type": "CrossEntropyLoss", "inputs": ["fc", "fruit"]},
        data={"train": {"dataset": "ds_1"}, "fields": fields},
        stop={"steps": 2},
    )
    found = train(tmp_path / "job", body, table)
    mine = evaluate(tmp_path / "eval", found, data={"split": "all"}, by="fruit", worst=30)
    assert mine["classes"] == listed
    assert [*mine["by"]["fruit"]] == listed
    assert {key: own["rows"] for key, own in mine["by"]["fruit"].items()} == dict.fromkeys(
        listed, 10
    )
    for one in mine["worst_samples"]:
        assert one["target_class"] == rows[one["row"]]["fruit"]
        assert one["prediction_class"] == listed[one["prediction"]]


def test_a_large_result_loses_its_largest_parts_and_says_which():
    points = {"thresholds": [0.5] * 5000, "precision": [[0.5] * 5000], "average_precision": [0.5]}
    found = bounded({"rows": 3, "pr_curve": points, "confusion": [[1]]}, 10_000)
    assert found == {
        "rows": 3,
        "confusion": [[1]],
        "pr_curve": {"average_precision": [0.5]},
        "left_out": ["pr_curve"],
    }


@pytest.mark.parametrize(
    ("changes", "pointer", "says"),
    [
        ({"by": "weight"}, "/by", "'weight'"),
        ({"by": ["label", "image"]}, "/by/1", "shape [1, 8, 8]"),
        ({"metrics": [{**ACCURACY, "inputs": ["fc8", "label"]}]}, "/metrics/0/inputs/0", "'fc8'"),
        ({"metrics": [{**F1, "args": {"num_classes": 5}}]}, "/metrics/0/args", "takes 5"),
        ({"data": {"split": "dev"}}, "/data/split", "'dev'"),
        ({"data": {"fields": {"age": {"type": "dense"}}}}, "/data/fields/age", "'age'"),
        ({"data": {"fields": {"label": {"type": "dense"}}}}, "/data/fields/label/type", "integer"),
        ({"by": "label", "metrics": [{**F1, "type": "MulticlassAUROC", "args": {
            "num_classes": 10, "thresholds": 20000}}]}, "/by", "without by"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    trained: Trained, changes: dict[str, Any], pointer: str, says: str
):
    problems = errors(body_of(**changes), meta_of(trained[2]), network=trained[0])
    assert says in problems[pointer], problems


def test_a_network_without_a_loss_is_refused(trained: Trained):
    upload = {"kind": "upload", "network": trained[0]["network"]}
    upload["fields"] = trained[0]["data"]["fields"]
    problems = errors(body_of(), meta_of(trained[2]), network=upload)
    assert "uploaded" in problems["/checkpoint"]


def test_too_many_values_of_a_column_end_the_job_with_the_fix(tmp_path: Path):
    x = np.zeros((150, 2), np.float32)
    columns = {"x": x, "y": x, "id": np.arange(150)}
    table = write_table(tmp_path / "data", columns, {"train": slice(0, 150)})
    body = spec(
        network={"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": 2}}]},
        loss={"type": "MSELoss", "inputs": ["fc", "y"]},
        data={"fields": {"x": {"type": "dense"}, "y": {"type": "dense"}}},
        stop={"steps": 1},
    )
    found = train(tmp_path / "job", body, table)
    with pytest.raises(AssertionError, match="more than 100 values"):
        evaluate(tmp_path / "eval", found, data={"split": "train"}, by="id")
