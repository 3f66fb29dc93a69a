"""What the judgement of a soak calls flat, and what it does not."""

import random

import pytest

from tests.soak.flat import LEAST_SAMPLES, Bound, judge

EVERY_S = 5.0
NUM = 540
"""Three quarters of an hour."""
Samples = list[tuple[float, float]]


def sampled(value, noise: float = 2.0) -> Samples:
    """Values of a function of the share of time that is over, with noise."""
    chance = random.Random(1)  # noqa: S311
    return [(n * EVERY_S, value(n / NUM) + chance.gauss(0, noise)) for n in range(NUM)]


def is_flat(samples: Samples, bound: float = 16) -> bool:
    verdict = judge("api", "rss_mib", samples, Bound(bound))
    assert verdict is not None
    return verdict.is_flat


@pytest.mark.parametrize(
    "value",
    [
        lambda _: 150,
        lambda over: 150 - 100 * over,
        lambda over: 150 + 40 * (over * 9 % 1),
        lambda over: 500 if 0.5 < over < 0.52 else 150,
        lambda over: 150 + 10 * over,
    ],
    ids=["still", "falling", "sawtooth", "one peak", "within its bound"],
)
def test_constant_or_falling_values_are_flat(value):
    assert is_flat(sampled(value))


@pytest.mark.parametrize(
    "value",
    [
        lambda over: 150 + 30 * over,
        lambda over: 150 + 30 * (over > 0.5),
        lambda over: 150 + 30 * (over > 0.7),
        lambda over: 150 + 30 * over + 40 * (over * 9 % 1),
    ],
    ids=["growing", "a step", "a late step", "a sawtooth that grows"],
)
def test_growing_values_are_not_flat(value):
    assert not is_flat(sampled(value))


def test_the_slope_is_given_by_the_hour():
    verdict = judge("api", "rss_mib", sampled(lambda over: 150 + 30 * over, 0), Bound(16))
    assert verdict is not None
    assert verdict.hours == pytest.approx(0.75, rel=0.01)
    assert verdict.per_hour == pytest.approx(40, rel=0.01)
    assert verdict.growth == pytest.approx(30, rel=0.01)


def test_a_bound_can_be_a_fraction_of_the_first_value():
    assert not is_flat(sampled(lambda over: 1000 + 50 * over))
    verdict = judge(
        "fork_server", "rss_mib", sampled(lambda over: 1000 + 50 * over), Bound(16, 0.08)
    )
    assert verdict is not None
    assert verdict.is_flat


def test_too_few_samples_say_nothing():
    few = [(float(n), 1.0) for n in range(LEAST_SAMPLES - 1)]
    assert judge("api", "rss_mib", few, Bound(16)) is None
