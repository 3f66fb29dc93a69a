"""All probes of a job: which of them watch a step, and where their records go."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from engine.core.readback import Readback
from engine.core.snapshot import State
from engine.core.spool import Emit, now, report_dropped
from engine.core.timing import clock_of
from engine.data.batches.batch import Batch
from engine.distributed.group import ALONE, Group
from engine.network.network import Network
from engine.probes.cost.governor import Governor
from engine.probes.cost.meter import Meter
from engine.probes.flight_recorder import FlightRecorder, Key
from engine.probes.hooks import StepWatcher, Unwatched, WatchedTraining, Watching
from engine.probes.step_records import RecordSender
from engine.probes.tensors.captures import Captures
from engine.probes.watched.probe import ActiveProbe, first_due_after
from engine.probes.watched.requested import RequestedProbes
from glasshouse.spec import Probe

MAX_FAILURES = 3
_SETTLE_STEPS = 4
"""Number of watched steps after which their costs are read."""
_IDLE = Unwatched()
_MAX_WATCHERS = 16


class Probes:
    """All probes of a job. The cost of those of evaluations is measured and never governed."""

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
        group: Group = ALONE,
    ) -> None:
        """Create the probes; without ``captures``, whole tensors become files of ``out_dir``.

        ``group``: the processes that have the rows of each step together.
        """
        self._group = group
        self._watchers: dict[tuple[ActiveProbe, ...], StepWatcher] = {}
        self._newest: StepWatcher | None = None
        self._emit = emit
        self.readback = readback
        self.clock = clock_of(readback.device)
        """The clock that excludes the time of watching from a pass."""
        self.captures = captures or Captures(out_dir, emit)
        self._meter, self._evaluation_meter = Meter(self.clock), Meter(self.clock)
        self._governor = Governor(emit, is_shared=not group.is_alone)
        watching = partial(
            Watching,
            network=network,
            captures=self.captures,
            sender=RecordSender(emit, readback),
            failed=self.failed,
            group=group,
        )
        self._steps = watching("train", training=training or WatchedTraining(), meter=self._meter)
        # no loss and no optimizer is watched in an evaluation
        self._evaluations = watching(
            "evaluate", training=WatchedTraining(), meter=self._evaluation_meter
        )
        self._num_evaluations = 0
        self._set([made(number, probe) for number, probe in enumerate(probes)])
        self._off: list[str] = []
        """Probes that were switched off because they kept failing."""
        self._next_due = self._step = 0
        self._wanted: RequestedProbes | None = None
        """The current list; None: the list of the spec, which has no ids."""

    def watch(self, wanted: RequestedProbes | None, step: int) -> None:
        """Watch this list from a step on; None or the same list changes nothing.

        An unchanged probe keeps its number of failures.
        """
        if wanted is None or wanted is self._wanted:
            return
        before, self._wanted = self._wanted, wanted
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
        self._forget_watchers()
        if wanted.revision:
            changes = wanted.changes_since(before)
            record = {"type": "probe", "at": now(), "step": step, "revision": wanted.revision}
            self._emit(record | {"changes": changes})

    def _set(self, watches: list[ActiveProbe]) -> None:
        self._all = watches
        self._training = [watch for watch in watches if watch.probe.phase == "train"]
        self._evaluating = [watch for watch in watches if watch.probe.phase == "evaluate"]
        self._governor.keep(watches)

    def at(self, step: int, batch: Batch, *, has_rows: bool = True) -> StepWatcher | Unwatched:
        """Return a context that watches the passes of a batch, if any probe is due.

        After the pass, its ``step`` runs the optimizer's step, which may be watched too.
        ``has_rows``: whether the batch is a share of the step, and not another process's rows.
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
            again = all(watch.is_due(step + 1) for watch in due)
            return self._watcher(due).at(step, batch, comes_again=again, has_rows=has_rows)
        if self._newest is not None:  # its interval has widened in the meantime
            self._newest.release()
        self._next_due = first_due_after(self._training, step)
        return _IDLE

    def evaluate(self, step: int) -> StepWatcher | Unwatched:
        """Return a context that watches the first batch of the evaluation after a step.

        It has the same rows each time. Intervals count evaluations; ``at`` lists steps.
        """
        number, self._num_evaluations = self._num_evaluations, self._num_evaluations + 1
        due = [watch for watch in self._evaluating if watch.is_due(step, number)]
        if not due:
            return _IDLE
        self._evaluation_meter.begin(step)
        self._evaluation_meter.watch(due)
        return StepWatcher(self._evaluations, due).at(step)

    def _watcher(self, due: list[ActiveProbe]) -> StepWatcher:
        """Return the watcher of these probes; only its hooks exist."""
        key = tuple(due)
        if key not in self._watchers:
            if len(self._watchers) >= _MAX_WATCHERS:
                self._forget_watchers()
            self._watchers[key] = StepWatcher(self._steps, due)
        watcher, before = self._watchers[key], self._newest
        self._newest = watcher
        if before is not None and before is not watcher:
            before.release()
        return watcher

    def _forget_watchers(self) -> None:
        if self._newest is not None:
            self._newest.release()
        self._newest = None
        self._watchers.clear()

    def proposals(self) -> dict[str, int]:
        """Return the factors of intervals that this process proposes to all."""
        return self._governor.take_proposals()

    def apply(self, factors: Mapping[str, int], step: int) -> None:
        """Change intervals from a step on, by probe."""
        self._governor.apply(factors, step)
        self._next_due = 0

    def _settle(self, step: int | None) -> None:
        """Read the measured costs that are available: before a step, or at the end."""
        for measured in self._meter.take():
            self._governor.take(measured, step)

    def close(self) -> None:
        """Send every kept tensor and report the cost of watching."""
        self._forget_watchers()
        self._meter.end()
        self._settle(step=None)
        self._evaluation_meter.end()
        for measured in self._evaluation_meter.take():
            self._governor.take_evaluation(measured)
        self._governor.report()
        self.captures.close()

    def figures(self) -> dict[str, float]:
        """Return the step metric of watching: the time it waited for a ``lossless`` probe."""
        waited_s = self.captures.take_waited_s()
        return {"time/lossless_wait": waited_s} if waited_s else {}

    def failed(self, watches: Sequence[ActiveProbe], error: Exception) -> None:
        """Count a failure of probes; a probe that keeps failing is switched off."""
        for watch in watches:
            watch.num_failures += 1
            if watch.num_failures > MAX_FAILURES and not self._group.is_alone:
                continue  # it stays on, and has been reported often enough
            is_off = watch.num_failures >= MAX_FAILURES and watch in self._all
            is_off = is_off and self._group.is_alone  # several processes must watch the same
            if is_off:
                self._set([item for item in self._all if item is not watch])
                self._off.append(str(watch.number))
            more = f"; it is off after {MAX_FAILURES} failures" if is_off else ""
            report_dropped(self._emit, f"probe {watch.number}", error, more)
            if is_off:
                self._report_failed(watch, error)

    def _report_failed(self, watch: ActiveProbe, error: Exception) -> None:
        detail = f"Looking failed {MAX_FAILURES} times, last with {type(error).__name__}: {error}"
        problem = {"code": "probe_failed", "detail": detail[:500]}
        change = {"probe": str(watch.number), "action": "failed", "problem": problem}
        revision = 0 if self._wanted is None else self._wanted.revision
        record = {"type": "probe", "at": now(), "step": self._step, "revision": revision}
        self._emit(record | {"changes": [change]})

    def state(self) -> State:
        """Return the factor of each interval, the failures, and what recorders keep."""
        found = {str(watch.number): watch.state() for watch in self._all}
        return {"evaluations": self._num_evaluations, "watches": found, "off": [*self._off]}

    def restore(self, state: State) -> None:
        """Restore the state; a probe that was changed since starts anew.

        For probes with ids, the current list says which were switched off.
        """
        self._num_evaluations = int(state["evaluations"])
        sent: dict[int, set[Key]] = {}
        for watch in self._all:
            if (saved := state["watches"].get(str(watch.number))) is not None:
                watch.restore(saved, sent)
        if self._wanted is None:
            self._off = [str(number) for number in state["off"]]
            self._set([watch for watch in self._all if str(watch.number) not in self._off])
        self._next_due = 0


def made(number: int | str, probe: Probe) -> ActiveProbe:
    """Create the active probe of a spec's probe."""
    return ActiveProbe(number, probe) if probe.on is None else FlightRecorder(number, probe)
