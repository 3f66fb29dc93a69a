"""The programs of the documents, as they stand in ``examples``: on little data, and on the real."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

import glasshouse as gh
from examples import sentiment, seq2seq, shakespeare, word2vec
from tests.acceptance.services import ROOT, LocalService, run_python

LIMIT_S = 3600
Shown = Callable[..., list[list[str]]]


def data(name: str) -> Path:
    """Real data: beside the checkout, where it is."""
    for above in (ROOT, *ROOT.parents):
        found = above.parent / "shared" / "data" / name
        if found.exists():
            return found
    pytest.skip(f"../shared/data/{name} is not there")


@pytest.fixture
def shown(local_service: LocalService, capsys) -> Shown:
    """Run a program as a stranger does; the rows of the table that it prints."""

    def run(name: str, *arguments: str | Path) -> list[list[str]]:
        environment = local_service.environment | {"PYTHONPATH": str(ROOT)}
        script = str(ROOT / "examples" / f"{name}.py")
        said = run_python(script, *map(str, arguments), environment=environment, timeout=LIMIT_S)
        with capsys.disabled():
            print(f"\n{said}")  # noqa: T201 - the figures of the documentation
        lines = [line for line in said.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[1:]]

    return run


# --- word2vec ----------------------------------------------------------------------------------

KINDS = {
    "animal": ["cat", "dog", "horse", "goat", "hen"],
    "food": ["bread", "fruit", "corn", "fish", "grass"],
    "name": ["anna", "bert", "carl", "dora", "emil"],
}


def sentences(num: int) -> str:
    """Words of a kind stand where others of the kind do."""
    generator = np.random.default_rng(0)
    pick = {kind: generator.choice(words, num) for kind, words in KINDS.items()}
    rows = zip(pick["name"], pick["animal"], pick["food"], strict=True)
    return "\n".join(f"Then {n} gave her {a} some {f}." for n, a, f in rows)


def test_words_in_the_same_contexts_become_neighbors(client: gh.Client):
    words = word2vec.upload(client, [sentences(400)])
    job = word2vec.submit(client, words, num_words=24, epochs=10, batch_size=32).wait()
    found = word2vec.neighbors(job, [*KINDS["animal"], "unheard"], num=4)
    assert set(found) == set(KINDS["animal"])
    for word, nearest in found.items():
        assert set(nearest) == set(KINDS["animal"]) - {word}


ALIKE = {
    "king": {"prince", "duke", "emperor", "queen", "lord", "percy", "bolingbroke", "richard"},
    "he": {"she", "it", "they", "we", "you", "i"},
    "father": {"brother", "wife", "mother", "daughter", "husband", "uncle", "son"},
    "would": {"should", "could", "might", "may", "shall", "must", "will", "can"},
    "two": {"three", "four", "five", "seven", "ten", "these"},
    "movie": {"film", "picture", "documentary", "story", "thriller", "comedy"},
    "comedy": {"drama", "thriller", "comedies", "flick", "documentary", "film", "movie"},
}
"""Of three thousand words those that one would name oneself."""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_real_words_have_neighbors_of_their_kind(shown: Shown):
    texts = [data("tiny_shakespeare") / "input.txt"]
    texts += [data("rt_polarity") / f"rt-polarity.{ending}" for ending in ("pos", "neg")]
    table = {word: nearest.split(", ") for word, nearest in shown("word2vec", *texts)}
    for word, expected in ALIKE.items():
        assert len(expected & set(table[word])) >= 2, word


# --- regression --------------------------------------------------------------------------------


def test_a_table_of_numbers_is_predicted_better_than_by_its_mean(shown: Shown, tmp_path: Path):
    rows = load_diabetes()
    path = tmp_path / "diabetes.csv"
    np.savetxt(path, np.column_stack([rows.data, rows.target]), delimiter=",")
    for _, num_rows, _, variance, error, explained in shown("wine", path):
        assert int(num_rows) == 442
        assert 3000 < float(variance) < 9000  # of the rows that judge, in the target's own units
        assert float(error) < 0.7 * float(variance)
        assert float(explained) > 0.3


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_quality_of_wine_is_predicted(shown: Shown):
    colors = [data("wine_quality") / f"winequality-{color}.csv" for color in ("red", "white")]
    for _, _, network, _, _, explained in shown("wine", *colors):
        assert float(explained) > (0.25 if network == "linear" else 0.33)


# --- sentences ---------------------------------------------------------------------------------


def opinions(num: int) -> tuple[list[str], list[int]]:
    """Sentences with one word that tells, which is not always at the same place."""
    generator = np.random.default_rng(0)
    telling = [["dull", "weak", "poor"], ["great", "warm", "clever"]]
    texts: list[str] = []
    labels = generator.integers(0, 2, num).tolist()
    for label in labels:
        words = [str(generator.choice(telling[label])), *["a", "film", "with", "a", "plot"]]
        texts.append(" ".join(generator.permutation(words)[: generator.integers(4, 7)]))
        if not set(texts[-1].split()) & set(telling[label]):
            texts[-1] = f"{words[0]} film"
    return texts, labels


@pytest.mark.parametrize("network", sentiment.NETWORKS)
def test_a_telling_word_is_found_in_sentences(client: gh.Client, network: str):
    parts = sentiment.divide(*opinions(1000))
    rows = client.datasets.upload(parts)
    job = sentiment.submit(client, rows, network, epochs=8, embedding_dim=32).wait()
    checkpoint = sentiment.best(job)
    figures = job.metrics("validation/accuracy").values
    assert checkpoint.metrics["validation/accuracy"] == max(figures)
    assert sentiment.tested(client, checkpoint, rows, parts["test"]) > 0.9


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_real_sentences_are_distinguished(shown: Shown):
    table = shown("sentiment", data("rt_polarity"))
    assert {row[0] for row in table} == set(sentiment.NETWORKS)
    for *_, tested in table:
        assert float(tested) >= 0.74


# --- one sequence into another -----------------------------------------------------------------


@pytest.mark.parametrize("task", seq2seq.TASKS)
def test_a_task_is_learned_with_both_clippings(client: gh.Client, task: str):
    job = seq2seq.submit(client, task, num=2000, epochs=3).wait()
    assert seq2seq.teacher_forced(job) > 0.3
    figures = job.metrics()
    assert figures["clipped_steps"]["last"] > 0
    assert figures["output_grad_clip/decoder"]["max"] > 0
    if task == "copy":  # eleven inferences
        symbols, whole = seq2seq.alone(client, job, task, num=20)
        assert symbols > 0.15  # a random guess: 1 in 21
        assert 0 <= whole <= 1


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_both_tasks_are_learned_almost_perfectly(shown: Shown):
    table = {row[0]: [float(cell) for cell in row[1:]] for row in shown("seq2seq")}
    assert set(table) == set(seq2seq.TASKS)
    for told, symbols, _ in table.values():
        assert told >= 0.99
        assert symbols >= 0.99


# --- a writer ----------------------------------------------------------------------------------


def test_a_small_writer_learns_which_character_is_next(client: gh.Client):
    text = client.datasets.upload((ROOT / "LICENSE").read_bytes(), name="text", format="text")
    sizes = {"num_layers": 1, "num_heads": 2, "width": 64}
    job = shakespeare.submit(client, text, steps=150, **sizes).wait()
    losses = job.metrics("loss").numpy()
    num_characters = len(job.checkpoints()[-1].vocabulary())
    assert abs(losses[0] - np.log(num_characters)) < 0.2
    assert job.metrics()["validation/loss"]["last"] < 0.7 * losses[0]
    (first, second) = shakespeare.write(client, job, "the ", 3, rows=2)
    assert first[:4] == second[:4] == "the "
    assert len(first) == len(second) == 7


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_shakespeare_loss_is_that_of_nanogpt(shown: Shown):
    text = data("tiny_shakespeare") / "input.txt"
    for rate, most in (("0.001", 1.92), ("0.003", 1.88)):  # by hand, with 0.001: 1.911
        last_step, loss = shown("shakespeare", text, "--rate", rate, "--length", "5")[-1]
        assert int(last_step) == shakespeare.NUM_STEPS
        assert float(loss) <= most
