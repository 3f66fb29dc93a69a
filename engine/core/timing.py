"""Measure time: a clock that attributes every lap to a part of the step, and gives moments.

On the CPU the host's clock is used. On an accelerator, events in the device's queue are used: they
measure what the step itself experiences, which is the kernels and the idle time of the queue while
they are launched. Events are read after they have completed, so nothing waits for the device.
Depends on torch's events, not on jobs.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.core.device import is_accelerator

PARTS = (
    *("data", "forward", "backward", "optimizer"),
    *("probes", "derived", "checkpoint", "evaluate"),
)
"""The parts that are reported. The rest of a step is reporting itself."""
COLLECTIVE = "collective"
"""Exchanging gradients and numbers with the other processes, and waiting for them. Reported only
if there are others."""
PREDICT = "predict"
"""Answering requests for predictions between two steps. Reported only if there were some."""
REPORT = "report"
TRAINING_FACTOR = 3
"""A step counts as three times the operations of its forward pass. This is the usual convention:
one for the forward pass, two for the gradients with respect to inputs and parameters."""
_MAX_WAITING = 4096
_timed_event = partial(torch.Event, enable_timing=True)


Laps = defaultdict[str, float]
"""Nanoseconds by part; and ``num_steps``, ``num_rows`` and ``num_tokens``, the steps of sequences
without padding."""


def _add(laps: Laps, more: Mapping[str, float]) -> None:
    for name, number in more.items():
        laps[name] += number


class HostClock:
    """Measures laps with the host's clock: exact if the device is the host."""

    def __init__(self) -> None:
        self._laps = Laps(float)
        self._taken = Laps(float)
        self._depth = 0
        self._paused = self._last = time.perf_counter_ns()

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to a part."""
        now = time.perf_counter_ns()
        self._laps[part] += now - self._last
        self._last = now

    def end_step(self, num_rows: int, num_tokens: int = 0) -> None:
        """Count a step of ``num_rows`` rows whose sequences have ``num_tokens`` steps."""
        self._laps["num_steps"] += 1
        self._laps["num_rows"] += num_rows
        self._laps["num_tokens"] += num_tokens

    def pause(self) -> None:
        """Exclude the time up to `resume` from the current part."""
        self._depth += 1
        if self._depth == 1:
            self._paused = time.perf_counter_ns()

    def resume(self, part: str) -> None:
        """Attribute the time since the outermost `pause` to a part."""
        self._depth -= 1
        if self._depth:
            return
        passed = time.perf_counter_ns() - self._paused
        self._laps[part] += passed
        self._last += passed

    def take(self, *, wait: bool = False) -> Laps:
        """Return what was measured since the last call."""
        taken, self._laps = self._laps, Laps(float)
        _add(self._taken, taken)
        return taken

    def total_s(self, part: str) -> float:
        """Return the seconds of a part since the clock was made."""
        return (self._taken[part] + self._laps[part]) / 1e9

    moment = staticmethod(time.perf_counter_ns)

    def moment_on(self, device: torch.device) -> int:
        """Return the time of the host: only its own tensors are measured by it."""
        return self.moment()

    def has_passed(self, moment: int) -> bool:
        """Return True: moments of the host have always passed."""
        return True

    def seconds(self, start: int, end: int) -> float:
        """Return the time between two moments."""
        return (end - start) / 1e9


class DeviceClock:
    """Measures laps in the device's queue. A lap counts once the event at its end has completed.

    Host work while the device is busy therefore counts as nothing. If the device waits for the
    host, the time counts for the part that it waits for.
    """

    def __init__(
        self, make_event: Callable[[], Any] = _timed_event, device: torch.device | None = None
    ) -> None:
        """``device``: the one to measure; None: the current one."""
        self._make_event = make_event
        # without a stream, an event is recorded on the current device, which autograd changes
        self._stream = () if device is None else (torch.accelerator.current_stream(device),)
        self._laps = Laps(float)
        self._taken = Laps(float)
        self._free: list[Any] = []
        self._waiting: deque[tuple[str | tuple[int, int] | None, Any]] = deque()
        self._carried_ms = 0.0
        self._depth = 0
        self._last = self._record()

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to a part."""
        self._waiting.append((part, self._record()))
        if len(self._waiting) > _MAX_WAITING:
            self._settle()

    def end_step(self, num_rows: int, num_tokens: int = 0) -> None:
        """Count a step of ``num_rows`` rows once the marks before it have completed."""
        self._waiting.append(((num_rows, num_tokens), None))

    def pause(self) -> None:
        """Exclude the time up to `resume` from the current part."""
        self._depth += 1
        if self._depth == 1:
            self._waiting.append((None, self._record()))

    def resume(self, part: str) -> None:
        """Attribute the time since the outermost `pause` to a part."""
        self._depth -= 1
        if not self._depth:
            self._waiting.append((f"+{part}", self._record()))

    def take(self, *, wait: bool = False) -> Laps:
        """Return what has completed since the last call; ``wait`` for all of it."""
        if wait and self._waiting:
            marked = [event for _, event in self._waiting if event is not None]
            if marked:
                marked[-1].synchronize()
        self._settle()
        taken, self._laps = self._laps, Laps(float)
        _add(self._taken, taken)
        return taken

    def total_s(self, part: str) -> float:
        """Return the seconds of a part since the clock was made, as far as they have passed."""
        return (self._taken[part] + self._laps[part]) / 1e9

    def moment(self) -> Any:
        """Record an event at the current position in the queue."""
        event = self._make_event()
        event.record(*self._stream)
        return event

    def moment_on(self, device: torch.device) -> Any:
        """Record an event at the current position in the queue of another device."""
        event = self._make_event()
        event.record(torch.accelerator.current_stream(device))
        return event

    def has_passed(self, moment: Any) -> bool:
        """Return whether the device has reached the event."""
        return moment.query()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the device time between two events that it has passed."""
        return start.elapsed_time(end) / 1e3

    def _record(self) -> Any:
        if not self._free:
            return self.moment()
        event = self._free.pop()
        event.record(*self._stream)
        return event

    def _settle(self) -> None:
        """Count the events that have completed, in order."""
        while self._waiting:
            what, event = self._waiting[0]
            if event is not None and not event.query():
                return
            self._waiting.popleft()
            if isinstance(what, tuple):
                _add(self._laps, {"num_steps": 1, "num_rows": what[0], "num_tokens": what[1]})
            else:
                self._count(what, event)

    def _count(self, what: str | None, event: Any) -> None:
        passed_ms = self._last.elapsed_time(event)
        self._free.append(self._last)
        self._last = event
        if what is None:  # a part was interrupted: the rest of it follows later
            self._carried_ms += passed_ms
        elif what.startswith("+"):
            self._laps[what[1:]] += passed_ms * 1e6
        else:
            self._laps[what] += (passed_ms + self._carried_ms) * 1e6
            self._carried_ms = 0.0


Clock = HostClock | DeviceClock
"""Attributes time to parts of a step."""


@contextmanager
def taken_out(clock: Clock, part: str) -> Generator[None]:
    """Attribute the time of this context to ``part`` instead of the current part."""
    clock.pause()
    try:
        yield
    finally:
        clock.resume(part)


def clock_of(device: torch.device) -> Clock:
    """Return the clock that measures a device."""
    return DeviceClock(device=device) if is_accelerator(device) else HostClock()


@dataclass(frozen=True)
class Work:
    """The work of a step, for ``throughput``."""

    flops_per_row: float | None = None
    """Floating point operations of the forward pass for one row; None: the job was not planned."""
    peak_flops: float | None = None
    """Peak operations per second of the job's devices; None if unknown."""


