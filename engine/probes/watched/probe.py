"""One active probe: what it watches, on which steps, and how often it has failed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.core.snapshot import State
from engine.probes.watched.select import Scope, means
from glasshouse.spec import Probe

NEVER = 2**62
_LATER: dict[str, Any] = {"ranks": "merged"}
"""Fields that the probes in older checkpoints do not have, with their values."""


class ActiveProbe:
    """An active probe and its number of failures."""

    def __init__(self, number: int | str, probe: Probe) -> None:
        self.number = number
        """Its index in the spec, or its id."""
        self.probe = probe
        self.num_failures = 0
        self.factor = 1
        """The factor by which the governor widened its interval."""
        self.takes_stats = "stats" in probe.want
        self.takes_full = not {"full", "sample"}.isdisjoint(probe.want)
        self.counts = frozenset(probe.want) & {"histogram", "quantiles"}
        """What it wants of the histogram."""
        self.point = probe.point
        self._at = frozenset(probe.at or ())
        self._known: dict[tuple[str, str, bool], bool] = {}

    @property
    def every(self) -> int | None:
        """The current interval; None for a probe with listed steps."""
        return None if self.probe.at is not None else (self.probe.every or 1) * self.factor

    @property
    def budget(self) -> float | None:
        """The fraction of step time above which the interval widens; None: never.

        A probe with listed steps has none, and neither has a lossless one: the time it waits for
        room was asked for.
        """
        is_fixed = self.probe.lossless or self.probe.at is not None
        return None if is_fixed else self.probe.max_overhead

    def wants(
        self,
        kind: str,
        name: str,
        *,
        owner: str | None = None,
        is_first: bool = True,
        scope: Scope = "parameter",
    ) -> bool:
        """Return whether the probe watches this tensor; ``owner`` is the layer it comes from."""
        key = (kind, name, is_first)
        known = self._known.get(key)
        if known is None:
            own = name if owner is None else owner
            known = kind in self.probe.kinds and any(
                means(glob, name, owner=own, is_first=is_first, scope=scope)
                for glob in self.probe.layers
            )
            self._known[key] = known
        return known

    def has_seen(self, kind: str, name: str) -> bool:
        """Return whether ``wants`` has found that the probe watches this tensor."""
        known = self._known
        return known.get((kind, name, True), False) or known.get((kind, name, False), False)

    def learn(self, kind: str, name: str) -> None:
        """Note that the probe watches a tensor that another process has."""
        self._known.setdefault((kind, name, True), True)

    def is_due(self, step: int, count: int | None = None) -> bool:
        """Return whether it is due at a step; ``count``: what its interval counts, if not steps."""
        every = self.every
        if every is None:
            return step in self._at and self.is_open(step)
        return (step if count is None else count) % every == 0 and self.is_open(step)

    def is_open(self, step: int) -> bool:
        """Return whether a step is between its ``start`` and ``stop``."""
        probe = self.probe
        return probe.start <= step and (probe.stop is None or step < probe.stop)

    def next_due(self, step: int) -> int:
        """Return the first later step at which it may be due; a lower bound is enough."""
        probe = self.probe
        if probe.at is not None:
            return min((item for item in probe.at if item > step), default=NEVER)
        if probe.stop is not None and step >= probe.stop:
            return NEVER
        every = self.every or 1
        return max((step // every + 1) * every, probe.start)

    def state(self) -> State:
        """Return what a checkpoint keeps.

        Widened intervals stay wide: a resumed job watches the steps that it would have watched
        without the interruption. The cost of watching is measured again.
        """
        asked = self.probe.model_dump(mode="json")
        return {"probe": asked, "factor": self.factor, "failures": self.num_failures}

    def restore(self, state: Mapping[str, Any], sent: dict[int, set[tuple[str, str]]]) -> bool:
        """Restore the state; return False for that of a probe that has been changed since.

        ``sent``: by step, the names and kinds of the rows that were sent; all recorders share it.
        """
        if _LATER | state["probe"] != self.probe.model_dump(mode="json"):
            return False
        self.factor, self.num_failures = int(state["factor"]), int(state["failures"])
        return True


class ActiveProbes(list[ActiveProbe]):
    """The probes that watch the same tensor, and what they want of it together; immutable."""

    def __init__(self, watches: Iterable[ActiveProbe] = ()) -> None:
        super().__init__(watches)
        self.takes_stats = any(watch.takes_stats for watch in self)
        self.takes_full = any(watch.takes_full for watch in self)
        self.counts = frozenset[str]().union(*(watch.counts for watch in self))
        """``histogram``, ``quantiles``, both or none."""
        self.of_ranks = [watch for watch in self if watch.probe.ranks != "merged"]
        """Those that want the values of single processes too."""

    def forms_of_ranks(self, kind: str, name: str, num: int) -> dict[int, frozenset[str]]:
        """Return the forms in which they want a tensor of single processes, by rank.

        ``num``: the number of processes.
        """
        found: dict[int, frozenset[str]] = {}
        for watch in self.of_ranks:
            if watch.has_seen(kind, name):
                for rank in watch.probe.own_ranks(num):
                    found[rank] = found.get(rank, frozenset()) | {*watch.probe.want}
        return found


def first_due_after(watches: Sequence[ActiveProbe], step: int) -> int:
    """Return the next step at which some probe may be due."""
    return min((watch.next_due(step) for watch in watches), default=NEVER)
