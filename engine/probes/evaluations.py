"""Watching evaluations: the first batch of the validation rows, the same rows each time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from engine.probes.captures import CaptureWriter
from engine.probes.look import Desk, Training
from engine.probes.measured import MeasuredLook
from engine.probes.meter import Meter
from engine.probes.overhead import Emit, Overhead
from engine.probes.telling import Seen, tell
from engine.probes.watch import Watch
from engine.readback import Readback
from engine.spool import now

_IDLE: AbstractContextManager[object] = nullcontext()
PHASE = "evaluate"
Failed = Callable[[Sequence[Watch], Exception], None]


class EvaluationCaptures:
    """Tensors of evaluations on their way to files."""

    def __init__(self, writer: CaptureWriter) -> None:
        self._writer = writer

    def offer(self, step: int, layer: str, kind: str, tensor: Tensor) -> bool:
        """Copy a tensor as it is now, to be written later; False when there is no room."""
        return self._writer.offer(step, layer, kind, tensor, phase=PHASE)


class Evaluations:
    """The probes that look at evaluations. Measured like the others, and never governed."""

    def __init__(  # noqa: PLR0913 (the parts of `Probes` that it shares)
        self,
        desk: Desk,
        writer: CaptureWriter,
        meter: Meter,
        overhead: Overhead,
        *,
        emit: Emit,
        readback: Readback,
        failed: Failed,
    ) -> None:
        self.network = desk.network
        self.spots = desk.spots
        self.training = Training()
        """An evaluation is no training: no loss and no optimizer is watched."""
        self.loss: Tensor | None = None
        self.captures = EvaluationCaptures(writer)
        self.watches: list[Watch] = []
        self._meter = meter
        self._overhead = overhead
        self._emit = emit
        self._readback = readback
        self._failed = failed
        self._looking: list[Watch] = []
        self._num_evaluations = 0

    def look(self, step: int) -> AbstractContextManager[object]:
        """Watch a batch of the evaluation after a step, if any probe is due."""
        number = self._num_evaluations
        self._num_evaluations += 1
        due = [watch for watch in self.watches if _is_due(watch, number, step)]
        if not due:
            return _IDLE
        self._looking = due
        self._meter.begin(step)
        self._meter.watch(due)
        return MeasuredLook(self, step, due, self._meter)

    def finish_step(self, step: int, rows: list[Seen]) -> None:
        """Send the statistics of an evaluation on their way."""
        record: dict[str, Any] = {"type": "stats", "at": now(), "step": step, "phase": PHASE}
        tell(record, rows, self._looking, None, emit=self._emit, readback=self._readback)

    def settle(self) -> None:
        """Take in what looking has cost, as far as it can be read."""
        self._meter.end()
        for measured in self._meter.take():
            self._overhead.take_evaluation(measured)

    def failed(self, watches: Sequence[Watch], error: Exception) -> None:
        """Count a failure to observe."""
        self._failed(watches, error)


def _is_due(watch: Watch, number: int, step: int) -> bool:
    """``every`` counts evaluations; ``at`` names the steps after which they ran."""
    if watch.probe.at is not None:
        return step in watch.probe.at and watch.is_open(step)
    return number % (watch.probe.every or 1) == 0 and watch.is_open(step)
