"""Rows of different lengths through the whole service: from the file to the trained network."""

import json
from pathlib import Path

import numpy as np
import pytest

import glasshouse as gh

LAYERS = [
    {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 8}, "inputs": ["ids"]},
    {"name": "gru", "type": "GRU", "args": {"hidden_size": 8, "batch_first": True}},
    {"name": "pool", "type": "SequencePool", "args": {"mode": "max"}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
]


def write_texts(path: Path, num_rows: int = 400) -> list[list[int]]:
    """Rows of ids. The label of a row is whether it contains a 7."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 20, draw.integers(1, 13)).tolist() for _ in range(num_rows)]
    lines = [json.dumps({"ids": row, "label": int(7 in row)}) + "\n" for row in rows]
    path.write_text("".join(lines))
    return rows


def test_a_network_learns_from_lists_of_different_lengths(client: gh.Client, tmp_path: Path):
    rows = write_texts(tmp_path / "texts.jsonl")
    dataset = client.datasets.upload(tmp_path / "texts.jsonl").wait()
    (ids, _) = dataset.columns
    assert (ids["shape"], ids["lengths"]["all"]["total"]) == ([None], sum(map(len, rows)))
    assert [row["ids"] for row in dataset.rows("all", limit=5)] == rows[:5]
    assert dataset.stats()["splits"]["all"]["ids"]["lengths"]["max"] == 12

    job = client.train(
        {"layers": LAYERS},
        dataset.id,
        loss={"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        optimizer={"type": "Adam", "args": {"lr": 0.02}},
        batch_size=32,
        epochs=15,
        seed=1,
    ).wait()
    assert job.data["summary"]["loss"]["last"] < 0.1
    found = client.infer(
        job, inputs={"ids": rows[:50]}, outputs=["fc", "gru"], fields=["value", "id"]
    )
    labels = [int(7 in row) for row in rows[:50]]
    assert np.mean(found["fc/id"] == labels) > 0.9
    assert found["gru/lengths"].tolist() == [len(row) for row in rows[:50]]


def test_a_row_at_fault_is_named_to_its_sender(client: gh.Client, tmp_path: Path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"ids": [1, 2]}\n{"ids": [1, null]}\n')
    with pytest.raises(gh.UnprocessableEntityError, match="line 2: column 'ids' has a null inside"):
        client.datasets.upload(path).wait()
    path.write_text('{"ids": [1, 2], "label": 0}\n{"ids": [9], "label": 1}\n')
    dataset = client.datasets.upload(path).wait()
    fields = {"ids": {"type": "integer_sequence", "dim": 5}, "label": {"type": "integer", "dim": 2}}
    job = client.jobs.create(
        {
            "kind": "train",
            "network": {"layers": LAYERS},
            "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
            "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
            "data": {"train": {"dataset": dataset.id}, "fields": fields, "batch_size": 2},
            "stop": {"steps": 1},
        }
    )
    with pytest.raises(
        gh.JobFailed, match=r"row 1 of split 'all' has 9 as value 0 of column 'ids'"
    ):
        job.wait()
