"""All probes of a job: which of them look at a step, and where goes what they see."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.network import Network
from engine.probes.captures import CaptureWriter
from engine.probes.counted import Counted, landed, on_device, told
from engine.probes.kernel import NUM_FIGURES
from engine.probes.look import Look
from engine.probes.wanted import Wanted
from engine.probes.watch import Watch, first_due_after
from engine.readback import Readback
from engine.spool import now
from glasshouse.spec import Probe

Emit = Callable[[dict[str, Any]], None]
MAX_FAILURES = 3
_IDLE: AbstractContextManager[None] = nullcontext()


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
    ) -> None:
        self.network = network
        self.emit = emit
        self.readback = readback
        self.captures = CaptureWriter(out_dir, emit)
        self._watches = [Watch(number, probe) for number, probe in enumerate(probes)]
        self._next_due = 0
        self.wanted: Wanted | None = None
        """The list in force; None: that of the spec, which has no ids."""

    def watch(self, wanted: Wanted, step: int) -> None:
        """Watch this list from a step on. A probe that stays as it is keeps its failures."""
        before, self.wanted = self.wanted, wanted
        told = {} if before is None else before.probes
        kept = {watch.number: watch for watch in self._watches}
        self._watches = [
            kept[name] if told.get(name) == probe else Watch(name, probe)
            for name, probe in wanted.probes.items()
            if told.get(name) != probe or name in kept
        ]
        self._next_due = 0
        if wanted.revision:
            changes = wanted.changes_since(before)
            record = {"type": "probe", "at": now(), "step": step, "revision": wanted.revision}
            self.emit(record | {"changes": changes})

    def at(self, step: int) -> AbstractContextManager[None]:
        """Watch one forward and backward pass, if any probe is due."""
        if step < self._next_due:
            return _IDLE
        due = [watch for watch in self._watches if watch.is_due(step)]
        if due:
            return Look(self, step, due)
        self._next_due = first_due_after(self._watches, step)
        return _IDLE

    def close(self) -> None:
        """Wait until every captured tensor is in its file."""
        self.captures.close()
        self._report_dropped()

    def finish_step(
        self, step: int, rows: list[tuple[str, str, Any]], counted: Sequence[Counted] = ()
    ) -> None:
        """Send the statistics of a step on their way."""
        self._report_dropped()
        if not rows and not counted:
            return
        at = now()
        names = [(layer, kind) for layer, kind, _ in rows]
        num_flat = NUM_FIGURES * len(names)

        def then(flat: list[float], found: Sequence[Counted] = counted) -> None:
            table = [
                [*name, *flat[start : start + NUM_FIGURES]]
                for name, start in zip(names, range(0, num_flat, NUM_FIGURES), strict=True)
            ]
            record = {"type": "stats", "at": at, "step": step, "phase": "train", "rows": table}
            self.emit(record | told(found))

        def then_many(numbers: Tensor) -> None:
            then(numbers[:num_flat].tolist(), [*landed(counted, numbers[num_flat:])])

        figures = [found for _, _, found in rows]
        if numbers := on_device(counted):
            self.readback.put_many([*figures, *numbers], then_many)
        elif figures and isinstance(figures[0], Tensor):
            self.readback.put(figures, then)
        else:
            then([value for found in figures for value in found])

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
