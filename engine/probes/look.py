"""The watching of one step: hooks that exist while it runs, and look without touching.

A forward hook sees what goes into and comes out of a layer, a tensor hook the gradient of that;
parameters and their gradients are read after backward, and around the optimizer's step where a
probe wants what the step does. No hook returns a value or draws a random number, so a watched step
computes the very same bits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from engine.data import Rows
from engine.network import Network, input_leaves, leaves, root
from engine.probes.calls import Calls
from engine.probes.captures import CaptureWriter
from engine.probes.gradients import watch_gradient
from engine.probes.losses import LOSS_NAMES, sample_losses
from engine.probes.points import Point, Spot
from engine.probes.select import LOSS, LOSS_ROWS, LOSS_SAMPLES, Scope
from engine.probes.summarize import summarize, summarize_all
from engine.probes.updates import changes, copies, states
from engine.probes.watch import Watch
from engine.timing import Clock

Seen = tuple[str, Tensor, list[Watch]]
"""A tensor by its name, and who wants it."""
Mark = Callable[[str], None]
T = TypeVar("T")
_KINDS = ("param", "input", "output", "output_grad", "param_grad", "update", "optim_state")


@dataclass(frozen=True)
class Training:
    """What a network is trained with, as far as it is watched."""

    loss_fn: nn.Module | None = None
    rows: Rows | None = None
    clips: bool = False
    """Whether gradients are clipped before the update."""


class Unwatched(AbstractContextManager["Unwatched"]):
    """A step that nothing looks at."""

    def __exit__(self, *_: object) -> None:
        """Nothing was begun."""

    def step(self, optimizer: torch.optim.Optimizer, _mark: Mark) -> None:
        """Make the optimizer's step."""
        optimizer.step()


class Desk(Protocol):
    """Where a look takes what it has seen."""

    network: Network
    training: Training
    captures: CaptureWriter
    clock: Clock

    def spots(self, due: Sequence[Watch]) -> list[Spot]:
        """Where to hook for these probes."""
        ...

    def finish_step(self, step: int, rows: list[tuple[str, str, Any]]) -> None:
        """Send the statistics of a step on their way."""
        ...

    def failed(self, watches: Sequence[Watch], error: Exception) -> None:
        """Count a failure to observe."""
        ...


