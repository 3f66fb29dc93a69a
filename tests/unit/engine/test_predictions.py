"""What an inference of a classifier gives unasked: class, probability, and the class's name."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from engine.inference.infer import classified
from glasshouse.client.data.tables import write_table
from glasshouse.client.data.tensors import as_torch, read_outputs
from glasshouse.spec import parse_trained
from tests.unit.engine.runs import of_type, planned, run
from tests.unit.engine.test_text_labels import NAMES, X, as_csv, fruit, made, meta_of

Trained = tuple[dict[str, Any], Path, Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The resolved spec, the checkpoint, and the data."""
    folder = tmp_path_factory.mktemp("fruit")
    table = made(folder, as_csv(NAMES))
    job = fruit()
    job["network"]["layers"].append(
        {"name": "soft", "type": "Softmax", "args": {"dim": 1}, "inputs": ["fc"]}
    )
    job["network"]["outputs"] = ["fc"]
    resolved = planned(job, meta_of(table))["spec"]
    records = run(folder / "job", resolved, table)
    return resolved, folder / "job" / of_type(records, "checkpoint")[-1]["dir"], table


def infer(folder: Path, trained: Trained, **changes: Any) -> list[dict[str, Any]]:
    resolved, checkpoint, table = trained
    job = {"kind": "infer", "job": "job_x", "data": {"dataset": "ds_1"}, **changes}
    checkpoints = {"dir": str(checkpoint)}
    return run(folder, job, table, trained_by=resolved, checkpoint=checkpoints)


def scores(checkpoint: Path) -> torch.Tensor:
    """By hand."""
    weights = load_file(checkpoint / "model.safetensors")
    return torch.tensor(X) @ weights["fc.weight"].T + weights["fc.bias"]


def test_a_classifier_gives_classes_by_name(trained: Trained, tmp_path: Path):
    records = infer(tmp_path, trained)
    expected = scores(trained[1])
    best = expected.softmax(1).max(1)
    names = [["apple", "fig", "pear"][number] for number in best.indices]
    artifacts = tmp_path / "artifacts"
    with safe_open(artifacts / "outputs.safetensors", "pt") as file:
        assert file.metadata() == {"fc/classes": '["apple","fig","pear"]'}
        assert sorted(file.keys()) == ["fc/id", "fc/prob", "fc/value"]
        torch.testing.assert_close(file.get_tensor("fc/value"), expected)
        assert torch.equal(file.get_tensor("fc/id"), best.indices)
        torch.testing.assert_close(file.get_tensor("fc/prob"), best.values)
    with (artifacts / "predictions.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["fc/class"] for row in rows] == names
    assert [int(row["fc/id"]) for row in rows] == best.indices.tolist()
    np.testing.assert_allclose([float(row["fc/prob"]) for row in rows], best.values)
    result = of_type(records, "result")[0]["result"]["fc"]
    assert result["class"] == {"dtype": "string", "shape": [8], "data": names}
    assert result["classes"]["data"] == ["apple", "fig", "pear"]
    assert result["classes"]["column"] == "label"
    told = {item["name"]: item["media_type"] for item in of_type(records, "artifact")}
    assert told == {
        "outputs.safetensors": "application/vnd.safetensors",
        "predictions.csv": "text/csv",
    }


def test_the_client_reads_the_names(trained: Trained, tmp_path: Path):
    infer(tmp_path, trained)
    found = read_outputs((tmp_path / "artifacts" / "outputs.safetensors").read_bytes())
    names = np.array(["apple", "fig", "pear"])
    np.testing.assert_array_equal(found["fc/class"], names[scores(trained[1]).argmax(1).numpy()])
    assert as_torch(found)["fc/class"] is found["fc/class"]
    for ending in (".csv", ".jsonl", ".parquet"):
        write_table(tmp_path / f"table{ending}", found)
    with (tmp_path / "table.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    lines = (tmp_path / "table.jsonl").read_text().splitlines()
    table = pq.read_table(tmp_path / "table.parquet").to_pylist()
    assert [row["fc/class"] for row in rows] == found["fc/class"].tolist()
    assert float(rows[3]["fc/value/1"]) == found["fc/value"][3, 1]
    assert [json.loads(line)["fc/value"] for line in lines] == found["fc/value"].tolist()
    assert [row["fc/class"] for row in table] == found["fc/class"].tolist()
    with pytest.raises(ValueError, match="different numbers of rows"):
        write_table(tmp_path / "table.csv", {"a": np.ones(2), "b": np.ones(3)})
    with pytest.raises(ValueError, match="which csv does not support"):
        write_table(tmp_path / "table.csv", {"a": np.ones((2, 2, 2))})


def test_fields_that_are_asked_for_are_given_as_they_are(trained: Trained, tmp_path: Path):
    infer(tmp_path / "value", trained, fields=["value"])
    folder = tmp_path / "value" / "artifacts"
    assert sorted(load_file(folder / "outputs.safetensors")) == ["fc/value"]
    assert not (folder / "predictions.csv").exists()
    infer(tmp_path / "id", trained, fields=["id"], outputs=["fc", "soft"])
    found = read_outputs((tmp_path / "id" / "artifacts" / "outputs.safetensors").read_bytes())
    assert sorted(found) == ["fc/class", "fc/id", "soft/class", "soft/id"]
    np.testing.assert_array_equal(found["fc/class"], found["soft/class"])
    infer(tmp_path / "flat", trained, flatten={"axis": 1})
    flat = load_file(tmp_path / "flat" / "artifacts" / "outputs.safetensors")
    assert {name: list(item.shape) for name, item in flat.items()} == {"value": [8, 3]}


def test_only_losses_of_classes_make_a_classifier(trained: Trained):
    spec = json.loads(json.dumps(trained[0]))
    known = classified(parse_trained(json.dumps(spec)))  # pyright: ignore[reportArgumentType]
    assert sorted(known) == ["fc", "soft"]
    spec["loss"] = {"type": "MSELoss", "inputs": ["fc", "x"]}
    assert classified(parse_trained(json.dumps(spec))) == {}  # pyright: ignore[reportArgumentType]
