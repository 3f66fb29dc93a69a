import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.rendering import slices
from glasshouse.errors import InvalidRequest

ENDS = st.none() | st.integers(-7, 7)
PARTS = st.one_of(
    st.integers(-5, 4),
    st.builds(slice, ENDS, ENDS, st.none() | st.integers(-3, 3).filter(bool)),
)


def write(part: int | slice) -> str:
    if isinstance(part, int):
        return str(part)
    texts = ["" if end is None else str(end) for end in (part.start, part.stop)]
    return ":".join(texts) + ("" if part.step is None else f":{part.step}")


@given(st.lists(PARTS, min_size=1, max_size=3))
def test_a_slice_means_what_numpy_means_by_it(parts: list[int | slice]) -> None:
    array = np.arange(5 * 5 * 5).reshape(5, 5, 5)
    expected, text = array[tuple(parts)], ",".join(map(write, parts))
    if expected.size:
        assert np.array_equal(array[slices.parse(text, array.shape)], expected)
    else:
        with pytest.raises(InvalidRequest, match="has nothing of axis") as caught:
            slices.parse(text, array.shape)
        assert [item.pointer for item in caught.value.problems] == ["/query/slice"]


def test_a_range_beyond_the_shape_says_which_and_of_which_axis() -> None:
    with pytest.raises(InvalidRequest, match="5000:6000 has nothing of axis 1, which has size 600"):
        slices.parse("0:10,5000:6000", (200, 600))
    assert slices.parse("150:6000", (200, 600)) == (slice(150, 6000),)  # cut, as in numpy
    assert slices.parse(":", (0, 3)) == (slice(None, None),)  # all of what has nothing


def test_dots_stand_for_the_axes_that_are_not_named() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(array[slices.parse("..., 1", array.shape)], array[..., 1])
    assert np.array_equal(array[slices.parse("0,...", array.shape)], array[0])


HOSTILE = (
    "| , |a|1.0|0x1|1e3|None|::0|1:2:3:4|...,...|2|-3|0,3|0,0,0|[0]|__import__('os')|1;2|...,9"
    "|:,:,:|--1|+1|\u0661|0\n|\t0|0\0|" + "9" * 40
).split("|")


@pytest.mark.parametrize("text", HOSTILE)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        slices.parse(text, (2, 3))


def test_many_axes_are_refused_without_work() -> None:
    with pytest.raises(InvalidRequest):
        slices.parse("," * 999, (2, 3))
