"""Measure the time that watching takes in each step, by probe.

Moments are read after the device has passed them; nothing waits for one.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.core.timing import Clock
from engine.probes.watched.probe import ActiveProbe


@dataclass(frozen=True)
class MeasuredStep:
    """The measurement of one watched step."""

    step: int
    own_s: float
    """Time from its start to the start of the next step, without watching."""
    costs: Mapping[ActiveProbe, float]
    """Seconds spent on watching, by probe."""


Shares = Mapping[ActiveProbe, float] | Sequence[ActiveProbe] | None
"""The probes that pay for a span, with weights or equally. None: all probes due at this step, in
proportion to their other spans."""
_Span = tuple[Any, Any, Shares, int]
"""Start, end, who pays, and the index of the first span nested in it (its own index if there is
none). A tuple, because one is created for every tensor."""


@dataclass
class _Step:
    number: int
    start: Any
    due: Sequence[ActiveProbe] = ()
    end: Any = None
    spans: list[_Span] = field(default_factory=list[_Span])
    elsewhere: dict[torch.device, Any] = field(default_factory=dict[torch.device, Any])
    """The newest moment of each device that is not the clock's."""


class Meter:
    """Measures watched steps from the start of one to the start of the next."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._open: _Step | None = None
        self._closed: deque[_Step] = deque()

    def begin(self, step: int) -> None:
        """Start a step and close the previous one."""
        self._open, before = _Step(step, self.clock.moment()), self._open
        if before is not None:
            before.end = self._open.start
            self._closed.append(before)

    @property
    def num_closed(self) -> int:
        """Number of closed steps that ``take`` has not returned yet."""
        return len(self._closed)

    def watch(self, due: Sequence[ActiveProbe]) -> None:
        """Set the probes that watch the open step; without probes the step is not measured."""
        if self._open is not None:
            self._open.due = due
        if not due:
            self._open = None

    def end(self) -> None:
        """Close the current step."""
        self.begin(0)
        self.watch(())

    def start(self, device: torch.device | None = None) -> tuple[Any, int]:
        """Start a span of watching; ``device``: what computes it, if that is not the clock's."""
        return self._moment(device), len(self._open.spans) if self._open else 0

    def stop(
        self, started: tuple[Any, int], shares: Shares, device: torch.device | None = None
    ) -> None:
        """End a span of watching and assign it to ``shares``; nested spans count separately.

        With ``shares`` None it is assigned to all probes of the step. ``device``: that of `start`.
        """
        if self._open is not None:
            end = self._moment(device)
            self._open.spans.append((started[0], end, shares, started[1]))
            if device is not None:
                self._open.elsewhere[device] = end

    def _moment(self, device: torch.device | None) -> Any:
        return self.clock.moment() if device is None else self.clock.moment_on(device)

    def take(self) -> Iterator[MeasuredStep]:
        """Yield the closed steps that can be read, each once."""
        while self._closed and self._has_passed(self._closed[0]):
            yield self._read(self._closed.popleft())

    def _has_passed(self, step: _Step) -> bool:
        return all(map(self.clock.has_passed, (step.end, *step.elsewhere.values())))

    def _read(self, step: _Step) -> MeasuredStep:
        seconds = self.clock.seconds
        own: list[float] = []
        costs: dict[ActiveProbe, float] = dict.fromkeys(step.due, 0.0)
        rest = 0.0
        for start, end, shares, nested in step.spans:  # nested spans come first
            spent = seconds(start, end)
            if nested < len(own):
                spent = max(0.0, spent - sum(own[nested:]))
            own.append(spent)
            if shares is None:
                rest += spent
            else:
                _share(costs, shares, spent)
        some = any(costs.values())
        _share(costs, dict(costs) if some else step.due, rest)
        total = seconds(step.start, step.end)
        return MeasuredStep(step.number, max(0.0, total - sum(own)), costs)


def _share(
    costs: dict[ActiveProbe, float],
    shares: Mapping[ActiveProbe, float] | Sequence[ActiveProbe],
    seconds: float,
) -> None:
    weights = shares if isinstance(shares, Mapping) else dict.fromkeys(shares, 1.0)
    whole = sum(weights.values())
    for watch, weight in weights.items():
        costs[watch] = costs.get(watch, 0.0) + seconds * (weight / whole)
