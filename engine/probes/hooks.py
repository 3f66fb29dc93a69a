"""Watch steps with hooks that exist only while they are needed and change no value.

A forward hook sees the inputs and outputs of a layer, a tensor hook sees their gradients.
Parameters and their gradients are read after backward, and around the optimizer's step if a probe
wants the update. No hook returns a value or draws a random number, so a watched step computes the
same bits as an unwatched one. The meter measures the cost of each observation and which probes
caused it; the flight recorders see the same tensors.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from engine.core.shards import own_part, whole
from engine.core.spool import now
from engine.core.tensor_names import input_leaves, leaves
from engine.data.batches.batch import Batch
from engine.distributed.group import ALONE, Group
from engine.losses.losses import Losses, LossValue
from engine.network.call_names import Calls
from engine.network.network import Network
from engine.optim.gradient_scaling import GradScaling
from engine.optim.updates import changes, copies, states
from engine.probes.cost.meter import Meter
from engine.probes.flight_recorder import FlightRecorder
from engine.probes.merging import PER_RANK, Coming, NotAlike, Row, SharedStep
from engine.probes.statistics.summarize import summarize, summarize_all
from engine.probes.step_records import RecordSender, TensorHistogram, histogram_keys
from engine.probes.tensors.captures import CapturePiece, Captures
from engine.probes.tensors.slices import kept
from engine.probes.watched.hook_sites import HookPoint, HookSites, Seen, sample_losses, wanting
from engine.probes.watched.layer_hooks import watch_gradient
from engine.probes.watched.probe import ActiveProbe, ActiveProbes
from engine.probes.watched.select import LOSS, LOSS_ROWS, LOSS_SAMPLES
from glasshouse.spec import Probe

T = TypeVar("T")
Mark = Callable[[str], None]
Update = Callable[[], object]
"""Runs the optimizer's step, or skips it."""
_SeenAs = tuple[str, str, Tensor, ActiveProbes]
"""Kind, name, tensor, and the probes that watch it."""
_KINDS = ("param", "input", "output", "output_grad", "param_grad", "update", "optim_state")
"""The order of kinds in a step's record."""


@dataclass(frozen=True)
class WatchedTraining:
    """The watched parts of a training: loss, optimizer, clipping, gradient scaling."""

    loss_fn: Losses | None = None
    clips: bool = False
    """Whether gradients are clipped before the update."""
    scaling: GradScaling | None = None
    """What scales the gradients with respect to outputs, if they are scaled."""
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class Watching:
    """What the watchers of one phase watch, and what receives what they have seen."""

    phase: str
    network: Network
    training: WatchedTraining
    meter: Meter
    captures: Captures
    """Receives whole tensors."""
    sender: RecordSender
    """Receives the statistics of a step."""
    failed: Callable[[Sequence[ActiveProbe], Exception], None]
    """Counts a failure to watch."""
    group: Group = ALONE
    """The processes that have the rows of each step together."""


class Unwatched(AbstractContextManager["Unwatched"]):
    """A step that no probe watches."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        pass

    def look(self, *, on: bool) -> None:
        """Watch the coming forward pass, or leave it out."""

    def step(self, update: Update, _mark: Mark) -> None:
        """Run the optimizer's step."""
        update()


