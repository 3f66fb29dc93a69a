"""Rows that stay in their files: the rows that memory would have, a pool of bounded size."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.core.problems import Findings
from engine.core.spool import read_frames
from engine.data.batches.rows import shuffled
from engine.data.batches.shuffle_pool import Pool
from engine.data.columns.table import StoredTable, Table
from engine.data.sources.loading import load
from engine.data.sources.reading import SourceReader
from engine.data.sources.streamed import StreamedRows
from engine.plan.data_memory import check_streaming
from engine.process import rank
from glasshouse.errors import DataFailed
from glasshouse.events import is_upkeep
from glasshouse.spec import (
    Data,
    DenseField,
    DenseSequenceField,
    Field,
    IntegerField,
    IntegerSequenceField,
    Sequences,
    Shuffle,
    Source,
    SparseBinaryField,
    SparseFloatField,
)
from tests.unit.engine.pools import drawn
from tests.unit.engine.ragged import job, layers, meta_of, texts, write_ragged
from tests.unit.engine.runs import (
    CNN,
    cnn,
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
NO_LIMIT = Sequences()
DIGIT_FIELDS: dict[str, Field] = {
    "image": DenseField(type="dense", shape=(1, 8, 8)),
    "label": IntegerField(type="integer", dim=10),
}


def streamed(
    table: Path,
    fields: dict[str, Field],
    source: Source | None = None,
    *,
    limit: Sequences = NO_LIMIT,
    workers: int = 0,
    **shuffle: Any,
) -> StreamedRows:
    reader = SourceReader(
        source or Source(dataset="d"), fields, StoredTable(table), seed=3, limit=limit
    )
    return StreamedRows(reader, CPU, shuffle=Shuffle(**shuffle), workers=workers)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


# --- the same rows as in memory --------------------------------------------------------------


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of every kind of field, some of them empty."""
    generator = np.random.default_rng(0)
    rows = [
        {
            "ids": generator.integers(0, 10, n).tolist(),
            "steps": generator.random((n, 2)).round(3).tolist(),
            "places": sorted(generator.choice(30, n % 5, replace=False).tolist()),
            "pairs": [[i, i / 4] for i in range(n % 4)],
            "x": float(n),
            "label": n % 2,
        }
        for n in generator.integers(0, 12, 61).tolist()
    ]
    return write_ragged(tmp_path_factory.mktemp("lists"), rows)


