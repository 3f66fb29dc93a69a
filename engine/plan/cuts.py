"""Cut a list of layers into stages so that the largest stage needs the least memory.

Knows neither torch nor jobs.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_LEAST = 0.5
"""Bytes by which sizes differ at least, halved: they are whole numbers."""
Places = NDArray[np.int64]
"""Numbers of layers: a stage begins before its first one and ends before the next one's."""


class LayerSizes:
    """The bytes of layers, in the order of their list."""

    def __init__(
        self, of_parameters: Sequence[int], made: Sequence[int], received: Sequence[int]
    ) -> None:
        """``of_parameters``: parameters and what belongs to them.

        ``made``: the outputs of each layer for one micro-batch. ``received``: what a stage that
        begins with the layer receives for one micro-batch.
        """
        self.num_layers = len(made)
        self._fixed = np.concatenate([[0.0], np.cumsum(np.asarray(of_parameters, np.float64))])
        self._made = np.concatenate([[0.0], np.cumsum(np.asarray(made, np.float64))])
        self._received = np.asarray(received, np.float64)

    def of_stages(self, starts: Places, end: int, num_held: int) -> NDArray[np.float64]:
        """Return the bytes of stages that begin at ``starts`` and end before ``end``.

        ``num_held``: the micro-batches whose activations a stage keeps at once.
        """
        sums = self._fixed + num_held * self._made
        return sums[end] - sums[starts] + num_held * self._received[starts]

    def furthest(self, starts: Places, num_held: int, limit: float) -> Places:
        """Return the last places before which stages can end that take at most ``limit`` bytes."""
        sums = self._fixed + num_held * self._made
        room = sums[starts] + limit - num_held * self._received[starts]
        return np.searchsorted(sums, room, side="right") - 1


def best_cuts(sizes: LayerSizes, allowed: Collection[int], held: Sequence[int]) -> list[int]:
    """Return the cuts whose largest stage is the smallest: the first layer of each stage but one.

    ``allowed``: where a stage may begin, at least as many places as cuts. ``held``: the number of
    micro-batches whose activations each stage keeps at once. The stages before the largest one, and
    those after it, are divided in the same way.
    """
    is_allowed = np.zeros(sizes.num_layers + 1, bool)
    is_allowed[[*allowed]] = True
    return _cut(sizes, is_allowed, held, 0, sizes.num_layers)


def _cut(
    sizes: LayerSizes, is_allowed: NDArray[np.bool_], held: Sequence[int], begin: int, end: int
) -> list[int]:
    """Return the cuts between two places."""
    if len(held) < 2:
        return []
    places = np.arange(begin, end)
    low, high = -1.0, float(sizes.of_stages(places, end, max(held)).max())
    found = _starts(sizes, is_allowed, held, begin, end, high)
    while high - low > _LEAST:
        middle = (low + high) / 2
        if starts := _starts(sizes, is_allowed, held, begin, end, middle):
            high, found = middle, starts
        else:
            low = middle
    cuts = _chosen(sizes, found, held, end, high)
    bounds = [begin, *cuts, end]
    taken = [
        float(sizes.of_stages(np.array([first]), last, count)[0])
        for (first, last), count in zip(pairwise(bounds), held, strict=True)
    ]
    largest = taken.index(max(taken))
    first, last = bounds[largest], bounds[largest + 1]
    before = _cut(sizes, is_allowed, held[:largest], begin, first)
    after = _cut(sizes, is_allowed, held[largest + 1 :], last, end)
    return [*before, *bounds[1:-1][max(0, largest - 1) : largest + 1], *after]


def _starts(
    sizes: LayerSizes,
    is_allowed: NDArray[np.bool_],
    held: Sequence[int],
    begin: int,
    end: int,
    limit: float,
) -> list[Places]:
    """Return where each stage can begin if none is above the limit; empty: they do not fit."""
    starts, found, ends = np.array([begin]), list[Places](), is_allowed
    for count in held:
        found.append(starts)
        furthest = sizes.furthest(starts, count, limit)
        fits = furthest > starts  # a stage has a layer, and can end at each place up to the last
        change = np.zeros(sizes.num_layers + 2, np.int64)
        np.add.at(change, starts[fits] + 1, 1)
        np.add.at(change, furthest[fits] + 1, -1)
        ends = np.cumsum(change)[:-1] > 0
        starts = np.flatnonzero(ends[:end] & is_allowed[:end])
    return found if ends[end] else []


def _chosen(
    sizes: LayerSizes, starts: Sequence[Places], held: Sequence[int], end: int, limit: float
) -> list[int]:
    """Return cuts whose stages are within the limit; ``starts``: where each stage may begin."""
    cuts: list[int] = []
    for stage in range(len(held) - 1, 0, -1):
        able = starts[stage][starts[stage] < end]
        able = able[sizes.furthest(able, held[stage], limit) >= end]
        end = int(able[len(able) // 2])
        cuts.append(end)
    return cuts[::-1]
