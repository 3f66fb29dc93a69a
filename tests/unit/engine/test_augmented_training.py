"""Augmented fields in a job: training rows only, and the same bits however batches are made."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from engine.core.spool import read_frames
from engine.data.augmentation.augmenting import Augmenting
from engine.data.batches.batch import Batch
from engine.data.batches.division import Division
from engine.data.columns.prepared import Preparing
from engine.data.columns.table import StoredTable, Table
from engine.data.sources.loading import load
from engine.data.sources.reading import SourceReader
from engine.data.sources.streamed import StreamedRows
from engine.inference import infer
from engine.process import rank
from engine.training.training_rows import Gathering
from glasshouse.spec import DenseField, InferJob, Normalize, Sequences, Shuffle, Source, parse_job
from tests.unit.engine.runs import errors, losses, of_type, planned, run, spec, write_job
from tests.unit.engine.runs import write_table as write

CPU = torch.device("cpu")
FLIP = {"type": "RandomHorizontalFlip"}
CROP = {"type": "RandomCrop", "args": {"padding": 2, "padding_mode": "reflect"}}
ALL = [
    FLIP,
    CROP,
    {"type": "RandomAffine", "args": {"degrees": 20, "interpolation": "bilinear"}},
    {"type": "ColorJitter", "args": {"brightness": 0.3, "contrast": 0.3}},
    {"type": "RandomErasing", "args": {"p": 0.2}},
    {"type": "GaussianNoise", "args": {"sigma": 0.02}},
]
NUM_ROWS = 90


@pytest.fixture(scope="module")
def table(tmp_path_factory: Any) -> Path:
    generator = np.random.default_rng(2)
    columns = {
        "image": generator.integers(0, 256, (NUM_ROWS, 1, 8, 8)).astype(np.uint8),
        "floats": generator.random((NUM_ROWS, 2, 5, 6)),
        "label": generator.integers(0, 10, NUM_ROWS),
    }
    splits = {"train": slice(0, 70), "test": slice(70, None)}
    return write(tmp_path_factory.mktemp("table"), columns, splits)


def fields(augment: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    image = {"type": "dense", "augment": augment, **more}
    return {"image": image, "label": {"type": "integer", "dim": 10}}


def job(augment: list[dict[str, Any]], data: dict[str, Any] | None = None, **more: Any) -> Any:
    return spec(data={"fields": fields(augment), "batch_size": 16, **(data or {})}, **more)


def meta(table: Path) -> dict[str, Any]:
    return json.loads((table / "meta.json").read_text())


# --- batches ---------------------------------------------------------------------------------

SEED = 5
PLAIN = {"seed": SEED, "device": CPU}
TRAIN = Source(dataset="ds_1", split="train")


def field(name: str = "image", augment: Any = ALL, **more: Any) -> DenseField:
    asked = {"type": "dense", "column": name, "augment": augment, **more}
    return DenseField.model_validate_json(json.dumps(asked))


def loaded(table: Path, source: Source = TRAIN, mine: DenseField | None = None, **more: Any) -> Any:
    wanted = {"x": mine or field()}
    rows = load(source, wanted, Table(table), **PLAIN, preparing=Preparing(**more))
    rows.augmenting = Augmenting.of(SEED, wanted)
    return rows


def streamed(table: Path, source: Source = TRAIN, **more: Any) -> StreamedRows:
    wanted = {"x": field()}
    reader = SourceReader(source, wanted, StoredTable(table), seed=SEED, limit=Sequences())
    rows = StreamedRows(reader, CPU, shuffle=Shuffle(buffer_size=20), **more)
    rows.augmenting = Augmenting.of(SEED, wanted)
    return rows


def by_number(batches: Iterator[Batch]) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for batch in batches:
        found |= dict(zip(batch.row_numbers.tolist(), batch["x"], strict=True))
    return found


@pytest.mark.parametrize("fraction", [None, (0.1, 0.8)])
@pytest.mark.parametrize("kind", ["memory", "two workers", "pool", "pool and workers", "cache"])
@pytest.mark.long
def test_each_row_of_an_epoch_is_changed_by_its_number_and_not_by_its_batch(table, kind, fraction):
    source = Source(dataset="ds_1", split="train", fraction=fraction)
    change = Augmenting(SEED, {"x": field().augment}).changes(torch.arange(70), 1)["x"]
    images = torch.from_numpy(np.load(table / "train" / "0.npy")).float() / 255
    by_hand = dict(enumerate(change(images)))
    if kind in ("memory", "two workers"):
        rows = loaded(table, source)
        rows.ahead.workers = 2 * (kind == "two workers")
    else:
        workers = 2 * (kind == "pool and workers")
        rows = streamed(table, source, workers=workers, keeps=kind == "cache")
    for order, first, parts in (
        ((SEED, 1), 0, 1),
        ((SEED, 1), 2, 1),
        ((SEED, 0), 0, 3),
        (None, 0, 2),
    ):
        batches = rows.epoch(
            8,
            drop_last=False,
            order=order,
            first=first,
            division=Division(parts),
            trained_in=1,
        )
        mine = by_number(batches)
        assert len(mine) == rows.num_rows - 8 * first
        assert all(torch.equal(by_hand[number], item) for number, item in mine.items())
    rows.close()


@pytest.mark.parametrize("make", [loaded, streamed])
def test_a_batch_once_more_is_as_it_was_trained_on_and_other_epochs_are_others(make, table):
    rows = make(table)
    seen: list[Tensor] = []
    for epoch in (0, 1):
        for batch in rows.epoch(16, drop_last=False, order=(SEED, 0), trained_in=epoch):
            assert batch.trained_in == epoch
            again = rows.batch(batch.taken, trained_in=batch.trained_in)
            assert torch.equal(again["x"], batch["x"])
            seen.append(batch["x"])
    assert not torch.equal(seen[0], seen[len(seen) // 2])


def test_rows_that_are_only_inspected_are_as_they_are_stored(table):
    rows, plain = loaded(table), loaded(table, mine=field(augment=[]))
    for one, other in zip(rows.in_order(16), plain.in_order(16), strict=True):
        assert torch.equal(one["x"], other["x"])
    assert torch.equal(rows.spaced(9)[1]["x"], plain.spaced(9)[1]["x"])


@pytest.mark.parametrize("name", ["image", "floats"])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_rows_are_scaled_then_changed_then_normalized(table, name, scale):
    """Padding is black before it is normalised, as torchvision's transforms are put in order."""
    if name == "image" and scale:
        scale = 1 / 510
    crop = [{"type": "RandomCrop", "args": {"padding": 3, "fill": 0.25}}]
    normalize = {"x": Normalize(type="standard")}
    rows = loaded(table, mine=field(name, crop, scale=scale), normalize=normalize)
    plain = loaded(table, mine=field(name, [], scale=scale))
    figures = rows.prepared.figures["x"]
    shift, divisor = (
        torch.from_numpy(item).float().view(-1, 1, 1) for item in (figures.shift, figures.divisor)
    )
    change = rows.augmenting.changes(torch.arange(70), 4)["x"]
    x = change(plain.batch(slice(0, 70))["x"])
    [batch] = rows.epoch(70, drop_last=False, order=None, trained_in=4)
    torch.testing.assert_close(batch["x"], (x - shift) / divisor, rtol=0, atol=1e-6)
    corner = (torch.tensor(0.25) - shift) / divisor
    is_filled = torch.isclose(batch["x"], corner, rtol=0, atol=1e-6).all(1).flatten(1).sum(1)
    assert int((is_filled > 0).sum()) > 50


