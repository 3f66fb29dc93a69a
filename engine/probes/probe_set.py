"""All probes of a job: which of them watch a step, and where their records go."""

import traceback
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from engine.core.readback import Readback
from engine.core.snapshot import State
from engine.core.spool import Emit, now
from engine.core.timing import clock_of
from engine.data.batches.batch import Batch
from engine.network.network import Network
from engine.probes import history
from engine.probes.cost.meter import Meter
from engine.probes.cost.overhead import Overhead
from engine.probes.evaluations import Evaluations
from engine.probes.flight_recorder import FlightRecorder
from engine.probes.hooks import StepWatcher
from engine.probes.sink import Unwatched, WatchedTraining
from engine.probes.statistics.histograms import TensorHistogram
from engine.probes.step_records import RecordSender, Seen
from engine.probes.tensors.captures import Captures
from engine.probes.watched.probe import ActiveProbe, first_due_after
from engine.probes.watched.requested import RequestedProbes
from glasshouse.spec import Probe

MAX_FAILURES = 3
_SETTLE_STEPS = 4
"""Number of watched steps after which their costs are read."""
_IDLE = Unwatched()
_KEPT_LOOKS = 16


class Probes:
    """All probes of a job."""

    phase = "train"

    def __init__(  # noqa: PLR0913 (each is another seam)
        self,
        network: Network,
        probes: Sequence[Probe],
        *,
        emit: Emit,
        readback: Readback,
        out_dir: Path,
        training: WatchedTraining | None = None,
        captures: Captures | None = None,
    ) -> None:
        """Create the probes; without ``captures``, whole tensors become files of ``out_dir``."""
        self.network = network
        self.training = training or WatchedTraining()
        self._looks: dict[tuple[ActiveProbe, ...], StepWatcher] = {}
        self._newest: StepWatcher | None = None
        self.emit = emit
        self.readback = readback
        self.clock = clock_of(readback.device)
        """The clock that excludes the time of watching from a pass."""
        self.captures = captures or Captures(out_dir, emit)
        self._meter = Meter(self.clock)
        self._overhead = Overhead(emit)
        self._telling = RecordSender(emit, readback)
        self.evaluations = Evaluations(self, Meter(self.clock), self._overhead, self._telling)
        self._set([made(number, probe) for number, probe in enumerate(probes)])
        self._off: list[str] = []
        """Probes that were switched off because they kept failing."""
        self._looking: list[ActiveProbe] = []
        self._next_due = self._step = 0
        self.loss: Tensor | None = None
        """The loss of the newest step; recorders check whether it is finite."""
        self.wanted: RequestedProbes | None = None
        """The current list; None: the list of the spec, which has no ids."""

    def watch(self, wanted: RequestedProbes | None, step: int) -> None:
        """Watch this list from a step on; None or the same list changes nothing.

        An unchanged probe keeps its number of failures.
        """
        if wanted is None or wanted is self.wanted:
            return
        before, self.wanted = self.wanted, wanted
        same = frozenset[str]() if before is None else wanted.same_as(before)
        kept = {watch.number: watch for watch in self._all}
        self._set(
            [
                kept[name] if name in same else made(name, probe)
                for name, probe in wanted.probes.items()
                if name not in wanted.off and (name not in same or name in kept)
            ]
        )
        self._next_due = 0
        self._forget_looks()
        if wanted.revision:
            changes = wanted.changes_since(before)
            record = {"type": "probe", "at": now(), "step": step, "revision": wanted.revision}
            self.emit(record | {"changes": changes})

    def _set(self, watches: list[ActiveProbe]) -> None:
        self._all = watches
        self._training = [watch for watch in watches if watch.probe.phase == "train"]
        self.evaluations.watches = [watch for watch in watches if watch.probe.phase == "evaluate"]
        self._overhead.keep(watches)

    def at(self, step: int, batch: Batch) -> StepWatcher | Unwatched:
        """Return a context that watches the passes of a batch, if any probe is due.

        After the pass, its ``step`` runs the optimizer's step, which may be watched too.
        """
        if self.captures.pending:
            self.captures.poll()
        if step < self._next_due:
            return _IDLE
        self._step = step
        self._meter.begin(step)  # this closes the previous watched step
        started = self._meter.start()
        if self._meter.num_closed >= _SETTLE_STEPS:
            self._settle(step)
        due = [watch for watch in self._training if watch.is_due(step)]
        self._meter.stop(started, None)
        self._meter.watch(due)
        if due:
            self._looking = due
            again = all(watch.is_due(step + 1) for watch in due)
            return self._look(due).at(step, batch, comes_again=again)
        if self._newest is not None:  # its interval has widened in the meantime
            self._newest.release()
        self._next_due = first_due_after(self._training, step)
        return _IDLE

    def _look(self, due: list[ActiveProbe]) -> StepWatcher:
        """Return the watcher of these probes; only its hooks exist."""
        key = tuple(due)
        if key not in self._looks:
            if len(self._looks) >= _KEPT_LOOKS:
                self._forget_looks()
            self._looks[key] = StepWatcher(self, due, self._meter)
        look, before = self._looks[key], self._newest
        self._newest = look
        if before is not None and before is not look:
            before.release()
        return look

    def _forget_looks(self) -> None:
        if self._newest is not None:
            self._newest.release()
        self._newest = None
        self._looks.clear()

    def _settle(self, step: int | None) -> None:
        """Read the measured costs that are available: before a step, or at the end."""
        for measured in self._meter.take():
            self._overhead.take(measured, self._all, step)

    def close(self) -> None:
        """Send every kept tensor and report the cost of watching."""
        self._forget_looks()
        self._meter.end()
        self._settle(step=None)
        self.evaluations.settle()
        self._overhead.tell(self._all)
        self.captures.close()
        self._report_dropped()

    def finish_step(
        self, step: int, rows: list[Seen], counted: Sequence[TensorHistogram] = ()
    ) -> None:
        """Send the tensors and the statistics of a step."""
        self.captures.finish_step()
        self._report_dropped()
        record = {"type": "stats", "at": now(), "step": step, "phase": self.phase}
        self._telling.tell(record, rows, counted, self._looking, self.loss)

    def figures(self) -> dict[str, float]:
        """Return the step metric of watching: the time it waited for a ``lossless`` probe."""
        waited_s = self.captures.take_waited_s()
        return {"time/lossless_wait": waited_s} if waited_s else {}

    def failed(self, watches: Sequence[ActiveProbe], error: Exception) -> None:
        """Count a failure of probes; a probe that keeps failing is switched off."""
        for watch in watches:
            watch.num_failures += 1
            what = f"probe {watch.number}: {type(error).__name__}: {error}"
            is_off = watch.num_failures >= MAX_FAILURES and watch in self._all
            if is_off:
                what += f"; it is off after {MAX_FAILURES} failures"
                self._set([item for item in self._all if item is not watch])
                self._off.append(str(watch.number))
            self.emit({"type": "dropped", "at": now(), "what": what[:500], "count": 1})
            if is_off:
                self._tell_failed(watch, error)
        traceback.print_exception(error)

    def _tell_failed(self, watch: ActiveProbe, error: Exception) -> None:
        detail = f"Looking failed {MAX_FAILURES} times, last with {type(error).__name__}: {error}"
        problem = {"code": "probe_failed", "detail": detail[:500]}
        change = {"probe": str(watch.number), "action": "failed", "problem": problem}
        revision = 0 if self.wanted is None else self.wanted.revision
        record = {"type": "probe", "at": now(), "step": self._step, "revision": revision}
        self.emit(record | {"changes": [change]})

    def state(self) -> State:
        """Return the factor of each interval, the failures, and what recorders keep."""
        return history.state(self._all, self._off, self.evaluations.num_evaluations)

    def restore(self, state: State) -> None:
        """Restore the state; a probe that was changed since starts anew.

        For probes with ids, the current list says which were switched off.
        """
        self.evaluations.num_evaluations = int(state["evaluations"])
        history.restore(state, self._all)
        if self.wanted is None:
            self._off = [str(number) for number in state["off"]]
            self._set([watch for watch in self._all if str(watch.number) not in self._off])
        self._next_due = 0

    def _report_dropped(self) -> None:
        count = self.captures.take_dropped()
        if count:
            self.emit({"type": "dropped", "at": now(), "what": "captures", "count": count})


def made(number: int | str, probe: Probe) -> ActiveProbe:
    """Create the active probe of a spec's probe."""
    return ActiveProbe(number, probe) if probe.on is None else FlightRecorder(number, probe)
