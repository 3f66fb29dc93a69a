"""A look that says what it took, and lets the flight recorders see what it sees."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from engine.probes.look import Desk, Look, Seen
from engine.probes.meter import Meter
from engine.probes.parts import parts, take
from engine.probes.recorder import Recorder
from engine.probes.watch import Watch, Watches

T = TypeVar("T")


class MeasuredLook(Look):
    """The watching of one step, measured."""

    def __init__(self, desk: Desk, step: int, due: list[Watch], meter: Meter) -> None:
        super().__init__(desk, step, due)
        self._meter = meter
        self._recorders = [watch for watch in due if isinstance(watch, Recorder)]
        self._shows = True
        """Whether the recorders see each tensor by itself, not many at once."""

    def __enter__(self) -> Self:
        started = self._meter.start()
        for recorder in self._recorders:
            recorder.begin()
        super().__enter__()
        if self._recorders and self._desk.training.loss_fn is not None:
            hook = self._desk.training.loss_fn.register_forward_hook(self._on_loss)
            self._handles.append(hook)
        self._meter.stop(started, None)
        return self

    def _on_loss(self, _module: nn.Module, _inputs: Any, loss: Tensor) -> None:
        self._desk.loss = loss.detach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        started = self._meter.start()
        if error is None:
            for recorder in self._recorders:
                recorder.see_loss(self._step, self._desk.loss, self._keeper(recorder))
        super().__exit__(kind, error, trace)
        self._meter.stop(started, None)

    def _finish(self) -> None:
        started = self._meter.start()
        super()._finish()
        for recorder in self._recorders:
            recorder.release()
        self._meter.stop(started, None)

    def _observe(self, watches: Sequence[Watch], make: Callable[[], T]) -> T | None:
        started = self._meter.start()
        made = super()._observe(watches, make)
        self._meter.stop(started, watches)
        return made

    def _see_all(self, kind: str, seen: Sequence[Seen]) -> None:
        if not seen:
            return
        started, before = self._meter.start(), len(self._rows)
        self._shows = False
        super()._see_all(kind, seen)
        self._shows = True
        self._meter.stop(started, _by_size(seen))
        if self._recorders:
            figures = {name: found for name, _, found in self._rows[before:]}
            for name, tensor, watches in seen:
                self._show(kind, name, tensor, watches, figures)

    def _see(
        self,
        kind: str,
        name: str,
        tensor: Tensor,
        watches: Watches,
        *,
        is_counted: bool = False,
    ) -> None:
        if not watches:
            return
        started, before = self._meter.start(), len(self._rows)
        super()._see(kind, name, tensor, watches, is_counted=is_counted)
        if self._recorders and self._shows and len(self._rows) > before:
            self._show(kind, name, tensor, watches, {name: self._rows[-1][2]})
        self._meter.stop(started, watches)

    def _show(
        self,
        kind: str,
        name: str,
        tensor: Tensor,
        watches: Sequence[Watch],
        figures: Mapping[str, Any],
    ) -> None:
        for watch in watches:
            if isinstance(watch, Recorder) and name in figures:
                try:
                    found, keep = figures[name], self._keeper(watch)
                    watch.see(self._step, (name, kind), tensor, found, keep)
                except Exception as error:
                    self._desk.failed([watch], error)

    def _keeper(self, recorder: Recorder) -> Callable[[int, str, str, Tensor], None]:
        """What keeps of a tensor what a recorder wants of it."""

        def keep(step: int, name: str, kind: str, tensor: Tensor) -> None:
            shape = tuple(tensor.shape)
            for part in parts(recorder.probe, shape, tensor.element_size()):
                view = take(tensor.detach(), part)
                self._desk.captures.offer(
                    step,
                    name,
                    kind,
                    view,
                    form=part.form,
                    slice=part.slice,
                    captured_from=shape,
                    lossless=recorder.probe.lossless,
                )

        return keep


def _by_size(seen: Sequence[Seen]) -> dict[Watch, float]:
    """Who wanted how much of several tensors that were looked at in one call."""
    shares: dict[Watch, float] = {}
    for _, tensor, watches in seen:
        for watch in watches:
            shares[watch] = shares.get(watch, 0.0) + (tensor.numel() + 1) / len(watches)
    return shares
