"""Repeat a pass to find where its first NaN or Inf is, without affecting training.

The batch, the random numbers and the parameters are those of the pass. Gradients, buffers and
random generators are restored after it, bit for bit.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.core.shards import own_part
from engine.core.tensor_names import leaves, root
from engine.data.batches.batch import Batch, Taken
from engine.data.batches.rows import Rows
from engine.learner.learner import Learner
from engine.learner.side_effects import Randomness, untouched
from engine.losses.loss_sums import StepPart
from engine.losses.losses import loss_of
from engine.network.hidden_state import States, alone
from engine.network.layers import LayerFailed
from engine.network.placement import backward_in_order
from engine.probes.statistics.summarize import summarize
from engine.probes.watched.layer_hooks import watch_gradient, watch_outputs
from glasshouse.events import STATS_COLUMNS

if TYPE_CHECKING:
    from engine.learner.pipelined import Pipelined

NUM_TENSORS = 20
"""Number of tensors whose statistics are kept, up to and including the first bad one."""
_NAN, _INF, _L2 = (STATS_COLUMNS.index(name) - 2 for name in ("nan", "inf", "l2"))

LARGEST_NORM = torch.finfo(torch.float32).max ** 0.5
"""The square of a larger norm overflows float32."""

Row = list[Any]


@dataclass(frozen=True)
class Pass:
    """The inputs of a forward and backward pass, besides the parameters."""

    taken: Taken
    randomness: Randomness
    trained_in: int | None = None
    """The epoch for which its rows were augmented."""
    hidden_state: States | None = None
    """The initial hidden state of its stateful layers, if there are any."""
    part: StepPart | None = None
    """Its place in the step, if several micro-batches make one step."""
    seed_stage: Callable[[int], object] | None = None
    """Of a pipeline: seeds the random generators for a stage, by its number."""

    def restore(self, learner: Learner) -> None:
        """Restore the random state and the hidden state that it began with."""
        self.randomness.restore()
        if learner.hidden_state is not None and self.hidden_state is not None:
            learner.hidden_state.put(self.hidden_state)


@dataclass
class Found:
    """Where a step first had a NaN or Inf."""

    layer: str | None = None
    """The layer, data field, or ``loss``; None: nothing was found."""
    tensor: str | None = None
    """The leaf or the parameter, by its name for probes."""
    kind: str | None = None
    phase: str | None = None
    """``forward``, ``backward``, or ``update`` if the parameters were bad before the step."""
    num_pass: int = 0
    """The index of the pass in the step."""
    bad_rows: Tensor | None = None
    """Which rows of the batch are bad; None: the tensor has no rows."""
    counts: tuple[int, int, int] = (0, 0, 0)
    """The number of NaN, Inf and all values."""
    rows: list[Row] = field(default_factory=list[Row])
    """The statistics of the tensors up to it, in order of computation."""
    fields: list[Row] = field(default_factory=list[Row])
    """The statistics of the batch's data fields, always kept."""
    norm: float | None = None
    """The l2 norm of a tensor with finite values whose norm is too large."""

    @property
    def overflows(self) -> bool:
        """Return whether the values are finite and the tensor's own norm overflows float32."""
        return self.norm is not None and self.norm > LARGEST_NORM


class Skipped:
    """The layers and parameters that are excluded from the checks."""

    def __init__(self, globs: Sequence[str]) -> None:
        self._globs = globs

    def __contains__(self, name: str) -> bool:
        """Return whether a layer, leaf or parameter is excluded, by itself or by its layer."""
        return any(
            fnmatchcase(one, glob)
            for glob in self._globs
            for one in dict.fromkeys((name, root(name)))
        )


