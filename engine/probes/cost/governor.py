"""Governor: keeps the time that watching takes within the budgets of the probes, and reports it.

It uses the measured cost of the newest due steps and the step time without watching. While all
governed probes together exceed a probe's ``max_overhead``, that probe's interval is multiplied by a
power of two, so the remaining steps are a subset of the requested ones. The interval narrows when
usage is clearly below the budget. In the wide band between the two thresholds nothing changes. A
probe that has to widen again after it narrowed waits twice as long before it narrows the next time,
so noise does not make intervals flap.

Probes with listed steps (``at``) and probes without ``max_overhead`` are measured but never
changed.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.spool import Emit, now
from engine.probes.cost.meter import MeasuredStep
from engine.probes.watched.probe import ActiveProbe

NUM_KEPT = 5
"""Number of due steps of a probe whose costs are kept; the median is used."""
NUM_STEPS = 9
"""Number of watched steps whose own time is kept; the median is used."""
MIN_MEASURED = 3
"""Due steps to measure before a change: the first one allocates, and one may be disturbed."""
MIN_FIRST = 10
"""Due steps to measure before the first change …"""
MAX_FIRST_STEPS = 40
"""… unless this many steps have passed and at least ``MIN_MEASURED`` of them were due."""
PATIENCE = 8
"""Due steps to measure before an interval narrows."""
MAX_PATIENCE = 512
WIDE_MARGIN = 0.8
"""Fraction of its budget that a probe may use after it widens."""
NARROW_MARGIN = 0.5
"""Fraction of its budget that a probe may use after it narrows."""
LEAST_SHARE = 0.1
"""Fraction of its budget that a probe may always use, even if probes with larger budgets use it
up."""
MAX_FACTOR = 2**20
AT_WINDOW = 100
"""Number of steps over which the cost of listed steps is spread."""
REPORT_S = 1.0
"""Seconds between two reports of the cost."""


class ProbeLoad(NamedTuple):
    """The cost, interval and budget of one governed probe."""

    cost_s: float
    """Cost of a due step."""
    every: int
    """The requested interval."""
    budget: float
    """The fraction of the job's time above which the interval widens."""


@dataclass
class _Pace:
    costs: deque[float] = field(default_factory=lambda: deque[float](maxlen=NUM_KEPT))
    num_due: int = 0
    """Due steps since the last change of the interval."""
    first: int | None = None
    """The first measured step."""
    is_known: bool = False
    """Whether enough due steps have ever been measured."""
    patience: int = PATIENCE
    has_narrowed: bool = False
    """Whether the last change narrowed the interval."""

    @property
    def cost_s(self) -> float | None:
        return statistics.median(self.costs) if self.costs else None

    def take(self, cost_s: float, step: int) -> None:
        self.costs.append(cost_s)
        self.num_due += 1
        self.first = step if self.first is None else self.first
        has_waited = self.num_due >= MIN_FIRST or step - self.first >= MAX_FIRST_STEPS
        self.is_known = self.is_known or (has_waited and self.num_due >= MIN_MEASURED)

    def changed(self, *, wider: bool) -> None:
        if wider and self.has_narrowed:
            self.patience = min(2 * self.patience, MAX_PATIENCE)
        self.has_narrowed = not wider
        self.num_due = 0
        while len(self.costs) > 1:  # keep one: the other probes' fractions still include its cost
            self.costs.popleft()


def factors(loads: Sequence[ProbeLoad], step_s: float, margin: float) -> list[int]:
    """Return the factor for each interval that keeps all probes within ``margin`` of their budgets.

    All intervals widen equally until the total fits the largest budget. The probes with that budget
    then stay, and the others widen further. Factors are rounded up to powers of two.
    """
    widths = [1.0] * len(loads)

    def fraction(chosen: Iterable[int]) -> float:
        return sum(loads[n].cost_s / (loads[n].every * widths[n]) for n in chosen) / step_s

    everybody = range(len(loads))
    for budget in sorted({load.budget for load in loads}, reverse=True):
        yielding = [n for n in everybody if loads[n].budget <= budget]
        used = fraction(yielding)
        others = fraction(everybody) - used
        room = max(margin * budget - others, LEAST_SHARE * margin * budget)
        if used > room:
            for n in yielding:
                widths[n] *= used / room
    return [min(MAX_FACTOR, 1 << (math.ceil(width) - 1).bit_length()) for width in widths]


