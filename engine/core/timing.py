"""Where a step's time goes: a clock whose every lap is put down to a part of the step.

On the CPU laps are of the host's clock. On CUDA they lie between events in the device's queue,
which are read once they have passed: the device is never waited for. Knows torch's events; knows
nothing of jobs.
"""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

PARTS = (
    *("data", "forward", "backward", "optimizer"),
    *("probes", "derived", "checkpoint", "evaluate"),
)
"""The parts that are reported; the rest of a step is reporting itself."""
REPORT = "report"
TRAINING_FACTOR = 3
"""A step's operations are taken for three times those of its forward pass: the usual convention,
one for the pass and two for the gradients of its inputs and its parameters."""
_MAX_WAITING = 4096


@dataclass
class Laps:
    """What has been measured: nanoseconds by part, steps, rows."""

    spent_ns: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PARTS, REPORT), 0))
    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    """Steps of sequences, without what rows are padded with."""

    def join(self, other: "Laps") -> None:
        """Take in what another one measured."""
        for part, spent in other.spent_ns.items():
            self.spent_ns[part] += spent
        self.num_steps += other.num_steps
        self.num_rows += other.num_rows
        self.num_tokens += other.num_tokens


class Clock(Protocol):
    """Puts time down to parts of a step."""

    def mark(self, part: str) -> None:
        """What has passed since the last mark was this part."""
        ...

    def end_step(self, num_rows: int, num_tokens: int = 0) -> None:
        """A step of so many rows is done, whose sequences have so many steps."""
        ...

    def pause(self) -> None:
        """What follows, up to `resume`, is not of the part that is under way."""
        ...

    def resume(self, part: str) -> None:
        """What has passed since the outermost `pause` was this part."""
        ...

    def take(self, *, wait: bool = False) -> Laps:
        """What was measured since this was last asked; ``wait`` for all of it."""
        ...


@contextmanager
def taken_out(clock: Clock, part: str) -> Generator[None]:
    """What happens in here is not of the part that is under way, but of this one."""
    clock.pause()
    try:
        yield
    finally:
        clock.resume(part)


class HostClock:
    """Laps of the host's clock: exact where the device is the host."""

    def __init__(self) -> None:
        self._laps = Laps()
        self._spent = self._laps.spent_ns
        self._depth = 0
        self._paused = self._last = time.perf_counter_ns()

    def mark(self, part: str) -> None:
        """What has passed since the last mark was this part."""
        now = time.perf_counter_ns()
        self._spent[part] += now - self._last
        self._last = now

    def end_step(self, num_rows: int, num_tokens: int = 0) -> None:
        """A step of so many rows is done, whose sequences have so many steps."""
        self._laps.num_steps += 1
        self._laps.num_rows += num_rows
        self._laps.num_tokens += num_tokens

    def pause(self) -> None:
        """What follows, up to `resume`, is not of the part that is under way."""
        self._depth += 1
        if self._depth == 1:
            self._paused = time.perf_counter_ns()

    def resume(self, part: str) -> None:
        """What has passed since the outermost `pause` was this part."""
        self._depth -= 1
        if self._depth:
            return
        passed = time.perf_counter_ns() - self._paused
        self._spent[part] += passed
        self._last += passed

    def take(self, *, wait: bool = False) -> Laps:
        """What was measured since this was last asked."""
        taken, self._laps = self._laps, Laps()
        self._spent = self._laps.spent_ns
        return taken


