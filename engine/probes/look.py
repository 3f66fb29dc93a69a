"""The watching of one step: hooks that exist while it runs, and look without touching.

A forward hook sees a layer's output, a tensor hook its gradient; parameters and their gradients are
read between backward and the optimizer's step. No hook returns a value or draws a random number, so
a watched step computes the very same bits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn

from engine.network import Network, leaves, root
from engine.probes.captures import CaptureWriter
from engine.probes.counted import Counted, wanted_counts
from engine.probes.parts import kept
from engine.probes.select import may_match
from engine.probes.summarize import summarize, summarize_all
from engine.probes.watch import Watch

_KINDS = ("param", "output", "output_grad", "param_grad")


class Desk(Protocol):
    """Where a look takes what it has seen."""

    network: Network
    captures: CaptureWriter

    def finish_step(
        self, step: int, rows: list[tuple[str, str, Any]], counted: Sequence[Counted]
    ) -> None:
        """Send the statistics of a step on their way."""
        ...

    def failed(self, watches: Sequence[Watch], error: Exception) -> None:
        """Count a failure to observe."""
        ...


class Look(AbstractContextManager[None]):
    """The watching of one step."""

    def __init__(self, desk: Desk, step: int, due: list[Watch]) -> None:
        self._desk = desk
        self._step = step
        self._due = due
        self._handles: list[Any] = []
        self._rows: list[tuple[str, str, Any]] = []
        self._counted: list[Counted] = []

    def __enter__(self) -> None:
        for name, module in self._desk.network.layers.items():
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
            order = {name: number for number, name in enumerate(self._desk.network.layers)}
            for found in (self._rows, self._counted):
                found.sort(key=lambda row: (order[root(row[0])], row[0], _KINDS.index(row[1])))
            self._desk.finish_step(self._step, self._rows, self._counted)

    def _on_output(self, layer: str, interested: list[Watch]) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            try:
                for number, (leaf, tensor) in enumerate(leaves(layer, output)):
                    self._tap(leaf, tensor, interested, is_first=number == 0)
            except Exception as error:
                self._desk.failed(interested, error)

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
            for name, parameter in self._desk.network.named_parameters():
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
            if any(watch.takes_stats for watch in watches) and not wanted_counts(watches)
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
            self._see(kind, name, tensor, watches, is_counted=not wanted_counts(watches))

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
            if not is_counted:
                self._count(kind, name, tensor, watches)
            if any(watch.takes_full for watch in watches):
                self._keep(kind, name, tensor, watches)
        except Exception as error:
            self._desk.failed(watches, error)

    def _count(self, kind: str, name: str, tensor: Tensor, watches: list[Watch]) -> None:
        takes_stats = any(watch.takes_stats for watch in watches)
        if wanted := wanted_counts(watches):
            figures, counts = summarize(tensor, histogram=True)
            self._counted.append(Counted(name, kind, figures, counts, wanted))
            if takes_stats:
                self._rows.append((name, kind, figures))
        elif takes_stats:
            self._rows.append((name, kind, summarize(tensor)))

    def _keep(self, kind: str, name: str, tensor: Tensor, watches: list[Watch]) -> None:
        for part, view in kept(watches, tensor):
            self._desk.captures.offer(
                self._step, name, kind, view, **part._asdict(), captured_from=tuple(tensor.shape)
            )
