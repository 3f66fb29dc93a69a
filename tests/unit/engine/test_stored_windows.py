"""Windows over a text that stays in its file: the windows that memory gives, from a pool."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.data.columns.prepared import Preparing
from engine.data.columns.table import StoredTable, Table
from engine.data.sources.loading import load
from engine.data.sources.streamed import StreamedRows
from engine.data.sources.streamed_windows import WindowReader
from engine.datasets.ingest import ingest
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    CbowWindows,
    Field,
    IntegerField,
    IntegerSequenceField,
    LanguageModelWindows,
    Shuffle,
    Source,
    Vocabulary,
    Windows,
)
from tests.unit.engine.ragged import meta_of
from tests.unit.engine.runs import errors, losses, of_type, planned, run
from tests.unit.engine.test_tokens import language_model

CPU = torch.device("cpu")


def fields(*names: str) -> dict[str, Field]:
    made: dict[str, Field] = {
        name: IntegerSequenceField(type="integer_sequence", dim=60) for name in names
    }
    if "centre" in made:
        made["centre"] = IntegerField(type="integer", dim=60)
    return made


def blocks(**more: Any) -> LanguageModelWindows:
    return LanguageModelWindows(type="language_model", **{"tokens": "words", "length": 5, **more})


def contexts(**more: Any) -> CbowWindows:
    return CbowWindows(type="cbow", **{"tokens": "words", **more})


KINDS: dict[str, tuple[Windows, dict[str, Field]]] = {
    "blocks": (blocks(), fields("input", "target")),
    "blocks that overlap": (blocks(stride=2), fields("input", "target")),
    "blocks with gaps": (blocks(length=3, stride=7), fields("target")),
    "characters": (blocks(tokens="characters", length=9), fields("input", "target")),
    "few words": (blocks(vocabulary=Vocabulary(max_size=6)), fields("input", "target")),
    "given": (blocks(vocabulary=Vocabulary(given=("w3", "w1"))), fields("input")),
    "contexts": (contexts(), fields("context", "centre")),
    "far contexts": (contexts(window=4, stride=3), fields("context", "centre")),
    "centres": (contexts(stride=2), fields("centre")),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Path:
    """Some rows are empty, one is long, and characters have different sizes."""
    generator = np.random.default_rng(0)
    sizes = [0, 3, 90, 0, 0, *generator.integers(0, 14, 40).tolist(), 0]
    lines = [" ".join(f"w{n}" for n in generator.geometric(0.15, size)) for size in sizes]
    lines[7] += " über 日本"
    directory = tmp_path_factory.mktemp("text")
    (directory / "text.txt").write_text("\n".join(lines) + "\n")
    ingest(directory / "text.txt", "text", directory / "dataset")
    return directory / "dataset"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", [None, (0.0, 0.6), (0.37, 0.9)])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.long
def test_windows_and_vocabulary_are_those_of_a_text_in_memory(text, kind, fraction, workers):
    windows, wanted = KINDS[kind]
    source = Source(dataset="d", fraction=fraction)
    preparing = Preparing(windows=windows)
    memory = load(source, wanted, Table(text), seed=3, device=CPU, preparing=preparing)
    reader = WindowReader(source, wanted, StoredTable(text), windows)
    rows = StreamedRows(reader, CPU, shuffle=Shuffle(buffer_size=16), workers=workers)
    assert rows.num_rows == memory.num_rows
    assert memory.prepared is not None
    mine = reader.prepared.tokens["data.windows"].listed
    assert mine == memory.prepared.tokens["data.windows"].listed
    again = WindowReader(source, wanted, StoredTable(text), windows, memory.prepared)
    assert again.prepared is memory.prepared
    for order, first in (((3, 0), 0), ((3, 1), 1), (None, 0)):
        seen: list[int] = []
        for batch in rows.epoch(8, drop_last=False, order=order, first=first):
            expected = memory.batch(batch.taken)
            assert {n: t.dtype for n, t in batch.items()} == {
                n: t.dtype for n, t in expected.items()
            }
            assert all(torch.equal(batch[name], expected[name]) for name in expected)
            seen += batch.row_numbers.tolist()
        assert len(set(seen)) == rows.num_rows - 8 * first
    rows.close()


def test_no_more_of_the_text_is_read_than_its_windows_need(text, monkeypatch):
    windows, wanted = KINDS["blocks"]
    reader = WindowReader(Source(dataset="d"), wanted, StoredTable(text), windows)
    read: list[int] = []
    plain = StoredTable.window

    def counting(self: StoredTable, split: str, runs: Any) -> Any:
        read.append(sum(last - first for first, last in runs))
        return plain(self, split, runs)

    monkeypatch.setattr(StoredTable, "window", counting)
    reader.read_runs([(0, 1), (30, 32)])
    assert sum(read) <= 3 + 4 + 8


def test_a_text_that_is_shorter_than_a_window_fails(text):
    with pytest.raises(DataFailed, match="a window takes more"):
        WindowReader(Source(dataset="d"), fields("input"), StoredTable(text), blocks(length=9999))


POOL = {"shuffle": {"buffer_size": 12, "min_buffer_size": 6}, "batch_size": 4}


@pytest.mark.parametrize("more", [{}, {"workers": 2}, {"cache": "memory"}], ids=str)
@pytest.mark.long
def test_a_job_resumes_bit_for_bit_in_the_middle_of_an_epoch(more, text, tmp_path):
    job = language_model(**POOL, **more)
    job["network"]["layers"][2]["args"]["out_features"] = 60
    records = run(tmp_path / "whole", job, text)
    assert planned(job, meta_of(text))["num_steps"] == len(losses(records))
    step = len(losses(records)) * 2 // 3
    there = {"dir": str(tmp_path / "whole" / "checkpoints" / f"step-{step}"), "step": step}
    rest = run(tmp_path / "rest", job, text, resume=there)
    assert losses(rest) == losses(records)[step:]
    assert len(losses(rest)) > 0
    ends = [
        load_file(tmp_path / name / of_type(found, "checkpoint")[-1]["dir"] / "model.safetensors")
        for name, found in (("whole", records), ("rest", rest))
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.long
def test_evaluations_are_those_of_a_text_in_memory(text, tmp_path):
    found: list[list[float]] = []
    for name, more in (("pool", POOL), ("memory", {"batch_size": 4})):
        job = language_model(**more) | {"optimizer": {"type": "SGD", "args": {"lr": 0.0}}}
        job["network"]["layers"][2]["args"]["out_features"] = 60
        records = run(tmp_path / name, job, text)
        values = [item["values"] for item in of_type(records, "metrics")]
        found.append([item["validation/loss"] for item in values if "validation/loss" in item])
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_the_plan_counts_the_pool_and_not_the_text(text):
    """And where the rows of the text begin, and the tokens while they are counted."""
    meta = meta_of(text)
    sizes = []
    for buffer_size in (None, 8, 40):
        shuffle = {} if buffer_size is None else {"shuffle": {"buffer_size": buffer_size}}
        job = language_model(batch_size=4, **shuffle)
        job["network"]["layers"][2]["args"]["out_features"] = 60
        sizes.append(planned(job, meta)["memory"]["data_bytes"])
    row = 2 * (4 * 4 + 128) + 24
    assert sizes[2] - sizes[1] == 32 * row
    meta["columns"][0]["tokens"]["characters"]["all"]["total"] += 10**9
    large = language_model(batch_size=4, shuffle={"buffer_size": 8})
    large["network"]["layers"][2]["args"]["out_features"] = 60
    assert planned(large, meta)["memory"]["data_bytes"] - sizes[1] < 8 * 10**9 / 2 / 4 + 10**6


def test_a_vocabulary_of_more_tokens_than_were_counted_must_be_given(text):
    meta = json.loads((text / "meta.json").read_text())
    meta["columns"][0]["tokens"]["characters"]["all"]["at_least"] = None
    windows = language_model()["data"]["windows"]
    job = language_model(**POOL, windows=windows | {"vocabulary": {"max_size": 58}})
    assert [*errors(job, meta)] == ["/data/windows/vocabulary"]
