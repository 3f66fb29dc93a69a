"""The governor: watching takes no more of a job's time than its probes allow.

It knows what looking took on the newest due steps and how long a step takes without it. While all
governed probes together take a larger fraction than a probe's ``max_overhead``, that probe's
interval widens by a power of two, so that the steps left over are some of those that were asked
for. It narrows when there is clear room. Between the two lies a wide band in which nothing is
changed, and a probe that had to widen again after it was narrowed waits twice as long the next
time: so noise makes no interval flap.

Probes with listed steps (``at``) and those without ``max_overhead`` are measured and never moved.
"""

import bisect
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.probes.cost.meter import MeasuredStep
from engine.probes.watched.probe import ActiveProbe

NUM_KEPT = 5
"""Due steps of a probe whose costs are kept; their median counts."""
NUM_STEPS = 9
"""Watched steps whose own time is kept; their median counts."""
MIN_MEASURED = 3
"""Due steps to measure before a change: the first allocates, and one may be disturbed."""
MIN_FIRST = 10
"""Due steps to measure before the first change …"""
MAX_FIRST_STEPS = 40
"""… unless so many steps have passed, and ``MIN_MEASURED`` of them were due."""
PATIENCE = 8
"""Due steps to measure before an interval narrows."""
MAX_PATIENCE = 512
WIDE_MARGIN = 0.8
"""Of its budget, what a probe that widens leaves to use."""
NARROW_MARGIN = 0.5
"""Of its budget, what a probe that narrows leaves to use."""
LEAST_SHARE = 0.1
"""Of its budget, what a probe may use although others, which are allowed more, use all of it."""
MAX_FACTOR = 2**20
AT_WINDOW = 100
"""Steps over which the cost of listed steps is spread."""


@dataclass(frozen=True)
class ProbeLoad:
    """One governed probe in numbers."""

    cost_s: float
    """Of a due step."""
    every: int
    """The interval that was asked for."""
    budget: float
    """The fraction of a job's time beyond which it yields."""


@dataclass(frozen=True)
class IntervalChange:
    """An interval that was changed."""

    watch: ActiveProbe
    before: int
    after: int


@dataclass
class _Pace:
    costs: deque[float] = field(default_factory=lambda: deque[float](maxlen=NUM_KEPT))
    num_due: int = 0
    """Due steps since its interval was changed last."""
    first: int | None = None
    """The first step that was measured."""
    is_known: bool = False
    """Whether enough of its due steps were measured at some time."""
    patience: int = PATIENCE
    has_narrowed: bool = False
    """Whether its last change was to look more often."""

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
        while len(self.costs) > 1:  # one stays: the others go on being judged beside it
            self.costs.popleft()


def factors(loads: Sequence[ProbeLoad], step_s: float, margin: float) -> list[int]:
    """How much wider each interval must be for all to keep within a part of their budgets.

    Everybody yields alike, until the total fits those that are allowed most; they stay, and the
    others go on. Powers of two, so that it may be somewhat more than needed.
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
    """Watches over what watching costs."""

    def __init__(self) -> None:
        self._paces: dict[ActiveProbe, _Pace] = {}
        self._steps: deque[float] = deque(maxlen=NUM_STEPS)
        self._step = 0

    @property
    def step_s(self) -> float | None:
        """What a step takes without watching; None before one was measured."""
        return statistics.median(self._steps) if self._steps else None

    def cost_s(self, watch: ActiveProbe) -> float | None:
        """What a due step of a probe takes; None before one was measured."""
        pace = self._paces.get(watch)
        return None if pace is None else pace.cost_s

    def keep(self, watches: Sequence[ActiveProbe]) -> None:
        """Forget all probes but these."""
        self._paces = {watch: pace for watch, pace in self._paces.items() if watch in watches}

    def take(self, measured: MeasuredStep) -> None:
        """Take in a watched step."""
        self._step = measured.step
        self._steps.append(measured.own_s)
        for watch, cost in measured.costs.items():
            self._paces.setdefault(watch, _Pace()).take(cost, measured.step)

    def govern(self) -> list[IntervalChange]:
        """Change the intervals that what was measured last calls for; says which."""
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
        """What watching adds at the intervals in force, as fractions of a step's own time.

        Returns:
            What all probes add, and what those without a budget add; None before a measurement.
        """
        step_s = self.step_s
        if not step_s:
            return None
        costs = {w: (pace.cost_s or 0.0) * self._rate(w) for w, pace in self._paces.items()}
        unbudgeted = sum(cost for watch, cost in costs.items() if not is_governed(watch))
        return sum(costs.values()) / step_s, unbudgeted / step_s

    def budget(self, watches: Iterable[ActiveProbe]) -> float | None:
        """The largest fraction that a governed probe allows; None where there is none."""
        budgets = (watch.max_overhead for watch in watches if is_governed(watch))
        return max((item for item in budgets if item is not None), default=None)

    def _move(
        self, loads: Mapping[ActiveProbe, ProbeLoad], watches: Sequence[ActiveProbe], margin: float
    ) -> list[IntervalChange]:
        """Bring intervals to what fits: wider ones at the wide margin, else narrower ones."""
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
        """Due steps per step, about now."""
        at, every = watch.probe.at, watch.every
        if at is not None:
            first = max(self._step - AT_WINDOW + 1, 0)
            ordered = sorted(at)
            recent = bisect.bisect_right(ordered, self._step) - bisect.bisect_left(ordered, first)
            return recent / (self._step - first + 1)
        return 1 / (every or 1) if watch.is_open(self._step) else 0.0


def is_governed(watch: ActiveProbe) -> bool:
    """Whether a probe's interval may be changed."""
    return watch.every is not None and watch.max_overhead is not None
