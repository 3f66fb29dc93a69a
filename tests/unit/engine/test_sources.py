"""Several sources: what one file with all their rows gives, in memory and through a pool."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.spool import read_frames
from engine.data.batches.shuffle_pool import Pool, PoolDraws
from engine.data.columns import dense, sequences
from engine.data.columns.prepared import Preparing
from engine.data.columns.table import Table
from engine.data.sources import reading
from engine.data.sources.joined import (
    ConcatenatedColumn,
    Joined,
    JoinedStored,
    TablePart,
    joined_meta,
)
from engine.data.sources.loading import load
from engine.data.sources.reading import SourceReader
from engine.data.sources.streamed import StreamedRows
from engine.process import rank
from engine.process.planner import answer
from glasshouse.errors import DataFailed
from glasshouse.spec import Sequences, Shuffle, Source
from tests.unit.engine.ragged import meta_of, write_ragged
from tests.unit.engine.runs import DIGITS_META, errors, losses, spec, write_job
from tests.unit.engine.test_fitting import ASKED, FIELDS, LIMITS

CPU = torch.device("cpu")
NUM, CUT = 150, 61


def rows_of(draw: np.random.Generator) -> list[dict[str, Any]]:
    words = [f"w{number}" for number in range(30)]
    return [
        {
            "x": None if draw.random() < 0.1 else float(draw.normal(0, 3)),
            "z": [float("nan") if draw.random() < 0.1 else float(v) for v in draw.normal(size=3)],
            "steps": draw.normal(2, 3, (1 + number % 7, 2)).tolist(),
            "text": " ".join(draw.choice(words, number % 9).tolist()),
            "kind": "abcd"[int(draw.integers(0, 4))],
            "label": int(draw.integers(0, 11)),
        }
        for number in range(NUM)
    ]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """All rows in one dataset, and the same in two."""
    directory = tmp_path_factory.mktemp("sources")
    rows = rows_of(np.random.default_rng(1))
    parts = {"whole": rows, "one": rows[:CUT], "other": rows[CUT:]}
    whole, one, other = (write_ragged(directory / name, part) for name, part in parts.items())
    return whole, one, other


BOTH = (Source(dataset="one"), Source(dataset="other"))


@pytest.mark.parametrize("limit", LIMITS)
def test_two_sources_are_one_file_with_their_rows(tables, limit, monkeypatch):
    for module in (dense, sequences, reading):
        monkeypatch.setattr(module, "BLOCK_VALUES", 64)
    whole, *halves = tables
    preparing, wanted = Preparing(**ASKED), LIMITS[limit]
    source = Source(dataset="whole")
    expected = load(
        source, FIELDS, Table(whole), seed=3, device=CPU, limit=wanted, preparing=preparing
    )
    parts = [TablePart(Table(path), item) for path, item in zip(halves, BOTH, strict=True)]
    memory = load(
        source, FIELDS, Joined(parts), seed=3, device=CPU, limit=wanted, preparing=preparing
    )
    stored = JoinedStored(parts)
    reader = SourceReader(source, FIELDS, stored, seed=3, limit=wanted, preparing=preparing)
    pooled = StreamedRows(reader, CPU, shuffle=Shuffle(buffer_size=30))
    for found in (memory, pooled):
        assert found.num_rows == expected.num_rows < NUM
        assert found.left_out == expected.left_out
        theirs = expected.prepared.state()
        assert all(torch.equal(item, theirs[n]) for n, item in found.prepared.state().items())
        for batch in found.epoch(8, drop_last=False, order=(1, 0)):
            same = expected.batch(batch.taken)
            assert batch.keys() == same.keys()
            assert torch.equal(batch.row_numbers, same.row_numbers)
            assert all(torch.equal(item, same[name]) for name, item in batch.items())


def test_each_source_may_be_a_part_of_its_split(tables):
    _, one, other = tables
    sources = (Source(dataset="one", fraction=(0.5, 1.0)), Source(dataset="other"))
    parts = [TablePart(Table(path), item) for path, item in zip((one, other), sources, strict=True)]
    fields = {"label": FIELDS["label"].model_copy(update={"dim": 11})}
    joined = load(Source(dataset="one"), fields, Joined(parts), seed=3, device=CPU)
    each = [
        load(source, fields, Table(path), seed=3, device=CPU)
        for source, path in zip(sources, (one, other), strict=True)
    ]
    assert joined.num_rows == 31 + NUM - CUT
    found = joined.batch(slice(0, joined.num_rows))["label"]
    assert torch.equal(found, torch.cat([r.batch(slice(0, r.num_rows))["label"] for r in each]))
    assert joined.numbers(slice(0, 31)).tolist() == each[0].numbers(slice(0, 31)).tolist()
    assert joined.numbers(slice(31, 33)).tolist() == [CUT, CUT + 1]


def test_what_is_known_of_two_sources_is_what_is_known_of_one_file(tables):
    whole, one, other = (meta_of(table) for table in tables)
    found = joined_meta([(BOTH[0], one), (BOTH[1], other)])
    assert found["splits"] == whole["splits"]
    for mine, theirs in zip(found["columns"], whole["columns"], strict=True):
        for key in ("name", "dtype", "shape", "missing", "lengths", "length_counts"):
            assert mine.get(key) == theirs.get(key), (mine["name"], key)
        for unit, counted in theirs.get("tokens", {}).items():
            bound = mine["tokens"][unit]["all"]
            assert {**bound, "at_least": 0} == {**counted["all"], "at_least": 0}
            exact = counted["all"]["at_least"]
            assert all(most >= count for most, count in zip(bound["at_least"], exact, strict=True))


def test_a_bad_row_is_named_by_its_own_dataset(tables):
    _, one, other = tables
    parts = [TablePart(Table(path), item) for path, item in zip((one, other), BOTH, strict=True)]
    labels = np.load(other / "all" / "5.npy")
    first = int(np.flatnonzero(labels == 10)[0])
    fields = {"label": FIELDS["label"]}
    at_one = [*np.load(one / "all" / "5.npy")].index(10)
    with pytest.raises(DataFailed, match=f"row {at_one} of split 'all' of dataset 'one' has 10"):
        load(Source(dataset="one"), fields, Joined(parts), seed=3, device=CPU)
    reader = SourceReader(
        Source(dataset="one"), fields, JoinedStored(parts), seed=3, limit=Sequences()
    )
    with pytest.raises(DataFailed, match=f"row {first} of split 'all' of dataset 'other' has 10"):
        reader.read(np.arange(CUT, NUM))


def test_a_chain_of_arrays_is_looked_up_like_one():
    parts = [
        np.arange(12).reshape(4, 3),
        np.empty((0, 3), np.int64),
        np.arange(12, 33).reshape(7, 3),
    ]
    chain, whole = ConcatenatedColumn(parts), np.concatenate(parts)
    assert (chain.shape, len(chain), chain.dtype) == (whole.shape, len(whole), whole.dtype)
    for rows in (slice(2, 6), slice(None), slice(9, 99), np.array([10, 0, 4, 3, 3]), 5):
        assert np.array_equal(chain[rows], whole[rows])
    index = np.array([[0, 5], [10, 1]])
    assert np.array_equal(chain[index], whole[index])
    assert np.array_equal(np.asarray(chain.reshape(-1)), whole.reshape(-1))


# --- the order of a pool ---------------------------------------------------------------------


def test_sources_in_turn_are_read_one_after_the_other():
    pool = Pool(300, 8, 40, sizes=(100, 150, 50))
    draws = PoolDraws(pool, 5, 0)
    entered: list[int] = []
    drawn: list[int] = []
    for _ in range(38):
        draw = draws.draw()
        entered += [row for run in draw.runs for row in range(*run)]
        drawn += draw.places.tolist()
    assert sorted(drawn) == [*range(300)]
    assert sorted(entered[:100]) == [*range(100)]
    assert sorted(entered[100:250]) == [*range(100, 250)]
    assert entered[:100] != [*range(100)]
    mixed = PoolDraws(Pool(300, 8, 40), 5, 0)
    first = [row for run in mixed.draw().runs for row in range(*run)]
    assert max(first) >= 100


# --- in a training ---------------------------------------------------------------------------

TRAIN = [{"dataset": "ds_1", "split": "train"}, {"dataset": "ds_2", "split": "train"}]
METAS = {"ds_1": DIGITS_META, "ds_2": DIGITS_META}


def plan_of(made: dict[str, Any], metas: dict[str, Any]) -> dict[str, Any]:
    return answer({"id": 1, "do": "plan", "spec": made, "datasets": metas})


def trained(
    directory: Path, made: dict[str, Any], tables: dict[str, Path], **more: Any
) -> list[dict[str, Any]]:
    metas = {name: json.loads((path / "meta.json").read_text()) for name, path in tables.items()}
    reply = plan_of(made, metas)
    assert reply["ok"], reply["errors"]
    datasets = {name: {"dir": str(path)} for name, path in tables.items()}
    write_job(directory, reply["plan"]["spec"], tables["ds_1"], datasets=datasets, **more)
    assert rank.main(directory) == 0
    records, _ = read_frames(directory / "spool", 0, 10**6)
    assert records[-1]["state"] == "succeeded", records[-1]
    assert (
        len(losses(records)) + more.get("resume", {"step": 0})["step"]
        == (reply["plan"]["num_steps"])
    )
    return records


SHUFFLES: dict[str, dict[str, Any]] = {
    "in memory": {},
    "mixed": {"shuffle": {"buffer_size": 100}},
    "in turn": {"shuffle": {"buffer_size": 100}, "interleave": "sequential"},
}


@pytest.mark.parametrize("kind", SHUFFLES)
@pytest.mark.long
def test_a_training_on_two_sources_resumes_bit_for_bit(digits, tmp_path, kind):
    made = spec(data={"train": TRAIN, **SHUFFLES[kind]}, checkpoint={"every_steps": 1})
    tables = {"ds_1": digits, "ds_2": digits}
    whole = losses(trained(tmp_path / "whole", made, tables))
    assert len(whole) == 2 * -(-600 // 64)
    for step in (3, 12):
        there = {"dir": str(tmp_path / "whole" / "checkpoints" / f"step-{step}"), "step": step}
        found = trained(tmp_path / str(step), made, tables, resume=there)
        assert losses(found) == whole[step:]


def test_the_resolved_spec_names_all_sources():
    reply = plan_of(spec(data={"train": TRAIN}), METAS)
    train = reply["plan"]["spec"]["data"]["train"]
    assert [item["dataset"] for item in train] == ["ds_1", "ds_2"]
    assert reply["plan"]["memory"]["data_bytes"] == 600 * (64 + 8)
    part = [TRAIN[0], {**TRAIN[1], "fraction": [0.5, 1]}]
    reply = plan_of(spec(data={"train": part}), METAS)
    assert reply["plan"]["num_steps"] == 2 * -(-450 // 64)


def test_a_source_with_other_columns_is_named_with_its_column():
    other = json.loads(json.dumps(DIGITS_META))
    other["columns"][1]["dtype"] = "int32"
    reply = plan_of(spec(data={"train": TRAIN}), {**METAS, "ds_2": other})
    (error,) = reply["errors"]
    assert error["pointer"] == "/data/train/1"
    assert "column 'label' has the dtype \"int32\" there" in error["detail"]
    del other["columns"][1]
    (error,) = plan_of(spec(data={"train": TRAIN}), {**METAS, "ds_2": other})["errors"]
    assert "its dataset has no column 'label', which the first source has" in error["detail"]
    (error,) = plan_of(spec(data={"train": TRAIN}), {"ds_1": DIGITS_META})["errors"]
    assert error["pointer"] == "/data/train/1/dataset"
    wrong = [TRAIN[0], {**TRAIN[1], "split": "test2"}]
    (error,) = plan_of(spec(data={"train": wrong}), METAS)["errors"]
    assert error["pointer"] == "/data/train/1/split"


def test_what_interleaves_nothing_is_refused():
    pool = {"shuffle": {"buffer_size": 100}}
    alone = errors(spec(data={"interleave": "random", **pool}))
    assert "name several" in alone["/data/interleave"]
    for data, word in (
        ({"train": TRAIN}, "buffer_size"),
        ({"train": TRAIN, "shuffle": {"enabled": False, "buffer_size": 100}}, "as they are stored"),
    ):
        made = spec(data={**data, "interleave": "sequential"})
        (error,) = plan_of(made, METAS)["errors"]
        assert (error["pointer"], word in error["detail"]) == ("/data/interleave", True)
    made = spec(data={"train": []})
    assert errors(made).keys() == {"/data/train"}
