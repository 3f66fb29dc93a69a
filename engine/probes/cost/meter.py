"""What watching costs: the time that looks take out of a step, and for whom.

On the CPU it is the clock of the process. On CUDA it is events on the stream, which see what the
step itself sees: kernels of the looks, and a stream that stands idle while a look is launched. An
event is read once the device has passed it; nothing ever waits for one.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.probes.watched.probe import ActiveProbe


class CostClock(Protocol):
    """Where time is read."""

    def mark(self) -> Any:
        """This moment."""
        ...

    def has_passed(self, mark: Any) -> bool:
        """Whether the moment is over, so that it can be read."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two moments that are over."""
        ...


class HostCostClock:
    """The clock of the process."""

    mark = staticmethod(time.perf_counter_ns)

    def has_passed(self, mark: int) -> bool:
        """Always."""
        return True

    def seconds(self, start: int, end: int) -> float:
        """The time between two moments."""
        return (end - start) / 1e9


class DeviceCostClock:
    """Events on the current CUDA stream."""

    def mark(self) -> Any:
        """This place in the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has come to this place."""
        return mark.query()

    def seconds(self, start: Any, end: Any) -> float:
        """The device's time between two places that it has passed."""
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> CostClock:
    """The clock that the steps of a device are measured with."""
    return DeviceCostClock() if device.type == "cuda" else HostCostClock()


@dataclass(frozen=True)
class MeasuredStep:
    """One watched step."""

    step: int
    own_s: float
    """From its boundary to the next one, without the looks."""
    costs: Mapping[ActiveProbe, float]
    """Seconds that it took to look, by the probe that wanted it."""


Shares = Mapping[ActiveProbe, float] | Sequence[ActiveProbe] | None
"""Who wanted a look: by weight, or equally; None: all that look at this step, as their other spans
are."""
_Span = tuple[Any, Any, Shares, int]
"""Its start and end, who wanted it, and the number of the first span inside it, which is its own
number where there is none. A tuple, because one is made for every tensor."""


@dataclass
class _Step:
    number: int
    start: Any
    due: Sequence[ActiveProbe] = ()
    end: Any = None
    spans: list[_Span] = field(default_factory=list[_Span])


class Meter:
    """Measures watched steps, from boundary to boundary."""

    def __init__(self, clock: CostClock) -> None:
        self._clock = clock
        self._open: _Step | None = None
        self._closed: deque[_Step] = deque()

    def begin(self, step: int) -> None:
        """A step begins here, and the one that was begun before is over."""
        self._open, before = _Step(step, self._clock.mark()), self._open
        if before is not None:
            before.end = self._open.start
            self._closed.append(before)

    @property
    def num_closed(self) -> int:
        """Steps that are over and were not taken yet."""
        return len(self._closed)

    def watch(self, due: Sequence[ActiveProbe]) -> None:
        """These look at the step; one that nobody looks at is not measured."""
        if self._open is not None:
            self._open.due = due
        if not due:
            self._open = None

    def end(self) -> None:
        """The step that was begun last is over."""
        self.begin(0)
        self.watch(())

    def start(self) -> tuple[Any, int]:
        """Begin to look."""
        return self._clock.mark(), len(self._open.spans) if self._open else 0

    def stop(self, started: tuple[Any, int], shares: Shares) -> None:
        """The look that began there is over, and was for these; spans inside it count on their own.

        Without shares it was for everybody who looks at the step.
        """
        if self._open is not None:
            self._open.spans.append((started[0], self._clock.mark(), shares, started[1]))

    def take(self) -> Iterator[MeasuredStep]:
        """The steps that are over and can be read, each once."""
        while self._closed and self._clock.has_passed(self._closed[0].end):
            yield self._read(self._closed.popleft())

    def _read(self, step: _Step) -> MeasuredStep:
        seconds = self._clock.seconds
        own: list[float] = []
        costs: dict[ActiveProbe, float] = dict.fromkeys(step.due, 0.0)
        rest = 0.0
        for start, end, shares, nested in step.spans:  # one inside another comes before it
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
    if not isinstance(shares, Mapping):
        if len(shares) == 1:  # nearly always
            costs[shares[0]] = costs.get(shares[0], 0.0) + seconds
            return
        for watch in shares:
            costs[watch] = costs.get(watch, 0.0) + seconds / len(shares)
        return
    weight = sum(shares.values())
    for watch, part in shares.items():
        share = part / weight if weight else 1 / len(shares)
        costs[watch] = costs.get(watch, 0.0) + seconds * share
