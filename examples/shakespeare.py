"""A transformer that writes, character by character: ``python examples/shakespeare.py FILE``.

FILE is a text, such as tiny_shakespeare. The network and all settings are those that nanoGPT gives
for a CPU. Needs a running service (``glasshouse up``); takes some minutes.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse import Client
from glasshouse.client import Dataset, Job
from glasshouse.spec import Preset

BLOCK_SIZE = 64
SIZES = {"block_size": BLOCK_SIZE, "num_layers": 4, "num_heads": 4, "width": 128}
NUM_STEPS, WARM_UP = 2000, 100


def layers(num_tokens: int, **sizes: int) -> list[dict[str, Any]]:
    """GPT-2's layers without biases; what is no matrix does not decay."""
    args = {"tokens": "input", "num_tokens": num_tokens, **SIZES, **sizes}
    args |= {"bias": False, "initializer_range": 0.02}
    graph = Preset(type="preset", preset="transformer_lm", args=args).graph()
    found = [layer.model_dump(mode="json", exclude_unset=True) for layer in graph.layers]
    decay = {"LayerNorm": {"weight_decay": 0}}
    return [layer | decay.get(layer.get("type", ""), {}) for layer in found]


def submit(
    client: Client,
    text: Dataset,
    steps: int = NUM_STEPS,
    rate: float = 1e-3,
    seed: int = 1,
    **sizes: int,
) -> Job:
    """Queue the training on nine tenths of a text, judged on the last tenth."""
    windows = {"type": "language_model", "tokens": "characters", "length": BLOCK_SIZE}
    both = {"train": {"dataset": text.id, "fraction": [0, 0.9]}}
    both["validation"] = {"dataset": text.id, "fraction": [0.9, 1]}
    characters = {"type": "integer_sequence"}
    warm_up = {"type": "LinearLR", "args": {"start_factor": 1 / 101, "total_iters": WARM_UP}}
    fall = {"type": "CosineAnnealingLR", "args": {"eta_min": rate / 10}}
    return client.train(
        layers(num_tokens(text), **sizes),
        both,
        fields={"input": characters, "target": characters},
        windows=windows,
        loss={"type": "CrossEntropyLoss", "inputs": ["scores", "target"]},
        optimizer={
            "type": "AdamW",
            "args": {"lr": rate, "betas": [0.9, 0.99], "weight_decay": 0.1},
        },
        scheduler={
            "type": "SequentialLR",
            "args": {"schedulers": [warm_up, fall], "milestones": [WARM_UP]},
        },
        grad_clip={"type": "global_norm", "max": 1.0},
        batch_size=12,
        drop_last=True,
        evaluate={"every_steps": 500},
        steps=steps,
        probes=[{"layers": ["h?"], "kinds": ["output"], "every": 100}],
        seed=seed,
        name="shakespeare",
    )


def num_tokens(text: Dataset) -> int:
    """Characters of the text, its line ends, and two ids for padding and what is unknown."""
    (column,) = text.columns
    return column["tokens"]["characters"]["all"]["at_least"][0] + 3


def write(client: Client, job: Job, prompt: str, length: int, rows: int = 1) -> list[str]:
    """Texts that the network writes on from a prompt, one inference for each character."""
    vocabulary = np.array(job.checkpoints()[-1].vocabulary())
    texts, generator = [prompt] * rows, np.random.default_rng(1)
    for _ in range(length):
        shown = [text[-BLOCK_SIZE:] for text in texts]
        scores = client.infer(job, {"input": shown}, outputs=["lm_head"])["lm_head"][:, -1, 2:]
        drawn = (scores / 0.8 + generator.gumbel(size=scores.shape)).argmax(axis=1)
        texts = [text + vocabulary[2 + token] for text, token in zip(texts, drawn, strict=True)]
    return texts


def main() -> None:
    """Upload, train, print the losses and what the network writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--length", type=int, default=200, help="characters to write")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with Client() as client:
        text = client.datasets.upload(given.text, format="text")
        job = submit(client, text, rate=given.rate, seed=given.seed).wait(progress=True)
        print("| step | validation loss |")
        print("|---|---|")
        losses = job.metrics("validation/loss")
        for step, loss in zip(losses.steps, losses.values, strict=True):
            print(f"| {step + 1} | {loss:.3f} |")
        print(*write(client, job, "\n", given.length))


if __name__ == "__main__":
    main()
