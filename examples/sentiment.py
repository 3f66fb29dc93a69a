"""Is a sentence for a film or against it? ``python examples/sentiment.py FOLDER`` counts.

FOLDER has ``rt-polarity.pos`` and ``rt-polarity.neg``, a sentence a line. An LSTM and a network of
convolutions learn four fifths of the sentences; the checkpoint that does best on a tenth is judged
by the last tenth, once. Needs a running service (``glasshouse up``); takes some minutes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse import Client
from glasshouse.client import Checkpoint, Dataset, Job
from glasshouse.spec import Preset

Texts = dict[str, NDArray[Any]]
NETWORKS: dict[str, dict[str, Any]] = {
    "lstm_classifier": {"hidden_size": 128, "bidirectional": True, "pool": "max", "dropout": 0.5},
    "text_cnn": {"channels": 100, "kernel_sizes": [3, 4, 5], "dropout": 0.5},
}
ACCURACY = "validation/accuracy"
COLUMNS = ["network", "seed", "best epoch", "validation", "test"]


def read(folder: Path) -> tuple[list[str], list[int]]:
    """All sentences, and 1 for those that are for their film."""
    texts: list[str] = []
    labels: list[int] = []
    for label, ending in enumerate(("neg", "pos")):
        lines = (folder / f"rt-polarity.{ending}").read_text().splitlines()
        texts += lines
        labels += [label] * len(lines)
    return texts, labels


def divide(texts: Sequence[str], labels: Sequence[int]) -> dict[str, Texts]:
    """Eight tenths to train on, one to choose by, one to judge by; always the same."""
    order = np.random.default_rng(0).permutation(len(texts))
    tenth = len(texts) // 10
    parts = {"train": order[: -2 * tenth], "validation": order[-2 * tenth : -tenth]}
    parts["test"] = order[-tenth:]
    rows = np.array(texts), np.array(labels)
    return {name: {"text": rows[0][own], "label": rows[1][own]} for name, own in parts.items()}


def layers(network: str, **sizes: Any) -> list[dict[str, Any]]:
    """The preset's, with small first vectors of words, half of which are hidden while it learns."""
    graph = Preset(type="preset", preset=network, args=NETWORKS[network] | sizes).graph()  # pyright: ignore[reportArgumentType]
    embedding, *others = [item.model_dump(mode="json", exclude_unset=True) for item in graph.layers]
    embedding["init"] = {"weight": {"type": "uniform_", "args": {"a": -0.25, "b": 0.25}}}
    return [embedding, {"name": "seen", "type": "Dropout", "args": {"p": 0.5}}, *others]


def submit(
    client: Client, sentences: Dataset, network: str, seed: int = 1, epochs: int = 8, **sizes: Any
) -> Job:
    """Queue one training, which keeps the checkpoint that does best on the validation rows."""
    words = {"type": "integer_sequence", "tokens": "words", "vocabulary": {"min_count": 2}}
    return client.train(
        layers(network, **sizes),
        sentences,
        fields={"text": words, "label": {"type": "integer", "dim": 2}},
        loss={"type": "CrossEntropyLoss", "inputs": ["fc", "label"]},
        optimizer={"type": "Adam", "args": {"lr": 0.001}},
        bucket_by_length={"width": 4},
        batch_size=50,
        epochs=epochs,
        evaluate={"every_epochs": 1},
        checkpoint={
            "every_epochs": 1,
            "keep_last": 1,
            "keep_best": {"metric": ACCURACY, "mode": "max"},
        },
        probes=[{"layers": ["fc"], "kinds": ["output"], "every": 100}],
        seed=seed,
        name=f"sentiment {network}",
    )


def best(job: Job) -> Checkpoint:
    """The checkpoint that does best on the validation rows, the first of several such."""
    return max(job.checkpoints(), key=lambda checkpoint: checkpoint.metrics[ACCURACY])


def tested(client: Client, checkpoint: Checkpoint, sentences: Dataset, test: Texts) -> float:
    """The share of the test rows that a checkpoint is right about."""
    rows = {"dataset": sentences.id, "split": "test"}
    guesses = client.infer(checkpoint, data=rows, outputs=["fc"], fields="id")["fc"]
    return float((guesses == test["label"]).mean())


def main() -> None:
    """Upload, train both networks from several seeds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the two files are")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each network")
    given = parser.parse_args()
    parts = divide(*read(given.folder))
    with Client() as client:
        sentences = client.datasets.upload(parts, name="rt-polarity")
        jobs = [
            (network, seed, submit(client, sentences, network, seed))
            for network in NETWORKS
            for seed in range(1, given.seeds + 1)
        ]
        print("|", " | ".join(COLUMNS), "|")
        print("|---" * len(COLUMNS) + "|")
        for network, seed, job in jobs:
            checkpoint = best(job.wait())
            accuracy = tested(client, checkpoint, sentences, parts["test"])
            about = [network, str(seed), str(checkpoint.epoch + 1)]
            figures = [f"{figure:.3f}" for figure in (checkpoint.metrics[ACCURACY], accuracy)]
            print("|", " | ".join([*about, *figures]), "|", flush=True)


if __name__ == "__main__":
    main()
