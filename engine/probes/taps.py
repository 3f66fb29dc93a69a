"""All probes of a job: which of them look at a step, and where goes what they see."""

import itertools
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.network import Network
from engine.probes.captures import CaptureWriter
from engine.probes.kernel import NUM_FIGURES
from engine.probes.look import Look, Training, Unwatched
from engine.probes.points import Spot, find_spots
from engine.probes.wanted import Wanted
from engine.probes.watch import Watch, first_due_after
from engine.readback import Readback
from engine.spool import now
from engine.timing import Clock, HostClock
from glasshouse.spec import Probe

Emit = Callable[[dict[str, Any]], None]
MAX_FAILURES = 3
_IDLE = Unwatched()
_KEPT_SPOTS = 16


class Probes:
    """All probes of a job."""

    def __init__(
        self,
        network: Network,
        probes: Sequence[Probe],
        *,
        emit: Emit,
        readback: Readback,
        out_dir: Path,
        training: Training | None = None,
    ) -> None:
        self.network = network
        self.training = training or Training()
        self._spots: dict[tuple[Watch, ...], list[Spot]] = {}
        self.emit = emit
        self.readback = readback
        self.clock: Clock = HostClock()
        """Where the time is told that hooks take out of a pass."""
        self.captures = CaptureWriter(out_dir, emit)
        self._watches = [Watch(number, probe) for number, probe in enumerate(probes)]
        self._next_due = 0
        self.wanted: Wanted | None = None
        """The list in force; None: that of the spec, which has no ids."""

    def watch(self, wanted: Wanted | None, step: int) -> None:
        """Watch this list from a step on; None: what is watched already.

        A probe that stays as it is keeps its failures.
        """
        if wanted is None:
            return
        before, self.wanted = self.wanted, wanted
        told = {} if before is None else before.probes
        kept = {watch.number: watch for watch in self._watches}
        self._watches = [
            kept[name] if told.get(name) == probe else Watch(name, probe)
            for name, probe in wanted.probes.items()
            if told.get(name) != probe or name in kept
        ]
        self._next_due = 0
        self._spots.clear()
        if wanted.revision:
            changes = wanted.changes_since(before)
            record = {"type": "probe", "at": now(), "step": step, "revision": wanted.revision}
            self.emit(record | {"changes": changes})

    def at(self, step: int) -> Look | Unwatched:
        """Watch one forward and backward pass, if any probe is due.

        It is entered for those; then it makes the optimizer's step, which may be watched too.
        """
        if step < self._next_due:
            return _IDLE
        due = [watch for watch in self._watches if watch.is_due(step)]
        if due:
            return Look(self, step, due)
        self._next_due = first_due_after(self._watches, step)
        return _IDLE

    def spots(self, due: Sequence[Watch]) -> list[Spot]:
        """Where to hook for these probes; found once."""
        key = tuple(due)
        if key not in self._spots:
            if len(self._spots) >= _KEPT_SPOTS:
                self._spots.clear()
            self._spots[key] = find_spots(self.network, due)
        return self._spots[key]

    def close(self) -> None:
        """Wait until every captured tensor is in its file."""
        self.captures.close()
        self._report_dropped()

    def finish_step(self, step: int, rows: list[tuple[str, str, Any]]) -> None:
        """Send the statistics of a step on their way."""
        self._report_dropped()
        if not rows:
            return
        at = now()
        names = [(layer, kind) for layer, kind, _ in rows]

        def then(flat: list[float]) -> None:
            arrived = iter(flat)
            table = [
                [
                    *name,
                    *(itertools.islice(arrived, NUM_FIGURES) if there is None else there),
                ]
                for name, there in zip(names, known, strict=True)
            ]
            record = {"type": "stats", "at": at, "step": step, "phase": "train", "rows": table}
            self.emit(record)

        known = [None if isinstance(figures, Tensor) else figures for _, _, figures in rows]
        # Beside tensors on a device there are scalars that the optimizer keeps in CPU memory.
        coming = [figures for _, _, figures in rows if isinstance(figures, Tensor)]
        if coming:
            self.readback.put(coming, then)
        else:
            then([])

    def failed(self, watches: Sequence[Watch], error: Exception) -> None:
        """Count a failure to observe; a probe that keeps failing is switched off."""
        for watch in watches:
            watch.num_failures += 1
            what = f"probe {watch.number}: {type(error).__name__}: {error}"
            if watch.num_failures >= MAX_FAILURES:
                what += f"; it is off after {MAX_FAILURES} failures"
                self._watches = [item for item in self._watches if item is not watch]
            self.emit({"type": "dropped", "at": now(), "what": what[:500], "count": 1})
        traceback.print_exception(error)

    def _report_dropped(self) -> None:
        count = self.captures.take_dropped()
        if count:
            self.emit({"type": "dropped", "at": now(), "what": "captures", "count": count})
