"""The course's network on MNIST: ``python examples/mnist.py DIR`` prints a table of accuracies.

DIR holds the four files of MNIST as they are published (``train-images-idx3-ubyte.gz`` …), or
``mnist.json.gz``, or both. Needs a running service (``glasshouse up``); takes some minutes.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from glasshouse import Client
from glasshouse.client import Dataset, Job

LAYERS: list[dict[str, Any]] = [
    {
        "name": "conv1",
        "type": "Conv2d",
        "args": {"in_channels": 1, "out_channels": 20, "kernel_size": 5, "padding": 2},
        "inputs": ["image"],
    },
    {"name": "relu1", "type": "ReLU"},
    {"name": "pool1", "type": "MaxPool2d", "args": {"kernel_size": 2}},
    {
        "name": "conv2",
        "type": "Conv2d",
        "args": {"in_channels": 20, "out_channels": 20, "kernel_size": 5, "padding": 2},
    },
    {"name": "relu2", "type": "ReLU"},
    {"name": "pool2", "type": "MaxPool2d", "args": {"kernel_size": 2}},
    {"name": "flat", "type": "Flatten"},
    {"name": "fc", "type": "Linear", "args": {"in_features": 980, "out_features": 10}},
]
OPTIMIZERS = {
    "SGD": {"type": "SGD", "args": {"lr": 0.01}},
    "Momentum 0.9": {"type": "SGD", "args": {"lr": 0.01, "momentum": 0.9}},
    "Adagrad": {"type": "Adagrad", "args": {"lr": 0.01}},
    "Adam": {"type": "Adam", "args": {"lr": 0.01}},
}
COLUMNS = ["format", "optimizer", "first loss", "first 100", "last 100", "test accuracy"]


def upload(client: Client, folder: Path) -> dict[str, Dataset]:
    """Upload what there is in the folder, by format."""
    found: dict[str, Dataset] = {}
    published = sorted(folder.glob("*-ubyte.gz"))
    if published:
        with tempfile.NamedTemporaryFile(suffix=".zip") as file:
            with zipfile.ZipFile(file, "w") as archive:  # stored: they are compressed already
                for path in published:
                    archive.write(path, path.name)
            file.flush()
            found["idx.zip"] = client.datasets.upload(file.name, name="mnist", format="idx.zip")
    if (folder / "mnist.json.gz").exists():
        found["mnist.json.gz"] = client.datasets.upload(folder / "mnist.json.gz", name="mnist")
    return found


def submit(client: Client, dataset: Dataset, optimizer: str) -> Job:
    """Queue one training: two epochs, judged on the test digits."""
    return client.train(
        LAYERS,
        {
            "train": {"dataset": dataset.id, "split": "train"},
            "validation": {"dataset": dataset.id, "split": "test"},
            "batch_size": 100,
        },
        fields={
            "image": {"type": "dense", "shape": [1, 28, 28]},
            "label": {"type": "integer", "dim": 10},
        },
        loss={"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        optimizer=OPTIMIZERS[optimizer],
        metrics=[{"type": "accuracy", "inputs": ["fc", "label"]}],
        evaluate={"every_epochs": 1},
        epochs=2,
        seed=1,
        name=f"mnist {optimizer}",
    )


def row(job: Job) -> list[str]:
    """The losses of a finished job, and how many of the test digits it recognises."""
    loss = job.metrics("loss").numpy()
    accuracy = job.metrics()["validation/accuracy"]["last"]
    figures = [loss[0], loss[:100].mean(), loss[-100:].mean()]
    return [*(f"{figure:.3f}" for figure in figures), f"{accuracy:.4f}"]


def main() -> None:
    """Upload, train with each optimizer, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the files of MNIST are")
    folder = parser.parse_args().folder
    with Client() as client:
        datasets = upload(client, folder)
        if not datasets:
            parser.error(f"{folder} has neither *-ubyte.gz nor mnist.json.gz")
        jobs = {
            (form, optimizer): submit(client, dataset, optimizer)
            for form, dataset in datasets.items()
            for optimizer in OPTIMIZERS
        }
        print("|", " | ".join(COLUMNS), "|")
        print("|---" * len(COLUMNS) + "|")
        for (form, optimizer), job in jobs.items():
            print("|", " | ".join([form, optimizer, *row(job.wait())]), "|", flush=True)


if __name__ == "__main__":
    main()
