"""Decide which checkpoints stay: the newest ones, and those with the best value of a metric.

This is for runs without the service. In the service the worker decides by the same rule. Pure
Python.
"""

import math
from collections.abc import Mapping

from glasshouse.spec import Checkpoint


class CheckpointRetention:
    """Tracks the checkpoints of a run, oldest first."""

    def __init__(self, rule: Checkpoint) -> None:
        self._rule = rule
        self._kept: dict[str, float] = {}

    def superseded(self, name: str, metrics: Mapping[str, float]) -> list[str]:
        """Add a new complete checkpoint; return the names of those that are no longer needed."""
        best = self._rule.keep_best
        self._kept[name] = math.nan if best is None else metrics.get(best.metric, math.nan)
        stay = {*list(self._kept)[-self._rule.keep_last :]}
        if best is not None:  # the earlier of equals; NaN and Inf never count as best
            sign = 1 if best.mode == "min" else -1
            known = [one for one, value in self._kept.items() if math.isfinite(value)]
            stay |= {*sorted(known, key=lambda one: sign * self._kept[one])[: best.count]}
        gone = [one for one in self._kept if one not in stay]
        for one in gone:
            del self._kept[one]
        return gone
