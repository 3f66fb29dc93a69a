import math

from hypothesis import given
from hypothesis import strategies as st

from models.metrics import Point, thin
from models.stats import FIGURES, Row, Series, decode, encode

series = st.builds(
    Series,
    st.text("abc.1", min_size=1, max_size=5),
    st.sampled_from(["output", "param_grad"]),
    st.sampled_from(["train", "evaluate"]),
)
rows = st.lists(
    st.builds(
        Row,
        series,
        st.integers(0, 2**53),
        st.tuples(*[st.floats(width=64) for _ in FIGURES]),
    ),
    min_size=1,
    max_size=30,
)


def same(left: Row, right: Row) -> bool:
    return left[:2] == right[:2] and all(
        a == b or (math.isnan(a) and math.isnan(b))
        for a, b in zip(left.figures, right.figures, strict=True)
    )


@given(rows)
def test_a_block_gives_back_every_row_bit_for_bit(given_rows: list[Row]):
    back = list(decode(encode(given_rows)))
    assert len(back) == len(given_rows)
    assert all(same(a, b) for a, b in zip(given_rows, back, strict=True))


def test_a_block_costs_at_most_12_bytes_a_figure():
    many = [
        Row(
            Series(f"layer{n % 20}", "output", "train"), n, tuple(math.sin(n * k) for k in range(9))
        )
        for n in range(2000)
    ]
    assert len(encode(many)) / (len(many) * len(FIGURES)) <= 12


values = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(values, min_size=1, max_size=300), st.integers(2, 50))
def test_thinning_keeps_the_ends_the_extremes_and_every_nonfinite_run(
    series_values: list[float], max_points: int
):
    points = [Point(step, 0, value) for step, value in enumerate(series_values)]
    kept = thin(points, max_points)
    steps = {point.step for point in kept}
    assert [point.step for point in kept] == sorted(steps)
    assert {0, len(points) - 1} <= steps
    finite = [point for point in points if math.isfinite(point.value)]
    if finite:
        lowest, highest = min(p.value for p in finite), max(p.value for p in finite)
        assert lowest in {point.value for point in kept}
        assert highest in {point.value for point in kept}
    for index, point in enumerate(points):
        begins = index == 0 or math.isfinite(points[index - 1].value)
        if not math.isfinite(point.value) and begins:
            assert point.step in steps


@given(st.integers(100, 5000), st.integers(10, 100))
def test_thinning_a_finite_series_stays_near_the_limit(length: int, max_points: int):
    points = [Point(step, 0, math.sin(step)) for step in range(length)]
    assert len(thin(points, max_points)) <= max_points + 2
