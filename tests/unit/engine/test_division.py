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
    counts: set[int] = set()
    for rank in range(num_ranks):
        division = Division(parts, num_ranks, rank)
        sizes, slices = division.sizes(num_rows), [*division.own(run)]
        assert len(sizes) == len(slices)
        counts.add(len(sizes))
        assert [one.stop - one.start for one in slices] == [max(1, size) for size in sizes]
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) <= parts
        assert sizes[-1] or not any(sizes)  # probes watch the last one
        for size, one in zip(sizes, slices, strict=True):
            if size:
                taken += range(one.start, one.stop)
            else:
                assert one == slice(start, start + 1)  # another's row, which does not count
        shares.append(sum(sizes))
    assert taken == [*range(run.start, run.stop)]  # in the order of the batch
    assert max(shares) - min(shares) <= 1
    assert shares[0] > 0
    assert len(counts) == 1  # as many passes in each process


def test_one_process_with_one_micro_batch_has_the_whole_batch():
    assert WHOLE.is_whole
    assert not Division(parts=2).is_whole
    assert not Division(num_ranks=2).is_whole
    assert [*WHOLE.own(slice(3, 9))] == [slice(3, 9)]
