"""How a batch is divided over processes and micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from engine.data.batches.division import WHOLE, Division


@given(
    num_rows=st.integers(1, 200),
    num_ranks=st.integers(1, 9),
    parts=st.integers(1, 9),
    start=st.integers(0, 50),
)
def test_every_row_is_in_one_micro_batch_of_one_process(num_rows, num_ranks, parts, start):
    run = slice(start, start + num_rows)
    taken: list[int] = []
    shares: list[int] = []
    for rank in range(num_ranks):
        division = Division(parts, num_ranks, rank)
        sizes, slices = division.sizes(num_rows), [*division.own(run)]
        assert len(sizes) == len(slices)
        if sizes == [0]:
            assert slices == [slice(start, start + 1)]  # another's row, which does not count
            shares.append(0)
            continue
        assert [one.stop - one.start for one in slices] == sizes
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) <= parts
        taken += [row for one in slices for row in range(one.start, one.stop)]
        shares.append(sum(sizes))
    assert taken == [*range(run.start, run.stop)]  # in the order of the batch
    assert max(shares) - min(shares) <= 1
    assert shares[0] > 0


def test_one_process_with_one_micro_batch_has_the_whole_batch():
    assert WHOLE.is_whole
    assert not Division(parts=2).is_whole
    assert not Division(num_ranks=2).is_whole
    assert [*WHOLE.own(slice(3, 9))] == [slice(3, 9)]
