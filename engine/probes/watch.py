"""One probe at work: what it looks at, on which steps, and how often it has failed."""

from collections.abc import Sequence

from engine.probes.select import is_due, matches
from glasshouse.spec import Probe

NEVER = 2**62


class Watch:
    """One probe at work, and how often it has failed."""

    def __init__(self, number: int | str, probe: Probe) -> None:
        self.number = number
        """Its place in the spec, or its id."""
        self.probe = probe
        self.num_failures = 0
        self.takes_stats = "stats" in probe.want
        self.takes_full = not {"full", "sample"}.isdisjoint(probe.want)
        self.counts = frozenset(probe.want) & {"histogram", "quantiles"}
        """What it wants of the histogram."""
        self._known: dict[tuple[str, str, bool], bool] = {}

    def wants(self, kind: str, name: str, *, is_first: bool = True) -> bool:
        """Whether the probe looks at this tensor."""
        key = (kind, name, is_first)
        known = self._known.get(key)
        if known is None:
            known = kind in self.probe.kinds and matches(self.probe, name, is_first=is_first)
            self._known[key] = known
        return known

    def is_due(self, step: int) -> bool:
        """Whether it looks at this step."""
        return is_due(self.probe, step)

    def next_due(self, step: int) -> int:
        """The first step after this one on which it may be due; a lower bound is enough."""
        probe = self.probe
        if probe.at is not None:
            return min((item for item in probe.at if item > step), default=NEVER)
        if probe.stop is not None and step >= probe.stop:
            return NEVER
        every = probe.every or 1
        return max((step // every + 1) * every, probe.start)


def first_due_after(watches: Sequence[Watch], step: int) -> int:
    """The next step at which some probe may be due."""
    return min((watch.next_due(step) for watch in watches), default=NEVER)
