"""What is learned of rows that stay in their files: what rows in memory teach, bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.core.spool import read_frames
from engine.data.columns import dense, normalization, sequences
from engine.data.columns.prepared import Preparing
from engine.data.columns.table import StoredTable, Table
from engine.data.sources import reading
from engine.data.sources.loading import load
from engine.data.sources.reading import SourceReader, recut
from engine.data.sources.streamed import StreamedRows
from engine.process import rank
from engine.training import training_rows
from engine.training.report import Outputs
from glasshouse.errors import DataFailed
from glasshouse.spec import (
    DenseField,
    DenseSequenceField,
    Field,
    IntegerField,
    IntegerSequenceField,
    Normalize,
    Sequences,
    Shuffle,
    Source,
    Vocabulary,
)
from tests.unit.engine.ragged import job, meta_of, write_ragged
from tests.unit.engine.runs import (
    errors,
    losses,
    of_type,
    planned,
    run,
    spec,
    write_job,
    write_table,
)

CPU = torch.device("cpu")
NUM = 233


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of all kinds: numbers with gaps, texts, vectors; some of them do not fit."""
    draw = np.random.default_rng(5)
    words = [f"w{number}" for number in range(40)]
    rows = [
        {
            "x": None if draw.random() < 0.1 else float(draw.normal(1.7e9, 3)),
            "z": [float("nan") if draw.random() < 0.1 else float(v) for v in draw.normal(size=3)],
            "steps": draw.normal(2, 3, (int(draw.integers(1, 9)), 2)).tolist(),
            "text": " ".join(draw.choice(words, int(draw.integers(0, 12))).tolist()),
            "kind": ["a", "b", "c", "d"][int(draw.integers(0, 4))],
            "label": int(draw.integers(0, 11)),
        }
        for _ in range(NUM)
    ]
    return write_ragged(tmp_path_factory.mktemp("fitting"), rows)


