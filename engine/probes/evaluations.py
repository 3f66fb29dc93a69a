"""Watch evaluations: the first batch of the validation rows, the same rows each time."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from engine.core.spool import now
from engine.core.timing import Clock
from engine.probes.cost.meter import Meter
from engine.probes.cost.overhead import Overhead
from engine.probes.hooks import StepWatcher
from engine.probes.sink import Sink, WatchedTraining
from engine.probes.statistics.histograms import TensorHistogram
from engine.probes.step_records import RecordSender, Seen
from engine.probes.watched.probe import ActiveProbe

_IDLE: AbstractContextManager[object] = nullcontext()
PHASE = "evaluate"


class Evaluations:
    """The probes of evaluations. Their cost is measured and never governed."""

    phase = PHASE

    def __init__(self, sink: Sink, meter: Meter, overhead: Overhead, telling: RecordSender) -> None:
        self._sink = sink
        self.network = sink.network
        self.captures = sink.captures
        self.failed = sink.failed
        self.training = WatchedTraining()
        """No loss and no optimizer is watched in an evaluation."""
        self.loss: Tensor | None = None
        self.watches: list[ActiveProbe] = []
        self._meter = meter
        self._overhead = overhead
        self._telling = telling
        self._looking: list[ActiveProbe] = []
        self.num_evaluations = 0

    @property
    def clock(self) -> Clock:
        """The clock that excludes the time of watching from a pass."""
        return self._sink.clock

    def look(self, step: int) -> AbstractContextManager[object]:
        """Watch a batch of the evaluation after a step, if any probe is due."""
        number = self.num_evaluations
        self.num_evaluations += 1
        due = [watch for watch in self.watches if _is_due(watch, number, step)]
        if not due:
            return _IDLE
        self._looking = due
        self._meter.begin(step)
        self._meter.watch(due)
        return StepWatcher(self, due, self._meter).at(step)

    def finish_step(
        self, step: int, rows: list[Seen], counted: Sequence[TensorHistogram] = ()
    ) -> None:
        """Send the tensors and the statistics of an evaluation."""
        self.captures.finish_step()
        record: dict[str, Any] = {"type": "stats", "at": now(), "step": step, "phase": PHASE}
        self._telling.tell(record, rows, counted, self._looking, None)

    def settle(self) -> None:
        """Add the measured costs that can be read by now."""
        self._meter.end()
        for measured in self._meter.take():
            self._overhead.take_evaluation(measured)


def _is_due(watch: ActiveProbe, number: int, step: int) -> bool:
    """Return whether a probe is due: ``every`` counts evaluations, ``at`` lists steps."""
    if watch.probe.at is not None:
        return step in watch.probe.at and watch.is_open(step)
    return number % (watch.probe.every or 1) == 0 and watch.is_open(step)