class Timing:
    """Computes the series ``time/…`` and ``throughput/…`` of a job."""

    def __init__(self, clock: Clock, work: Work) -> None:
        self.clock = clock
        self._work = work
        self._laps = Laps(float)
        self._reported: tuple[int, Laps] | None = None

    def figures(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Return means over the steps that ended since the last call; empty if none did.

        ``last`` waits for the device. A second call for the same step includes the first one's
        measurements and replaces them: this adds, for example, an evaluation after the last step.
        """
        _add(self._laps, self.clock.take(wait=last))
        if self._reported is not None and self._reported[0] == step:
            _add(self._laps, self._reported[1])
        if not self._laps["num_steps"]:
            return {}
        self._reported, self._laps = (step, self._laps), Laps(float)
        return figures_of(self._reported[1], self._work)


def figures_of(laps: Laps, work: Work) -> dict[str, float]:
    """Return seconds per step by part, and throughput per second."""
    parts = (*PARTS, *(part for part in (COLLECTIVE, PREDICT) if laps[part]))
    steps, total_s = laps["num_steps"], sum(laps[part] for part in (*parts, REPORT)) / 1e9
    figures = {f"time/{part}": laps[part] / 1e9 / steps for part in parts}
    figures["time/step"] = total_s / steps
    if total_s <= 0:
        return figures
    rate = laps["num_rows"] / total_s
    figures["throughput/samples_per_s"] = rate
    if laps["num_tokens"]:
        figures["throughput/tokens_per_s"] = laps["num_tokens"] / total_s
    if work.flops_per_row:
        flops = TRAINING_FACTOR * work.flops_per_row * rate
        figures["throughput/flops_per_s"] = flops
        if work.peak_flops:
            figures["throughput/flops_fraction"] = flops / work.peak_flops
    return figures
