"""Datasets with rows of different lengths for the engine's tests, and jobs that read them."""

import json
from pathlib import Path
from typing import Any

from engine.datasets.ingest import ingest

TEXTS: list[list[int]] = [
    [3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5], [8, 9, 7, 9], [3, 2, 3, 8, 4], [6, 2], [6, 4, 3, 3, 8],
    [3, 2, 7, 9, 5, 0], [2, 8], [8, 4, 1, 9, 7, 1, 6, 9], [3], [9, 9],
]  # fmt: skip


def write_ragged(directory: Path, rows: list[dict[str, Any]]) -> Path:
    """A dataset directory, as the reader process makes it of a jsonl file."""
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ingest(source, "jsonl", directory / "dataset")
    return directory / "dataset"


def texts(directory: Path, rows: list[list[int]] = TEXTS) -> Path:
    """Rows of ids, the same as vectors, and what to learn of each."""
    return write_ragged(
        directory,
        [
            {"ids": row, "steps": [[i / 10, 1.0] for i in row], "label": len(row) % 2}
            for row in rows
        ],
    )


def meta_of(table: Path) -> dict[str, Any]:
    """What the planner receives about a dataset."""
    return json.loads((table / "meta.json").read_text())


def layers(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """An embedding of the ids, and what follows."""
    return [
        {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}, "inputs": ["ids"]},
        *more,
    ]


LSTM = layers(
    {"name": "lstm", "type": "LSTM", "args": {"hidden_size": 5, "batch_first": True}},
    {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
    {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
)


def job(network: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """A small training job on ragged ids; keyword arguments replace its parts."""
    data = {
        "train": {"dataset": "ds_1"},
        "fields": {
            "ids": {"type": "integer_sequence", "dim": 10},
            "label": {"type": "integer", "dim": 2},
        },
        "batch_size": 5,
    }
    return {
        "kind": "train",
        "seed": 3,
        "network": {"layers": network or LSTM},
        "loss": {"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        "optimizer": {"type": "SGD", "args": {"lr": 0.1}},
        "stop": {"epochs": 3},
        **changes,
        "data": {**data, **changes.get("data", {})},
    }
