"""Texts as tokens: vocabularies, windows over running text, and inference from plain strings."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.data.columns.prepared import Prepared, Preparing
from engine.data.columns.table import Table
from engine.data.sources.joined import source_rows
from engine.data.sources.loading import load
from engine.data.sources.text_windows import num_windows
from engine.datasets.ingest import ingest
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    CbowWindows,
    Field,
    IntegerField,
    IntegerSequenceField,
    LanguageModelWindows,
    Sequences,
    Source,
    Vocabulary,
)
from tests.unit.engine.ragged import meta_of, write_ragged
from tests.unit.engine.runs import errors, losses, of_type, planned, run, spec

CPU = torch.device("cpu")
REVIEWS = [
    ("a fine film", 1), ("dull , dull film", 0), ("", 0), ("a fine  cast", 1), ("dull", 0),
    ("fine fine fine", 1), ("über film", 1), ("dull cast a film", 0),
]  # fmt: skip
LINES = ["28 29 4 10 4", "4 4 10", "", "7 28 4 29 10 4 4", "9"]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory) -> Path:
    rows = [{"text": text, "label": label} for text, label in REVIEWS]
    return write_ragged(tmp_path_factory.mktemp("reviews"), rows)


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("lines")
    (directory / "lines.txt").write_text("\n".join(LINES) + "\n")
    ingest(directory / "lines.txt", "text", directory / "dataset")
    return directory / "dataset"


def by_hand(texts: list[str], min_count: int = 1, most: int | None = None) -> list[str]:
    """A vocabulary as it is documented: by falling count, then by the token."""
    counts = Counter(word for text in texts for word in text.split())
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [word for word in ranked if counts[word] >= min_count][:most]


def read(table: Path, source: Source | None = None, limit: Sequences | None = None,
         fields: dict[str, Field] | None = None, **preparing: Any):  # fmt: skip
    return load(
        source or Source(dataset="d"), fields or {"text": WORDS}, Table(table), seed=0, device=CPU,
        limit=limit or Sequences(), preparing=Preparing(**preparing),
    )  # fmt: skip


WORDS = IntegerSequenceField(type="integer_sequence", tokens="words", dim=100)


# --- vocabularies ----------------------------------------------------------------------------


def test_words_get_ids_from_two_on_by_how_often_they_occur(reviews):
    rows = read(reviews)
    listed = by_hand([text for text, _ in REVIEWS])
    assert listed[:3] == ["fine", "dull", "film"]
    assert rows.prepared.tokens["text"].listed == listed
    batch = rows.batch(slice(0, len(REVIEWS)))
    for (text, _), ids, length in zip(REVIEWS, batch["text"], batch["text.lengths"], strict=True):
        assert ids[:length].tolist() == [listed.index(word) + 2 for word in text.split()]
        assert (ids[length:] == 0).all()


@pytest.mark.parametrize(
    ("vocabulary", "dim", "kept"),
    [
        (Vocabulary(max_size=2), 100, ["fine", "dull"]),
        (Vocabulary(min_count=2), 100, ["fine", "dull", "film", "a", "cast"]),
        (Vocabulary(given=("cast", "dull", "zebra")), 100, ["cast", "dull", "zebra"]),
        (None, 4, ["fine", "dull"]),
    ],
)
def test_what_is_not_in_the_vocabulary_is_one(reviews, vocabulary, dim, kept):
    field = WORDS.model_copy(update={"vocabulary": vocabulary, "dim": dim})
    rows = read(reviews, fields={"text": field})
    assert rows.prepared.tokens["text"].listed == kept
    ids = rows.batch(slice(7, 8))["text"][0].tolist()
    words = REVIEWS[7][0].split()
    assert ids == [kept.index(word) + 2 if word in kept else 1 for word in words]


def test_a_vocabulary_is_that_of_the_rows_and_steps_that_are_trained_on(reviews):
    half = Source(dataset="d", fraction=(0.0, 0.5))
    taken = source_rows(len(REVIEWS), (0.0, 0.5), 0).tolist()
    texts = [REVIEWS[number][0] for number in taken]
    assert read(reviews, half).prepared.tokens["text"].listed == by_hand(texts)
    cut = read(reviews, half, Sequences(max_length=1))
    firsts = [" ".join(text.split()[:1]) for text in texts]
    assert cut.prepared.tokens["text"].listed == by_hand(firsts)
    rest = Source(dataset="d", fraction=(0.5, 1.0))
    judged = read(reviews, rest, known=cut.prepared)
    assert judged.prepared.tokens["text"].listed == by_hand(firsts)


def test_characters_are_those_of_unicode(reviews):
    field = IntegerSequenceField(type="integer_sequence", tokens="characters", dim=100)
    rows = read(reviews, fields={"text": field})
    listed = rows.prepared.tokens["text"].listed
    batch = rows.batch(slice(6, 7))
    assert "".join(listed[i - 2] for i in batch["text"][0].tolist()) == "über film"


@pytest.mark.parametrize("unit", ["words", "characters"])
@pytest.mark.parametrize("min_count", [1, 2, 3, 4, 30])
def test_a_plan_knows_the_size_of_the_vocabulary_exactly(reviews, unit, min_count):
    field = {"type": "integer_sequence", "tokens": unit, "vocabulary": {"min_count": min_count}}
    job = classifier(fields={"text": field, "label": {"type": "integer", "dim": 2}})
    resolved = planned(job, meta_of(reviews))["spec"]
    asked = IntegerSequenceField.model_validate_json(json.dumps(field))
    rows = read(reviews, fields={"text": asked.model_copy(update={"dim": 100})})
    assert resolved["data"]["fields"]["text"]["dim"] == rows.prepared.tokens["text"].dim
    sizes = {layer["name"]: layer["args"] for layer in resolved["network"]["layers"]}
    assert sizes["emb"]["num_embeddings"] == rows.prepared.tokens["text"].dim


# --- windows ---------------------------------------------------------------------------------


def running(texts: list[str]) -> list[str]:
    """The words of a running text, by hand."""
    return [word for text in texts for word in [*text.split(), "\n"]]


@pytest.mark.parametrize("stride", [None, 1, 3, 7])
@pytest.mark.parametrize("fraction", [None, (0.0, 0.5), (0.5, 1.0)])
def test_a_language_model_reads_blocks_and_what_follows_them(lines, stride, fraction):
    windows = LanguageModelWindows(type="language_model", tokens="words", length=4, stride=stride)
    fields: dict[str, Field] = {
        "input": IntegerSequenceField(type="integer_sequence", dim=50),
        "target": IntegerSequenceField(type="integer_sequence", dim=50),
    }
    rows = read(lines, Source(dataset="d", fraction=fraction), fields=fields, windows=windows)
    words = running(LINES)
    first, last = fraction or (0, 1)
    words = words[int(first * len(words)) : int(last * len(words))]
    listed = rows.prepared.tokens["data.windows"].listed
    starts = range(0, len(words) - 4, stride or 4)
    assert rows.num_rows == len(starts)
    batch = rows.batch(torch.arange(rows.num_rows).flip(0))
    for start, x, y in zip(reversed(starts), batch["input"], batch["target"], strict=True):
        assert [listed[i - 2] for i in x.tolist()] == words[start : start + 4]
        assert [listed[i - 2] for i in y.tolist()] == words[start + 1 : start + 5]
    assert batch["input.lengths"].tolist() == [4] * rows.num_rows


@pytest.mark.parametrize(("window", "stride"), [(2, 1), (1, 2), (3, 1)])
def test_a_word_is_predicted_from_the_words_around_it(lines, window, stride):
    windows = CbowWindows(type="cbow", tokens="words", window=window, stride=stride)
    fields: dict[str, Field] = {
        "context": IntegerSequenceField(type="integer_sequence", dim=50),
        "centre": IntegerField(type="integer", dim=50),
    }
    rows = read(lines, fields=fields, windows=windows)
    words = running(LINES)
    listed = rows.prepared.tokens["data.windows"].listed
    centres = range(window, len(words) - window, stride)
    batch = rows.batch(slice(0, rows.num_rows))
    assert rows.num_rows == len(centres)
    for centre, context, word in zip(centres, batch["context"], batch["centre"], strict=True):
        around = [*words[centre - window : centre], *words[centre + 1 : centre + window + 1]]
        assert [listed[i - 2] for i in context.tolist()] == around
        assert listed[word - 2] == words[centre]
    if (window, stride) == (2, 1):
        first = [listed[i - 2] for i in batch["context"][0].tolist()]
        assert (first, listed[batch["centre"][0] - 2]) == (["28", "29", "10", "4"], "4")


@pytest.mark.parametrize("num_tokens", range(12))
def test_windows_are_counted_as_they_are_made(num_tokens):
    blocks = LanguageModelWindows(type="language_model", tokens="words", length=3, stride=2)
    starts = [at for at in range(0, num_tokens, 2) if at + 3 + 1 <= num_tokens]
    assert num_windows(blocks, num_tokens) == len(starts)
    contexts = CbowWindows(type="cbow", tokens="words", window=2, stride=3)
    assert num_windows(contexts, num_tokens) == len(range(2, num_tokens - 2, 3))


def test_a_text_that_is_shorter_than_a_window_fails(lines):
    windows = LanguageModelWindows(type="language_model", tokens="words", length=400)
    with pytest.raises(DataFailed, match="has 21 tokens here, and a window takes more"):
        read(lines, fields={"input": WORDS}, windows=windows)


# --- jobs ------------------------------------------------------------------------------------


def classifier(**data: Any) -> dict[str, Any]:
    fields = {"text": {"type": "integer_sequence", "tokens": "words"},
              "label": {"type": "integer", "dim": 2}}  # fmt: skip
    return spec(
        network={"layers": [
            {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}, "inputs": ["text"]},
            {"name": "pool", "type": "SequencePool", "args": {"mode": "average"}},
            {"name": "fc", "type": "Linear", "args": {"out_features": 2}},
        ]},
        data={"train": {"dataset": "ds_1", "fraction": [0, 0.7]},
              "validation": {"dataset": "ds_1", "fraction": [0.7, 1]},
              "fields": fields, "batch_size": 2, **data},
        evaluate={"every_epochs": 1},
        checkpoint={"every_steps": 1, "keep_last": 50},
    )  # fmt: skip


def language_model(**data: Any) -> dict[str, Any]:
    windows = {"type": "language_model", "tokens": "characters", "length": 4, "stride": 2}
    return spec(
        network={"layers": [
            {"name": "emb", "type": "Embedding", "args": {"embedding_dim": 4}, "inputs": ["input"]},
            {"name": "gru", "type": "GRU", "args": {"hidden_size": 6, "batch_first": True}},
            {"name": "fc", "type": "Linear", "args": {"out_features": 11}},
            {"name": "classes", "type": "permute", "args": {"dims": [0, 2, 1]}},
        ]},
        loss={"type": "CrossEntropyLoss", "inputs": ["classes", "target"]},
        data={"train": {"dataset": "ds_1", "fraction": [0, 0.8]},
              "validation": {"dataset": "ds_1", "fraction": [0.8, 1]},
              "windows": windows, "batch_size": 3,
              "fields": {"input": {"type": "integer_sequence"},
                         "target": {"type": "integer_sequence"}}, **data},
        evaluate={"every_epochs": 1},
        checkpoint={"every_steps": 1, "keep_last": 50},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["classifier", "language_model"])
def test_a_job_on_texts_resumes_bit_for_bit(kind, reviews, lines, tmp_path):
    job, table = (classifier(), reviews) if kind == "classifier" else (language_model(), lines)
    records = run(tmp_path / "whole", job, table)
    step = len(losses(records)) * 2 // 3
    there = {"dir": str(tmp_path / "whole" / "checkpoints" / f"step-{step}"), "step": step}
    rest = run(tmp_path / "rest", job, table, resume=there)
    assert losses(rest) == losses(records)[step:]
    assert len(losses(rest)) > 0
    ends = [
        load_file(tmp_path / name / of_type(found, "checkpoint")[-1]["dir"] / "model.safetensors")
        for name, found in (("whole", records), ("rest", rest))
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_plan_knows_how_many_windows_there_are(lines, tmp_path):
    plan = planned(language_model(), meta_of(lines))
    records = run(tmp_path, language_model(), lines)
    assert plan["num_steps"] == len(losses(records))
    assert plan["memory"]["data_bytes"] > 0
    num_characters = len("\n".join(LINES)) + 1
    assert (num_characters, sorted(set("\n".join(LINES)))) == (40, list("\n 0124789"))
    assert plan["spec"]["data"]["fields"]["input"]["dim"] == 11


def test_inference_takes_plain_texts(reviews, tmp_path):
    records = run(tmp_path / "train", classifier(), reviews)
    resolved = planned(classifier(), meta_of(reviews))["spec"]
    last = tmp_path / "train" / of_type(records, "checkpoint")[-1]["dir"]
    more = {"checkpoint": {"dir": str(last)}, "trained_by": resolved}
    asked = {"kind": "infer", "checkpoint": "ckpt_1", "outputs": ["fc", "emb"]}
    texts = [text for text, _ in REVIEWS]
    run(tmp_path / "data", {**asked, "data": {"dataset": "ds_1"}}, reviews, **more)
    run(tmp_path / "inline", {**asked, "inputs": {"text": texts}}, reviews, **more)
    ids = [Prepared.of(last).tokens["text"].ids(text.split()) for text in texts]
    run(tmp_path / "ids", {**asked, "inputs": {"text": ids}}, reviews, **more)
    found = [
        load_file(tmp_path / name / "artifacts" / "outputs.safetensors")
        for name in ("data", "inline", "ids")
    ]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    weights = load_file(last / "model.safetensors")
    table = weights["emb.weight"].numpy()
    pooled = np.stack([table[row].mean(axis=0) if row else np.zeros(4) for row in ids])
    expected = pooled @ weights["fc.weight"].numpy().T + weights["fc.bias"].numpy()
    np.testing.assert_allclose(found[0]["fc/value"], expected, rtol=1e-5, atol=1e-6)


def test_a_language_model_continues_from_a_plain_text(lines, tmp_path):
    records = run(tmp_path / "train", language_model(), lines)
    resolved = planned(language_model(), meta_of(lines))["spec"]
    last = tmp_path / "train" / of_type(records, "checkpoint")[-1]["dir"]
    more = {"checkpoint": {"dir": str(last)}, "trained_by": resolved}
    asked = {"kind": "infer", "checkpoint": "ckpt_1", "outputs": ["fc"]}
    run(tmp_path / "inline", {**asked, "inputs": {"input": ["28 2", "4"]}}, lines, **more)
    found = load_file(tmp_path / "inline" / "artifacts" / "outputs.safetensors")
    assert found["fc/lengths"].tolist() == [4, 1]
    run(tmp_path / "data", {**asked, "data": {"dataset": "ds_1"}}, lines, **more)
    rows = load_file(tmp_path / "data" / "artifacts" / "outputs.safetensors")["fc/value"]
    assert len(rows) == (40 - 1 - 4) // 2 + 1
    torch.testing.assert_close(rows[0, :4], found["fc/value"][0, :4])


def test_a_job_that_begins_with_a_checkpoint_keeps_its_vocabulary(reviews, lines, tmp_path):
    """Ids mean the same words, though the new rows would give others."""
    records = run(tmp_path / "train", classifier(), reviews)
    resolved = planned(classifier(), meta_of(reviews))["spec"]
    last = tmp_path / "train" / of_type(records, "checkpoint")[-1]["dir"]
    other = write_ragged(tmp_path / "other", [{"text": "new words", "label": 0}] * 4)
    job = classifier() | {"init": {"checkpoint": "ckpt_1"}, "stop": {"steps": 1}}
    job["data"] |= {"train": {"dataset": "ds_1"}, "validation": None}
    del job["data"]["validation"], job["evaluate"]
    more = {"checkpoint": {"dir": str(last)}, "trained_by": resolved}
    run(tmp_path / "next", job, other, **more)
    found = Prepared.of(tmp_path / "next" / "checkpoints" / "step-1")
    assert found.tokens["text"].listed == Prepared.of(last).tokens["text"].listed


def test_a_dataset_without_token_counts_is_refused(reviews, lines):
    for job, table, pointer in (
        (classifier(), reviews, "/data/fields/text/column"),
        (language_model(), lines, "/data/windows/column"),
    ):
        meta = meta_of(table)
        for column in meta["columns"]:
            column.pop("tokens", None)
        assert "upload the dataset again" in errors(job, meta)[pointer]


def test_more_tokens_than_were_counted_need_a_size(reviews):
    meta = meta_of(reviews)
    (column,) = [item for item in meta["columns"] if item["name"] == "text"]
    column["tokens"]["words"]["all"]["at_least"] = None
    found = errors(classifier(), meta)
    assert "how many of them have an id" in found["/data/fields/text/vocabulary/max_size"]
    text = {"type": "integer_sequence", "tokens": "words", "vocabulary": {"max_size": 5}}
    fields = {"text": text, "label": {"type": "integer", "dim": 2}}
    resolved = planned(classifier(fields=fields), meta)["spec"]
    assert resolved["data"]["fields"]["text"]["dim"] == 7


@pytest.mark.parametrize(
    ("make", "data", "pointer", "says"),
    [
        (classifier, {"fields": {"text": {"type": "integer_sequence", "dim": 9}}},
         "/data/fields/text", "say which tokens it is made of"),
        (classifier, {"fields": {"text": {"type": "integer_sequence", "tokens": "words",
                                          "dim": 2}}},
         "/data/fields/text/dim", "dim counts padding and unknown tokens too"),
        (classifier, {"fields": {"text": {"type": "integer_sequence", "vocabulary": {}}}},
         "/data/fields/text/vocabulary", "vocabulary needs tokens"),
        (classifier, {"fields": {"text": {"type": "integer_sequence", "tokens": "words",
                                          "vocabulary": {"given": ["a"], "max_size": 3}}}},
         "/data/fields/text", "given is the whole vocabulary"),
        (language_model, {"sequence": {"max_length": 3}}, "/data/sequence/max_length",
         "windows have their own length"),
        (language_model, {"on_bad_row": "drop"}, "/data/on_bad_row", "have no bad rows"),
        (language_model, {"windows": {"type": "cbow", "tokens": "words", "column": "zz"}},
         "/data/windows/column", "the dataset has no column 'zz'"),
        (language_model, {"windows": {"type": "cbow", "tokens": "words"}},
         "/data/fields/input", "has no column 'input'; it has: context, centre"),
        (language_model, {"fields": {"input": {"type": "dense"},
                                     "target": {"type": "integer_sequence"}}},
         "/data/fields/input/type", "windows give integers"),
        (language_model, {"train": {"dataset": "ds_1", "fraction": [0, 0.1]}},
         "/data/train", "the text is shorter than a window"),
    ],
)  # fmt: skip
def test_what_texts_cannot_give_is_refused(make, data, pointer, says, reviews, lines):
    table = reviews if make is classifier else lines
    found = errors(make(**data), meta_of(table))
    key = next((name for name in found if name.startswith(pointer)), "")
    assert says in found.get(key, str(found))
    assert key
