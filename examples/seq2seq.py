"""One sequence into another: ``python examples/seq2seq.py`` trains copying and reversing.

A GRU reads a row of symbols, another one writes it with attention to what was read: as it was, or
from its end. Gradients are clipped as in PaddlePaddle's FAQ: those of parameters by the job, those
of layer outputs (errors) by the layers. Needs a running service (``glasshouse up``).
"""

import argparse
import json
from typing import Any

import numpy as np

from glasshouse import Client
from glasshouse.client import Dataset, Job
from glasshouse.spec import Preset

BEGIN, END, NUM_ENTRIES = 0, 1, 22
"""Marks of a target's beginning and end; the other entries are symbols."""
TASKS = {"copy": 1, "reverse": -1}
"""The step with which a target reads its source."""
LONGEST = 10
SIZES = {"num_entries": NUM_ENTRIES, "embedding_dim": 64, "hidden_size": 128}
COLUMNS = ["task", "teacher forcing", "by itself", "rows"]


def rows(task: str, num: int, seed: int) -> list[dict[str, list[int]]]:
    """Random sources, the rows to generate, and the same rows after a start mark."""
    generator = np.random.default_rng(seed)
    made: list[dict[str, list[int]]] = []
    for _ in range(num):
        length = generator.integers(3, LONGEST, endpoint=True)
        source = generator.integers(2, NUM_ENTRIES, length).tolist()
        target = source[:: TASKS[task]]
        made.append({"source": source, "target": [BEGIN, *target], "next": [*target, END]})
    return made


def upload(client: Client, task: str, num: int, seed: int) -> Dataset:
    """Upload rows of a task."""
    content = "\n".join(map(json.dumps, rows(task, num, seed))).encode()
    return client.datasets.upload(content, name=task, format="jsonl")


def layers() -> list[dict[str, Any]]:
    """The layers of the preset, with clipped output gradients of both recurrent layers."""
    graph = Preset(type="preset", preset="seq2seq", args=SIZES).graph()
    found = [layer.model_dump(mode="json", exclude_unset=True) for layer in graph.layers]
    clip = {"GRU": {"output_grad_clip": 1e-3}}
    return [layer | clip.get(layer["type"], {}) for layer in found]


def submit(client: Client, task: str, num: int = 20_000, epochs: int = 5) -> Job:
    """Submit one training job, evaluated on separate rows."""
    ids = {"type": "integer_sequence", "dim": NUM_ENTRIES}
    judged = ["scores", "next"]
    return client.train(
        layers(),
        {
            "train": {"dataset": upload(client, task, num, seed=1).id},
            "validation": {"dataset": upload(client, task, 1000, seed=2).id},
        },
        fields={"source": ids, "target": ids, "next": ids | {"padding_value": -100}},
        loss={"type": "CrossEntropyLoss", "inputs": judged},
        optimizer={"type": "Adam", "args": {"lr": 0.002}},
        scheduler={"type": "CosineAnnealingLR"},
        grad_clip={"type": "value", "max": 0.1},
        metrics=[
            {
                "type": "MulticlassAccuracy",
                "args": {"num_classes": NUM_ENTRIES, "average": "micro", "ignore_index": -100},
                "inputs": judged,
            }
        ],
        probes=[{"layers": ["decoder"], "kinds": ["output_grad"], "every": 20}],
        bucket_by_length={"field": "source"},
        batch_size=64,
        epochs=epochs,
        seed=1,
        name=f"seq2seq {task}",
    )


def teacher_forced(job: Job) -> float:
    """The fraction of correct symbols if the network is given the correct previous ones."""
    return job.metrics()["validation/MulticlassAccuracy"]["last"]


def write(client: Client, job: Job, sources: list[list[int]]) -> list[list[int]]:
    """The rows that the network generates, symbol by symbol, up to the end mark."""
    written = np.full((len(sources), 1), BEGIN)
    for _ in range(LONGEST + 1):
        inputs = {"source": sources, "target": written}
        entries = client.infer(job, inputs, outputs=["out"], fields="id")["out"]
        written = np.hstack([written, entries[:, -1:]])
    return [[*row[: row.index(END)], END] if END in row else row for row in written[:, 1:].tolist()]


def alone(client: Client, job: Job, task: str, num: int = 100) -> tuple[float, float]:
    """The fraction of symbols, and of whole rows, that it generates correctly."""
    asked = rows(task, num, seed=3)
    written = write(client, job, [row["source"] for row in asked])
    wanted = [row["next"] for row in asked]
    right = [
        sum(one == other for one, other in zip(*both, strict=False))
        for both in zip(written, wanted, strict=True)
    ]
    whole = sum(both[0] == both[1] for both in zip(written, wanted, strict=True))
    return sum(right) / sum(map(len, wanted)), whole / num


def main() -> None:
    """Train both tasks, print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with Client() as client:
        jobs = {task: submit(client, task) for task in TASKS}
        print("|", " | ".join(COLUMNS), "|")
        print("|---" * len(COLUMNS) + "|")
        for task, job in jobs.items():
            job.wait()
            figures = [teacher_forced(job), *alone(client, job, task)]
            cells = [task, *(f"{figure:.4f}" for figure in figures)]
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
