"""Regression on numeric tables: ``python examples/wine.py FILE.csv …`` prints errors.

Predicts the last column of each file, such as the quality of wines, from the other columns. Trains
on 80 % of the rows and validates on the rest. Needs a running service (``glasshouse up``).
"""

import argparse
from pathlib import Path
from typing import Any

from glasshouse import Client
from glasshouse.client import Dataset, Job

NETWORKS: dict[str, list[dict[str, Any]]] = {
    "linear": [{"name": "predicted", "type": "Linear", "args": {"out_features": 1}}],
    "two hidden layers": [
        {"name": "hidden1", "type": "Linear", "args": {"out_features": 64}},
        {"name": "relu1", "type": "ReLU"},
        {"name": "hidden2", "type": "Linear", "args": {"out_features": 64}},
        {"name": "relu2", "type": "ReLU"},
        {"name": "drop", "type": "Dropout", "args": {"p": 0.2}},
        {"name": "predicted", "type": "Linear", "args": {"out_features": 1}},
    ],
}
COLUMNS = ["table", "rows", "network", "variance", "mean squared error", "R²"]


def submit(client: Client, table: Dataset, network: str, epochs: int = 40) -> Job:
    """Queue one training job that predicts the last column. All columns are normalized."""
    *features, target = [column["name"] for column in table.columns]
    compared = ["predicted", "target"]
    return client.train(
        NETWORKS[network],
        {
            "train": {"dataset": table.id, "fraction": [0, 0.8]},
            "validation": {"dataset": table.id, "fraction": [0.8, 1]},
        },
        fields={
            "features": {"type": "dense", "columns": features},
            "target": {"type": "dense", "column": target, "shape": [1]},
        },
        normalize={"features": "standard", "target": "standard"},
        loss={"type": "MSELoss", "inputs": compared},
        optimizer={"type": "AdamW", "args": {"lr": 0.003, "weight_decay": 0.01}},
        scheduler={"type": "CosineAnnealingLR"},
        metrics=[
            {"type": "MeanSquaredError", "inputs": compared},
            {"type": "R2Score", "inputs": compared},
        ],
        probes=[{"layers": ["predicted"], "kinds": ["output"], "every": 100}],
        batch_size=32,
        epochs=epochs,
        seed=1,
        name=f"wine {network}",
    )


def row(job: Job) -> list[str]:
    """The validation metrics of a finished job, in the units of the target."""
    figures = job.metrics()
    unit = job.checkpoints()[-1].learned()["target.divisor"].item()
    error = figures["validation/MeanSquaredError"]["last"] * unit**2
    explained = figures["validation/R2Score"]["last"]
    variance = error / (1 - explained)  # of the validation rows: the error of predicting their mean
    return [f"{variance:.3f}", f"{error:.3f}", f"{explained:.3f}"]


def main() -> None:
    """Upload, train, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+", help="csv files")
    with Client() as client:
        tables = [client.datasets.upload(path) for path in parser.parse_args().tables]
        jobs = [(table, name, submit(client, table, name)) for table in tables for name in NETWORKS]
        print("|", " | ".join(COLUMNS), "|")
        print("|---" * len(COLUMNS) + "|")
        for table, name, job in jobs:
            about = [table.name, str(table.splits["all"]), name]
            print("|", " | ".join([*about, *row(job.wait())]), "|", flush=True)


if __name__ == "__main__":
    main()