LIST_FIELDS: dict[str, Field] = {
    "ids": IntegerSequenceField(type="integer_sequence", dim=10, padding_value=7),
    "steps": DenseSequenceField(type="dense_sequence", dim=2, scale=2.0),
    "places": SparseBinaryField(type="sparse_binary", dim=30),
    "pairs": SparseFloatField(type="sparse_float", dim=30),
    "x": DenseField(type="dense", columns=("x", "label")),
    "label": IntegerField(type="integer", dim=2),
}
SOURCES = {
    "all": (Source(dataset="d"), NO_LIMIT),
    "a part": (Source(dataset="d", fraction=(0.2, 0.9)), NO_LIMIT),
    "cut": (Source(dataset="d"), Sequences(max_length=6)),
    "without long ones": (Source(dataset="d"), Sequences(max_length=6, overflow="drop")),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_that_memory_gives_for_the_same_rows(lists, kind, workers):
    source, limit = SOURCES[kind]
    memory = load(source, LIST_FIELDS, Table(lists), seed=3, device=CPU, limit=limit)
    rows = streamed(lists, LIST_FIELDS, source, limit=limit, workers=workers, buffer_size=20)
    assert (rows.num_rows, rows.left_out) == (memory.num_rows, memory.left_out)
    for order in ((3, 0), (3, 1), None):
        for batch in rows.epoch(8, drop_last=False, order=order):
            expected = memory.batch(batch.taken)
            same(batch, expected)
            assert torch.equal(batch.row_numbers, expected.row_numbers)
            assert batch.lengths.keys() == expected.lengths.keys()
            for name, lengths_B in expected.lengths.items():
                assert torch.equal(batch.lengths[name], lengths_B)
            same(rows.batch(batch.taken), batch)
    asked = [0, 3, memory.num_batches(8) - 1]  # as several processes divide them
    for mine, expected in zip(rows.stored(8, asked), memory.stored(8, asked), strict=True):
        same(mine, expected)
        assert torch.equal(mine.row_numbers, expected.row_numbers)
    numbers, spaced = rows.spaced(5)
    assert torch.equal(numbers, memory.spaced(5)[0])
    same(spaced, memory.spaced(5)[1])
    rows.close()


def test_columns_of_images_are_those_that_memory_gives(digits):
    source = Source(dataset="d", split="train")
    memory = load(source, DIGIT_FIELDS, Table(digits), seed=0, device=CPU)
    rows = streamed(digits, DIGIT_FIELDS, source, buffer_size=64, min_buffer_size=40)
    for batch in rows.epoch(32, drop_last=True, order=(1, 2), first=3):
        same(batch, memory.batch(batch.taken))
    for one, other in zip(rows.in_order(70), memory.in_order(70), strict=True):
        same(one, other)


def test_no_more_rows_are_read_than_the_pool_has_room_for(digits, monkeypatch):
    """A resumed run reads none of the earlier batches."""
    read: list[int] = []
    plain = StoredTable.window

    def counting(self: StoredTable, split: str, runs: Any) -> Any:
        read.append(sum(last - first for first, last in runs))
        return plain(self, split, runs)

    monkeypatch.setattr(StoredTable, "window", counting)
    rows = streamed(digits, DIGIT_FIELDS, Source(dataset="d", split="train"), buffer_size=50)
    for number, _ in enumerate(rows.epoch(10, drop_last=False, order=(1, 0))):
        assert sum(read) - 10 * (number + 1) <= 50
        assert rows.figures()["data/pool_rows"] <= 50
    assert sum(read) == 300
    read.clear()
    assert len([*rows.epoch(10, drop_last=False, order=(1, 0), first=25)]) == 5
    assert sum(read) == 50


def test_what_the_pool_takes_is_reported_as_it_is(lists):
    fields = {name: LIST_FIELDS[name] for name in ("ids", "x")}
    rows = streamed(lists, fields, buffer_size=30, min_buffer_size=30)
    next(rows.epoch(10, drop_last=False, order=(1, 0)))
    held = rows._held
    there = [row for row in held._lists["ids"] if row is not None]
    found = rows.figures()
    assert found["data/pool_rows"] == len(there) == 20
    assert found["data/pool_bytes"] == sum(row.nbytes + 128 for row in there) + 20 * 8
    assert all(is_upkeep(name) for name in found)


# --- in a training ---------------------------------------------------------------------------

POOLED = {"shuffle": {"buffer_size": 128, "min_buffer_size": 70}}


@pytest.mark.parametrize("workers", [0, 2])
def test_training_from_files_is_plain_torch_on_the_rows_that_are_drawn(digits, tmp_path, workers):
    network = [layer for layer in CNN if layer["type"] != "Dropout"]
    made = spec(data={**POOLED, "workers": workers}, network={"layers": network})
    records = run(tmp_path, made, digits)
    images = torch.from_numpy(np.load(digits / "train" / "0.npy"))
    labels = torch.from_numpy(np.load(digits / "train" / "1.npy"))
    torch.manual_seed(3)
    by_hand = nn.Sequential(*[layer for layer in cnn() if not isinstance(layer, nn.Dropout)])
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for epoch in range(2):
        for rows in drawn(Pool(300, 64, 128, 70), epoch=epoch):
            loss = nn.functional.cross_entropy(by_hand(images[rows].float() / 255), labels[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    assert losses(records) == expected
    assert planned(spec(data=POOLED))["num_steps"] == len(expected)
    told = [r["values"] for r in of_type(records, "metrics") if "data/pool_rows" in r["values"]]
    assert told


PART = {"dataset": "ds_1", "split": "train", "fraction": [0, 0.9]}
KINDS: dict[str, dict[str, Any]] = {
    "a pool": {"data": POOLED},
    "whole batches": {"data": {**POOLED, "drop_last": True}},
    "a part": {"data": {**POOLED, "train": PART}},
    "as stored": {"data": {"shuffle": {"enabled": False, "buffer_size": 64}}},
    "accumulate": {"data": {**POOLED, "batch_size": 16}, "accumulate": 4},
    "cache": {"data": {**POOLED, "cache": "memory"}},
    "cache of whole batches": {"data": {**POOLED, "cache": "memory", "drop_last": True}},
    "cache as stored": {
        "data": {"shuffle": {"enabled": False, "buffer_size": 64}, "cache": "memory"}
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_a_run_that_was_stopped_resumes_bit_for_bit_with_any_number_of_workers(
    digits, tmp_path, kind
):
    made = spec(**KINDS[kind], checkpoint={"every_steps": 1})
    expected = losses(run(tmp_path / "whole", made, digits))
    for step in (1, len(expected) // 2 - 1, len(expected) - 2):
        for workers in (0, 2):
            made["data"]["workers"] = workers
            there = {"dir": str(tmp_path / "whole" / "checkpoints" / f"step-{step}"), "step": step}
            resumed = run(tmp_path / f"{step}-{workers}", made, digits, resume=there)
            assert losses(resumed) == expected[step:]


def test_a_run_on_lists_resumes_bit_for_bit(tmp_path):
    table = texts(tmp_path)
    made = job(
        data={"shuffle": {"buffer_size": 6}, "batch_size": 3, "sequence": {"max_length": 5}},
        checkpoint={"every_steps": 1},
    )
    records = run(tmp_path / "whole", made, table)
    assert any("max_length 5" in item["what"] for item in of_type(records, "dropped"))
    for step in (1, 5, 6):
        there = {"dir": str(tmp_path / "whole" / "checkpoints" / f"step-{step}"), "step": step}
        assert (
            losses(run(tmp_path / str(step), made, table, resume=there)) == losses(records)[step:]
        )


def test_a_checkpoint_of_another_pool_is_refused(digits, tmp_path, capfd):
    made = spec(data=POOLED, checkpoint={"every_steps": 1})
    run(tmp_path / "whole", made, digits)
    there = {"dir": str(tmp_path / "whole" / "checkpoints" / "step-2"), "step": 2}
    for shuffle in ({}, {"buffer_size": 129, "min_buffer_size": 70}):
        error = failure(tmp_path / "b", spec(data={"shuffle": shuffle}), digits, resume=there)
        assert error["code"] == "checkpoint_mismatch"
        assert "buffer_size" in error["message"]
    capfd.readouterr()


def test_evaluations_from_files_give_what_they_give_from_memory(digits, tmp_path):
    still = {
        "optimizer": {"type": "SGD", "args": {"lr": 0.0}},
        "metrics": [{"type": "accuracy", "inputs": ["fc", "label"]}],
        "evaluate": {"every_epochs": 1, "samples": 3},
        "stop": {"steps": 1},
    }
    found = []
    for number, shuffle in enumerate(({}, {"buffer_size": 64})):
        data = {"validation": {"dataset": "ds_1", "split": "test"}, "shuffle": shuffle}
        records = run(tmp_path / str(number), spec(data=data, **still), digits)
        values = [item["values"] for item in of_type(records, "metrics")]
        found.append(next(item for item in values if "validation/loss" in item))
    assert found[0] == found[1]
    files = [tmp_path / name / "artifacts" / "samples-0.safetensors" for name in ("0", "1")]
    assert files[0].read_bytes() == files[1].read_bytes()


def failure(directory: Path, made: dict[str, Any], table: Path, **more: Any) -> dict[str, Any]:
    meta = json.loads((table / "meta.json").read_text())
    write_job(directory, planned(made, meta)["spec"], table, **more)
    assert rank.main(directory) == 0
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["state"] == "failed"
    return records[-1]["error"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_label_outside_its_range_is_named_by_its_row(tmp_path, capfd, workers):
    labels = np.zeros(812_400, np.uint8)
    labels[812_345] = 2
    table = write_table(tmp_path / "t", {"x": labels, "label": labels}, {"all": slice(None)})
    fields = {"x": {"type": "dense", "shape": [1]}, "label": {"type": "integer", "dim": 2}}
    layers = [{"name": "fc", "type": "Linear", "args": {"out_features": 2}, "inputs": ["x"]}]
    made = spec(
        network={"layers": layers},
        data={
            "train": {"dataset": "ds_1"},
            "fields": fields,
            "batch_size": 4096,
            "shuffle": {"buffer_size": 8192},
            "workers": workers,
        },
        stop={"epochs": 1},
    )
    error = failure(tmp_path / "j", made, table)
    assert error["code"] == "data_failed"
    assert "row 812345 of split 'all' has 2 in column 'label'" in error["message"]
    capfd.readouterr()


def test_an_id_outside_its_range_is_named_by_its_row(lists):
    fields = {"ids": IntegerSequenceField(type="integer_sequence", dim=9)}
    rows = streamed(lists, fields, buffer_size=20)
    ids = StoredTable(lists).ragged("all", "ids")
    with pytest.raises(DataFailed) as caught:
        for _ in rows.in_order(20):
            pass
    row = int(caught.value.detail.split()[1])
    assert 9 in ids.values[ids.offsets[row] : ids.offsets[row + 1]]


def test_the_rows_of_a_bad_step_are_found_again_in_their_files(tmp_path, capfd):
    x = np.ones((40, 3), np.float32)
    x[33, 1] = np.nan
    table = write_table(
        tmp_path / "t", {"x": x, "y": np.ones(40, np.float32)}, {"all": slice(None)}
    )
    layers = [{"name": "fc", "type": "Linear", "args": {"out_features": 1}, "inputs": ["x"]}]
    layers.append({"name": "out", "type": "Flatten", "args": {"start_dim": 0}})
    made = spec(
        network={"layers": layers},
        loss={"type": "MSELoss", "inputs": ["out", "y"]},
        data={
            "train": {"dataset": "ds_1"},
            "fields": {"x": {"type": "dense", "fill": "NaN"}, "y": {"type": "dense", "shape": []}},
            "batch_size": 8,
            "shuffle": {"buffer_size": 16},
        },
        stop={"epochs": 1},
        guards={"nonfinite": {"check": ["loss"], "action": "fail"}},
    )
    meta = json.loads((table / "meta.json").read_text())
    write_job(tmp_path / "j", planned(made, meta)["spec"], table)
    rank.main(tmp_path / "j")
    records, _ = read_frames(tmp_path / "j" / "spool", 0, 10**6)
    (finding,) = of_type(records, "finding")
    assert finding["bad_samples"] == [33]
    capfd.readouterr()


# --- rows that stay once they were read -------------------------------------------------------


def cached(table: Path, fields: dict[str, Field], **shuffle: Any) -> StreamedRows:
    reader = SourceReader(Source(dataset="d"), fields, StoredTable(table), seed=3, limit=NO_LIMIT)
    return StreamedRows(reader, CPU, shuffle=Shuffle(**shuffle), workers=1, keeps=True)


def test_a_cache_reads_each_row_once_and_then_shuffles_all_of_them(lists, monkeypatch):
    read: list[int] = []
    plain = StoredTable.window

    def counting(self: StoredTable, split: str, runs: Any) -> Any:
        read.append(sum(last - first for first, last in runs))
        return plain(self, split, runs)

    memory = load(Source(dataset="d"), LIST_FIELDS, Table(lists), seed=3, device=CPU)
    monkeypatch.setattr(StoredTable, "window", counting)
    rows, pool = cached(lists, LIST_FIELDS, buffer_size=20), Pool(61, 8, 20)
    for epoch in range(3):
        taken = []
        for batch in rows.epoch(8, drop_last=False, order=(5, epoch)):
            same(batch, memory.batch(batch.taken))
            taken.append(batch.taken.tolist())
        expected = shuffled(61, 5, epoch).split(8)
        later = [part.tolist() for part in expected]
        assert taken == (later if epoch else drawn(pool, seed=5))
        assert sum(read) == 61
    for one, other in zip(rows.in_order(9), memory.in_order(9), strict=True):
        same(one, other)
    assert sum(read) == 61
    assert rows.figures()["data/pool_rows"] == 61
    rows.close()


def test_a_row_that_was_read_before_its_turn_is_kept_once(lists):
    """As by a trial before the first step, or an evaluation that was left."""
    memory = load(Source(dataset="d"), LIST_FIELDS, Table(lists), seed=3, device=CPU)
    rows = cached(lists, LIST_FIELDS, buffer_size=20)
    next(rows.in_order(30))
    assert rows.figures()["data/pool_rows"] == 30
    for batch in rows.epoch(8, drop_last=False, order=(5, 0)):
        same(batch, memory.batch(batch.taken))
    assert rows.figures()["data/pool_rows"] == 61
    there = [row for kept in rows._cache._lists.values() for row in kept]
    expected = sum(row.nbytes + 128 for row in there) + 61 * (2 * 4 + 8)
    assert rows.figures()["data/pool_bytes"] == expected
    rows.close()


def test_a_cache_that_begins_in_a_later_epoch_reads_all_rows_first(lists):
    memory = load(Source(dataset="d"), LIST_FIELDS, Table(lists), seed=3, device=CPU)
    rows = cached(lists, LIST_FIELDS, buffer_size=20)
    for batch in rows.epoch(8, drop_last=False, order=(5, 2), first=4):
        same(batch, memory.batch(batch.taken))
    rows.close()


def test_the_plan_counts_all_rows_of_a_cache(lists):
    data = {"shuffle": {"buffer_size": 20}, "batch_size": 10}
    fields = {name: LIST_FIELDS[name] for name in ("ids", "label")}
    plain = planned(job(data=data), meta_of(lists))["memory"]["data_bytes"]
    kept = planned(job(data={**data, "cache": "memory"}), meta_of(lists))["memory"]["data_bytes"]
    rows = cached(lists, fields, buffer_size=20)
    for _ in rows.epoch(10, drop_last=False, order=(1, 0)):
        pass
    rows.close()
    assert plain < rows.figures()["data/pool_bytes"] < kept


def test_a_cache_of_what_is_in_memory_is_refused():
    assert "all rows are in memory" in errors(spec(data={"cache": "memory"}))["/data/cache"]


# --- files that are not what they were -------------------------------------------------------


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4000])


def _rewrite(make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return lambda path: np.save(path, make(np.load(path)))


DAMAGED: dict[str, Callable[[Path], None]] = {
    "shorter": _shorten,
    "gone": Path.unlink,
    "fewer rows": _rewrite(lambda array: array[:200]),
    "columns first": _rewrite(lambda array: np.asfortranarray(array.reshape(len(array), -1))),
    "no array": lambda path: path.write_bytes(b"{}"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_a_named_failure(digits, tmp_path, kind):
    table = tmp_path / "t"
    shutil.copytree(digits, table)
    DAMAGED[kind](table / "train" / "0.npy")
    rows = streamed(table, DIGIT_FIELDS, Source(dataset="d", split="train"), buffer_size=64)
    with pytest.raises(DataFailed, match="column 'image' of split 'train' cannot be read"):
        for _ in rows.epoch(32, drop_last=False, order=(1, 0)):
            pass


def test_offsets_that_lead_elsewhere_are_a_named_failure(lists, tmp_path):
    table = tmp_path / "t"
    shutil.copytree(lists, table)
    path = table / "all" / "0.offsets.npy"
    for bad in ([0, 5, 3], [0, -1, 4], [0, 10**9, 10**9 + 1]):
        ends = np.load(lists / "all" / path.name)
        ends[: len(bad)] = bad
        np.save(path, ends)
        fields = {"ids": LIST_FIELDS["ids"]}
        rows = streamed(table, fields, buffer_size=10)
        with pytest.raises(DataFailed, match="cannot be read"):
            rows.batch(slice(0, 2))


# --- the plan --------------------------------------------------------------------------------


def test_the_plan_counts_the_pool_and_not_the_file():
    meta = {
        "columns": [
            {"name": "image", "dtype": "uint8", "shape": [1, 8, 8], "file": "0.npy"},
            {"name": "label", "dtype": "int64", "shape": [], "file": "1.npy"},
        ],
        "splits": {"train": 10_000_000, "test": 97},
    }
    memory = planned(spec(data={"shuffle": {"buffer_size": 5000}, "batch_size": 100}), meta)[
        "memory"
    ]
    row = 64 + 8
    index = 24 * 5000 + 8 * 10_000_000 // 12
    assert memory["data_bytes"] == pytest.approx(5000 * row + 5 * 100 * row + index, rel=0.001)
    assert planned(spec(), meta)["memory"]["data_bytes"] == 10_000_000 * row


def test_the_plan_counts_the_longest_rows(lists):
    """Not less than what the pool ever takes, whichever rows are in it."""
    fields = {name: LIST_FIELDS[name] for name in ("ids", "label")}
    made = job(data={"shuffle": {"buffer_size": 20}, "batch_size": 10})
    needed = planned(made, meta_of(lists))["memory"]["data_bytes"]
    most = 0.0
    for epoch in range(30):
        rows = streamed(lists, fields, buffer_size=20)
        for _ in rows.epoch(10, drop_last=False, order=(1, epoch)):
            most = max(most, rows.figures()["data/pool_bytes"])
    assert most < needed


FC = {"name": "fc", "type": "Linear", "args": {"out_features": 2}}


def test_the_plan_of_many_rows_is_near_what_rows_of_many_lengths_take():
    """Not twenty thousand of the longest, of which there are few."""
    lengths = {"min": 1, "max": 1000, "total": 50_000_000}
    meta = {
        "columns": [
            {"name": "ids", "dtype": "int32", "shape": [None], "lengths": {"all": lengths}},
            {"name": "label", "dtype": "int64", "shape": []},
        ],
        "splits": {"all": 1_000_000},
    }
    network = layers({"name": "pool", "type": "SequencePool", "args": {"mode": "sum"}}, FC)
    made = job(network, data={"shuffle": {"buffer_size": 20_000}, "batch_size": 64})
    needed = planned(made, meta)["memory"]["data_bytes"]
    mean = 20_000 * (50 * 4 + 128 + 8)
    assert mean < needed < 2 * mean
    made["data"]["cache"] = "memory"
    kept = planned(made, meta)["memory"]["data_bytes"]
    assert kept == pytest.approx(50_000_000 * 4 + 1_000_000 * (128 + 8 + 17), rel=0.01)


REFUSED = {
    "smaller than a batch": ({"buffer_size": 63}, "/data/shuffle/buffer_size", "at least 64"),
    "begins above its size": (
        {"buffer_size": 100, "min_buffer_size": 101},
        "/data/shuffle/min_buffer_size",
        "at most",
    ),
    "begins below a batch": (
        {"buffer_size": 100, "min_buffer_size": 63},
        "/data/shuffle/min_buffer_size",
        "or 0",
    ),
    "begins without a size": (
        {"min_buffer_size": 100},
        "/data/shuffle/min_buffer_size",
        "set buffer_size",
    ),
    "begins in order": (
        {"enabled": False, "buffer_size": 100, "min_buffer_size": 100},
        "/data/shuffle/min_buffer_size",
        "stored order",
    ),
    "no rows": ({"buffer_size": 0}, "/data/shuffle/buffer_size", "at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_pool_is_refused_with_its_place(case):
    shuffle, pointer, word = REFUSED[case]
    assert word in errors(spec(data={"shuffle": shuffle}))[pointer]


def test_options_that_files_know_nothing_of_are_refused():
    """So is one that is added later, until somebody decides."""

    class Grown(Data):
        novelty: str | None = None

    class GrownField(IntegerField):
        novelty: float | None = None

    given = {
        "train": Source(dataset="d"),
        "batch_size": 4,
        "shuffle": Shuffle(buffer_size=8),
    }
    fields = {
        "x": DenseField(type="dense", fill="median"),
        "y": IntegerField(type="integer", classes=("a", "b")),
        "z": GrownField(type="integer", dim=2, novelty=1.0),
    }
    wanted = {"novelty": "yes"}
    findings = Findings()
    check_streaming(Grown.model_construct(**given, fields=fields, **wanted), {}, findings)
    assert {item.pointer for item in findings.problems} == {
        "/data/novelty",
        "/data/fields/z/novelty",
    }
    findings = Findings()
    fields = {"x": DenseField(type="dense", fill=2.5), "z": GrownField(type="integer", dim=2)}
    check_streaming(Grown.model_construct(**given, fields=fields), {}, findings)
    assert not findings.problems


def test_gaps_are_filled_by_a_number_as_in_memory(tmp_path):
    x = np.arange(40.0).reshape(20, 2)
    x[::3, 1] = np.nan
    table = write_table(tmp_path, {"x": x}, {"all": slice(None)})
    field = DenseField(type="dense", fill=-7.0, scale=2.0)
    source = Source(dataset="d")
    whole = load(source, {"x": field}, Table(table), seed=0, device=torch.device("cpu"))
    reader = SourceReader(source, {"x": field}, StoredTable(table), seed=0, limit=Sequences())
    streamed = StreamedRows(reader, torch.device("cpu"), shuffle=Shuffle(buffer_size=6))
    both = zip(whole.in_order(4), streamed.in_order(4), strict=True)
    assert all(torch.equal(mine["x"], other["x"]) for mine, other in both)
    assert (whole.batch(slice(0, 1))["x"] == torch.tensor([[0.0, -14.0]])).all()


def test_a_training_that_ends_leaves_no_thread(digits, tmp_path):
    """The fixture of all tests looks; a run that is cut short is the hard case."""
    run(tmp_path, spec(data={**POOLED, "workers": 3}, stop={"steps": 2}), digits)
    run(tmp_path / "m", spec(data={"workers": 3}, stop={"steps": 2}), digits)
