"""Rows that do not fit their fields: named where they fail a job, counted where dropped."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.columns.prepared import Preparing
from engine.data.columns.table import Table
from engine.data.sources.loading import load
from engine.datasets.ingest import ingest
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    IntegerField,
    IntegerSequenceField,
    Normalize,
    Source,
    SparseBinaryField,
)
from tests.unit.engine.ragged import meta_of, write_ragged
from tests.unit.engine.runs import errors, of_type, planned, run, spec, write_table

CPU = torch.device("cpu")
CLASSES = ("Adelie", "Chinstrap", "Gentoo")
PENGUINS = [
    ("Adelie", "39.1", "3"), ("Gentoo", "", "4"), ("Chinstrap", "46.5", ""), ("Emperor", "50", "1"),
    ("Adelie", "39.5", "9"), ("", "40", "2"), ("Gentoo", "47", "0"), ("Adelie", "38.2", "2.5"),
]  # fmt: skip


@pytest.fixture
def penguins(tmp_path: Path) -> Path:
    source = tmp_path / "penguins.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([("species", "bill", "count"), *PENGUINS])
    ingest(source, "csv", tmp_path / "dataset")
    return tmp_path / "dataset"


def read(table: Path, on_bad_row: str = "fail", source: Source | None = None, **fields: Any):
    source = source or Source(dataset="d")
    preparing = Preparing(on_bad_row=on_bad_row)
    return load(source, fields, Table(table), seed=0, device=CPU, preparing=preparing)


SPECIES = IntegerField(type="integer", column="species", classes=CLASSES)
BILL = DenseField(type="dense", column="bill")
COUNT = IntegerField(type="integer", column="count", dim=5)
LISTED = 'the classes of field \'x\' are "Adelie", "Chinstrap", "Gentoo"'


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (SPECIES, f"row 3 of split 'all' has \"Emperor\" in column 'species'; {LISTED}"),
        (BILL, "row 1 of split 'all': column 'bill' is missing (NaN), and field 'x' has no fill"),
        (COUNT, "row 2 of split 'all' has no value in column 'count'; field 'x' takes integers in"),
    ],
)
def test_the_first_bad_row_fails_the_job_with_its_column(penguins, field, says):
    with pytest.raises(DataFailed) as caught:
        read(penguins, x=field)
    assert says in str(caught.value)


def test_texts_become_the_places_of_their_classes(penguins):
    rows = read(penguins, "drop", x=SPECIES)
    batch = rows.batch(slice(0, rows.num_rows))["x"]
    assert batch.tolist() == [0, 2, 1, 0, 2, 0]
    assert batch.dtype == torch.int64
    assert rows.numbers(slice(0, 6)).tolist() == [0, 1, 2, 4, 6, 7]
    assert rows.left_out == {"rows whose value of field 'x' is no class of it, of split 'all'": 2}


def test_a_row_with_two_flaws_is_counted_once(penguins):
    rows = read(penguins, "drop", species=SPECIES, bill=BILL, count=COUNT)
    assert rows.numbers(slice(0, rows.num_rows)).tolist() == [0, 6]
    assert list(rows.left_out.values()) == [2, 1, 3]
    assert sum(rows.left_out.values()) + rows.num_rows == len(PENGUINS)
    assert rows.batch(slice(0, 2))["count"].tolist() == [3, 0]


def test_integers_of_any_size_become_classes(tmp_path):
    values = np.array([-5, 10**12, 7, -5])
    table = write_table(tmp_path, {"x": values}, {"all": slice(None)})
    field = IntegerField(type="integer", classes=(7, -5, 10**12))
    assert read(table, x=field).batch(slice(0, 4))["x"].tolist() == [1, 2, 0, 1]
    with pytest.raises(DataFailed, match="row 2 of split 'all' has 7 in column 'x'; the classes"):
        read(table, x=IntegerField(type="integer", classes=(-5, 10**12)))


def test_only_rows_that_a_source_takes_are_checked(tmp_path):
    values = np.arange(40)
    table = write_table(tmp_path, {"x": values}, {"all": slice(None)})
    rows = read(table, source=Source(dataset="d", fraction=(0.0, 0.5)), on_bad_row="drop",
                x=IntegerField(type="integer", dim=30))  # fmt: skip
    taken = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:20]
    good = sorted(number for number in taken.tolist() if number < 30)
    assert rows.batch(slice(0, rows.num_rows))["x"].tolist() == good
    assert list(rows.left_out.values()) == [20 - len(good)]
    others = [number for number in range(40) if number >= 30]
    only = write_table(tmp_path / "b", {"x": np.where(np.isin(values, taken), 99, values)},
                       {"all": slice(None)})  # fmt: skip
    rest = read(only, source=Source(dataset="d", fraction=(0.5, 1.0)),
                x=IntegerField(type="integer", dim=40))  # fmt: skip
    assert rest.num_rows == 20
    assert others


def test_lists_with_bad_values_and_of_other_lengths_are_dropped(tmp_path):
    rows = [
        {"ids": [1, 2], "steps": [[1.0], [2.0]], "flat": [1.0, 2.0]},
        {"ids": [9], "steps": [[1.0]], "flat": [3.0, 4.0]},
        {"ids": [], "steps": [["NaN"], [1.0]], "flat": [5.0]},
        {"ids": [3], "steps": [], "flat": ["NaN", 6.0]},
        {"ids": [4, 4], "steps": [[7.0]], "flat": [8.0, 9.0]},
    ]
    table = write_ragged(tmp_path, rows)
    ids = IntegerSequenceField(type="integer_sequence", dim=5)
    steps = DenseSequenceField(type="dense_sequence", dim=1)
    flat = DenseField(type="dense", shape=(2,))
    found = read(table, "drop", ids=ids, steps=steps, flat=flat)
    assert found.numbers(slice(0, 9)).tolist() == [0, 4]
    batch = found.batch(slice(0, 2))
    assert batch["flat"].tolist() == [[1, 2], [8, 9]]
    assert batch["ids"].tolist() == [[1, 2], [4, 4]]
    assert list(found.left_out.values()) == [1, 1, 1]
    with pytest.raises(DataFailed, match="row 2 of split 'all' has 1 values in column 'flat'"):
        read(table, flat=flat)
    with pytest.raises(DataFailed, match="row 2 of split 'all': value 0 of step 0 of column"):
        read(table, steps=steps)
    places = SparseBinaryField(type="sparse_binary", dim=5)
    assert read(table, "drop", ids=places).num_rows == 4


def test_infinite_values_are_bad_only_where_figures_are_taken_of_them(tmp_path):
    table = write_table(tmp_path, {"x": np.array([1.0, np.inf, 3.0])}, {"all": slice(None)})
    field = DenseField(type="dense")
    assert read(table, x=field).num_rows == 3
    preparing = Preparing({"x": Normalize(type="minmax")})
    with pytest.raises(DataFailed, match="column 'x' is inf, and field 'x' is normalised"):
        load(Source(dataset="d"), {"x": field}, Table(table), seed=0, device=CPU,
             preparing=preparing)  # fmt: skip
    dropping = Preparing({"x": Normalize(type="minmax")}, on_bad_row="drop")
    rows = load(Source(dataset="d"), {"x": field}, Table(table), seed=0, device=CPU,
                preparing=dropping)  # fmt: skip
    assert rows.batch(slice(0, 2))["x"].tolist() == [0, 1]


def test_a_source_with_no_good_row_fails(tmp_path):
    table = write_table(tmp_path, {"x": np.array([7, 8])}, {"all": slice(None)})
    with pytest.raises(DataFailed, match="split 'all' has no rows that fit the fields"):
        read(table, "drop", x=IntegerField(type="integer", dim=3))


# --- jobs ------------------------------------------------------------------------------------


def job(**data: Any) -> dict[str, Any]:
    fields = {
        "bill": {"type": "dense", "fill": "mean"},
        "species": {"type": "integer", "classes": list(CLASSES)},
    }
    return spec(
        network={"layers": [
            {"name": "row", "type": "reshape", "args": {"shape": [-1, 1]}, "inputs": ["bill"]},
            {"name": "fc", "type": "Linear", "args": {"out_features": 3}},
        ]},
        loss={"type": "CrossEntropyLoss", "inputs": ["fc", "species"]},
        metrics=[{"type": "accuracy", "inputs": ["fc", "species"]}],
        data={"train": {"dataset": "ds_1"}, "fields": fields, "batch_size": 4, **data},
    )  # fmt: skip


def test_a_job_drops_bad_rows_and_says_how_many(penguins, tmp_path):
    found = planned(job(on_bad_row="drop"), meta_of(penguins))
    assert found["spec"]["data"]["fields"]["species"]["dim"] == 3
    records = run(tmp_path / "job", job(on_bad_row="drop"), penguins)
    (dropped,) = of_type(records, "dropped")
    assert (dropped["count"], "no class" in dropped["what"]) == (2, True)
    assert of_type(records, "progress")[-1]["samples"] == 2 * 6


def test_what_is_known_to_be_missing_is_refused_before_anything_runs(penguins):
    fields = {"bill": {"type": "dense"}, "count": {"type": "integer", "dim": 10}}
    fields["species"] = {"type": "integer", "classes": list(CLASSES)}
    found = errors(job(fields=fields), meta_of(penguins))
    assert "has 1 missing values: set fill, or data.on_bad_row" in found["/data/fields/bill/fill"]
    assert "'count' has 1 missing values" in found["/data/on_bad_row"]
    warned = planned(job(fields=fields, on_bad_row="drop"), meta_of(penguins))["warnings"]
    assert "fewer steps than planned" in json.dumps(warned)


def test_lists_that_differ_in_length_are_refused_unless_bad_rows_are_dropped(tmp_path):
    rows = [{"bill": [1.0, 2.0], "species": 0}, {"bill": [3.0], "species": 1}]
    table = write_ragged(tmp_path, [*rows, *rows])
    fields = {"bill": {"type": "dense", "shape": [2]}, "species": {"type": "integer", "dim": 2}}
    layers = [{"name": "fc", "type": "Linear", "args": {"out_features": 3}, "inputs": ["bill"]}]
    whole = job(fields=fields) | {"network": {"layers": layers}}
    found = errors(whole, meta_of(table))
    assert "differ in length: set data.on_bad_row to drop" in found["/data/fields/bill/shape"]
    whole["data"] |= {"on_bad_row": "drop"}
    records = run(tmp_path / "job", whole, table)
    assert [record["count"] for record in of_type(records, "dropped")] == [2]
    del fields["bill"]["shape"]
    found = errors(whole, meta_of(table))["/data/fields/bill"]
    assert "or a field of one such column with a shape" in found
    fields["bill"] = {"type": "dense", "columns": ["species", "bill"], "shape": [3]}
    found = errors(whole, meta_of(table))["/data/fields/bill/columns/1"]
    assert "of column 'bill' have 1 to 2 steps" in found


@pytest.mark.parametrize(
    ("field", "pointer", "says"),
    [
        ({"classes": [1, 2]}, "/classes", "the classes are integers, and column 'species' holds"),
        ({}, "/classes", "list the classes of field 'species'"),
        ({"classes": ["a", "a"]}, "/classes/1", "twice"),
        ({"classes": ["a", 1]}, "/classes/1", "all texts or all integers"),
        ({"classes": ["a", "b"], "dim": 3}, "/dim", "dim is 3, but classes lists 2"),
        ({"classes": ["a"], "column": "bill"}, "/classes", "the classes are texts, and column"),
    ],
)
def test_classes_that_do_not_fit_are_refused(penguins, field, pointer, says):
    fields = {"bill": {"type": "dense", "fill": 0}, "species": {"type": "integer", **field}}
    found = errors(job(fields=fields), meta_of(penguins))
    assert says in found[f"/data/fields/species{pointer}"]


def test_an_integer_field_that_nobody_sizes_is_refused(tmp_path):
    table = write_table(tmp_path, {"bill": np.ones(3), "species": np.arange(3)},
                        {"all": slice(None)})  # fmt: skip
    fields = {"bill": {"type": "dense"}, "species": {"type": "integer"}}
    found = errors(job(fields=fields), meta_of(table))
    assert "say how many different values" in found["/data/fields/species/dim"]
