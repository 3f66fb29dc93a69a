"""A pool whose batches are of rows of like length: each batch by hand, and the rows of memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.data.batches.rows import order_generator
from engine.data.batches.shuffle_pool import BucketDraws, Pool, PoolDraws, block_rows
from engine.data.columns.table import StoredTable, Table
from engine.data.sources.loading import load
from engine.data.sources.reading import SourceReader
from engine.data.sources.streamed import StreamedRows
from glasshouse.spec import (
    BucketByLength,
    Field,
    IntegerField,
    IntegerSequenceField,
    Sequences,
    Shuffle,
    Source,
    SparseBinaryField,
)
from tests.unit.engine.ragged import job, meta_of, write_ragged
from tests.unit.engine.runs import errors, losses, of_type, planned, run

CPU = torch.device("cpu")
NUM = 157
LENGTHS = np.random.default_rng(3).integers(0, 40, NUM)


def drawn(pool: Pool, width: int = 1, epoch: int = 1, skip: int = 0) -> list[list[int]]:
    wanted = BucketByLength(width=width)
    draws = BucketDraws(pool, 3, epoch, wanted=wanted, lengths_N=LENGTHS)
    draws.skip(skip)
    num = -(-NUM // pool.batch_size) - skip
    return [draws.draw().places.tolist() for _ in range(num)]


@pytest.mark.parametrize("size", [16, 20, 47, 63, 400])
@pytest.mark.parametrize("width", [1, 6])
def test_blocks_in_the_order_of_reading_are_sorted_cut_and_their_batches_drawn(size, width):
    """The documented rule, by hand."""
    pool = Pool(NUM, 8, size)
    block = NUM if size >= NUM else (size // 8 - 1) * 8
    assert block_rows(pool) == block
    generator = order_generator(3, 1)
    runs = torch.randperm(NUM, generator=generator).tolist()  # an eighth of a batch is a row
    expected: list[list[int]] = []
    for start in range(0, NUM, block):
        rows = runs[start : start + block]
        mixed = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
        whole = len(rows) // 8 * 8
        ranked = sorted(mixed[:whole], key=lambda row: -(-int(LENGTHS[row]) // width))
        cut = [ranked[i : i + 8] for i in range(0, whole, 8)]
        expected += [cut[i] for i in torch.randperm(len(cut), generator=generator).tolist()]
        expected += [mixed[whole:]] if mixed[whole:] else []
    assert drawn(pool, width) == expected


@pytest.mark.parametrize("size", [16, 47, 400])
def test_a_pool_never_has_more_rows_than_it_may_and_every_row_is_drawn_once(size):
    pool = Pool(NUM, 8, size)
    draws = BucketDraws(pool, 3, 0, wanted=BucketByLength(), lengths_N=LENGTHS)
    there: dict[int, int] = {}
    seen: list[int] = []
    while len(seen) < NUM:
        draw = draws.draw()
        rows = [row for run in draw.runs for row in range(*run)]
        for slot, row in zip(draw.entered.tolist(), rows, strict=True):
            assert slot not in there
            there[slot] = row
        assert len(there) <= min(size, NUM)
        assert [there.pop(slot) for slot in draw.drawn.tolist()] == draw.places.tolist()
        seen += draw.places.tolist()
        slots, places = draws.held
        assert dict(zip(slots.tolist(), places.tolist(), strict=True)) == there
    assert sorted(seen) == [*range(NUM)]
    assert len(draws.draw().places) == 0


def test_batches_that_were_taken_are_skipped_and_the_others_are_the_same():
    for size in (16, 47, 400):
        whole = drawn(Pool(NUM, 8, size))
        assert all(drawn(Pool(NUM, 8, size), skip=n) == whole[n:] for n in (1, 3, 5, 11, 19))
        assert drawn(Pool(NUM, 8, size), epoch=2) != whole


def test_rows_of_a_batch_are_of_like_length():
    def spread(batches: list[list[int]]) -> float:
        return float(np.mean([np.ptp(LENGTHS[rows]) for rows in batches]))

    plain = PoolDraws(Pool(NUM, 8, 63), 3, 1)
    by_chance = spread([plain.draw().places.tolist() for _ in range(19)])
    assert spread(drawn(Pool(NUM, 8, 63))[:-1]) < by_chance / 3
    assert spread(drawn(Pool(NUM, 8, 400))[:-1]) < by_chance / 8


# --- rows ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lists(tmp_path_factory: Any) -> Path:
    generator = np.random.default_rng(1)
    rows = [
        {
            "ids": generator.integers(0, 10, n).tolist(),
            "text": " ".join("abc"[i] for i in generator.integers(0, 3, n)),
            "places": sorted(generator.choice(60, n, replace=False).tolist()),
            "label": n % 2,
        }
        for n in LENGTHS.tolist()
    ]
    return write_ragged(tmp_path_factory.mktemp("lists"), rows)


FIELDS: dict[str, Field] = {
    "ids": IntegerSequenceField(type="integer_sequence", dim=10),
    "text": IntegerSequenceField(type="integer_sequence", tokens="words", dim=5),
    "places": SparseBinaryField(type="sparse_binary", dim=60),
    "label": IntegerField(type="integer", dim=2),
}
LIMITS = {
    "none": Sequences(),
    "cut": Sequences(max_length=17),
    "dropped": Sequences(max_length=17, overflow="drop"),
}


@pytest.mark.parametrize("name", ["ids", "text", "places"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("fraction", [None, (0.1, 0.8)])
def test_lengths_and_rows_are_those_of_memory(lists, name, limit, fraction):
    source = Source(dataset="d", fraction=fraction)
    wanted = {name: FIELDS[name], "label": FIELDS["label"], "ids": FIELDS["ids"]}
    memory = load(source, wanted, Table(lists), seed=3, device=CPU, limit=LIMITS[limit])
    reader = SourceReader(
        source, wanted, StoredTable(lists), seed=3, limit=LIMITS[limit], bucket=name
    )
    expected = memory.fields[name].lengths  # type: ignore[union-attr]
    assert torch.equal(reader.lengths, expected)
    shuffle = Shuffle(buffer_size=64)
    rows = StreamedRows(reader, CPU, shuffle=shuffle, bucket=BucketByLength(field=name), workers=2)
    spreads: list[int] = []
    for batch in rows.epoch(8, drop_last=True, order=(3, 1)):
        same = memory.batch(batch.taken)
        assert all(torch.equal(batch[key], same[key]) for key in same)
        spreads.append(int(batch.lengths[name].max() - batch.lengths[name].min()))
    assert len(spreads) == rows.num_rows // 8
    assert np.mean(spreads) < 18
    rows.close()


@pytest.mark.parametrize("more", [{}, {"workers": 2}, {"cache": "memory"}], ids=str)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.long
def test_a_job_resumes_bit_for_bit_in_the_middle_of_an_epoch(more, epoch, lists, tmp_path):
    asked = pooled(**more)
    records = run(tmp_path / "whole", asked, lists)
    assert planned(asked, meta_of(lists))["num_steps"] == len(losses(records)) == 2 * 20
    step = 20 * epoch + 13
    there = {"dir": str(tmp_path / "whole" / "checkpoints" / f"step-{step}"), "step": step}
    rest = run(tmp_path / "rest", asked, lists, resume=there)
    assert losses(rest) == losses(records)[step:]
    ends = [
        load_file(tmp_path / name / of_type(found, "checkpoint")[-1]["dir"] / "model.safetensors")
        for name, found in (("whole", records), ("rest", rest))
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_less_of_the_batches_is_padding(lists, tmp_path):
    def padding(directory: Path, asked: dict[str, Any]) -> float:
        values = [item["values"] for item in of_type(run(directory, asked, lists), "metrics")]
        return float(np.mean([v["padding/ids"] for v in values if "padding/ids" in v]))

    plain = pooled()
    plain["data"].pop("bucket_by_length")
    assert padding(tmp_path / "a", pooled()) < padding(tmp_path / "b", plain) / 2


def pooled(**data: Any) -> dict[str, Any]:
    made = job(
        data={
            "bucket_by_length": {},
            "shuffle": {"buffer_size": 48},
            "batch_size": 8,
            **data,
        }
    )
    made["stop"] = {"epochs": 2}
    made["checkpoint"] = {"every_steps": 1, "keep_last": 99}
    return made


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"bucket_by_length": {"max_tokens": 400}}, "/data/bucket_by_length/max_tokens"),
        ({"shuffle": {"buffer_size": 15}}, "/data/shuffle/buffer_size"),
        (
            {"shuffle": {"buffer_size": 48, "min_buffer_size": 10}},
            "/data/shuffle/min_buffer_size",
        ),
        ({"shuffle": {"buffer_size": 48, "enabled": False}}, "/data/bucket_by_length"),
    ],
)
def test_what_does_not_go_with_a_pool_is_refused_at_its_place(data, place, lists):
    assert [*errors(pooled(**data), meta_of(lists))] == [place]


def test_the_plan_counts_lengths_and_says_that_padding_is_not_known(lists):
    plain = pooled()
    plain["data"].pop("bucket_by_length")
    found = [planned(asked, meta_of(lists)) for asked in (pooled(), plain)]
    more = found[0]["memory"]["data_bytes"] - found[1]["memory"]["data_bytes"]
    assert more == 32 * NUM + 48 * 48
    assert found[0]["sequences"]["ids"]["padding"] is None
    assert found[0]["sequences"]["ids"]["by_chance"] > 0