class Replay:
    """Finds the first bad tensor of recorded passes."""

    def __init__(self, learner: Learner, rows: Rows, skipped: Skipped) -> None:
        self._learner = learner
        self._network = learner.network
        self._rows = rows
        self._skipped = skipped

    def find(self, passes: Sequence[Pass]) -> Found:
        """Check the parameters, then each pass: data, forward, loss, backward.

        If every value is finite and only the norm overflows: return the first gradient whose own
        norm overflows, else the parameter's gradient with the largest norm.
        """
        found = self.in_parameters()
        if self._any(found):
            return found
        largest = Found()
        for number, one in enumerate(passes):
            hidden_state = self._learner.hidden_state
            with untouched(self._network, *one.randomness.devices), alone(hidden_state):
                one.restore(self._learner)
                search = _Search(self._skipped)
                batch = self._rows.batch(one.taken, trained_in=one.trained_in)
                self._run(batch, one, search)
            found = search.found
            found.num_pass = search.largest.num_pass = number
            if self._any(found):
                return found
            largest = larger(largest, search.largest)
        return largest

    def _any(self, found: Found) -> bool:
        """Whether something was found in any process; the passes may need all of them."""
        if self._learner.group.is_alone:
            return found.layer is not None
        return bool(self._learner.group.sum(torch.tensor(float(found.layer is not None))))

    @torch.no_grad()
    def in_parameters(self) -> Found:
        """Return the first parameter with a NaN or Inf."""
        for name, parameter in self._network.named_parameters():
            if name not in self._skipped and not is_finite(parameter):
                search = _Search(self._skipped)
                search.see_parameter(name, "param", "update", parameter)
                return search.found
        return Found()

    @torch.no_grad()
    def in_forward(self, batch: Batch) -> Found:
        """Return the first bad tensor of the data, the parameters and a forward pass."""
        search = _Search(Skipped(()))
        search.see_batch(batch)
        for name, parameter in self._network.named_parameters():
            search.see_parameter(name, "param", "update", parameter)
        is_alone = self._learner.group.is_alone or not (
            self._learner.is_sharded or self._learner.synced
        )
        if search.found.layer is not None or not is_alone:
            return search.found  # the other processes do not run the pass again
        handles = watch_outputs(self._network, search.see_output)
        try:
            with contextlib.suppress(LayerFailed):  # as in the step itself
                self._network(batch)
        finally:
            for handle in handles:
                handle.remove()
        return search.found

    def _run(self, batch: Batch, one: Pass, search: "_Search") -> None:
        loss_fn, scaling = self._learner.loss_fn, self._learner.scaling
        search.see_batch(batch)
        handles = watch_outputs(self._network, search.see_output)
        for name, parameter in self._network.named_parameters():
            if parameter.requires_grad:
                hook = partial(search.see_grad, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            if self._learner.pipeline is not None:
                self._run_stages(self._learner.pipeline, batch, one, search)
                return
            # If a layer fails, check what was computed before it.
            with contextlib.suppress(LayerFailed, RuntimeError), torch.enable_grad():
                loss = loss_of(loss_fn, self._network(batch.tensors), one.part).total
                search.see("loss", "loss", "output", "forward", loss)
                if not self._any(search.found):
                    with backward_in_order(self._network.placement):
                        (loss if scaling is None else loss * scaling.scale).backward()
        finally:
            for handle in handles:
                handle.remove()

    def _run_stages(
        self, pipeline: "Pipelined", batch: Batch, one: Pass, search: "_Search"
    ) -> None:
        """Run both passes through all stages, each of which checks what it computes.

        A process does not know what an earlier stage has found, so it may find what follows from
        that: `guard.joined` takes the first.
        """

        def after(_number: int, values: Mapping[str, Tensor]) -> Tensor:
            loss = loss_of(self._learner.loss_fn, values, one.part).total
            search.see("loss", "loss", "output", "forward", loss)
            return loss

        def before(_number: int, stage: int) -> None:
            if one.seed_stage is not None:
                one.seed_stage(stage)

        with torch.enable_grad():
            pipeline.run([batch], before=before, after=after)


class _Search:
    """Checks tensors in the order of computation, up to the first bad one."""

    def __init__(self, skipped: Skipped) -> None:
        self._skipped = skipped
        self._rows: deque[Row] = deque(maxlen=NUM_TENSORS)
        self._fields: list[Row] = []
        self._num_rows = 0
        self.found = Found()
        self.largest = Found()
        """The gradient that makes a norm overflow while all values are finite."""

    def see_batch(self, batch: Batch) -> None:
        """Check the fields of the data."""
        self._num_rows = batch.num_rows
        for name, tensor in batch.items():
            self.see(name, name, "input", "forward", tensor)

    def see_output(self, layer: str, output: Any) -> None:
        """Check the output of a layer, and the gradient with respect to it when it is there."""
        for leaf, tensor in leaves(layer, output):
            self.see(layer, leaf, "output", "forward", tensor)
            if tensor.requires_grad:
                watch_gradient(tensor, partial(self.see, layer, leaf, "output_grad", "backward"))

    def see_grad(self, name: str, parameter: Tensor) -> None:
        """Check the gradient of a parameter."""
        if parameter.grad is not None:
            self.see_parameter(name, "param_grad", "backward", parameter.grad)

    def see_parameter(self, name: str, kind: str, phase: str, tensor: Tensor) -> None:
        """Check a parameter, or a tensor that belongs to it."""
        self.see(name.rpartition(".")[0] or name, name, kind, phase, tensor)

    def see(self, layer: str, name: str, kind: str, phase: str, tensor: Tensor) -> None:
        """Check a tensor that still has its value."""
        if self.found.layer is not None or not tensor.is_floating_point():
            return
        tensor = own_part(tensor.detach())
        figures = summarize(tensor)
        row: Row = [*(figures.tolist() if isinstance(figures, Tensor) else figures)]
        self._rows.append([name, kind, *row])
        if kind == "input":
            self._fields.append(self._rows[-1])
        if name in self._skipped:
            return
        found = Found(layer, name, kind, phase)
        if row[_NAN] or row[_INF]:
            found.counts = int(row[_NAN]), int(row[_INF]), tensor.numel()
            found.bad_rows = self._rows_where(lambda rows: ~torch.isfinite(rows).all(1), tensor)
            found.rows, found.fields = [*self._rows], [*self._fields]
            self.found = found
        elif phase == "backward":
            found.norm = float(row[_L2])
            if larger(self.largest, found) is found:
                found.bad_rows = self._rows_where(_largest, tensor)
                found.rows, found.fields = [*self._rows], [*self._fields]
                self.largest = found

    def _rows_where(self, test: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor | None:
        """Return the rows of the batch that match a test; None: the tensor has no rows."""
        if tensor.layout is not torch.strided or not tensor.dim():
            return None
        if tensor.shape[0] != self._num_rows or not tensor.numel():
            return None
        return test(tensor.detach().reshape(self._num_rows, -1)).nonzero().reshape(-1)


def _largest(rows: Tensor) -> Tensor:
    """Return the rows whose own norm overflows; if none does, the one with the largest norm."""
    norms = torch.linalg.vector_norm(rows.double(), dim=1)
    return norms >= min(LARGEST_NORM, float(norms.max()))


def larger(first: Found, second: Found) -> Found:
    """Return which of two finite gradients to blame for an overflowing norm.

    The first one that overflows by itself; if none does, the largest gradient of a parameter,
    because the norm is that of the parameters' gradients.
    """
    if first.overflows or second.norm is None:
        return first
    if second.overflows:
        return second
    if second.kind != "param_grad":
        return first
    return second if first.norm is None or second.norm > first.norm else first


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite; waits for the device."""
    return not tensor.is_floating_point() or bool(torch.isfinite(own_part(tensor)).all())


def described(found: Found, readers: Sequence[str]) -> str:
    """Return a description of the place; ``readers``: the layers that read the found one."""
    if found.tensor is None or found.norm is not None:
        return _of_norm(found)
    nan, infinities, count = found.counts
    what = f"{nan:,} NaN and {infinities:,} infinities among {count:,} values"
    match found.kind:
        case "input":
            return f"The data's {found.tensor!r} was not finite: {what}."
        case "param":
            return f"The parameter {found.tensor!r} was not finite: {what}."
        case "output":
            thing = "the loss" if found.layer == "loss" else f"the output of {found.tensor!r}"
            return f"In the forward pass {thing} was not finite: {what}."
        case "output_grad":
            back = " and ".join(map(repr, readers)) or "loss"
            thing = f"the gradient with respect to the output of {found.tensor!r}"
            return f"In the backward pass {thing}, from {back}, was not finite: {what}."
        case _:
            thing = f"the gradient of {found.tensor!r}"
            return f"In the backward pass {thing} was not finite: {what}."


def _of_norm(found: Found) -> str:
    """Return a description of where a norm overflowed."""
    if found.norm is None:
        return "Run again, the step's tensors all are finite: a norm or a sum of them is not."
    by = "the output" if found.kind == "output_grad" else "the parameter"
    which = "The first gradient whose own norm does" if found.overflows else "The largest one"
    return (
        "All values of the step are finite, but their norm overflows float32. "
        f"{which} is that with respect to {by} {found.tensor!r}, with the norm {found.norm:.3g}."
    )
