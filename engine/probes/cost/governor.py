"""Governor: keeps the time that watching takes within the budgets of the probes.

It uses the measured cost of the newest due steps and the step time without watching. While all
governed probes together exceed a probe's ``max_overhead``, that probe's interval is multiplied by a
power of two, so the remaining steps are a subset of the requested ones. The interval narrows when
usage is clearly below the budget. In the wide band between the two thresholds nothing changes. A
probe that has to widen again after it narrowed waits twice as long before it narrows the next time,
so noise does not make intervals flap.

Probes with listed steps (``at``) and probes without ``max_overhead`` are measured but never
changed.
"""

import bisect
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class ProbeLoad:
    """The cost, interval and budget of one governed probe."""

    cost_s: float
    """Cost of a due step."""
    every: int
    """The requested interval."""
    budget: float
    """The fraction of the job's time above which the interval widens."""


@dataclass(frozen=True)
class IntervalChange:
    """A changed interval."""

    watch: ActiveProbe
    before: int
    after: int


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
    def may_change(self) -> bool:
        return self.is_known and self.num_due >= MIN_MEASURED

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
    return [_power_of_two(width) for width in widths]


def _power_of_two(width: float) -> int:
    factor = 1
    while factor < width and factor < MAX_FACTOR:
        factor *= 2
    return factor


class Governor:
    """Adjusts the intervals of probes to keep watching within its budgets."""

    def __init__(self) -> None:
        self._paces: dict[ActiveProbe, _Pace] = {}
        self._steps: deque[float] = deque(maxlen=NUM_STEPS)
        self._step = 0

    @property
    def step_s(self) -> float | None:
        """The step time without watching; None before the first measurement."""
        return statistics.median(self._steps) if self._steps else None

    def cost_s(self, watch: ActiveProbe) -> float | None:
        """Return the cost of a probe's due step; None before the first measurement."""
        pace = self._paces.get(watch)
        return None if pace is None else pace.cost_s

    def keep(self, watches: Sequence[ActiveProbe]) -> None:
        """Forget all probes except these."""
        self._paces = {watch: pace for watch, pace in self._paces.items() if watch in watches}

    def take(self, measured: MeasuredStep) -> None:
        """Add the measurement of a watched step."""
        self._step = measured.step
        self._steps.append(measured.own_s)
        for watch, cost in measured.costs.items():
            self._paces.setdefault(watch, _Pace()).take(cost, measured.step)

    def govern(self) -> list[IntervalChange]:
        """Change the intervals where the latest measurements require it; return the changes."""
        loads: dict[ActiveProbe, ProbeLoad] = {}
        for watch, pace in self._paces.items():
            budget, every = watch.max_overhead, watch.every
            if budget is None or every is None or not pace.is_known:
                continue
            if watch.is_open(self._step):
                loads[watch] = ProbeLoad(pace.cost_s or 0.0, every // watch.factor, budget)
        step_s = self.step_s
        if not loads or not step_s:
            return []
        used = sum(load.cost_s / (load.every * watch.factor) for watch, load in loads.items())
        over = [watch for watch, load in loads.items() if used / step_s > load.budget]
        calm = [
            watch
            for watch in loads
            if watch.factor > 1 and self._paces[watch].num_due >= self._paces[watch].patience
        ]
        changes = self._move(loads, over, WIDE_MARGIN) if over else []
        moved = {change.watch for change in changes}
        calm = [watch for watch in calm if watch not in moved and watch not in over]
        return changes + (self._move(loads, calm, NARROW_MARGIN) if calm else [])

    def fractions(self) -> tuple[float, float] | None:
        """Return what watching adds at the current intervals, as fractions of the step time.

        Returns:
            The fractions of all probes and of those without a budget; None before a measurement.
        """
        step_s = self.step_s
        if not step_s:
            return None
        costs = {w: (pace.cost_s or 0.0) * self._rate(w) for w, pace in self._paces.items()}
        unbudgeted = sum(cost for watch, cost in costs.items() if not is_governed(watch))
        return sum(costs.values()) / step_s, unbudgeted / step_s

    def budget(self, watches: Iterable[ActiveProbe]) -> float | None:
        """Return the largest budget of a governed probe; None if no probe is governed."""
        budgets = (watch.max_overhead for watch in watches if is_governed(watch))
        return max((item for item in budgets if item is not None), default=None)

    def _move(
        self, loads: Mapping[ActiveProbe, ProbeLoad], watches: Sequence[ActiveProbe], margin: float
    ) -> list[IntervalChange]:
        """Set the intervals to what fits: wider ones at the wide margin, else narrower ones."""
        fitting = factors([*loads.values()], self.step_s or 1.0, margin)
        changes: list[IntervalChange] = []
        for watch, factor in zip(loads, fitting, strict=True):
            right = factor > watch.factor if margin == WIDE_MARGIN else factor < watch.factor
            if right and watch in watches and self._paces[watch].may_change:
                changes.append(self._change(watch, factor))
        return changes

    def _change(self, watch: ActiveProbe, factor: int) -> IntervalChange:
        before = watch.every or 1
        self._paces[watch].changed(wider=factor > watch.factor)
        watch.factor = factor
        return IntervalChange(watch, before, watch.every or 1)

    def _rate(self, watch: ActiveProbe) -> float:
        """Return the current number of due steps per step."""
        at, every = watch.probe.at, watch.every
        if at is not None:
            first = max(self._step - AT_WINDOW + 1, 0)
            ordered = sorted(at)
            recent = bisect.bisect_right(ordered, self._step) - bisect.bisect_left(ordered, first)
            return recent / (self._step - first + 1)
        return 1 / (every or 1) if watch.is_open(self._step) else 0.0


def is_governed(watch: ActiveProbe) -> bool:
    """Return whether a probe's interval may be changed."""
    return watch.every is not None and watch.max_overhead is not None
