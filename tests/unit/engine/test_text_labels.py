"""Labels that are texts: an integer field over them has their classes, and keeps them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.datasets.ingest import ingest
from engine.process.planner import answer
from glasshouse import jsonio
from glasshouse.errors import DataFailed
from glasshouse.spec import IntegerField, Source
from glasshouse.spec.labels import text_labels, with_values
from tests.unit.engine.runs import errors, of_type, planned, run, spec

NAMES = ["pear", "apple", "fig", "apple", "pear", "apple", "fig", "pear"]
PLACES = [2, 0, 1, 0, 2, 0, 1, 2]
X = [[float(n), float(n % 3)] for n in range(8)]


def as_csv(labels: list[Any], delimiter: str = ",") -> bytes:
    rows = [["a", "b", "label"], *([*x, label] for x, label in zip(X, labels, strict=True))]
    return "".join(delimiter.join(map(str, row)) + "\n" for row in rows).encode()


def as_jsonl(labels: list[Any]) -> bytes:
    rows = ({"a": x[0], "b": x[1], "label": y} for x, y in zip(X, labels, strict=True))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(labels: list[Any]) -> bytes:
    file = io.BytesIO()
    a, b = np.array(X).T
    pq.write_table(pa.table({"a": a, "b": b, "label": labels}), file)
    return file.getvalue()


def as_npz(labels: list[Any], dtype: str | None = None) -> bytes:
    file = io.BytesIO()
    a, b = np.array(X).T
    np.savez(file, a=a, b=b, label=np.array(labels, dtype))
    return file.getvalue()


FORMATS = {
    "csv": as_csv,
    "tsv": lambda labels: as_csv(labels, "\t"),
    "jsonl": as_jsonl,
    "parquet": as_parquet,
    "npz": as_npz,
    "npz of bytes": lambda labels: as_npz(labels, "S5" if isinstance(labels[0], str) else None),
}


def made(folder: Path, content: bytes, form: str = "csv") -> Path:
    number = len(list(folder.glob("file-*")))
    source = folder / f"file-{number}"
    source.write_bytes(content)
    ingest(source, form, folder / f"dataset-{number}")
    return folder / f"dataset-{number}"


def meta_of(table: Path) -> dict[str, Any]:
    """A dataset as the service describes it to the planner."""
    meta = jsonio.loads((table / "meta.json").read_bytes())
    stats = jsonio.loads((table / "stats.json").read_bytes())
    fields = {"label": IntegerField(type="integer")}
    labels = text_labels(fields, meta["columns"])
    return {**meta, "columns": with_values(meta["columns"], stats, labels)}


def fruit(width: int = 3, **label: Any) -> dict[str, Any]:
    fields = {
        "x": {"type": "dense", "columns": ["a", "b"]},
        "label": {"type": "integer", **label},
    }
    data = {"train": {"dataset": "ds_1"}, "fields": fields, "batch_size": 3}
    return spec(
        network={"layers": [{"name": "fc", "type": "Linear", "args": {"out_features": width}}]},
        data=data,
    )


def label_of(plan: dict[str, Any]) -> dict[str, Any]:
    return plan["spec"]["data"]["fields"]["label"]


def losses(records: list[dict[str, Any]]) -> list[float]:
    told = [item["values"] for item in of_type(records, "metrics")]
    return [values["loss"] for values in told if "loss" in values]


@pytest.mark.parametrize("form", FORMATS)
def test_text_labels_train_as_their_places_do_in_every_format(form: str, tmp_path: Path):
    write, kind = FORMATS[form], form.partition(" ")[0]
    texts = made(tmp_path, write(NAMES), kind)
    numbers = made(tmp_path, write(PLACES), kind)
    plan = planned(fruit(), meta_of(texts))
    assert label_of(plan)["classes"] == ["apple", "fig", "pear"]
    assert label_of(plan)["dim"] == 3
    again = planned(plan["spec"], meta_of(texts))  # what runs can be submitted again
    assert again["spec"] == plan["spec"]
    expected = losses(run(tmp_path / "numbers", fruit(dim=3), numbers))
    resolved = {**plan["spec"]}
    assert losses(run(tmp_path / "texts", resolved, texts)) == expected


def test_the_classes_are_those_of_all_splits(tmp_path: Path):
    file = io.BytesIO()
    parts = {"train": ["b", "c"], "validation": ["c", "c"], "test": ["a", "b"]}
    np.savez(file, **{f"label_{name}": np.array(rows) for name, rows in parts.items()},
             **{f"x_{name}": np.ones((2, 2)) for name in parts})  # fmt: skip
    table = made(tmp_path, file.getvalue(), "npz")
    job = fruit()
    job["data"]["fields"]["x"] = {"type": "dense"}
    for split in ("train", "test"):
        job["data"]["train"] = {"dataset": "ds_1", "split": split}
        assert label_of(planned(job, meta_of(table)))["classes"] == ["a", "b", "c"]


def test_a_value_that_training_did_not_have_names_row_and_value(tmp_path: Path):
    plan = planned(fruit(), meta_of(made(tmp_path, as_csv(NAMES))))
    field = IntegerField.model_validate_json(json.dumps(label_of(plan)))
    other = made(tmp_path, as_csv([*NAMES[:5], "plum", *NAMES[6:]]))
    with pytest.raises(DataFailed) as caught:
        load(
            Source(dataset="d"), {"label": field}, Table(other), seed=0, device=torch.device("cpu")
        )
    assert caught.value.detail == (
        "row 5 of split 'all' has \"plum\" in column 'label'; the classes of field 'label' are"
        ' "apple", "fig", "pear"'
    )


def test_a_missing_label_is_a_bad_row(tmp_path: Path):
    table = made(tmp_path, as_csv([*NAMES[:7], ""]))
    plan = planned(fruit(), meta_of(table))
    assert label_of(plan)["classes"] == ["apple", "fig", "pear"]
    plan["spec"]["data"]["on_bad_row"] = "drop"
    records = run(tmp_path / "job", plan["spec"], table)
    assert of_type(records, "dropped")[0]["count"] == 1


def test_dim_is_checked(tmp_path: Path):
    meta = meta_of(made(tmp_path, as_csv(NAMES)))
    assert label_of(planned(fruit(dim=3), meta))["classes"] == ["apple", "fig", "pear"]
    assert errors(fruit(dim=4), meta) == {
        "/data/fields/label/dim": "dim is 4, and column 'label' has 3 different texts: \"apple\","
        ' "fig", "pear"; leave dim out, or list the classes'
    }


def test_classes_that_are_listed_keep_their_order(tmp_path: Path):
    meta = meta_of(made(tmp_path, as_csv(NAMES)))
    listed = ["pear", "fig", "apple"]
    assert label_of(planned(fruit(classes=listed), meta))["classes"] == listed


@pytest.mark.parametrize("text", ["x" * 201, None])
def test_texts_that_are_no_classes_are_refused(text: str | None, tmp_path: Path):
    rows = [f"t{n}" for n in range(1001)] if text is None else ["a", text]
    table = made(tmp_path, b"a,b,label\n" + b"".join(f"1,2,{t}\n".encode() for t in rows))
    found = errors(fruit(), meta_of(table))
    assert (
        "more than 1,000 different texts, or one of more than 200 bytes"
        in (found["/data/fields/label/classes"])
    )


def test_a_job_that_begins_with_weights_keeps_their_classes(tmp_path: Path):
    meta = meta_of(made(tmp_path, as_csv(NAMES)))
    before = planned(fruit(4, classes=["quince", "pear", "fig", "apple"]), meta)["spec"]
    job = fruit(4) | {"init": {"checkpoint": "ckpt_1", "load": "model", "missing": "init"}}
    found = planned(job, meta, network=before)
    assert label_of(found)["classes"] == ["quince", "pear", "fig", "apple"]
    other = planned(fruit(classes=["quince", "kiwi", "melon"]), meta)["spec"]
    assert label_of(planned(fruit(), meta, network=other))["classes"] == ["apple", "fig", "pear"]


def test_numbers_with_a_text_among_them_are_classes_with_a_warning(tmp_path: Path):
    meta = meta_of(made(tmp_path, as_csv([0, 1, "x1", 0, 1, 0, 1, 0])))
    plan = planned(fruit(), meta)
    assert label_of(plan)["classes"] == ["0", "1", "x1"]
    (warning,) = [item for item in plan["warnings"] if item["code"] == "mixed_classes"]
    assert warning["pointer"] == "/data/fields/label"
    assert 'the first text is "x1" in line 4' in warning["detail"]
    assert not planned(fruit(), meta_of(made(tmp_path, as_csv(NAMES))))["warnings"]


def test_a_text_in_a_column_of_numbers_is_named_with_its_line(tmp_path: Path):
    content = as_csv(NAMES).replace(b"3.0,0.0", b"3.0,n/a")
    meta = meta_of(made(tmp_path, content))
    assert errors(fruit(), meta) == {
        "/data/fields/x/columns/1": "field 'x' needs numbers, and column 'b' holds text: line 5 of "
        'the file has "n/a", the first value that is not a number. Correct the file (a missing '
        "value is an empty cell) and upload it again, or read the column as classes (type integer)"
    }


def test_folders_of_images_keep_the_names_of_their_classes():
    column = {"name": "label", "dtype": "int64", "shape": [], "classes": ["cat", "dog", "owl"]}
    columns = [{"name": "a", "dtype": "float64", "shape": []}, column]
    columns.append({"name": "b", "dtype": "float64", "shape": []})
    meta = {"columns": columns, "splits": {"all": 8}}
    found = planned(fruit(), meta)
    assert label_of(found)["classes"] == ["cat", "dog", "owl"]
    assert planned(found["spec"], meta)["spec"] == found["spec"]
    assert label_of(planned(fruit(4, dim=4), meta))["classes"] is None


def test_several_sources_have_the_classes_of_all(tmp_path: Path):
    first = meta_of(made(tmp_path, as_csv(NAMES)))
    second = meta_of(made(tmp_path, as_csv(["kiwi", *NAMES[1:]])))
    job = fruit(4)
    job["data"]["train"] = [{"dataset": "ds_1"}, {"dataset": "ds_2"}]
    both = {"ds_1": first, "ds_2": second}
    reply = answer({"id": 1, "do": "plan", "spec": job, "datasets": both})
    assert reply["ok"], reply["errors"]
    assert label_of(reply["plan"])["classes"] == ["apple", "fig", "kiwi", "pear"]