class Governor:
    """Adjusts the intervals of probes to keep watching within its budgets; emits what it costs."""

    def __init__(self, emit: Emit, *, is_shared: bool = False) -> None:
        """``is_shared``: several processes watch the same steps, so changes are only proposed.

        They apply when `apply` is called in all processes.
        """
        self._emit = emit
        self._proposed: dict[str, int] | None = {} if is_shared else None
        self._paces: dict[ActiveProbe, _Pace] = {}
        self._steps: deque[float] = deque(maxlen=NUM_STEPS)
        self._step = 0
        self._reported_at = time.monotonic()
        self._is_reported = True

    def keep(self, watches: Sequence[ActiveProbe]) -> None:
        """Measure these probes and forget all others."""
        self._paces = {watch: self._paces.get(watch) or _Pace() for watch in watches}

    def take(self, measured: MeasuredStep, step: int | None) -> None:
        """Add a watched step; a changed interval is emitted with ``step`` as its first step.

        The measurement may be older than the latest change of the probes. Probes that were removed
        since are ignored. ``step`` None means that no step follows: nothing is changed, because the
        last checkpoint has already been written and would not contain the change.
        """
        self._step, self._is_reported = measured.step, False
        self._steps.append(measured.own_s)
        for watch, cost in measured.costs.items():
            if watch in self._paces:
                self._paces[watch].take(cost, measured.step)
        if step is None:
            return
        self._govern(step)
        if time.monotonic() - self._reported_at >= REPORT_S:
            self.report()

    def take_evaluation(self, measured: MeasuredStep) -> None:
        """Add the measurement of a watched evaluation: reported, never governed."""
        self._step, self._is_reported = measured.step, False
        for watch, cost in measured.costs.items():
            if watch in self._paces:
                self._paces[watch].costs = deque([cost])

    def report(self) -> None:
        """Emit the current cost of watching if it has changed."""
        if self._is_reported:
            return
        self._is_reported, self._reported_at = True, time.monotonic()
        costs = {watch: pace.cost_s for watch, pace in self._paces.items()}
        total, unbudgeted = self.fractions() or (None, None)
        self._emit(
            {
                "type": "overhead",
                "at": now(),
                "step": self._step,
                "fraction": None if total is None else _rounded(total),
                "unbudgeted": None if unbudgeted is None else _rounded(unbudgeted),
                "budget": max((w.budget for w in costs if w.budget is not None), default=None),
                "probes": {
                    str(watch.number): _rounded(cost)
                    for watch, cost in costs.items()
                    if cost is not None
                },
                "every": {str(watch.number): watch.every for watch in costs if watch.factor > 1},
            }
        )

    def fractions(self) -> tuple[float, float] | None:
        """Return what watching adds at the current intervals, as fractions of the step time.

        Returns:
            The fractions of all probes and of those without a budget; None before a measurement.
        """
        step_s = self._step_s
        if not step_s:
            return None
        costs = {w: (pace.cost_s or 0.0) * self._rate(w) for w, pace in self._paces.items()}
        unbudgeted = sum(cost for watch, cost in costs.items() if watch.budget is None)
        return sum(costs.values()) / step_s, unbudgeted / step_s

    @property
    def _step_s(self) -> float | None:
        """The step time without watching; None before the first measurement."""
        return statistics.median(self._steps) if self._steps else None

    def _govern(self, step: int) -> None:
        """Change the intervals where the latest measurements require it."""
        loads: dict[ActiveProbe, ProbeLoad] = {}
        for watch, pace in self._paces.items():
            budget, every = watch.budget, watch.every
            if budget is None or every is None or not pace.is_known:
                continue
            if watch.is_open(self._step):
                loads[watch] = ProbeLoad(pace.cost_s or 0.0, every // watch.factor, budget)
        step_s = self._step_s
        if not loads or not step_s:
            return
        used = sum(load.cost_s / (load.every * watch.factor) for watch, load in loads.items())
        over = [watch for watch, load in loads.items() if used / step_s > load.budget]
        calm = [
            watch
            for watch in loads
            if watch not in over
            and watch.factor > 1
            and self._paces[watch].num_due >= self._paces[watch].patience
        ]
        for watches, margin in ((over, WIDE_MARGIN), (calm, NARROW_MARGIN)):
            if watches:
                fitting = factors([*loads.values()], step_s, margin)
                for watch, factor in zip(loads, fitting, strict=True):
                    is_right = factor > watch.factor if watches is over else factor < watch.factor
                    if is_right and watch in watches:
                        self._change(watch, factor, step)

    def _change(self, watch: ActiveProbe, factor: int, step: int) -> None:
        if self._paces[watch].num_due < MIN_MEASURED:
            return
        if self._proposed is None:
            self._apply(watch, factor, step)
        else:
            self._proposed[str(watch.number)] = factor

    def take_proposals(self) -> dict[str, int]:
        """Return the factors that were proposed since the last call, by probe."""
        found = self._proposed or {}
        if found:
            self._proposed = {}
        return found

    def apply(self, factors: Mapping[str, int], step: int) -> None:
        """Change the intervals of probes from a step on, as process 0 has proposed."""
        for watch in self._paces:
            if (factor := factors.get(str(watch.number))) is not None:
                self._apply(watch, factor, step)

    def _apply(self, watch: ActiveProbe, factor: int, step: int) -> None:
        pace, before, number = self._paces[watch], watch.every, str(watch.number)
        pace.changed(wider=factor > watch.factor)
        watch.factor = factor
        self._emit(
            {
                "type": "adjusted",
                "at": now(),
                "what": f"probe {number}.every",
                "probe": number,
                "from": before,
                "to": watch.every,
                "by": "max_overhead",
                "step": step,
            }
        )

    def _rate(self, watch: ActiveProbe) -> float:
        """Return the current number of due training steps per step."""
        if watch.probe.phase == "evaluate":
            return 0.0
        if watch.probe.at is not None:
            first = max(self._step - AT_WINDOW + 1, 0)
            return sum(first <= at <= self._step for at in watch.probe.at) / (
                self._step - first + 1
            )
        return 1 / (watch.every or 1) if watch.is_open(self._step) else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
