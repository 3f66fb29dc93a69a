"""Which scale a histogram over steps is drawn on, and edges that all its steps share."""

import numpy as np

from api.rendering.drawing import histograms
from api.routes.observations.plots import literal, spread
from api.routes.observations.stats import share_edges
from glasshouse import histogram_bins
from models.observations.stats_bytes import Histograms


def counted(steps: list[np.ndarray]) -> Histograms:
    every = [np.unique(histogram_bins.bins_of(values), return_counts=True) for values in steps]
    return Histograms(
        np.arange(len(steps)),
        np.array([len(numbers) for numbers, _ in every]),
        np.concatenate([numbers for numbers, _ in every]).astype(np.uint16),
        np.concatenate([counts for _, counts in every]).astype(np.uint64),
    )


def test_values_far_from_the_others_are_drawn_on_a_scale_that_shows_both():
    chance = np.random.default_rng(0)
    near = [chance.normal(size=1000) for _ in range(5)]
    assert spread(counted(near)).linear_within is None
    far = [*near, np.append(chance.normal(size=999), 1e30)]
    found = spread(counted(far))
    assert found.linear_within is not None
    assert 1 < found.linear_within < 5
    assert found.counts.sum(axis=1).tolist() == [1000] * 6
    assert found.edges[-1] > 1e30
    assert histograms("far", found, "png").startswith(b"\x89PNG")


def test_bins_that_are_not_merged_have_their_own_bars():
    data = counted([np.array([1.0, 1.0, -2.0]), np.array([0.0, 100.0])])
    edges, counts = share_edges(data, None)
    for place, values in enumerate(([1.0, 1.0, -2.0 - 1e-9], [0.0, 100.0])):
        assert counts[place].tolist() == np.histogram(values, edges)[0].tolist()


def test_steps_without_a_finite_value_have_no_bars_and_can_be_drawn():
    empty = counted([np.array([np.nan]), np.array([np.inf])])
    found = spread(empty)
    assert found.counts.shape == (2, 0)
    assert b"</svg>" in histograms("empty", found, "svg")


def test_a_name_is_no_glob():
    assert literal("a*b[0]?") == "a[*]b[[]0][?]"