def test_missing_values_are_filled_before(tmp_path):
    x = np.random.default_rng(0).random((30, 1, 4, 4))
    x[3, 0, 1, 1] = np.nan
    table = write(tmp_path, {"x": x}, {"train": slice(None)})
    mine = field("x", [{"type": "RandomVerticalFlip", "args": {"p": 1}}], fill=0.5)
    rows = loaded(table, mine=mine, normalize={"x": Normalize(type="minmax", per="all")})
    [batch] = rows.epoch(30, drop_last=False, order=None, trained_in=0)
    whole = np.nan_to_num(x, nan=0.5)
    expected = (whole - whole.min()) / (whole.max() - whole.min())
    np.testing.assert_allclose(batch["x"].numpy(), expected[:, :, ::-1], atol=1e-6)


# --- jobs ------------------------------------------------------------------------------------


def test_losses_are_those_of_the_same_changes_by_hand(table, tmp_path):
    """One step over all rows with a network that only adds up what it is given."""
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    whole = job(ALL, {"batch_size": 70}, network={"layers": layers}, stop={"epochs": 3})
    whole["optimizer"] = {"type": "SGD", "args": {"lr": 0.1}}
    found = losses(run(tmp_path, whole, table))
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(table / "train" / "2.npy"))
    torch.manual_seed(3)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    augmenting = Augmenting(3, {"image": field().augment})
    for epoch in range(3):
        order = torch.randperm(70, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        x = augmenting.changes(order, epoch)["image"](images[order].float() / 255)
        loss = torch.nn.functional.cross_entropy(network(x), labels[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert found[epoch] == pytest.approx(loss.item(), rel=1e-6)


VARIANTS: dict[str, dict[str, Any]] = {
    "workers": {"data": {"workers": 2}},
    "watched": {"probes": [{"layers": ["*"], "kinds": ["output", "input"], "every": 1}]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_changes_a_number(variant, table, tmp_path):
    plain = run(tmp_path / "a", job(ALL), table)
    more = VARIANTS[variant]
    other = run(
        tmp_path / "b",
        job(ALL, more.get("data"), **{k: v for k, v in more.items() if k != "data"}),
        table,
    )
    assert losses(plain) == losses(other)
    assert losses(plain) != losses(run(tmp_path / "c", job([]), table))


def test_two_workers_beside_a_pool_are_as_none(table, tmp_path):
    pool = {"shuffle": {"buffer_size": 24}}
    found = [
        losses(run(tmp_path / str(workers), job(ALL, pool | {"workers": workers}), table))
        for workers in (0, 2)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "data",
    [{}, {"workers": 2}, {"shuffle": {"buffer_size": 24}}, {"shuffle": {"enabled": False}}],
    ids=["memory", "workers", "pool", "in order"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_in_the_middle_of_an_epoch_gives_the_same_bits(data, accumulate, table, tmp_path):
    whole = job(ALL, data, accumulate=accumulate, checkpoint={"every_steps": 1, "keep_last": 99})
    straight = run(tmp_path / "a", whole, table)
    step = 4 if accumulate == 1 else 2
    there = {"dir": str(tmp_path / "a" / "checkpoints" / f"step-{step}"), "step": step}
    rest = run(tmp_path / "b", whole, table, resume=there)
    assert losses(rest) == losses(straight)[step:]
    last = f"checkpoints/step-{len(losses(straight))}/model.safetensors"
    one, other = load_file(tmp_path / "a" / last), load_file(tmp_path / "b" / last)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_batches_in_parts_see_the_rows_of_whole_ones(table, tmp_path):
    """As many small batches accumulated, bit for bit."""
    layers = [
        {"name": "flat", "type": "Flatten"},
        {"name": "fc", "type": "Linear", "args": {"out_features": 10}},
    ]
    asked = {"network": {"layers": layers}, "stop": {"epochs": 3}}
    halves = run(tmp_path / "a", job(ALL, {"batch_size": 14}, **asked), table, parts=2)
    small = run(tmp_path / "b", job(ALL, {"batch_size": 7}, accumulate=2, **asked), table)
    assert losses(halves) == losses(small)


def test_evaluations_are_of_rows_as_they_are(table, tmp_path):
    """Where nothing is learned, they are those of a job that augments nothing."""
    judged = {
        "validation": {"dataset": "ds_1", "split": "test"},
        "normalize": {"image": {"type": "standard"}},
    }
    still = {"optimizer": {"type": "SGD", "args": {"lr": 0.0}}, "evaluate": {"every_epochs": 1}}
    found: list[list[float]] = []
    for name, augment in (("a", ALL), ("b", [])):
        records = run(tmp_path / name, job(augment, judged, **still), table)
        values = [item["values"] for item in of_type(records, "metrics")]
        found.append([item["validation/loss"] for item in values if "validation/loss" in item])
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_rows_to_judge_by_have_the_bits_that_they_have_without(table):
    """Of numbers that are normalised before a batch is made, but for fields that are augmented."""
    normalize = {"image": {"type": "standard"}}
    asked = job([], {"fields": fields([FLIP], column="floats"), "normalize": normalize})
    resolved = json.dumps(planned(asked, meta(table))["spec"])
    found = Gathering(parse_job(resolved), {"ds_1": Table(table)}, CPU, Any, Any)
    judges = Source(dataset="ds_1", split="test")
    training = found.training(None)
    preparing = Preparing(found.job.data.normalize, known=training.prepared)
    plain = {"image": field("floats", [])}
    expected = load(judges, plain, Table(table), **PLAIN, preparing=preparing)
    judged = found.judging(judges, training.prepared)
    assert judged.augmenting is None
    assert torch.equal(*(rows.batch(slice(0, 20))["image"] for rows in (judged, expected)))


def test_the_guard_names_rows_that_only_their_change_has_spoilt(table, tmp_path):
    """It makes the batch again, as it was."""
    loud = [{"type": "GaussianNoise", "args": {"sigma": 1.2e38, "clip": False}}]
    asked = job(loud, guards={"nonfinite": {"check": ["loss"], "action": "fail"}})
    resolved = planned(asked, meta(table))["spec"]
    directory = write_job(tmp_path, resolved, table)
    assert rank.main(directory) == 0
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["state"] == "failed"
    [finding] = of_type(records, "finding")
    assert (finding["layer"], finding["kind"]) == ("image", "input")
    numbers = torch.tensor(finding["samples"])
    change = Augmenting(3, {"image": field(augment=loud).augment}).changes(numbers, 0)["image"]
    images = torch.from_numpy(np.load(table / "train" / "0.npy"))[numbers].float() / 255
    is_bad = ~change(images).isfinite().flatten(1).all(1)
    assert 0 < int(is_bad.sum()) < 16
    assert finding["bad_samples"] == numbers[is_bad].tolist()


def test_inference_changes_nothing_and_refuses_a_field_that_asks_for_it(table):
    trained = parse_job(json.dumps(planned(job(ALL), meta(table))["spec"]))
    asked = {"kind": "infer", "checkpoint": "c", "data": {"dataset": "ds_1", "split": "test"}}
    inference = InferJob.model_validate_json(json.dumps(asked))
    needed = infer.fields_needed(inference, trained)
    assert needed["image"].augment == ()
    asked["data"]["fields"] = {"image": fields([FLIP])["image"]}
    found = errors(asked, meta(table), network=trained.model_dump(mode="json"))
    assert list(found) == ["/data/fields/image/augment"]


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"type": "RandomHorizontalFlop"}, ()),
        ({"type": "CenterCrop", "args": {"size": 4}}, ()),
        ({"type": "RandomHorizontalFlip", "args": {"p": 1.5}}, ("args", "p")),
        ({"type": "RandomHorizontalFlip", "args": {"p": "often"}}, ("args", "p")),
        ({"type": "RandomHorizontalFlip", "args": {"q": 0.5}}, ("args", "q")),
        ({"type": "RandomCrop"}, ("args",)),
        ({"type": "RandomCrop", "args": {"padding": -1}}, ("args", "padding")),
        ({"type": "RandomCrop", "args": {"padding": [1, 2, 3]}}, ("args", "padding")),
        ({"type": "RandomCrop", "args": {"padding": 1, "padding_mode": "wrap"}}, ("args",)),
        ({"type": "RandomRotation"}, ("args",)),
        ({"type": "RandomRotation", "args": {"degrees": [9, -9]}}, ("args",)),
        ({"type": "RandomRotation", "args": {"degrees": 9, "expand": True}}, ("args", "expand")),
        ({"type": "RandomAffine", "args": {"degrees": 0, "scale": [0, 1]}}, ("args", "scale")),
        ({"type": "RandomAffine", "args": {"degrees": 0, "translate": [2, 0]}}, ("args",)),
        ({"type": "RandomAffine", "args": {"degrees": 0, "shear": [0, 1, 5, 2]}}, ("args",)),
        ({"type": "ColorJitter"}, ("args",)),
        ({"type": "ColorJitter", "args": {}}, ("args",)),
        ({"type": "ColorJitter", "args": {"hue": 0.7}}, ("args", "hue")),
        ({"type": "ColorJitter", "args": {"brightness": [2, 1]}}, ("args",)),
        ({"type": "RandomErasing", "args": {"scale": [0.5, 0.2]}}, ("args",)),
        ({"type": "RandomErasing", "args": {"value": "zero"}}, ("args", "value")),
        ({"type": "RandomErasing", "args": {"ratio": [0, 1]}}, ("args", "ratio")),
        ({"type": "GaussianNoise", "args": {"sigma": -1}}, ("args", "sigma")),
    ],
)
def test_an_unknown_augmentation_is_refused_at_its_place(item, place):
    with pytest.raises(ValidationError) as caught:
        parse_job(json.dumps(job([FLIP, item])))
    for entry in caught.value.errors():
        found = [part for part in entry["loc"] if part not in ("train", "dense", item["type"])]
        assert found[:5] == ["data", "fields", "image", "augment", 1]
        assert found[5 : 5 + len(place)] == list(place)


@pytest.mark.parametrize("kind", ["integer", "integer_sequence", "dense_sequence"])
def test_other_fields_than_dense_ones_have_no_images(kind):
    whole = job([])
    whole["data"]["fields"]["label"] = {"type": kind, "dim": 10, "augment": [FLIP]}
    with pytest.raises(ValidationError) as caught:
        parse_job(json.dumps(whole))
    assert any("augment" in entry["loc"] for entry in caught.value.errors())


@pytest.mark.parametrize(
    ("image", "place", "word"),
    [
        ({"augment": [FLIP], "shape": [64]}, "", "channels, height, width"),
        ({"augment": [FLIP], "shape": [8, 8]}, "", "channels, height, width"),
        ({"augment": [FLIP, CROP], "shape": [1, 2, 32]}, "/1/args/padding", "1 pixels above"),
        (
            {
                "augment": [
                    {"type": "RandomCrop", "args": {"padding": 9, "padding_mode": "symmetric"}}
                ]
            },
            "/0/args/padding",
            "8 pixels",
        ),
        (
            {"augment": [{"type": "RandomCrop", "args": {"padding": 1, "size": 7}}]},
            "/0/args/size",
            "8 x 8",
        ),
        (
            {"augment": [{"type": "RandomCrop", "args": {"padding": 1, "fill": [1, 2]}}]},
            "/0/args/fill",
            "1 channels",
        ),
        (
            {"augment": [{"type": "RandomErasing", "args": {"value": [1, 2, 3]}}]},
            "/0/args/value",
            "3 values",
        ),
        (
            {"augment": [{"type": "ColorJitter", "args": {"saturation": 0.5}}]},
            "/0/args/saturation",
            "one channel",
        ),
        (
            {"augment": [{"type": "ColorJitter", "args": {"brightness": 0.5}}], "shape": [4, 4, 4]},
            "/0",
            "1 or 3 channels",
        ),
        ({"augment": [{"type": "GaussianNoise"}], "scale": 1.0}, "/0", "scale gives 255"),
    ],
)
def test_a_change_that_does_not_fit_the_images_is_refused_at_its_place(image, place, word):
    whole = job([])
    whole["data"]["fields"]["image"] = {"type": "dense", **image}
    found = errors(whole)
    assert [*found] == [f"/data/fields/image/augment{place}"]
    assert word in next(iter(found.values()))


def test_a_crop_of_the_images_own_size_is_one_without_a_size():
    for size in (8, [8, 8]):
        crop = {"type": "RandomCrop", "args": {"padding": 1, "size": size}}
        resolved = planned(job([crop]))["spec"]
        assert planned(resolved)["spec"] == resolved
