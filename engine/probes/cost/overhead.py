"""Emit the cost of watching as records: the overhead, and each changed interval."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.core.spool import Emit, now
from engine.probes.cost.governor import Governor, IntervalChange
from engine.probes.cost.meter import MeasuredStep
from engine.probes.watched.probe import ActiveProbe

TELL_S = 1.0


class Overhead:
    """Passes measurements to the governor and emits its changes and the overhead."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._governor = Governor()
        self._kept: frozenset[ActiveProbe] = frozenset()
        self._once: dict[ActiveProbe, float] = {}
        self._step: int | None = None
        self._told_at = time.monotonic()
        self._is_told = True

    def keep(self, watches: Sequence[ActiveProbe]) -> None:
        """Forget all probes except these."""
        self._kept = frozenset(watches)
        self._governor.keep(watches)
        self._once = {watch: cost for watch, cost in self._once.items() if watch in self._kept}

    def take(
        self, measured: MeasuredStep, watches: Sequence[ActiveProbe], step: int | None
    ) -> None:
        """Add a watched step; a changed interval is emitted with ``step`` as its first step.

        The measurement may be older than the latest change of the probes. Probes that were removed
        since are ignored. ``step`` None means that no step follows: nothing is changed, because the
        last checkpoint has already been written and would not contain the change.
        """
        self._step, self._is_told = measured.step, False
        costs = {watch: cost for watch, cost in measured.costs.items() if watch in self._kept}
        self._governor.take(replace(measured, costs=costs))
        if step is None:
            return
        for change in self._governor.govern():
            self._emit(_adjusted(change, step))
        if time.monotonic() - self._told_at >= TELL_S:
            self.tell(watches)

    def take_evaluation(self, measured: MeasuredStep) -> None:
        """Add the measurement of a watched evaluation: reported, never governed."""
        self._is_told = False
        self._step = measured.step
        self._once |= measured.costs

    def tell(self, watches: Sequence[ActiveProbe]) -> None:
        """Emit the current cost of watching if it has changed."""
        if self._is_told or self._step is None:
            return
        self._is_told, self._told_at = True, time.monotonic()
        governor = self._governor
        costs = {watch: self._once.get(watch, governor.cost_s(watch)) for watch in watches}
        total, unbudgeted = governor.fractions() or (None, None)
        self._emit(
            {
                "type": "overhead",
                "at": now(),
                "step": self._step,
                "fraction": None if total is None else _rounded(total),
                "unbudgeted": None if unbudgeted is None else _rounded(unbudgeted),
                "budget": governor.budget(watches),
                "probes": {
                    str(watch.number): _rounded(cost)
                    for watch, cost in costs.items()
                    if cost is not None
                },
                "every": {str(watch.number): watch.every for watch in watches if watch.factor > 1},
            }
        )


def _adjusted(change: IntervalChange, step: int) -> dict[str, Any]:
    number = str(change.watch.number)
    return {
        "type": "adjusted",
        "at": now(),
        "what": f"probe {number}.every",
        "probe": number,
        "from": change.before,
        "to": change.after,
        "by": "max_overhead",
        "step": step,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