class StepWatcher(AbstractContextManager["StepWatcher"]):
    """Watches steps with one set of probes, one step at a time."""

    def __init__(self, watching: Watching, due: list[ActiveProbe]) -> None:
        self._watching = watching
        self._meter = watching.meter
        self._clock = watching.meter.clock
        self._step = 0
        self._batch: Batch | None = None
        self._due = due
        self._sites = sites = HookSites(watching.network, due)
        self._order = functools.cache(
            lambda row: (sites.place(row[0]), row[0], _KINDS.index(row[1]))
        )
        """The sort key of a row by name and kind."""
        self._clips = watching.training.clips
        self._is_placed = watching.network.placement is not None
        """Whether tensors are on several devices, each of which is measured."""
        recorders = [watch for watch in due if isinstance(watch, FlightRecorder)]
        self._records = bool(recorders)
        self._recorders = recorders if watching.group.is_first else []
        self._shows = True
        """Whether recorders see each tensor by itself instead of many at once."""
        self._is_open = self._comes_again = False
        self._hooks: list[Any] = []
        """On modules; they stay while consecutive steps are watched."""
        self._taps: list[Any] = []
        """On tensors of this step."""
        self._calls: list[Calls] = []
        self._rows: list[tuple[str, str, Any]] = []
        self._counted: list[TensorHistogram] = []
        self._group = watching.group
        self._asked = ActiveProbes(due)
        self._shared = None if self._group.is_alone else SharedStep(self._group, due)
        self._loss: Tensor | None = None
        """The loss of the step; recorders check whether it is finite."""
        self._continues = sites.watches_update or (self._clips and sites.sees_clipped)

    def at(
        self,
        step: int,
        batch: Batch | None = None,
        *,
        comes_again: bool = False,
        has_rows: bool = True,
    ) -> Self:
        """Prepare for a step. If the next step is watched too, the hooks may stay until then.

        ``has_rows``: whether the batch is a share of the step, and not another process's rows.
        """
        if self._shared is not None:
            self._shared.begin(has_rows=has_rows)
        self._step, self._batch, self._comes_again = step, batch, comes_again
        return self

    def __enter__(self) -> Self:
        started = self._meter.start()
        self._rows, self._counted, self._is_open = [], [], True
        for recorder in self._recorders:
            recorder.begin()
        for calls in self._calls:
            calls.restart()
        if not self._hooks:
            self._hook()
            self._watch_loss()
        self._meter.stop(started, None)
        return self

    def look(self, *, on: bool) -> None:
        """Watch the coming forward pass, or leave it out: several run before this ends."""
        self._is_open = on

    def release(self) -> None:
        """Remove the remaining hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._calls = [], []

    def _hook(self) -> None:
        for site in self._sites.sites:
            calls = Calls(site.layers, counted=site.is_counted)
            if site.is_counted:
                self._calls.append(calls)
                self._hooks.append(site.module.register_forward_pre_hook(self._on_begin(calls)))
            for point in site.points:
                if point.inputs:
                    hook = self._on_input(calls, point)
                    handle = point.module.register_forward_pre_hook(hook, with_kwargs=True)
                    self._hooks.append(handle)
                if point.outputs:
                    hook = self._on_output(calls, point)
                    self._hooks.append(point.module.register_forward_hook(hook))

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        started = self._meter.start()
        self._is_open, self._batch = False, None
        if error is None:
            for recorder in self._recorders:
                recorder.see_loss(self._step, self._loss, self._keeper(recorder))
        for tap in self._taps:
            tap.remove()
        self._taps.clear()
        if error is not None or not self._comes_again:
            self.release()
        if error is None:
            parameters = self._sites.parameters("param")
            self._see_all({"param": parameters, "param_grad": self._gradients("raw")})
            if not self._continues:
                self._finish()
        self._meter.stop(started, None)

    def step(self, update: Update, mark: Mark) -> None:
        """Run the optimizer's step, and watch the gradients before it and the update after it.

        ``mark`` receives the phase of the step that has just ended.
        """
        if not self._continues:
            update()
            return
        mark("optimizer")
        if self._clips:
            self._see_all({"param_grad": self._gradients("clipped")})
        changing = self._sites.parameters("update")
        tensors = {name: tensor for name, tensor, _ in changing}
        watches = list({id(w): w for _, _, wanted in changing for w in wanted}.values())
        before = self._observe(watches, lambda: copies(tensors))
        mark("probes")
        update()
        mark("optimizer")
        after = self._observe(watches, lambda: changes(before or {}, tensors)) or {}
        updates = [(n, after[n], wanted) for n, _, wanted in changing if n in after]
        self._see_all({"update": updates})
        keeping = [w for w in self._due if "optim_state" in w.probe.kinds]
        if keeping:
            kept = self._observe(keeping, self._states)
            self._see_all({"optim_state": kept or []})
        self._finish()
        mark("probes")

    def _finish(self) -> None:
        started = self._meter.start()
        for found in (self._rows, self._counted):
            found.sort(key=self._of_row)
        record = {"type": "stats", "at": now(), "step": self._step, "phase": self._watching.phase}
        if self._shared is None:
            self._send(record, self._rows, self._loss)
        else:
            self._merge(self._shared, record)
        for recorder in self._recorders:
            recorder.release()
        self._meter.stop(started, None)

    def _of_row(self, row: Any) -> Any:
        return self._order(tuple(row[:2]))

    def _send(self, record: Mapping[str, Any], rows: Sequence[Row], loss: Tensor | None) -> None:
        """Send what was seen of a step; only process 0 does."""
        if self._group.is_first:
            self._watching.captures.finish_step()
            self._watching.sender.send(record, rows, self._counted, self._due, loss)

    def _merge(self, shared: SharedStep, record: Mapping[str, Any]) -> None:
        """Replace what this process has seen by what all have seen, and send it."""
        coming = shared.start_rows(self._rows)
        # what is due is the same in all processes; what was seen may not be
        if not self._records and not any(watch.counts or watch.takes_full for watch in self._due):
            # nothing else to exchange: the next step begins meanwhile
            self._watching.sender.after(coming, functools.partial(self._arrived, coming, record))
            return
        loss = self._loss
        if self._records and loss is not None:
            loss = self._group.sum_of_rows(loss.clone())
        of_ranks: dict[int, list[TensorHistogram]] = {}
        if any(watch.counts for watch in self._due):
            self._counted, of_ranks = shared.merge_histograms(self._counted, self._forms)
            self._counted.sort(key=self._of_row)
        full = [watch for watch in self._due if watch.takes_full]
        if full:
            for one in shared.merge_tensors():
                self._keep(one.kind, one.name, one.tensor, one.probes, one.rank)
            if shared.missing:
                detail = f"its rows have different shapes in each process: {shared.missing[0]}"
                self._watching.failed(full, ValueError(detail))
        self._watching.sender.catch_up()
        rows = self._merged(coming)
        self._send({**record, **self._of_ranks(coming, of_ranks)}, rows, loss)

    def _arrived(self, coming: Coming, record: Mapping[str, Any]) -> None:
        started = self._meter.start()
        rows = self._merged(coming)
        self._send({**record, **self._of_ranks(coming, {})}, rows, None)
        self._meter.stop(started, None)

    def _forms(self, kind: str, name: str) -> Mapping[int, frozenset[str]]:
        return self._asked.forms_of_ranks(kind, name, self._group.size)

    def _of_ranks(
        self, coming: Coming, counted: Mapping[int, Sequence[TensorHistogram]]
    ) -> dict[str, Any]:
        """Return the key of a record that has the values of single processes, if there are any."""
        if not self._asked.of_ranks:
            return {}
        rows = coming.of_ranks(self._forms)
        found = [
            {"rank": rank, "rows": rows.get(rank, []), **histogram_keys(counted.get(rank, ()))}
            for rank in sorted({*rows, *counted})
        ]
        return {"ranks": found} if found else {}

    def _merged(self, coming: Coming) -> Sequence[Row]:
        try:
            found = coming.merged()
            return sorted(found, key=self._of_row) if self._group.is_staged else found
        except NotAlike as error:  # what this process has seen is not the step's
            self._watching.failed(self._due, error)
            return coming.same

    # --- in the forward and the backward pass -----------------------------------------------

    def _on_begin(self, calls: Calls) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._is_open:
                calls.begin()

        return hook

    def _on_input(self, calls: Calls, point: HookPoint) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, keywords: Any) -> None:
            if not self._is_open:  # an evaluation between two steps
                return
            try:
                name = calls.name(point.path, "input")
                for number, (leaf, tensor) in enumerate(input_leaves(name, args, keywords)):
                    self._see("input", leaf, tensor, point.wanting("input", leaf, name, number))
            except Exception as error:
                self._watching.failed(point.inputs, error)

        return hook

    def _on_output(self, calls: Calls, point: HookPoint) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._is_open:
                return
            try:
                name = calls.name(point.path, "output")
                for number, (leaf, tensor) in enumerate(leaves(name, output)):
                    wanted = point.wanting("output", leaf, name, number)
                    self._see("output", leaf, tensor, wanted)
                    graded = point.wanting("output_grad", leaf, name, number)
                    if graded and tensor.requires_grad:
                        self._tap(leaf, tensor, graded)
            except Exception as error:
                self._watching.failed(point.outputs, error)

        return hook

    def _tap(self, leaf: str, tensor: Tensor, graded: ActiveProbes) -> None:
        scaling = self._watching.training.scaling

        def see(gradient: Tensor) -> None:
            found: Tensor | None = gradient
            if scaling is not None:
                found = self._observe(graded, functools.partial(scaling.unscaled, gradient))
            if found is not None:
                self._see("output_grad", leaf, found, graded)

        self._taps += watch_gradient(tensor, see)

    # --- the loss ---------------------------------------------------------------------------

    def _watch_loss(self) -> None:
        loss_fn = self._watching.training.loss_fn
        if loss_fn is None:
            return
        batch = self._batch
        is_taken = LOSS in self._sites.order or (batch is not None and LOSS in batch)
        wanted = {} if is_taken else self._sites.loss
        if not self._records and not any(wanted.values()):
            return

        def hook(_module: nn.Module, inputs: tuple[Any, ...], loss: LossValue) -> None:
            if not self._is_open:
                return
            self._loss = loss.total.detach()
            if not wanted:
                return
            self._see("output", LOSS, loss.total, wanted[LOSS])
            if watches := wanted[LOSS_SAMPLES]:
                each = self._observe(watches, lambda: sample_losses(loss_fn, inputs))
                if each is not None:
                    self._see("output", LOSS_SAMPLES, each, watches)
            if (watches := wanted[LOSS_ROWS]) and self._batch is not None:
                self._see("output", LOSS_ROWS, self._batch.row_numbers, watches)

        self._hooks.append(loss_fn.register_forward_hook(hook))

    # --- parameters and what belongs to them ------------------------------------------------

    def _gradients(self, point: str) -> list[Seen]:
        """Return the gradients to watch now; without clipping all are watched as they came."""
        wanted = self._sites.parameters("param_grad")
        if self._clips:
            some = [
                (n, p, ActiveProbes(w for w in found if w.point == point)) for n, p, found in wanted
            ]
            wanted = [seen for seen in some if seen[2]]
        return [(n, p.grad, watches) for n, p, watches in wanted if p.grad is not None]

    def _states(self) -> list[Seen]:
        found: list[Seen] = []
        optimizer = self._watching.training.optimizer
        if optimizer is None:
            return found
        for name, parameter in self._watching.network.named_parameters():
            for key, item in states(optimizer, name, parameter).items():
                found.append((key, item, wanting(self._due, "optim_state", key)))
        return [seen for seen in found if seen[2]]

    # --- watching ---------------------------------------------------------------------------

    def _see_all(self, kinds: Mapping[str, Sequence[Seen]]) -> None:
        """Watch many tensors that still have their values, with one call for the statistics."""
        seen = [(kind, *one) for kind, some in kinds.items() for one in some]
        if not seen:
            return
        before = len(self._rows)
        self._shows = False
        for device, some in self._by_device(seen):
            started = self._meter.start(device)
            self._count_all(some)
            self._meter.stop(started, _by_size(some), device)
        self._shows = True
        if self._recorders:
            figures = {(kind, name): found for name, kind, found in self._rows[before:]}
            for kind, name, tensor, watches in seen:
                if (kind, name) in figures:
                    self._show(kind, name, tensor, watches, figures[kind, name])

    def _by_device(
        self, seen: Sequence[_SeenAs]
    ) -> Iterable[tuple[torch.device | None, Sequence[_SeenAs]]]:
        """Return tensors by the device that computes their statistics; None: the usual one."""
        if not self._is_placed:
            return [(None, seen)]
        found: dict[torch.device | None, list[_SeenAs]] = {}
        for one in seen:
            found.setdefault(self._device_of(one[2]), []).append(one)
        return found.items()

    def _device_of(self, tensor: Tensor) -> torch.device | None:
        return None if not self._is_placed or tensor.is_cpu else tensor.device

    def _count_all(self, seen: Sequence[_SeenAs]) -> None:
        counted = [one for one in seen if one[3].takes_stats and not one[3].counts]
        try:
            figures = summarize_all([own_part(tensor) for _, _, tensor, _ in counted])
        except Exception:  # one by one, so that only the failing tensor is missing
            for kind, name, tensor, watches in seen:
                self._see(kind, name, tensor, watches)
            return
        if self._shared is not None:
            for kind, name, tensor, watches in counted:
                self._shared.count(name, kind, tensor, of_ranks=bool(watches.of_ranks))
        self._rows += [
            (name, kind, row) for (kind, name, _, _), row in zip(counted, figures, strict=True)
        ]
        for kind, name, tensor, watches in seen:
            if watches.takes_full or watches.counts:
                self._see(kind, name, tensor, watches, is_counted=not watches.counts)

    def _see(
        self,
        kind: str,
        name: str,
        tensor: Tensor,
        watches: ActiveProbes,
        *,
        is_counted: bool = False,
    ) -> None:
        """Watch a tensor now: the next operation may overwrite it."""
        if not watches:
            return
        device = self._device_of(tensor)
        started, before = self._meter.start(device), len(self._rows)
        self._clock.pause()
        try:
            if (divided := self._watching.network.divided) is not None:
                tensor = divided.as_part(name, kind, tensor)
            if not is_counted:
                self._count(kind, name, tensor, watches)
            if watches.takes_full:
                probes = [watch.probe for watch in watches if watch.takes_full]
                self._keep_share(kind, name, tensor, probes)
        except Exception as error:
            self._watching.failed(watches, error)
        finally:
            self._clock.resume("probes")
        if self._recorders and self._shows and len(self._rows) > before:
            self._show(kind, name, tensor, watches, self._rows[-1][2])
        self._meter.stop(started, watches, device)

    def _count(self, kind: str, name: str, tensor: Tensor, watches: ActiveProbes) -> None:
        if self._shared is not None:
            self._shared.count(name, kind, tensor, of_ranks=bool(watches.of_ranks))
        if watches.counts:
            figures, counts = summarize(own_part(tensor), histogram=True)
            self._counted.append(TensorHistogram(name, kind, figures, counts, watches.counts))
            if watches.takes_stats:
                self._rows.append((name, kind, figures))
        elif watches.takes_stats:
            self._rows.append((name, kind, summarize(own_part(tensor))))

    def _keep_share(self, kind: str, name: str, tensor: Tensor, probes: Sequence[Probe]) -> None:
        """Capture a tensor; with several processes, when the rows of all of them are there."""
        if self._shared is not None and (kind in PER_RANK or self._group.is_staged):
            self._shared.hold(kind, name, tensor, probes)
            return
        if self._shared is not None:
            self._shared.hold_own(kind, name, tensor, probes)
        tensor = whole(tensor)
        if self._group.is_first:
            self._keep(kind, name, tensor, probes)

    def _keep(
        self,
        kind: str,
        name: str,
        tensor: Tensor,
        probes: Sequence[Probe],
        rank: int | None = None,
    ) -> None:
        """Capture the wanted parts of a tensor: of all processes, or of one."""
        step, phase, shape = self._step, self._watching.phase, tuple(tensor.shape)
        for part, view, lossless in kept(probes, tensor):
            piece = CapturePiece(step, name, kind, *part, shape, lossless, phase, rank)
            self._watching.captures.offer(piece, view)

    def _show(
        self, kind: str, name: str, tensor: Tensor, watches: ActiveProbes, figures: Any
    ) -> None:
        """Pass a tensor with known statistics to the recorders among the probes."""
        for watch in watches:
            if isinstance(watch, FlightRecorder):
                try:
                    keep = self._keeper(watch)
                    watch.see(self._step, (name, kind), own_part(tensor), figures, keep)
                except Exception as error:
                    self._watching.failed([watch], error)

    def _keeper(self, recorder: FlightRecorder) -> Callable[[str, str, Tensor], None]:
        """Return the function that keeps the parts of a tensor that a recorder wants."""
        return lambda name, kind, tensor: self._keep(kind, name, tensor, [recorder.probe])

    def _observe(self, watches: Sequence[ActiveProbe], make: Callable[[], T]) -> T | None:
        """Call ``make``; a failure counts for the probes and does not fail the job."""
        started = self._meter.start()
        try:
            return make()
        except Exception as error:
            self._watching.failed(watches, error)
            return None
        finally:
            self._meter.stop(started, watches)


def _by_size(seen: Sequence[_SeenAs]) -> dict[ActiveProbe, float] | ActiveProbes:
    """Return each probe's weight by tensor size, for tensors watched in one call."""
    same = seen[0][3]
    if all(watches is same for _, _, _, watches in seen):
        return same
    shares: dict[ActiveProbe, float] = {}
    for _, _, tensor, watches in seen:
        for watch in watches:
            shares[watch] = shares.get(watch, 0.0) + (tensor.numel() + 1) / len(watches)
    return shares
