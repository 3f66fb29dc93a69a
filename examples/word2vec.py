"""Word vectors from the words around: ``python examples/word2vec.py FILE …`` prints neighbors.

The FILEs are texts, such as tiny_shakespeare. The network is that of PaddlePaddle's FAQ: which of
3,000 words stands between two before and two after? Needs a running service (``glasshouse up``).
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse import Client
from glasshouse.client import Dataset, Job
from glasshouse.spec import Preset

NUM_WORDS = 3000
"""As many ids: padding, one for all other words, and the most frequent words."""
ASKED = ["king", "he", "father", "good", "would", "two", "york", "movie", "funny", "comedy"]


def words_of(texts: Iterable[str]) -> list[str]:
    """The lines of texts as words in small letters, without punctuation."""
    lines = (line for text in texts for line in text.splitlines())
    found = (re.findall(r"[a-z]+(?:'[a-z]+)*", line.lower()) for line in lines)
    return [" ".join(words) for words in found if words]


def upload(client: Client, texts: Iterable[str]) -> Dataset:
    """Upload the words of texts."""
    content = "\n".join(words_of(texts)).encode()
    return client.datasets.upload(content, name="words", format="text")


def layers(num_words: int) -> list[dict[str, Any]]:
    """The preset's, with vectors that begin as small as PaddlePaddle's did.

    torch's begin a hundred times as large, and what is learned is small beside that.
    """
    graph = Preset(type="preset", preset="cbow", args={"num_words": num_words}).graph()
    embedding, scores = [item.model_dump(mode="json", exclude_unset=True) for item in graph.layers]
    embedding["init"] = {"weight": {"type": "normal_", "args": {"std": num_words**-0.5}}}
    return [embedding, scores]


def submit(
    client: Client,
    words: Dataset,
    num_words: int = NUM_WORDS,
    epochs: int = 3,
    batch_size: int = 256,
) -> Job:
    """Queue the training: the sum of four words' vectors tells the word between them."""
    return client.train(
        layers(num_words),
        words,
        windows={
            "type": "cbow",
            "tokens": "words",
            "window": 2,
            "vocabulary": {"max_size": num_words - 2},
        },
        split="all",
        optimizer={"type": "Adagrad", "args": {"lr": 0.03}},
        batch_size=batch_size,
        epochs=epochs,
        probes=[{"layers": ["embedding"], "kinds": ["output"], "every": 100}],
        seed=1,
        name="word2vec",
    )


def neighbors(job: Job, asked: Sequence[str], num: int = 6) -> dict[str, list[str]]:
    """The words whose vectors have the highest cosine with those of the words asked for."""
    checkpoint = job.checkpoints()[-1]
    words = checkpoint.vocabulary()
    vectors = checkpoint.weights()["embedding.weight"][2 : len(words)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found: dict[str, list[str]] = {}
    for word in set(asked) & set(words):
        cosines = vectors @ vectors[words.index(word) - 2]
        found[word] = [words[2 + place] for place in np.argsort(-cosines)[1 : num + 1]]
    return {word: found[word] for word in asked if word in found}


def main() -> None:
    """Upload, train, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, nargs="+", help="text files")
    parser.add_argument("--words", nargs="+", default=ASKED, help="whose neighbors")
    given = parser.parse_args()
    with Client() as client:
        words = upload(client, [path.read_text() for path in given.texts])
        job = submit(client, words).wait(progress=True)
        print("| word | nearest |")
        print("|---|---|")
        for word, nearest in neighbors(job, given.words).items():
            print(f"| {word} | {', '.join(nearest)} |")


if __name__ == "__main__":
    main()
