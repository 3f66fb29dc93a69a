"""Flight recorder: a probe with ``on: nonfinite``.

It watches every step and keeps the statistics of the last steps in memory. When a tensor that it
watches or the loss has a NaN or Inf, it sends the kept steps and that step, once. A finite step
arms it again.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.core.snapshot import State
from engine.probes.watched.probe import ActiveProbe
from glasshouse import jsonio
from glasshouse.events import STATS_COLUMNS
from glasshouse.spec import Probe

NUM_STEPS = 20
"""Number of kept steps that are sent with the first step that has a NaN or Inf."""
_NAN, _INF = STATS_COLUMNS.index("nan"), STATS_COLUMNS.index("inf")
_OF_FORWARD = ("output", "input")

Row = Sequence[Any]
Key = tuple[str, str]
Keep = Callable[[str, str, Tensor], object]


class FlightRecorder(ActiveProbe):
    """A probe that sends records only when a tensor or the loss has a NaN or Inf."""

    def __init__(self, number: int | str, probe: Probe) -> None:
        super().__init__(number, probe)
        self.takes_stats = True
        self.takes_full = False  # `see` keeps whole tensors: it knows whether the step is bad
        self._keeps = not {"full", "sample"}.isdisjoint(probe.want)
        self._kept: deque[tuple[dict[str, Any], list[Row], set[Key]]] = deque(maxlen=NUM_STEPS)
        self._is_armed = True
        self._is_bad = False
        """Whether tensors of the current step are kept from here on."""
        self._is_late = False
        """Whether a step was found bad only after its tensors were gone."""
        self._spoilt: int | None = None
        self._held: list[tuple[str, str, Tensor, int]] = []

    def begin(self) -> None:
        """Start a step. If the previous bad step was found too late, keep this step's tensors."""
        self._is_bad, self._is_late = self._is_late, False

    def release(self) -> None:
        """End the step and drop its tensors."""
        self._held.clear()

    def see(
        self, step: int, key: Key, tensor: Tensor, figures: Sequence[float] | Tensor, keep: Keep
    ) -> None:
        """Process a tensor that still has its value; ``key`` is its name and kind.

        From the first bad tensor on, the step's tensors are kept. Earlier tensors of the forward
        pass are kept too, unless they were overwritten.
        """
        if not self._keeps:
            return
        if self._is_armed and not self._is_bad and not isinstance(figures, Tensor):
            if is_bad([*key, *figures]):
                self._spoil(step, keep)
            elif key[1] in _OF_FORWARD:
                self._held.append((*key, tensor.detach(), tensor._version))
        if self._is_bad:
            keep(*key, tensor)

    def see_loss(self, step: int, loss: Tensor | None, keep: Keep) -> None:
        """Check the loss of the step if that does not wait for a device."""
        if not self._keeps or not self._is_armed or self._is_bad or loss is None:
            return
        if loss.device.type == "cpu" and not bool(torch.isfinite(loss).all()):
            self._spoil(step, keep)

    def _spoil(self, step: int, keep: Keep) -> None:
        self._is_bad, self._spoilt = True, step
        for name, kind, tensor, version in self._held:
            if tensor._version == version:
                keep(name, kind, tensor)
        self._held.clear()

    def take(
        self, record: Mapping[str, Any], rows: Sequence[Row], loss: float, sent: set[Key]
    ) -> list[dict[str, Any]]:
        """Process the statistics of a step after readback; return the records to send now.

        ``sent`` is the set of rows of this step that any probe has sent; what is returned is added
        to it.
        """
        entry = (dict(record), [*rows], sent)
        if math.isfinite(loss) and not any(is_bad(row) for row in rows):
            self._is_armed = True
            self._kept.append(entry)
            return []
        if not self._is_armed:
            return []
        self._is_armed = False
        self._is_late = self._keeps and self._spoilt != record["step"]
        found = [*self._kept, entry]
        self._kept.clear()
        return [late for kept in found if (late := _unsent(*kept)) is not None]

    def state(self) -> State:
        """Return what a checkpoint keeps, with the kept steps and whether the recorder is armed."""
        kept = [[record, rows, sorted(sent)] for record, rows, sent in self._kept]
        recorder = {"armed": self._is_armed, "late": self._is_late, "kept": kept}
        return super().state() | {"recorder": recorder}

    def restore(self, state: Mapping[str, Any], sent: dict[int, set[Key]]) -> bool:
        """Restore the state; return False for that of a probe that has been changed since."""
        if not super().restore(state, sent):
            return False
        saved = state["recorder"]
        self._is_armed, self._is_late = bool(saved["armed"]), bool(saved["late"])
        self._kept.clear()
        for record, rows, names in saved["kept"]:
            shared = sent.setdefault(int(record["step"]), set())
            shared.update((name, kind) for name, kind in names)
            figures: list[Row] = [[*row[:2], *map(jsonio.number, row[2:])] for row in rows]
            self._kept.append((record, figures, shared))
        return True


def is_bad(row: Row) -> bool:
    """Return whether a row of statistics counts a NaN or Inf."""
    return bool(row[_NAN] or row[_INF])


def _unsent(record: dict[str, Any], rows: list[Row], sent: set[Key]) -> dict[str, Any] | None:
    left = [row for row in rows if (row[0], row[1]) not in sent]
    sent.update((row[0], row[1]) for row in left)
    return {**record, "rows": left} if left else None
