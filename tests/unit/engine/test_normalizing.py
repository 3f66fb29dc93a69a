"""Normalised and filled fields: every figure against scikit-learn, and kept with the checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from engine.checkpoint import checkpoint
from engine.data.columns.normalization import Moments, find_figures
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.table import Table
from engine.data.sources.joined import source_rows
from engine.data.sources.loading import load
from glasshouse.errors import CheckpointMismatch, DataFailed
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    IntegerField,
    Normalize,
    Sequences,
    Source,
)
from tests.unit.engine.ragged import write_ragged
from tests.unit.engine.runs import errors, losses, of_type, planned, run, spec, write_table

CPU = torch.device("cpu")
ROWS = 211
HALF = Source(dataset="ds_1", fraction=(0.0, 0.5))
REST = Source(dataset="ds_1", fraction=(0.5, 1.0))


def columns_of(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """A column far from zero, one with gaps, one that is constant, images, and what to learn."""
    gaps = generator.normal(3, 2, ROWS)
    gaps[generator.choice(ROWS, 40, replace=False)] = np.nan
    far = 1.7e9 + generator.normal(0, 1, ROWS)
    images = generator.integers(0, 256, (ROWS, 3, 4, 4)).astype(np.uint8)
    return {
        "far": far,
        "gaps": gaps,
        "same": np.full(ROWS, 0.1),
        "image": images,
        "label": generator.integers(0, 10, ROWS),
        "y": far - 1.7e9,
    }


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    columns = columns_of(np.random.default_rng(0))
    return write_table(tmp_path_factory.mktemp("table"), columns, {"all": slice(None)})


def read(table: Path, source: Source, fields: dict[str, Any], **preparing: Any):
    return load(source, fields, Table(table), seed=4, device=CPU, preparing=Preparing(**preparing))


def whole(rows: Any, name: str) -> np.ndarray:
    return rows.batch(slice(0, rows.num_rows))[name].numpy()


def column(table: Path, number: int) -> np.ndarray:
    return np.load(table / "all" / f"{number}.npy")


# --- figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "scaler"), [("standard", StandardScaler()), ("minmax", MinMaxScaler())]
)
def test_both_halves_are_normalized_by_the_figures_of_the_first(table, kind, scaler):
    field = DenseField(type="dense", columns=("far", "same", "y"))
    train = read(table, HALF, {"x": field}, normalize={"x": Normalize(type=kind)})
    judged = read(
        table, REST, {"x": field}, normalize={"x": Normalize(type=kind)}, known=train.prepared
    )
    x = np.stack([column(table, 0), column(table, 2), column(table, 5)], axis=1)
    numbers = [rows.numbers(slice(0, rows.num_rows)).numpy() for rows in (train, judged)]
    assert sorted(np.concatenate(numbers)) == list(range(ROWS))
    scaler.fit(x[numbers[0]])
    for rows, mine in zip((train, judged), numbers, strict=True):
        expected = scaler.transform(x[mine])
        np.testing.assert_allclose(whole(rows, "x"), expected, rtol=2e-6, atol=2e-7)
    assert (whole(train, "x")[:, 1] == 0).all()  # the constant column


def test_the_price_of_houses_is_normalized_by_mean_and_range(table):
    normalize = {"x": Normalize(type="mean_normalization")}
    rows = read(table, HALF, {"x": DenseField(type="dense", column="y")}, normalize=normalize)
    y = column(table, 5)[rows.numbers(slice(0, rows.num_rows)).numpy()]
    expected = (y - y.mean()) / (y.max() - y.min())
    np.testing.assert_allclose(whole(rows, "x"), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("per", ["feature", "all"])
def test_images_have_figures_by_channel_or_one_for_all(table, per):
    field = DenseField(type="dense")
    normalize = {"image": Normalize(type="standard", per=per)}
    rows = read(table, Source(dataset="d"), {"image": field}, normalize=normalize)
    assert rows.fields["image"].values.dtype == torch.uint8  # a quarter of the memory
    x = column(table, 3).astype(np.float64) / 255
    axes = (0, 2, 3) if per == "feature" else None
    mean, std = x.mean(axis=axes, keepdims=True), x.std(axis=axes, keepdims=True)
    np.testing.assert_allclose(whole(rows, "image"), (x - mean) / std, rtol=1e-4, atol=1e-5)
    assert rows.prepared.figures["image"].shift.shape == ((3,) if per == "feature" else (1,))


def test_values_far_from_zero_lose_no_more_than_their_columns_do(table):
    normalize = {"x": Normalize(type="standard")}
    rows = read(table, Source(dataset="d"), {"x": DenseField(type="dense", column="far")},
                normalize=normalize)  # fmt: skip
    far = column(table, 0)
    np.testing.assert_allclose(whole(rows, "x"), (far - far.mean()) / far.std(), atol=1e-6)
    assert len(np.unique(far.astype(np.float32))) < 10 < len(np.unique(whole(rows, "x")))


@pytest.mark.parametrize("fill", ["mean", "median", 7.5])
def test_missing_values_are_filled_before_the_figures_are_taken(table, fill):
    field = DenseField(type="dense", columns=("gaps", "y"), fill=fill)
    rows = read(table, HALF, {"x": field}, normalize={"x": Normalize(type="standard")})
    x = np.stack([column(table, 1), column(table, 5)], axis=1)
    x = x[rows.numbers(slice(0, rows.num_rows)).numpy()]
    strategy = {"strategy": fill} if isinstance(fill, str) else {
        "strategy": "constant", "fill_value": fill}  # fmt: skip
    filled = SimpleImputer(**strategy).fit_transform(x)
    expected = StandardScaler().fit_transform(filled)
    np.testing.assert_allclose(whole(rows, "x"), expected, rtol=2e-6, atol=1e-6)
    alone = read(table, HALF, {"x": field})
    np.testing.assert_allclose(whole(alone, "x"), filled, rtol=1e-6)


def test_figures_come_in_the_networks_units_where_a_field_is_scaled(table):
    field = DenseField(type="dense", column="y", scale=10.0)
    rows = read(table, HALF, {"x": field}, normalize={"x": Normalize(type="minmax")})
    assert (whole(rows, "x").min(), whole(rows, "x").max()) == (0, 1)
    y = column(table, 5)[rows.numbers(slice(0, rows.num_rows)).numpy()]
    assert rows.prepared.figures["x"].shift[0] == pytest.approx(10 * y.min())


def test_moments_do_not_depend_on_how_the_rows_are_cut():
    x = np.random.default_rng(1).normal(1e6, 1, (1000, 2))
    x[::7, 1] = np.nan
    found = Moments(whole=False)
    for part in np.split(x, [1, 3, 500, 999]):
        found.update(part)
    shift, divisor = found.of(Normalize(type="standard"))
    np.testing.assert_allclose(shift, np.nanmean(x, axis=0), rtol=1e-14)
    np.testing.assert_allclose(divisor, np.nanstd(x, axis=0), rtol=1e-9)


@pytest.mark.parametrize("kind", ["standard", "minmax", "mean_normalization"])
@pytest.mark.parametrize("value", [0.1, 0.0, -3e300])
def test_a_constant_column_becomes_zero_whatever_its_value(kind, value):
    x = np.full((1000, 1), value)
    figures = find_figures("x", lambda: iter([x[:3], x[3:]]), None, None, Normalize(type=kind))
    assert (figures.normalized(x) == 0).all()


def test_a_sequence_is_normalized_by_its_steps_and_padded_with_zeros(tmp_path):
    lists = [[[1.0, 10.0], [3.0, 10.0]], [[5.0, 10.0]], [], [["NaN", 10.0], [9.0, 10.0]]]
    table = write_ragged(tmp_path, [{"s": row} for row in lists])
    field = DenseSequenceField(type="dense_sequence", dim=2, fill="mean")
    normalize = {"s": Normalize(type="standard")}
    limit = Sequences(max_length=1)
    for cut, values in ((Sequences(), [1, 3, 5, 6 - 1.5, 9]), (limit, [1, 5, 3])):
        rows = load(
            Source(dataset="d"), {"s": field}, Table(table), seed=0, device=CPU, limit=cut,
            preparing=Preparing(normalize),
        )  # fmt: skip
        found = rows.batch(slice(0, 4))
        expected = (np.array(values) - np.mean(values)) / np.std(values)
        is_step = torch.arange(found["s"].shape[1]) < found["s.lengths"][:, None]
        np.testing.assert_allclose(found["s"][..., 0][is_step], expected, rtol=1e-6)
        assert (found["s"][~is_step] == 0).all()
        assert (found["s"][..., 1] == 0).all()  # constant


def test_a_column_that_is_missing_everywhere_cannot_be_filled(tmp_path):
    table = write_table(tmp_path, {"x": np.full((4, 2), np.nan)}, {"all": slice(None)})
    field = DenseField(type="dense", fill="median")
    with pytest.raises(DataFailed, match="feature 0 of field 'x' is missing in all training rows"):
        read(table, Source(dataset="d"), {"x": field})


# --- jobs ------------------------------------------------------------------------------------

FIELDS = {
    "x": {"type": "dense", "columns": ["far", "gaps"], "fill": "median"},
    "image": {"type": "dense"},
    "label": {"type": "integer", "dim": 10},
}
LAYERS = [
    {"name": "flat", "type": "Flatten", "inputs": ["image"]},
    {"name": "both", "type": "cat", "inputs": ["flat", "x"], "args": {"dim": 1}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
]


def job(**changes: Any) -> dict[str, Any]:
    data = {
        "train": {"dataset": "ds_1", "fraction": [0, 0.6]},
        "validation": {"dataset": "ds_1", "fraction": [0.6, 1]},
        "fields": FIELDS,
        "normalize": {"x": {"type": "standard"}, "image": {"type": "minmax", "per": "all"}},
        "batch_size": 20,
    }
    return spec(
        network={"layers": LAYERS},
        data=data | changes.pop("data", {}),
        evaluate={"every_epochs": 1},
        checkpoint={"every_steps": 1, "keep_last": 50},
        **changes,
    )


@pytest.fixture(scope="module")
def trained(table, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    return run(directory, job(), table), directory


def known(directory: Path, step: int) -> Prepared:
    return Prepared.of(directory / "checkpoints" / f"step-{step}")


def test_a_checkpoint_holds_what_was_learned_in_a_file_of_its_own(trained):
    records, directory = trained
    last = of_type(records, "checkpoint")[-1]["dir"]
    found = load_file(directory / last / "data.safetensors")
    assert sorted(found) == [
        "image.divisor", "image.shift", "x.divisor", "x.fill", "x.shift",
    ]  # fmt: skip
    assert {item.dtype for item in found.values()} == {torch.float64}


@pytest.mark.parametrize("step", [3, 7, 10])
def test_a_job_resumes_bit_for_bit_with_the_figures_that_it_had(trained, table, tmp_path, step):
    records, directory = trained
    there = {"dir": str(directory / "checkpoints" / f"step-{step}"), "step": step}
    rest = run(tmp_path, job(), table, resume=there)
    assert losses(rest) == losses(records)[step:]
    for part in ("model", "data"):
        mine = load_file(tmp_path / of_type(rest, "checkpoint")[-1]["dir"] / f"{part}.safetensors")
        theirs = directory / of_type(records, "checkpoint")[-1]["dir"] / f"{part}.safetensors"
        assert all(torch.equal(mine[name], item) for name, item in load_file(theirs).items())


def test_a_resumed_job_keeps_the_statistics_and_does_not_compute_them_again(
    trained, table, tmp_path
):
    """Other rows, which would give other figures: a fork takes those of the checkpoint."""
    _, directory = trained
    start = directory / "checkpoints" / "step-10"
    resolved = planned(job(), json.loads((table / "meta.json").read_text()))["spec"]
    other = {"train": {"dataset": "ds_1", "fraction": [0.3, 0.4]}}
    begun = {"init": {"checkpoint": "ckpt_1"}, "stop": {"steps": 1}}
    more = {"checkpoint": {"dir": str(start)}, "trained_by": resolved}
    run(tmp_path / "alike", job(data=other, **begun), table, **more)
    assert known(tmp_path / "alike", 1).state().keys() == known(directory, 10).state().keys()
    known(tmp_path / "alike", 1).restore(known(directory, 10).state())
    asked = {**other, "normalize": {"x": {"type": "minmax"}}}
    run(tmp_path / "unlike", job(data=asked, **begun), table, **more)
    unlike = known(tmp_path / "unlike", 1)
    assert unlike.figures["x"].divisor[0] != known(directory, 10).figures["x"].divisor[0]


def test_inference_normalizes_rows_of_a_dataset_and_of_a_request_alike(trained, table, tmp_path):
    records, directory = trained
    resolved = planned(job(), json.loads((table / "meta.json").read_text()))["spec"]
    last = directory / of_type(records, "checkpoint")[-1]["dir"]
    more = {"checkpoint": {"dir": str(last)}, "trained_by": resolved}
    asked = {"kind": "infer", "checkpoint": "ckpt_1", "outputs": ["fc"]}
    run(tmp_path / "data", {**asked, "data": {"dataset": "ds_1"}}, table, **more)
    x = np.stack([column(table, 0), column(table, 1)], axis=1)
    given = [["NaN" if np.isnan(value) else value for value in row] for row in x.tolist()]
    images = (column(table, 3) / 255).tolist()
    run(tmp_path / "inline", {**asked, "inputs": {"x": given, "image": images}}, table, **more)
    found = [
        load_file(tmp_path / name / "artifacts" / "outputs.safetensors")["fc/value"]
        for name in ("data", "inline")
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    weights = load_file(last / "model.safetensors")
    figures = load_file(last / "data.safetensors")
    filled = np.where(np.isnan(x), figures["x.fill"].numpy(), x)
    normal = (filled - figures["x.shift"].numpy()) / figures["x.divisor"].numpy()
    pixels = column(table, 3).reshape(ROWS, -1) / 255
    pixels = (pixels - figures["image.shift"].item()) / figures["image.divisor"].item()
    by_hand = np.concatenate([pixels, normal], axis=1) @ weights["fc.weight"].numpy().T
    by_hand += weights["fc.bias"].numpy()
    np.testing.assert_allclose(found[0], by_hand, rtol=1e-3, atol=1e-4)


def test_validation_rows_are_judged_by_the_figures_of_training(trained, table):
    records, directory = trained
    last = directory / of_type(records, "checkpoint")[-1]["dir"]
    figures, weights = load_file(last / "data.safetensors"), load_file(last / "model.safetensors")
    numbers = source_rows(ROWS, (0.6, 1.0), 3).numpy()
    x = np.stack([column(table, 0), column(table, 1)], axis=1)[numbers]
    x = np.where(np.isnan(x), figures["x.fill"].numpy(), x)
    x = (x - figures["x.shift"].numpy()) / figures["x.divisor"].numpy()
    pixels = column(table, 3)[numbers].reshape(len(numbers), -1) / 255
    pixels = (pixels - figures["image.shift"].item()) / figures["image.divisor"].item()
    rows = torch.from_numpy(np.concatenate([pixels, x], axis=1)).to(torch.float32)
    scores = rows @ weights["fc.weight"].T + weights["fc.bias"]
    labels = torch.from_numpy(column(table, 4)[numbers])
    by_hand = torch.nn.functional.cross_entropy(scores, labels).item()
    judged = [r["values"] for r in of_type(records, "metrics") if "validation/loss" in r["values"]]
    assert judged[-1]["validation/loss"] == pytest.approx(by_hand, rel=1e-5)


def test_figures_of_another_run_are_refused(trained, table, tmp_path):
    _, directory = trained
    saved = checkpoint.read(directory / "checkpoints" / "step-3")
    rows = read(table, HALF, {"x": DenseField(type="dense", column="y")},
                normalize={"x": Normalize(type="standard")})  # fmt: skip
    with pytest.raises(CheckpointMismatch, match=r"The checkpoint's image\.divisor"):
        rows.prepared.restore(saved.parts["data"])
    broken = tmp_path / "step-3"
    broken.mkdir()
    for path in (directory / "checkpoints" / "step-3").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    save_file({"x.shift": torch.zeros(2)}, broken / "data.safetensors")
    with pytest.raises(Exception, match="is not what was written"):
        Prepared.of(broken)


# --- plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalize", "pointer", "says"),
    [
        ({"zz": {"type": "standard"}}, "/data/normalize/zz", "there is no field 'zz'"),
        ({"label": {"type": "standard"}}, "/data/normalize/label", "field 'label' is integer"),
        ({"x": {"type": "zscore"}}, "/data/normalize/x/type", "standard"),
    ],
)
def test_what_cannot_be_normalized_is_refused(table, normalize, pointer, says):
    meta = json.loads((table / "meta.json").read_text())
    assert says in errors(job(data={"normalize": normalize}), meta)[pointer]


def test_a_plan_counts_the_bytes_of_images_as_bytes(table):
    meta = json.loads((table / "meta.json").read_text())
    plain = planned(job(data={"normalize": {}}), meta)["memory"]["data_bytes"]
    assert planned(job(), meta)["memory"]["data_bytes"] == plain


def test_an_integer_field_keeps_its_sizes_in_the_resolved_spec(table):
    meta = json.loads((table / "meta.json").read_text())
    assert planned(job(), meta)["spec"]["data"]["fields"]["label"]["dim"] == 10
    assert IntegerField(type="integer", dim=3).dim == 3