class Look(AbstractContextManager["Look"]):
    """The watching of one step."""

    def __init__(self, desk: Desk, step: int, due: list[Watch]) -> None:
        self._desk = desk
        self._step = step
        self._due = due
        self._clips = desk.training.clips
        self._handles: list[Any] = []
        self._rows: list[tuple[str, str, Any]] = []
        self._goes_on = any(self._is_late(watch) for watch in due)

    def _is_late(self, watch: Watch) -> bool:
        """Whether a probe looks at something past the backward pass."""
        kinds = {*watch.probe.kinds}
        return bool({"update", "optim_state"} & kinds) or (
            self._clips and watch.point == "clipped" and "param_grad" in kinds
        )

    def __enter__(self) -> "Look":
        for spot in self._desk.spots(self._due):
            calls = Calls(spot.layers, counted=spot.is_counted)
            if spot.is_counted:
                self._handles.append(spot.module.register_forward_pre_hook(_beginning(calls)))
            for point in spot.points:
                if point.inputs:
                    hook = self._on_input(calls, point)
                    handle = point.module.register_forward_pre_hook(hook, with_kwargs=True)
                    self._handles.append(handle)
                if point.outputs:
                    hook = self._on_output(calls, point)
                    self._handles.append(point.module.register_forward_hook(hook))
        self._watch_loss()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if error is not None:
            return
        self._see_all("param", self._parameters("param"))
        self._see_all("param_grad", self._gradients("raw"))
        if not self._goes_on:
            self._finish()

    def step(self, optimizer: torch.optim.Optimizer, mark: Mark) -> None:
        """Make the optimizer's step, and look at what it takes and what it does.

        ``mark`` is told which part of the step has just ended.
        """
        if not self._goes_on:
            optimizer.step()
            return
        mark("optimizer")
        if self._clips:
            self._see_all("param_grad", self._gradients("clipped"))
        changing = self._parameters("update")
        tensors = {name: tensor for name, tensor, _ in changing}
        watches = _all_of(changing)
        before = self._observe(watches, lambda: copies(tensors))
        mark("probes")
        optimizer.step()
        mark("optimizer")
        after = self._observe(watches, lambda: changes(before or {}, tensors)) or {}
        self._see_all("update", [(n, after[n], wanted) for n, _, wanted in changing if n in after])
        self._see_all("optim_state", self._states(optimizer))
        self._finish()
        mark("probes")

    def _finish(self) -> None:
        order = {name: number for number, name in enumerate(self._desk.network.layers)}
        last = len(order)
        self._rows.sort(
            key=lambda row: (order.get(root(row[0]), last), row[0], _KINDS.index(row[1]))
        )
        self._desk.finish_step(self._step, self._rows)

    # --- in the forward and the backward pass -----------------------------------------------

    def _on_input(self, calls: Calls, point: Point) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, keywords: Any) -> None:
            try:
                name = calls.name(point.path, "input")
                for number, (leaf, tensor) in enumerate(input_leaves(name, args, keywords)):
                    named = _named(name, number, point)
                    wanted = [w for w in point.inputs if w.wants("input", leaf, **named)]
                    self._see("input", leaf, tensor, wanted)
            except Exception as error:
                self._desk.failed(point.inputs, error)

        return hook

    def _on_output(self, calls: Calls, point: Point) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            try:
                name = calls.name(point.path, "output")
                for number, (leaf, tensor) in enumerate(leaves(name, output)):
                    self._tap(leaf, tensor, point.outputs, _named(name, number, point))
            except Exception as error:
                self._desk.failed(point.outputs, error)

        return hook

    def _tap(self, leaf: str, tensor: Tensor, watches: list[Watch], named: dict[str, Any]) -> None:
        wanted = [watch for watch in watches if watch.wants("output", leaf, **named)]
        self._see("output", leaf, tensor, wanted)
        graded = [watch for watch in watches if watch.wants("output_grad", leaf, **named)]
        if not graded or not tensor.requires_grad:
            return

        def see(gradient: Tensor) -> None:
            self._see("output_grad", leaf, gradient, graded)

        self._handles += watch_gradient(tensor, see)

    # --- the loss ---------------------------------------------------------------------------

    def _watch_loss(self) -> None:
        loss_fn, rows = self._desk.training.loss_fn, self._desk.training.rows
        layers = self._desk.network.layers
        if loss_fn is None or LOSS in layers or (rows is not None and LOSS in rows.fields):
            return
        wanted = {name: self._wanting("output", name, "loss") for name in LOSS_NAMES}
        if not any(wanted.values()):
            return

        def hook(_module: nn.Module, inputs: tuple[Any, ...], loss: Tensor) -> None:
            self._see("output", LOSS, loss, wanted[LOSS])
            if watches := wanted[LOSS_SAMPLES]:
                each = self._observe(watches, lambda: sample_losses(loss_fn, inputs))
                if each is not None:
                    self._see("output", LOSS_SAMPLES, each, watches)
            if (watches := wanted[LOSS_ROWS]) and rows is not None:
                self._see("output", LOSS_ROWS, rows.newest, watches)

        self._handles.append(loss_fn.register_forward_hook(hook))

    # --- parameters and what belongs to them ------------------------------------------------

    def _wanting(self, kind: str, name: str, scope: Scope = "parameter") -> list[Watch]:
        return [watch for watch in self._due if watch.wants(kind, name, scope=scope)]

    def _parameters(self, kind: str) -> list[Seen]:
        if not any(kind in watch.probe.kinds for watch in self._due):
            return []
        named = self._desk.network.named_parameters()
        found = [(name, item, self._wanting(kind, name)) for name, item in named]
        return [seen for seen in found if seen[2]]

    def _gradients(self, point: str) -> list[Seen]:
        """The gradients that are to be seen now; without clipping all are seen as they came."""
        found: list[Seen] = []
        for name, parameter, watches in self._parameters("param_grad"):
            now = [w for w in watches if (w.point if self._clips else "raw") == point]
            if now and parameter.grad is not None:
                found.append((name, parameter.grad, now))
        return found

    def _states(self, optimizer: torch.optim.Optimizer) -> list[Seen]:
        if not any("optim_state" in watch.probe.kinds for watch in self._due):
            return []
        found: list[Seen] = []
        for name, parameter in self._desk.network.named_parameters():
            for key, item in states(optimizer, name, parameter).items():
                found.append((key, item, self._wanting("optim_state", key)))
        return [seen for seen in found if seen[2]]

    # --- looking ----------------------------------------------------------------------------

    def _see_all(self, kind: str, seen: Sequence[Seen]) -> None:
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
        self._desk.clock.pause()
        try:
            if not is_counted and any(watch.takes_stats for watch in watches):
                self._rows.append((name, kind, summarize(tensor)))
            if any(watch.takes_full for watch in watches):
                self._desk.captures.offer(self._step, name, kind, tensor)
        except Exception as error:
            self._desk.failed(watches, error)
        finally:
            self._desk.clock.resume("probes")

    def _observe(self, watches: Sequence[Watch], make: Callable[[], T]) -> T | None:
        """Make something to look at; a failure is the probes', not the job's."""
        try:
            return make()
        except Exception as error:
            self._desk.failed(watches, error)
            return None


def _all_of(seen: Sequence[Seen]) -> list[Watch]:
    return list({id(watch): watch for _, _, watches in seen for watch in watches}.values())


def _named(owner: str, number: int, point: Point) -> dict[str, Any]:
    """How a leaf stands to the globs."""
    return {"owner": owner, "is_first": number == 0, "scope": point.scope}


def _beginning(calls: Calls) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any) -> None:
        calls.begin()

    return hook
