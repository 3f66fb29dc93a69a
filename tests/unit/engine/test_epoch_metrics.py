"""Metrics of torchmetrics: compared with scikit-learn, with closed forms, and over any batches."""

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn import metrics as sk
from torch.nn import functional as F

from engine.metrics.torch_metrics import RunningMetric, metric_classes, metric_parameters
from engine.network.network import Network
from engine.plan import catalog
from engine.plan.plan import parse_spec
from glasshouse.spec import Metric
from tests.unit.engine.ragged import TEXTS, layers, meta_of, write_ragged
from tests.unit.engine.ragged import job as texts_job
from tests.unit.engine.runs import (
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_table,
)

TEN = {"num_classes": 10}
JUDGED = {"validation": {"dataset": "ds_1", "split": "test"}}


def metric(kind: str, *inputs: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "inputs": list(inputs or ("fc", "label")), **more}


def judging(metrics: list[dict[str, Any]], batch_size: int = 64, **changes: Any) -> dict[str, Any]:
    data = {**JUDGED, "batch_size": batch_size}
    return spec(**{"data": data, "evaluate": {"every_epochs": 1}, **changes}, metrics=metrics)


def last_values(records: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of the last evaluation, without their prefix."""
    found = [
        item["values"]
        for item in of_type(records, "metrics")
        if any(name.startswith("validation/") for name in item["values"])
    ]
    return {name.removeprefix("validation/"): value for name, value in found[-1].items()}


def predicted(directory, job: dict[str, Any], table, fields: dict[str, torch.Tensor], layer="fc"):
    """What the trained network says, from its checkpoint."""
    resolved = parse_spec(planned(job, meta_of(table))["spec"])
    network = Network(resolved.network, [layer])
    network.load_state_dict(newest_weights(directory))
    network.eval()
    with torch.no_grad():
        return network(fields)[layer]


def newest_weights(directory) -> dict[str, torch.Tensor]:
    made = (directory / "checkpoints").iterdir()
    newest = max(made, key=lambda path: int(path.name.removeprefix("step-")))
    return load_file(newest / "model.safetensors")


@pytest.fixture(scope="module")
def judged(digits, tmp_path_factory):
    """A job with many metrics, its figures, and the scores and labels of its validation rows."""
    wanted = [
        metric("MulticlassF1Score", args=TEN),
        metric("MulticlassPrecision", args=TEN),
        metric("MulticlassRecall", args={**TEN, "average": "none"}),
        metric("MulticlassConfusionMatrix", args=TEN, name="confusion"),
        metric("MulticlassAUROC", "soft", "label", args=TEN),
        metric("MulticlassAveragePrecision", "soft", "label", args=TEN),
        metric("MulticlassROC", "soft", "label", args={**TEN, "thresholds": 5}, name="roc"),
        metric("accuracy"),
    ]
    network = {"layers": [*spec()["network"]["layers"], {"name": "soft", "type": "softmax"}]}
    network["layers"][-1]["args"] = {"dim": 1}
    directory = tmp_path_factory.mktemp("judged")
    job = judging(wanted, 13, network=network, stop={"epochs": 1})
    records = run(directory, job, digits)
    image = torch.from_numpy(np.load(digits / "test" / "0.npy")).to(torch.float32) / 255
    labels = np.load(digits / "test" / "1.npy")
    scores = predicted(directory, job, digits, {"image": image})
    return directory, records, scores, labels


def test_figures_over_an_evaluation_are_scikit_learns(judged):
    _, records, scores, labels = judged
    values, best = last_values(records), scores.argmax(dim=1).numpy()
    soft = scores.softmax(dim=1).numpy()
    expected = {
        "accuracy": sk.accuracy_score(labels, best),
        "MulticlassF1Score": sk.f1_score(labels, best, average="macro", zero_division=0),
        "MulticlassPrecision": sk.precision_score(labels, best, average="macro", zero_division=0),
        "MulticlassAUROC": sk.roc_auc_score(labels, soft, multi_class="ovr", average="macro"),
        "MulticlassAveragePrecision": sk.average_precision_score(np.eye(10)[labels], soft),
    }
    for name, value in expected.items():
        assert math.isclose(values[name], value, rel_tol=1e-5), name


def test_a_value_per_class_is_a_series_per_class(judged):
    _, records, scores, labels = judged
    values = last_values(records)
    found = [values[f"MulticlassRecall/{digit}"] for digit in range(10)]
    best = scores.argmax(dim=1).numpy()
    assert np.allclose(found, sk.recall_score(labels, best, average=None, zero_division=0))
    assert "MulticlassRecall" not in values
    assert "confusion" not in values


def test_a_confusion_matrix_is_a_tensor_of_an_artifact(judged):
    directory, records, scores, labels = judged
    files = [item for item in of_type(records, "artifact") if item["name"].startswith("metrics-")]
    assert [item["name"] for item in files] == ["metrics-23.safetensors"]
    tensors = load_file(directory / files[0]["file"])
    expected = sk.confusion_matrix(labels, scores.argmax(dim=1).numpy(), labels=range(10))
    assert np.array_equal(tensors["confusion"].numpy(), expected)
    assert tensors["confusion"].dtype == torch.int64
    assert [list(tensors[f"roc/{part}"].shape) for part in range(3)] == [[10, 5], [10, 5], [5]]


def test_the_batch_size_changes_no_figure(digits, tmp_path):
    wanted = [
        metric("MulticlassF1Score", args=TEN),
        metric("MulticlassCohenKappa", args=TEN),
        metric("MulticlassHingeLoss", args=TEN),
    ]
    frozen = {"optimizer": {"type": "SGD", "args": {"lr": 0.0}}}
    few, many = (
        last_values(run(tmp_path / str(size), judging(wanted, size, **frozen), digits))
        for size in (7, 97)
    )
    for name in ("MulticlassF1Score", "MulticlassCohenKappa", "MulticlassHingeLoss"):
        assert math.isclose(few[name], many[name], rel_tol=1e-6), name


# --- regression, language --------------------------------------------------------------------


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    """Three features, a price of shape [1] that they decide, and zeros and ones."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3)).astype(np.float32)
    y = (x @ np.array([[1.0], [2.0], [3.0]], np.float32) + 5).astype(np.float32)
    columns = {"x": x, "y": y, "above": (y > 5).astype(np.float32)}
    splits = {"train": slice(0, 60), "test": slice(60, None)}
    return write_table(tmp_path_factory.mktemp("houses"), columns, splits)


def priced(metrics: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    layers = [{"name": "fc", "type": "Linear", "args": {"out_features": 1}, "inputs": ["x"]}]
    fields = {name: {"type": "dense"} for name in ("x", "y", "above")}
    return judging(
        metrics,
        network={"layers": layers},
        loss={"type": "MSELoss", "inputs": ["fc", "y"]},
        optimizer={"type": "SGD", "args": {"lr": 0.05}},
        data={**JUDGED, "fields": fields, "batch_size": 16},
        **changes,
    )


def test_regression_is_what_its_formulas_say(houses, tmp_path):
    kinds = ("MeanSquaredError", "MeanAbsoluteError", "R2Score", "PearsonCorrCoef")
    job = priced([metric(kind, "fc", "y") for kind in kinds])
    values = last_values(run(tmp_path, job, houses))
    x, y = (torch.from_numpy(np.load(houses / "test" / f"{n}.npy")) for n in (0, 1))
    said = predicted(tmp_path, job, houses, {"x": x}).double().numpy()
    y = y.double().numpy()
    expected = {
        "MeanSquaredError": np.square(said - y).mean(),
        "MeanAbsoluteError": np.abs(said - y).mean(),
        "R2Score": 1 - np.square(said - y).sum() / np.square(y - y.mean()).sum(),
        "PearsonCorrCoef": np.corrcoef(said[:, 0], y[:, 0])[0, 1],
    }
    for name, value in expected.items():
        assert math.isclose(values[name], value, rel_tol=1e-5), name
    assert math.isclose(values["MeanSquaredError"], values["loss"], rel_tol=1e-5)


def test_targets_of_a_binary_metric_may_be_a_dense_field(houses, tmp_path):
    job = priced([metric("BinaryF1Score", "fc", "above", args={"threshold": 0.9})])
    values = last_values(run(tmp_path, job, houses))
    x, above = (torch.from_numpy(np.load(houses / "test" / f"{n}.npy")) for n in (0, 2))
    said = predicted(tmp_path, job, houses, {"x": x})
    batches = zip(said.split(16), above.split(16), strict=True)
    best = torch.cat([(a.sigmoid() > 0.9) for a, _ in batches])
    expected = sk.f1_score(above.numpy()[:, 0], best.numpy()[:, 0])
    assert math.isclose(values["BinaryF1Score"], expected, rel_tol=1e-5)


def test_sums_over_many_rows_are_kept_in_float64():
    item = Metric(type="MeanSquaredError", inputs=("a", "b"))
    counted = RunningMetric("mse", item, {})
    rows = torch.full((1000,), 1.0)
    counted.update([torch.full((1,), 1e5), torch.zeros(1)])  # 1e10: float32 steps by 1024 there
    for _ in range(100):
        counted.update([rows / 10, rows * 0])
    found = float(counted.compute().series["mse"])
    assert math.isclose(found, (1e10 + 1000) / 100_001, rel_tol=1e-9)


def test_states_in_float64_are_reduced_over_processes_as_torchmetrics_own():
    """Two halves that are merged as processes merge them are the whole."""
    torch.manual_seed(0)
    scores, target = torch.randn(40, 3), torch.randint(0, 3, (40,))
    values, other = torch.randn(40), torch.randn(40)
    some = {"MeanSquaredError": (values, other), "R2Score": (values, other)}
    merged = 0
    for kind, cls in metric_classes().items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = cls(**arguments_of(kind))
            item = Metric(type=kind, args=arguments_of(kind), inputs=("a", "b"))
            states = RunningMetric("x", item, {})._made
        assert states._reductions == own._reductions, kind
        assert states._persistent == own._persistent, kind
        if kind in some or kind == "MulticlassHingeLoss":
            first, second = some.get(kind, (scores, target))
            parts = [RunningMetric("x", item, {}) for _ in range(3)]
            for part, rows in zip(parts, (slice(0, 9), slice(9, 40), slice(0, 40)), strict=True):
                part.update([first[rows], second[rows]])
            parts[0]._made.merge_state(parts[1]._made)
            found, expected = parts[0].compute().series["x"], parts[2].compute().series["x"]
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
            merged += 1
    assert merged == 3


def test_perplexity_is_the_exponential_of_the_mean_cross_entropy_of_what_is_not_padding():
    item = Metric(type="Perplexity", args={"ignore_index": -100}, inputs=("a", "b"))
    counted = RunningMetric("p", item, {})
    torch.manual_seed(0)
    scores, target = torch.randn(6, 5, 11), torch.randint(0, 11, (6, 5))
    target[3:, 2:] = -100
    for rows in (slice(0, 4), slice(4, 6)):
        counted.update([scores[rows], target[rows]])
    mean = F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=-100)
    assert math.isclose(counted.compute().series["p"], mean.exp(), rel_tol=1e-5)


# --- every class that is offered -------------------------------------------------------------

GIVEN: dict[str, Any] = {"num_classes": 3, "num_labels": 4, "beta": 0.5, "p": 3.0, "threshold": 0.5}
GIVEN |= {f"min_{name}": 0.5 for name in ("recall", "precision", "specificity", "sensitivity")}


def arguments_of(kind: str) -> dict[str, Any]:
    required = [name for name, item in metric_parameters(kind).items() if item.required]
    three = {"num_classes": 3} if kind.startswith("Multiclass") else {}
    return {name: GIVEN[name] for name in required} | three


SPECIAL: dict[str, Callable[[], list[torch.Tensor]]] = {
    "MulticlassExactMatch": lambda: [torch.rand(40, 3, 5), torch.randint(0, 3, (40, 5))],
    "Perplexity": lambda: [torch.rand(40, 5, 3), torch.randint(0, 3, (40, 5))],
    "KLDivergence": lambda: [torch.rand(40, 3).softmax(1), torch.rand(40, 3).softmax(1)],
    "JensenShannonDivergence": lambda: [torch.rand(40, 3).softmax(1), torch.rand(40, 3).softmax(1)],
    "CosineSimilarity": lambda: [torch.rand(40, 3), torch.rand(40, 3)],
    "ContinuousRankedProbabilityScore": lambda: [torch.rand(40, 3), torch.rand(40)],
}
BY_TASK: dict[str, Callable[[], list[torch.Tensor]]] = {
    "Binary": lambda: [torch.rand(40), torch.randint(0, 2, (40,))],
    "Multiclass": lambda: [torch.rand(40, 3), torch.randint(0, 3, (40,))],
    "Multilabel": lambda: [torch.rand(40, 4), torch.randint(0, 2, (40, 4))],
    "": lambda: [torch.rand(40), torch.rand(40)],
}


def operands_of(kind: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    task = next(task for task in BY_TASK if kind.startswith(task))
    return SPECIAL.get(kind, BY_TASK[task])()


@pytest.mark.parametrize("kind", sorted(metric_classes()))
def test_every_class_gives_the_same_over_batches_as_over_all_rows(kind):
    args, (scores, target) = arguments_of(kind), operands_of(kind)
    counted = RunningMetric("m", Metric(type=kind, args=args, inputs=("a", "b")), {})
    for rows in (slice(0, 25), slice(25, 40)):
        counted.update([scores[rows], target[rows]])
    given = counted.compute()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = metric_classes()[kind](**args)
        whole.update(scores, target)
        expected = whole.compute()
    found = [*given.series.values(), *given.tensors.values()]
    flat = _flat(expected)
    if len(found) != len(flat):  # a vector that became a series for each value
        flat = [*flat[0]]
    for one, other in zip(found, flat, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [part for item in value for part in _flat(item)]


def test_the_catalog_lists_them_with_their_arguments():
    entries = {entry["name"]: entry for entry in catalog.section("metrics")}
    f1 = entries["MulticlassF1Score"]
    assert f1["schema"]["required"] == ["num_classes"]
    assert f1["inputs"] == {"min": 2, "max": 2}
    assert "validate_args" not in f1["schema"]["properties"]
    assert set(metric_classes()) < set(entries)
    assert {"accuracy", "l2", "R2Score", "Perplexity"} <= set(entries)
    assert not {"F1Score", "BinaryFairness"} & set(entries)


# --- training batches ------------------------------------------------------------------------


def test_on_training_batches_it_is_computed_only_where_it_is_due(digits, tmp_path):
    asked = metric("MulticlassF1Score", args=TEN, every=4)
    fc = {"layers": ["fc"], "kinds": ["output"], "at": [4], "want": ["full"]}
    labels = {"layers": ["loss.rows"], "kinds": ["output"], "at": [4], "want": ["full"]}
    job = judging([asked], probes=[fc, labels])
    records = run(tmp_path, job, digits)
    found = {
        item["step"]: item["values"]["MulticlassF1Score"]
        for item in of_type(records, "metrics")
        if "MulticlassF1Score" in item["values"]
    }
    assert list(found) == [0, 4, 8]
    seen = {
        entry["layer"]: load_file(tmp_path / record["file"])[entry["tensor"]]
        for record in of_type(records, "captures")
        for entry in record["tensors"]
    }
    label = np.load(digits / "train" / "1.npy")[seen["loss.rows"].long().numpy()]
    best = seen["fc"].argmax(dim=1).numpy()
    expected = sk.f1_score(label, best, labels=range(10), average="macro", zero_division=0)
    present = np.union1d(label, best)  # torchmetrics leaves out classes that are nowhere
    expected = expected * 10 / len(present)
    assert math.isclose(found[4], expected, rel_tol=1e-5)


def test_metrics_change_no_number_of_training(digits, tmp_path):
    plain = run(tmp_path / "a", judging([]), digits)
    more = [metric("MulticlassAUROC", args=TEN, every=1), metric("MulticlassF1Score", args=TEN)]
    assert losses(run(tmp_path / "b", judging(more), digits)) == losses(plain)


@pytest.mark.long
def test_a_job_without_them_never_imports_torchmetrics():
    code = (
        "import sys, engine.process.rank, engine.process.planner, engine.plan.catalog as c;"
        "engine.process.planner.warm_up(); c.section('layers');"
        "sys.exit('torchmetrics' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- what goes wrong -------------------------------------------------------------------------


def test_a_figure_that_cannot_be_computed_is_nan_and_reported(houses, tmp_path, capfd):
    job = priced(
        [metric("BinaryF1Score", "fc", "y"), metric("R2Score", "fc", "y")],
        checkpoint={"keep_best": {"metric": "validation/BinaryF1Score", "mode": "max"}},
        stop={
            "epochs": 2,
            "early": {"metric": "validation/BinaryF1Score", "mode": "max", "patience": 9},
        },
    )
    records = run(tmp_path, job, houses)
    values = last_values(records)
    assert math.isnan(float(values["BinaryF1Score"]))
    assert math.isfinite(values["R2Score"])
    told = [item["what"] for item in of_type(records, "dropped")]
    assert len(told) == 2
    assert "metric BinaryF1Score of the evaluation" in told[0]
    assert "Traceback" in capfd.readouterr().err


def test_tensors_that_cannot_be_written_are_reported_and_training_continues(
    digits, tmp_path, capfd
):
    tmp_path.joinpath("artifacts").write_text("no directory")
    records = run(tmp_path, judging([metric("MulticlassConfusionMatrix", args=TEN)]), digits)
    assert "tensors of metrics" in of_type(records, "dropped")[0]["what"]
    assert len(losses(records)) == 10
    capfd.readouterr()


def test_what_is_no_row_by_row_figure_may_be_the_best_or_the_end(digits, tmp_path):
    job = judging(
        [metric("MulticlassRecall", args={**TEN, "average": "none"})],
        checkpoint={"keep_best": {"metric": "validation/MulticlassRecall/3", "mode": "max"}},
        stop={
            "epochs": 9,
            "early": {"metric": "validation/MulticlassRecall/3", "mode": "min", "patience": 1},
        },
    )
    records = run(tmp_path, job, digits)
    assert len(losses(records)) < 45


REFUSED = [
    (metric("F1Score", args=TEN), "/metrics/0/type", "MulticlassF1Score"),
    (metric("Unheard"), "/metrics/0/type", "GET /catalog/metrics"),
    (metric("r2score"), "/metrics/0/type", "a class of torchmetrics"),
    (metric("BinaryFairness"), "/metrics/0/type", "two tensors"),
    (metric("MulticlassAUROC"), "/metrics/0/args/num_classes", "needs the argument"),
    (metric("MulticlassF1Score", args={"num_classes": 7}), "/metrics/0/args", "has 10 classes"),
    (metric("MulticlassF1Score", args={**TEN, "bins": 3}), "/metrics/0/args/bins", "no argument"),
    (
        metric("MulticlassF1Score", args={**TEN, "average": "best"}),
        "/metrics/0/args",
        "refuses its arguments",
    ),
    (metric("MulticlassF1Score", args={"num_classes": 11}), "/metrics/0/inputs", "does not fit"),
    (metric("R2Score"), "/metrics/0/inputs", "[64, 10] (float32) from 'fc'"),
    (
        metric("MulticlassConfusionMatrix", args={"num_classes": 10_000_000}),
        "/metrics/0/args/num_classes",
        "at most 1000000",
    ),
    (
        metric("MulticlassConfusionMatrix", args={"num_classes": 100_000}),
        "/metrics/0/args",
        "the most is",
    ),
    (metric("MulticlassConfusionMatrix", args=TEN, every=2), "/metrics/0/every", "leave it out"),
    (metric("accuracy", args={"top_k": 2}), "/metrics/0/args", "args apply to classes"),
    (
        metric("MulticlassF1Score", "fc/output_grad", "label", args=TEN),
        "/metrics/0/inputs/0",
        "outputs",
    ),
    (metric("MulticlassF1Score", "lost", "label", args=TEN), "/metrics/0/inputs/0", "no layer"),
]


@pytest.mark.parametrize(("item", "pointer", "part"), REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(item, pointer, part):
    found = errors(judging([item]))
    assert pointer in found
    assert part in found[pointer]


def test_scores_of_more_rows_than_there_is_room_for_need_thresholds():
    meta = {"columns": _columns(), "splits": {"train": 300, "test": 6_000_000}}
    found = errors(judging([metric("MulticlassAUROC", args=TEN)]), meta)
    assert "thresholds" in found["/metrics/0/args/thresholds"]
    assert "6000000 rows" in found["/metrics/0/args/thresholds"]
    binned = metric("MulticlassAUROC", args={**TEN, "thresholds": 100})
    assert planned(judging([binned]), meta)


def _columns() -> list[dict[str, Any]]:
    return [
        {"name": "image", "dtype": "uint8", "shape": [1, 8, 8], "file": "0.npy"},
        {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"},
    ]


def test_a_metric_that_nothing_would_compute_is_refused():
    never = metric("MulticlassF1Score", args=TEN)
    assert "never be computed" in errors(spec(metrics=[never]))["/metrics/0"]
    assert planned(spec(metrics=[{**never, "every": 5}]))
    assert planned(spec(metrics=[never], data=JUDGED))
    unread = errors(spec(metrics=[never], data=JUDGED, evaluate=None))["/metrics/0"]
    assert "name evaluate for it" in unread


def test_two_metrics_may_not_give_one_series():
    recall = metric("MulticlassRecall", args={**TEN, "average": "none"}, name="recall")
    other = metric("MulticlassF1Score", args=TEN, name="recall/3")
    assert "recall/3" in errors(judging([recall, other]))["/metrics"]


def test_logits_of_a_binary_metric_give_a_warning(houses):
    found = planned(priced([metric("BinaryF1Score", "fc", "above")]), meta_of(houses))["warnings"]
    assert [(item["pointer"], item["code"]) for item in found] == [
        ("/metrics/0/inputs/0", "logits")
    ]


PADDED = [
    (0, {}, "warning"),
    (-100, {}, "refused"),
    (-100, {"ignore_index": -100}, "accepted"),
]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """Rows of ids of different lengths, and as many tags each."""
    rows = [{"ids": row, "tags": row[::-1]} for row in TEXTS]
    return write_ragged(tmp_path_factory.mktemp("tagged"), rows)


def tagging(padding: int, args: dict[str, Any]) -> dict[str, Any]:
    tags = {"type": "integer_sequence", "dim": 10, "padding_value": padding}
    fields = {"ids": {"type": "integer_sequence", "dim": 10}, "tags": tags}
    return texts_job(
        layers(
            {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
            {"name": "turned", "type": "transpose", "args": {"dim0": 1, "dim1": 2}},
        ),
        loss={"type": "CrossEntropyLoss", "inputs": ["turned", "tags"]},
        data={"fields": fields, "validation": {"dataset": "ds_1"}},
        evaluate={"every_epochs": 1},
        metrics=[metric("MulticlassAccuracy", "turned", "tags", args={**TEN, **args})],
    )


@pytest.mark.parametrize(("padding", "more", "outcome"), PADDED)
def test_padding_that_a_metric_counts_gives_a_warning(tagged, padding, more, outcome):
    job = tagging(padding, more)
    if outcome == "refused":
        assert "set ignore_index" in errors(job, meta_of(tagged))["/metrics/0/args/ignore_index"]
        return
    codes = [item["code"] for item in planned(job, meta_of(tagged))["warnings"]]
    assert ("padding" in codes) == (outcome == "warning")


def test_padded_targets_do_not_count(tagged, tmp_path):
    job = tagging(-100, {"ignore_index": -100, "average": "micro"})
    values = last_values(run(tmp_path, job, tagged))
    resolved = parse_spec(planned(job, meta_of(tagged))["spec"])
    network = Network(resolved.network, ["fc"])
    network.load_state_dict(newest_weights(tmp_path))
    right = total = 0
    for row in TEXTS:  # each alone, so that nothing is padded
        best = network({"ids": torch.tensor([row])})["fc"][0].argmax(dim=-1)
        right += int((best == torch.tensor(row[::-1])).sum())
        total += len(row)
    assert math.isclose(values["MulticlassAccuracy"], right / total, rel_tol=1e-6)
