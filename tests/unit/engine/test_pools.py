"""A shuffle pool, as arithmetic: against rows that are put into a dict and taken out of it."""

import numpy as np
import pytest

from engine.data.batches.shuffle_pool import Pool, PoolDraws
from engine.data.columns.table import runs_of
from tests.unit.engine.pools import drawn

POOLS = {
    "as large as all": Pool(100, 10, 100),
    "larger than all": Pool(100, 10, 1000, 60),
    "small": Pool(1000, 10, 40),
    "one batch": Pool(205, 10, 10),
    "begins full": Pool(1003, 16, 200, 200),
    "rows that fill no run": Pool(1007, 64, 300, 100),
    "one row": Pool(1, 10, 10),
    "batches of one": Pool(57, 1, 7),
}


@pytest.mark.parametrize("kind", POOLS)
def test_an_epoch_draws_every_row_once(kind):
    pool = POOLS[kind]
    made = drawn(pool)
    assert sorted(row for rows in made for row in rows) == [*range(pool.num_rows)]
    assert [len(rows) for rows in made[:-1]] == [pool.batch_size] * (len(made) - 1)
    assert PoolDraws(pool, 3, 0).draw().places.tolist() == made[0]
    if pool.num_rows > 1:
        assert drawn(pool, epoch=1) != made != drawn(pool, seed=4)


@pytest.mark.parametrize("kind", POOLS)
def test_the_pool_holds_what_was_read_and_never_more_than_it_may(kind):
    """Slot by slot, against a dict that takes and gives rows one by one."""
    pool = POOLS[kind]
    draws, held = PoolDraws(pool, 3, 0), {}
    for batch in range(-(-pool.num_rows // pool.batch_size)):
        draw = draws.draw()
        entering = [row for first, last in draw.runs for row in range(first, last)]
        assert len(entering) == len(draw.entered)
        for slot, row in zip(draw.entered.tolist(), entering, strict=True):
            assert slot not in held
            held[slot] = row
        if not batch:
            assert len(held) == pool.begin
        assert len(held) <= pool.capacity
        assert [held.pop(slot) for slot in draw.drawn.tolist()] == draw.places.tolist()
        slots, places = draws.held
        assert dict(zip(slots.tolist(), places.tolist(), strict=True)) == held
    assert not held


def test_the_pool_grows_by_a_batch_with_each_batch():
    draws, sizes = PoolDraws(Pool(1000, 10, 60, 25), 1, 0), []
    for _ in range(8):
        draw = draws.draw()
        sizes.append(len(draws.held[0]) + len(draw.drawn))
    assert sizes == [25, 35, 45, 55, 60, 60, 60, 60]


@pytest.mark.parametrize("kind", POOLS)
def test_batches_that_were_taken_are_skipped_and_the_others_are_the_same(kind):
    made = drawn(POOLS[kind])
    for skip in (0, 1, len(made) // 2, len(made)):
        assert drawn(POOLS[kind], skip=skip) == made[skip:]


def test_a_sorted_file_is_mixed_from_the_first_batch_on():
    labels = np.repeat(np.arange(10), 1000)
    for buffer_size in (100, 500):
        made = drawn(Pool(10_000, 100, buffer_size))
        kinds = [len({*labels[rows].tolist()}) for rows in made]
        assert kinds[0] >= 4
        assert sum(kinds) / len(kinds) > 6


def test_every_row_of_the_pool_is_as_likely_to_be_drawn():
    """Of a pool of all 40 rows: how often each is in the first batch, in 4,000 epochs."""
    for size in (4, 30):  # drawn at random from many, shuffled if few
        pool = Pool(40, size, 40, 40)
        counts = np.zeros(40)
        for epoch in range(4000):
            places = PoolDraws(pool, 1, epoch).draw().places
            assert len({*places.tolist()}) == size
            counts[places] += 1
        mean = 4000 * size / 40
        spread = (mean * (1 - size / 40)) ** 0.5
        assert abs(counts - mean).max() < 4.5 * spread


def test_rows_side_by_side_are_one_run():
    assert runs_of(np.array([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)]
    assert runs_of(np.array([4])) == [(4, 5)]
    assert runs_of(np.array([], np.int64)) == []