class DeviceClock:
    """Laps of the device's queue. A lap is counted once the event at its end has passed.

    So what the host does while the device is busy costs nothing, and a device that waits for
    the host shows in the part that it waits for.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make_event = make_event or _cuda_event
        self._laps = Laps()
        self._free: list[Any] = []
        self._waiting: deque[tuple[str | tuple[int, int] | None, Any]] = deque()
        self._carried_ms = 0.0
        self._depth = 0
        self._last = self._record()

    def mark(self, part: str) -> None:
        """What has passed since the last mark was this part."""
        self._waiting.append((part, self._record()))
        if len(self._waiting) > _MAX_WAITING:
            self._settle()

    def end_step(self, num_rows: int, num_tokens: int = 0) -> None:
        """A step of so many rows is done, once what was marked before has passed."""
        self._waiting.append(((num_rows, num_tokens), None))

    def pause(self) -> None:
        """What follows, up to `resume`, is not of the part that is under way."""
        self._depth += 1
        if self._depth == 1:
            self._waiting.append((None, self._record()))

    def resume(self, part: str) -> None:
        """What has passed since the outermost `pause` was this part."""
        self._depth -= 1
        if not self._depth:
            self._waiting.append((f"+{part}", self._record()))

    def take(self, *, wait: bool = False) -> Laps:
        """What has passed since this was last asked; ``wait`` for all of it."""
        if wait and self._waiting:
            marked = [event for _, event in self._waiting if event is not None]
            if marked:
                marked[-1].synchronize()
        self._settle()
        taken, self._laps = self._laps, Laps()
        return taken

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def _settle(self) -> None:
        """Count what has passed, in order."""
        while self._waiting:
            what, event = self._waiting[0]
            if event is not None and not event.query():
                return
            self._waiting.popleft()
            if isinstance(what, tuple):
                self._laps.num_steps += 1
                self._laps.num_rows += what[0]
                self._laps.num_tokens += what[1]
            else:
                self._count(what, event)

    def _count(self, what: str | None, event: Any) -> None:
        passed_ms = self._last.elapsed_time(event)
        self._free.append(self._last)
        self._last = event
        if what is None:  # a part was interrupted: the rest of it is still to come
            self._carried_ms += passed_ms
        elif what.startswith("+"):
            self._laps.spent_ns[what[1:]] += passed_ms * 1e6
        else:
            self._laps.spent_ns[what] += (passed_ms + self._carried_ms) * 1e6
            self._carried_ms = 0.0


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def clock_of(device: torch.device) -> Clock:
    """The clock that measures what a device does."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Work:
    """What a step computes, for ``throughput``."""

    flops_per_row: float | None = None
    """Operations of the forward pass; None: nobody has planned the job."""
    peak_flops: float | None = None
    """Operations a second of the job's devices; None where it is not known."""


class Timing:
    """The series ``time/…`` and ``throughput/…`` of a job."""

    def __init__(self, clock: Clock, work: Work) -> None:
        self.clock = clock
        self._work = work
        self._laps = Laps()
        self._told: tuple[int, Laps] | None = None

    def figures(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Means over the steps that have ended since the last figures; empty if none has.

        ``last`` waits for the device. Figures that are told again of a step replace those told
        before: what came after the last step, an evaluation for one, is told with that step.
        """
        self._laps.join(self.clock.take(wait=last))
        if self._told is not None and self._told[0] == step:
            self._laps.join(self._told[1])
        if not self._laps.num_steps:
            return {}
        self._told, self._laps = (step, self._laps), Laps()
        return figures_of(self._told[1], self._work)


def figures_of(laps: Laps, work: Work) -> dict[str, float]:
    """Seconds a step by part, and what was done in a second."""
    steps, total_s = laps.num_steps, sum(laps.spent_ns.values()) / 1e9
    figures = {f"time/{part}": laps.spent_ns[part] / 1e9 / steps for part in PARTS}
    figures["time/step"] = total_s / steps
    if total_s <= 0:
        return figures
    rate = laps.num_rows / total_s
    figures["throughput/samples_per_s"] = rate
    if laps.num_tokens:
        figures["throughput/tokens_per_s"] = laps.num_tokens / total_s
    if work.flops_per_row:
        flops = TRAINING_FACTOR * work.flops_per_row * rate
        figures["throughput/flops_per_s"] = flops
        if work.peak_flops:
            figures["throughput/flops_fraction"] = flops / work.peak_flops
    return figures
