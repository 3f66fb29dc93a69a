"""Bytes of statistics: what goes in comes out, bit for bit."""

import json
import math
import struct
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.observations.stats_bytes import (
    Block,
    Gathered,
    Histograms,
    StatsArrays,
    StoredSeries,
    pack_block,
    pack_chunk,
    unpack_block,
    unpack_chunk,
)
from models.observations.thinning import evenly, kept_places

series = st.builds(
    StoredSeries,
    st.text("abc.1", min_size=1, max_size=5),
    st.sampled_from(["output", "param_grad"]),
    st.sampled_from(["train", "evaluate"]),
)
steps = st.lists(st.integers(0, 2**53), min_size=1, max_size=30)


@st.composite
def figures(draw: st.DrawFn) -> StatsArrays:
    at = draw(steps)
    num = draw(st.sampled_from([7, 9]))
    row = st.lists(st.floats(width=64), min_size=len(at), max_size=len(at))
    return StatsArrays(np.array(at, np.int64), np.array([draw(row) for _ in range(num)]))


@st.composite
def histograms(draw: st.DrawFn) -> Histograms:
    at = draw(steps)
    bins = [sorted(draw(st.sets(st.integers(0, 4095), max_size=20))) for _ in at]
    entries = [number for some in bins for number in some]
    counts = draw(st.lists(st.integers(1, 2**53), min_size=len(entries), max_size=len(entries)))
    return Histograms(
        np.array(at, np.int64),
        np.array([len(some) for some in bins], np.int64),
        np.array(entries, np.uint16),
        np.array(counts, np.uint64),
    )


def same(left: StatsArrays | Histograms, right: StatsArrays | Histograms) -> bool:
    if isinstance(left, StatsArrays) and isinstance(right, StatsArrays):
        return left.steps.tobytes() == right.steps.tobytes() and (
            left.values.astype("<f8").tobytes() == right.values.astype("<f8").tobytes()
        )
    assert isinstance(left, Histograms)
    assert isinstance(right, Histograms)
    return all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("steps", "sizes", "bins", "counts")
    )


@given(st.one_of(figures(), histograms()))
def test_a_chunk_returns_every_row_bit_for_bit(data: StatsArrays | Histograms):
    assert same(unpack_chunk(pack_chunk(data)), data)


@given(st.one_of(figures(), histograms()), st.lists(series, min_size=1, max_size=4, unique=True))
def test_a_block_returns_every_row_bit_for_bit(
    data: StatsArrays | Histograms, names: list[StoredSeries]
):
    numbers = np.arange(len(data.steps), dtype=np.uint32) % len(names)
    back = unpack_block(pack_block(Block(names, numbers, data)))
    assert back.names == names
    assert back.numbers.tolist() == numbers.tolist()
    assert same(back.data, data)


@given(
    st.lists(st.one_of(histograms()), min_size=1, max_size=5),
    st.lists(series, min_size=1, max_size=4, unique=True),
)
def test_gathering_sorts_the_rows_of_many_blocks_by_series(
    parts: list[Histograms], names: list[StoredSeries]
):
    gathered = Gathered(lambda one: one != names[-1] or len(names) == 1)
    expected: dict[tuple[int, StoredSeries], list[tuple[int, list[int], list[int]]]] = {}
    for place, data in enumerate(parts):
        attempt = place % 2
        numbers = np.arange(len(data.steps), dtype=np.uint32)[::-1] % len(names)
        gathered.add(attempt, pack_block(Block(names, numbers, data)))
        begin = 0
        for number, step, size in zip(numbers, data.steps, data.sizes, strict=True):
            end = begin + int(size)
            if names[number] != names[-1] or len(names) == 1:
                row = (int(step), data.bins[begin:end].tolist(), data.counts[begin:end].tolist())
                expected.setdefault((attempt, names[number]), []).append(row)
            begin = end
    found = gathered.by_series()
    assert set(found) == set(expected)
    for key, data in found.items():
        assert isinstance(data, Histograms)
        assert data.steps.tolist() == [row[0] for row in expected[key]]
        assert data.bins.tolist() == [number for row in expected[key] for number in row[1]]
        assert data.counts.tolist() == [count for row in expected[key] for count in row[2]]


def test_a_block_of_the_first_version_can_still_be_read():
    names = [["conv1", "output", "train"], ["fc", "param", "train"]]
    values = np.arange(18, dtype="<f8").reshape(9, 2)
    head = json.dumps(names).encode()
    body = np.array([1, 0], "<u4").tobytes() + np.array([7, 9], "<u8").tobytes() + values.tobytes()
    block = unpack_block(struct.pack("<II", len(head), 2) + head + zlib.compress(body, 1))
    assert block.names[0] == StoredSeries("conv1", "output", "train")
    assert block.numbers.tolist() == [1, 0]
    assert isinstance(block.data, StatsArrays)
    assert block.data.steps.tolist() == [7, 9]
    assert (block.data.values == values).all()


def test_a_chunk_of_noise_costs_less_than_8_bytes_a_figure():
    noise = np.random.default_rng(0).normal(size=(9, 500))
    packed = pack_chunk(StatsArrays(np.arange(500), noise))
    assert len(packed) / noise.size < 8


values = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(values, min_size=1, max_size=300), st.integers(1, 50))
def test_thinning_never_keeps_more_than_was_asked_for(series_values: list[float], max_points: int):
    """And within that the ends, what is not finite, and the extremes, in this order."""
    num = len(series_values)
    places = kept_places([np.array(series_values)], max_points).tolist()
    assert places == sorted(set(places))
    assert len(places) <= max_points
    assert {0, num - 1} <= set(places) or max_points == 1
    bad = [not math.isfinite(value) for value in series_values]
    ends = [
        place
        for place in range(num)
        if bad[place] and not (bad[max(0, place - 1)] and bad[min(num - 1, place + 1)])
    ]
    inner = [place for place in ends if 0 < place < num - 1]
    if len(inner) <= max_points - 2:
        assert set(ends) <= set(places)
    elif max_points > 2:
        assert len(places) == max_points
        assert inner[0] in places
    finite = [value for value in series_values if math.isfinite(value)]
    if finite and max_points - 2 - len(inner) >= 2:
        kept = {series_values[place] for place in places}
        assert {min(finite), max(finite)} <= kept


@given(st.integers(1, 5), st.integers(2, 400), st.integers(1, 100))
def test_thinning_several_columns_never_keeps_more_either(
    num_columns: int, length: int, max_points: int
):
    columns = [np.sin(np.arange(length) * (n + 1)) for n in range(num_columns)]
    places = kept_places(columns, max_points)
    assert len(places) <= max_points
    assert len(places) >= min(length, max_points, 2)


def test_thinning_several_columns_keeps_the_extremes_of_each():
    columns = [np.sin(np.arange(1000.0)), np.zeros(1000), np.ones(1000)]
    columns[1][333], columns[2][444], columns[2][445:448] = 9.0, -9.0, math.nan
    kept = kept_places(columns, 90).tolist()
    assert {0, 333, 444, 445, 447, 999} <= set(kept)
    assert 446 not in kept
    assert len(kept) <= 90


@given(st.integers(1, 500), st.integers(2, 60))
def test_even_places_have_both_ends_and_no_more_than_asked(num: int, max_points: int):
    places = evenly(num, max_points).tolist()
    assert places == sorted(set(places))
    assert (places[0], places[-1]) == (0, num - 1)
    assert len(places) <= max(max_points, 1)
