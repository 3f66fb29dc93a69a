"""Whether a figure that was sampled for a while stays as it is. Pure; knows nothing of processes.

Flat is what, after a time of warming up, grows by no more than a bound: neither by a robust line
through all samples (the median of the slopes of all pairs) nor from the median of the first third
to that of the last. Both are asked: a line alone overlooks a late step, two windows alone overlook
what a sawtooth hides. Falling is no fault.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

LEAST_SAMPLES = 12
MOST_POINTS = 90
"""So many medians of neighbors stand for all samples: the pairs of those are quickly gone over."""


@dataclass(frozen=True)
class Bound:
    """What a figure may grow by in the time that is judged: the larger of the two."""

    absolute: float
    share: float = 0.0
    """Of what it was in the first third."""

    def of(self, first: float) -> float:
        """As a number, for a figure that began there."""
        return max(self.absolute, self.share * first)


@dataclass(frozen=True)
class Verdict:
    """What a figure did."""

    line: str
    figure: str
    samples: int
    hours: float
    first: float
    last: float
    most: float
    per_hour: float
    """The slope of the robust line."""
    growth: float
    """The larger of what the line and the two windows say, over the time that was judged."""
    bound: float

    @property
    def is_flat(self) -> bool:
        """Whether it grew by no more than it may."""
        return self.growth <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """Its JSON form."""
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return rounded | {"flat": self.is_flat}


def judge(
    line: str, figure: str, samples: Sequence[tuple[float, float]], bound: Bound
) -> Verdict | None:
    """Judge samples, each a time in seconds and a value. None: there are too few to say."""
    if len(samples) < LEAST_SAMPLES:
        return None
    points = thinned(samples)
    slope = statistics.median(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in combinations(points, 2)
        if later[0] > earlier[0]
    )
    span_s = samples[-1][0] - samples[0][0]
    third = len(samples) // 3
    values = [value for _, value in samples]
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    return Verdict(
        line=line,
        figure=figure,
        samples=len(samples),
        hours=span_s / 3600,
        first=first,
        last=last,
        most=max(values),
        per_hour=slope * 3600,
        growth=max(slope * span_s, last - first),
        bound=bound.of(first),
    )


def thinned(
    samples: Sequence[tuple[float, float]], most: int = MOST_POINTS
) -> list[tuple[float, float]]:
    """Medians of neighbors, few enough to compare all pairs."""
    size = -(-len(samples) // most)
    groups = [samples[n : n + size] for n in range(0, len(samples), size)]
    return [
        (statistics.median(at for at, _ in group), statistics.median(value for _, value in group))
        for group in groups
    ]
