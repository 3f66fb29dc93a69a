import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.rate_limit import BURST_S, RateLimiter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_and_then_its_rate():
    clock = Clock()
    rates = RateLimiter(clock)
    given_at_once = sum(rates.take("ada", 10) == 0 for _ in range(100))
    assert given_at_once == 10 * BURST_S
    assert rates.take("ada", 10) == pytest.approx(0.1)
    clock.now += 0.1001
    assert rates.take("ada", 10) == 0
    assert rates.take("ada", 10) > 0
    assert rates.take("bob", 10) == 0, "one key's bucket is not another's"


@given(st.floats(0.1, 1000), st.lists(st.floats(0, 5), max_size=200))
def test_no_pattern_of_asking_gets_more_than_rate_and_burst(rate: float, pauses: list[float]):
    clock = Clock()
    rates = RateLimiter(clock)
    began = clock.now
    taken = 0
    for pause in pauses:
        clock.now += pause
        taken += rates.take("ada", rate) == 0
        assert taken <= max(1.0, rate * BURST_S) + (clock.now - began) * rate + 1e-6


@given(st.floats(0.1, 1000))
def test_after_the_pause_that_is_asked_for_there_is_room(rate: float):
    clock = Clock()
    rates = RateLimiter(clock)
    while not (pause := rates.take("ada", rate)):
        pass
    clock.now += pause * 1.001 + 1e-6
    assert rates.take("ada", rate) == 0


def test_buckets_of_keys_that_went_away_are_forgotten():
    clock = Clock()
    rates = RateLimiter(clock)
    for number in range(10_000):
        rates.take(f"key {number}", 1)
    clock.now += BURST_S + 1
    rates.take("one more", 1)
    assert len(rates._buckets) == 1