FIELDS: dict[str, Field] = {
    "x": DenseField(type="dense"),
    "z": DenseField(type="dense", fill="median"),
    "z2": DenseField(type="dense", column="z", fill="mean", scale=2.0),
    "steps": DenseSequenceField(type="dense_sequence", dim=2),
    "text": IntegerSequenceField(
        type="integer_sequence", tokens="words", vocabulary=Vocabulary(min_count=3, max_size=30)
    ),
    "letters": IntegerSequenceField(type="integer_sequence", column="text", tokens="characters"),
    "kind": IntegerField(type="integer", classes=("c", "a", "b")),
    "label": IntegerField(type="integer", dim=10),
}
ASKED: dict[str, Any] = {
    "normalize": {
        "x": Normalize(type="standard"),
        "z2": Normalize(type="minmax"),
        "steps": Normalize(type="mean_normalization"),
    },
    "on_bad_row": "drop",
}
LIMITS = {
    "any length": Sequences(),
    "cut": Sequences(max_length=5),
    "without long ones": Sequences(max_length=30, overflow="drop"),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all rows are many blocks, and many windows."""
    for module in (dense, sequences, reading):
        monkeypatch.setattr(module, "BLOCK_VALUES", 64)
    monkeypatch.setattr(normalization, "_FEW", 20)


def both(
    table: Path, fields: dict[str, Field], source: Source, limit: Sequences = LIMITS["any length"],
    **asked: Any,
):  # fmt: skip
    preparing = Preparing(**asked)
    memory = load(
        source, fields, Table(table), seed=3, device=CPU, limit=limit, preparing=preparing
    )
    stored = StoredTable(table)
    reader = SourceReader(source, fields, stored, seed=3, limit=limit, preparing=preparing)
    return memory, StreamedRows(reader, CPU, shuffle=Shuffle(buffer_size=40))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("fraction", [None, (0.1, 0.8)])
@pytest.mark.usefixtures("small_blocks")
def test_files_teach_what_memory_teaches_bit_for_bit(table, limit, fraction):
    source = Source(dataset="d", fraction=fraction)
    memory, rows = both(table, FIELDS, source, LIMITS[limit], **ASKED)
    assert 0 < rows.num_rows == memory.num_rows < (NUM if fraction is None else 0.71 * NUM)
    assert rows.left_out == memory.left_out
    assert len(rows.left_out) >= 3
    mine, theirs = rows.prepared.state(), memory.prepared.state()
    assert mine.keys() == theirs.keys()
    assert {"x.shift", "z.fill", "z2.divisor", "steps.shift", "text.tokens"} <= mine.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    for batch in rows.epoch(8, drop_last=False, order=(1, 0)):
        expected = memory.batch(batch.taken)
        assert batch.keys() == expected.keys()
        assert torch.equal(batch.row_numbers, expected.row_numbers)
        for name in batch:
            assert torch.equal(batch[name], expected[name]), name
    rows.close()


@pytest.mark.usefixtures("small_blocks")
def test_bytes_are_normalized_as_in_memory(tmp_path):
    draw = np.random.default_rng(0)
    columns = {"image": draw.integers(0, 256, (50, 3, 4, 4)).astype(np.uint8)}
    table = write_table(tmp_path, columns, {"all": slice(None)})
    fields: dict[str, Field] = {"image": DenseField(type="dense")}
    wanted = {"image": Normalize(type="standard")}
    memory, rows = both(table, fields, Source(dataset="d"), normalize=wanted)
    for batch in rows.in_order(8):
        assert torch.equal(batch["image"], memory.batch(batch.taken)["image"])
    assert abs(float(rows.batch(slice(0, 50))["image"].mean())) < 1e-6


def test_what_was_learned_before_is_not_looked_for_again(table, monkeypatch):
    memory, _ = both(table, FIELDS, Source(dataset="d"), **ASKED)
    read: list[Any] = []
    monkeypatch.setattr(reading.SourceReader, "_blocks", lambda *args: read.append(args))
    monkeypatch.setattr(reading.SourceReader, "tokens", lambda *args: read.append(args))
    preparing = Preparing(**ASKED, known=memory.prepared)
    source = Source(dataset="d", fraction=(0.8, 1.0))
    reader = SourceReader(
        source, FIELDS, StoredTable(table), seed=3, limit=Sequences(), preparing=preparing
    )
    assert not read
    assert reader.prepared.state().keys() == memory.prepared.state().keys()


def test_a_row_that_cannot_be_normalized_is_named_before_the_first_step(tmp_path):
    x = np.ones((5000, 300), np.float32)
    x[4321, 7] = np.inf
    table = write_table(tmp_path, {"x": x}, {"all": slice(None)})
    fields: dict[str, Field] = {"x": DenseField(type="dense")}
    with pytest.raises(DataFailed, match="row 4321 of split 'all': value 7 of column 'x' is inf"):
        both_streamed = Preparing(normalize={"x": Normalize(type="standard")})
        SourceReader(
            Source(dataset="d"),
            fields,
            StoredTable(table),
            seed=0,
            limit=Sequences(),
            preparing=both_streamed,
        )


@pytest.mark.parametrize("few", [1, 7, 100, 10**6])
def test_medians_are_those_of_numpy_however_few_values_are_taken_at_once(few, monkeypatch):
    monkeypatch.setattr(normalization, "_FEW", few)
    draw = np.random.default_rng(few)
    for values in (
        draw.normal(size=(301, 3)),
        draw.integers(-2, 3, (200, 2)).astype(float),
        10.0 ** draw.integers(-300, 300, (64, 2)) * draw.choice([-1, 1], (64, 2)),
        np.zeros((50, 1)),
    ):
        values[draw.random(values.shape) < 0.2] = np.nan
        found = normalization.medians(lambda values=values: iter(np.array_split(values, 5)))
        assert np.array_equal(found, np.nanmedian(values, axis=0))


def test_values_are_cut_into_pieces_wherever_they_came_apart():
    parts = np.split(np.arange(23), [2, 2, 9, 10, 22])
    pieces = [piece.tolist() for piece in recut(iter(parts), 5)]
    assert pieces == [[*range(start, min(start + 5, 23))] for start in range(0, 23, 5)]


# --- in a training ---------------------------------------------------------------------------

POOLED = {
    "normalize": {"image": {"type": "standard"}},
    "shuffle": {"buffer_size": 128},
    "validation": {"dataset": "ds_1", "split": "test"},
}


def test_a_training_continues_with_what_it_learned_and_looks_at_no_row_again(digits, tmp_path):
    made = spec(data=POOLED, evaluate={"every_epochs": 1}, checkpoint={"every_steps": 1})
    records = run(tmp_path / "whole", made, digits)
    told = [r for r in of_type(records, "metrics") if "data/fit_s" in r["values"]]
    assert told[-1]["values"]["data/fitted_rows"] == 300
    assert told[-1]["step"] == 0
    made["data"] = {**made["data"], "shuffle": {}}
    run(tmp_path / "memory", made, digits)
    kept = [
        load_file(tmp_path / name / "checkpoints" / "step-4" / "data.safetensors")
        for name in ("whole", "memory")
    ]
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    made["data"] = {**made["data"], "shuffle": POOLED["shuffle"]}
    there = {"dir": str(tmp_path / "whole" / "checkpoints" / "step-4"), "step": 4}
    resumed = run(tmp_path / "resumed", made, digits, resume=there)
    assert losses(resumed) == losses(records)[4:]
    assert not [r for r in of_type(resumed, "metrics") if "data/fit_s" in r["values"]]


def test_a_job_that_is_asked_to_end_while_rows_are_gone_through_ends(
    digits, tmp_path, monkeypatch, capfd
):
    made = spec(data=POOLED)
    asked: list[int] = []

    def ask(self: training_rows.Progress, num_rows: int) -> None:
        asked.append(num_rows)
        self._control._end("cancelled")
        plain(self, num_rows)

    plain = training_rows.Progress.__call__
    monkeypatch.setattr(training_rows.Progress, "__call__", ask)
    write_job(tmp_path, planned(made)["spec"], digits)
    assert rank.main(tmp_path) == 0
    records, _ = read_frames(tmp_path / "spool", 0, 10**6)
    assert records[-1]["state"] == "cancelled"
    assert not of_type(records, "metrics")
    assert len(asked) == 1
    capfd.readouterr()


def test_a_long_sample_is_reported_while_it_lasts(monkeypatch, tmp_path):
    """A worker takes a rank that says nothing for one that stands still."""
    told: list[dict[str, Any]] = []
    flushed: list[int] = []
    monkeypatch.setattr(training_rows, "_REPORT_S", 0.0)
    out = Outputs(tmp_path, told.append, flush=lambda: flushed.append(len(told)))
    progress = training_rows.Progress(7, rank.Lifeline(None, tmp_path), out)
    for _ in range(3):
        progress(100)
    assert [item["values"]["data/fitted_rows"] for item in told] == [100, 200, 300]
    assert flushed == [1, 2, 3]
    assert {item["step"] for item in told} == {7}


# --- the plan --------------------------------------------------------------------------------


def test_tokens_that_nobody_counted_are_not_counted_beside_a_pool(table):
    meta = meta_of(table)
    text = {"type": "integer_sequence", "column": "text", "tokens": "words"}
    fields = {"ids": text, "label": {"type": "integer", "dim": 2}}
    made = job(data={"fields": fields, "shuffle": {"buffer_size": 20}, "batch_size": 10})
    needed = planned(made, meta)["memory"]["data_bytes"]
    column = next(item for item in meta["columns"] if item["name"] == "text")
    column["tokens"]["words"]["all"]["at_least"] = None
    text["vocabulary"] = {"max_size": 100}
    assert "give the vocabulary" in errors(made, meta)["/data/fields/ids/vocabulary"]
    text["vocabulary"] = {"given": ["w1"]}
    assert planned(made, meta)["memory"]["data_bytes"] == needed - 40 * 250
    made["data"]["shuffle"] = {}
    text["vocabulary"] = {"max_size": 100}
    assert planned(made, meta)["memory"]["data_bytes"] > 0


def test_the_plan_counts_what_it_takes_to_know_which_rows_fit(table):
    meta = json.loads(json.dumps(meta_of(table)))
    meta["splits"]["all"] = 10**6
    fields = {
        "ids": {"type": "dense", "column": "x", "shape": [1]},
        "label": {"type": "integer", "dim": 11},
    }
    data = {"fields": fields, "shuffle": {"buffer_size": 20}, "batch_size": 10}
    network = [{"name": "fc", "type": "Linear", "args": {"out_features": 11}, "inputs": ["ids"]}]
    for item in meta["columns"]:
        item["missing"] = 0
    plain = planned(job(network, data=data), meta)["memory"]["data_bytes"]
    network = [{"name": "fc", "type": "Linear", "args": {"out_features": 11}, "inputs": ["ids"]}]
    drops = planned(job(network, data={**data, "on_bad_row": "drop"}), meta)["memory"]
    assert drops["data_bytes"] == plain + 16 * 10**6
