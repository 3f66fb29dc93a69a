"""Taps: hooks that exist on due steps only, and look without touching.

A forward hook sees a layer's output, a tensor hook its gradient; parameters and their gradients are
read between backward and the optimizer's step. No hook returns a value or draws a random number, so
a watched step computes the very same bits.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from engine.network import Network, leaves, root
from engine.probes.captures import CaptureWriter
from engine.probes.kernel import NUM_FIGURES
from engine.probes.select import is_due, matches, may_match
from engine.probes.summarize import summarize, summarize_all
from engine.probes.wanted import Wanted
from engine.readback import Readback
from engine.spool import now
from glasshouse.spec import Probe

Emit = Callable[[dict[str, Any]], None]
MAX_FAILURES = 3
_KINDS = ("param", "output", "output_grad", "param_grad")
_IDLE: AbstractContextManager[None] = nullcontext()


class Watch:
    """One probe at work, and how often it has failed."""

    def __init__(self, number: int | str, probe: Probe) -> None:
        self.number = number
        """Its place in the spec, or its id."""
        self.probe = probe
        self.num_failures = 0
        self.takes_stats = "stats" in probe.want
        self.takes_full = "full" in probe.want
        self._known: dict[tuple[str, str, bool], bool] = {}

    def wants(self, kind: str, name: str, *, is_first: bool = True) -> bool:
        """Whether the probe looks at this tensor."""
        key = (kind, name, is_first)
        known = self._known.get(key)
        if known is None:
            known = kind in self.probe.kinds and matches(self.probe, name, is_first=is_first)
            self._known[key] = known
        return known


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
        due = [watch for watch in self._watches if is_due(watch.probe, step)]
        if due:
            return _Look(self, step, due)
        self._next_due = self._first_due_after(step)
        return _IDLE

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
            table = [
                [*name, *flat[start : start + NUM_FIGURES]]
                for name, start in zip(names, range(0, len(flat), NUM_FIGURES), strict=True)
            ]
            record = {"type": "stats", "at": at, "step": step, "phase": "train", "rows": table}
            self.emit(record)

        if isinstance(rows[0][2], Tensor):
            self.readback.put([figures for _, _, figures in rows], then)
        else:
            then([value for _, _, figures in rows for value in figures])

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

    def _first_due_after(self, step: int) -> int:
        """The next step at which some probe may be due; a lower bound is enough."""
        candidates: list[int] = []
        for watch in self._watches:
            probe = watch.probe
            if probe.at is not None:
                candidates.append(min((item for item in probe.at if item > step), default=2**62))
            elif probe.stop is not None and step >= probe.stop:
                continue
            else:
                every = probe.every or 1
                candidates.append(max((step // every + 1) * every, probe.start))
        return min(candidates, default=2**62)


class _Look(AbstractContextManager[None]):
    """The watching of one step."""

    def __init__(self, probes: Probes, step: int, due: list[Watch]) -> None:
        self._probes = probes
        self._step = step
        self._due = due
        self._handles: list[Any] = []
        self._rows: list[tuple[str, str, Any]] = []

    def __enter__(self) -> None:
        for name, module in self._probes.network.layers.items():
            interested = [
                watch
                for watch in self._due
                if may_match(watch.probe, name) and {"output", "output_grad"} & {*watch.probe.kinds}
            ]
            if interested:
                self._handles.append(
                    module.register_forward_hook(self._on_output(name, interested))
                )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if error is None:
            self._read_parameters()
            order = {name: number for number, name in enumerate(self._probes.network.layers)}
            self._rows.sort(key=lambda row: (order[root(row[0])], row[0], _KINDS.index(row[1])))
            self._probes.finish_step(self._step, self._rows)

    def _on_output(self, layer: str, interested: list[Watch]) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            try:
                for number, (leaf, tensor) in enumerate(leaves(layer, output)):
                    self._tap(leaf, tensor, interested, is_first=number == 0)
            except Exception as error:
                self._probes.failed(interested, error)

        return hook

    def _tap(self, leaf: str, tensor: Tensor, watches: list[Watch], *, is_first: bool) -> None:
        wanted = [watch for watch in watches if watch.wants("output", leaf, is_first=is_first)]
        self._see("output", leaf, tensor, wanted)
        graded = [watch for watch in watches if watch.wants("output_grad", leaf, is_first=is_first)]
        if not graded or not tensor.requires_grad:
            return

        def hook(gradient: Tensor) -> None:
            self._see("output_grad", leaf, gradient, graded)

        self._handles.append(tensor.register_hook(hook))

    def _read_parameters(self) -> None:
        for kind in ("param", "param_grad"):
            if not any(kind in watch.probe.kinds for watch in self._due):
                continue
            seen: list[tuple[str, Tensor, list[Watch]]] = []
            for name, parameter in self._probes.network.named_parameters():
                tensor = parameter if kind == "param" else parameter.grad
                watches = [watch for watch in self._due if watch.wants(kind, name)]
                if tensor is not None and watches:
                    seen.append((name, tensor, watches))
            self._see_all(kind, seen)

    def _see_all(self, kind: str, seen: list[tuple[str, Tensor, list[Watch]]]) -> None:
        """Look at many tensors, all of which are still what they were: one call for the figures."""
        counted = [
            (name, tensor)
            for name, tensor, watches in seen
            if any(watch.takes_stats for watch in watches)
        ]
        try:
            figures = summarize_all([tensor for _, tensor in counted])
        except Exception:  # one by one, so that only the one at fault is missing
            for name, tensor, watches in seen:
                self._see(kind, name, tensor, watches)
            return
        for (name, _), row in zip(counted, figures, strict=True):
            self._rows.append((name, kind, row))
        for name, tensor, watches in seen:
            self._see(kind, name, tensor, watches, is_counted=True)

    def _see(
        self,
        kind: str,
        name: str,
        tensor: Tensor,
        watches: list[Watch],
        *,
        is_counted: bool = False,
    ) -> None:
        """Look at a tensor now: it may be overwritten by the next instruction."""
        try:
            if not is_counted and any(watch.takes_stats for watch in watches):
                self._rows.append((name, kind, summarize(tensor)))
            if any(watch.takes_full for watch in watches):
                self._probes.captures.offer(self._step, name, kind, tensor)
        except Exception as error:
            self._probes.failed(watches, error)
