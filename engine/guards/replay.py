"""One pass once more, to see where its numbers first are not finite; training is not touched by it.

The batch, the random numbers and the parameters are those of the pass. Gradients, buffers and
generators are put back after it, bit for bit.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.tensor_names import leaves, root
from engine.data.batches.rows import Rows, Taken
from engine.learner.side_effects import Randomness, untouched
from engine.losses.loss_sums import StepPart
from engine.losses.losses import Losses, loss_of
from engine.network.hidden_state import HiddenState, States, alone
from engine.network.layers import LayerFailed
from engine.network.network import Network
from engine.optim.gradient_scaling import GradScaling
from engine.probes.statistics.summarize import summarize
from engine.probes.watched.gradients import watch_gradient
from glasshouse.events import STATS_COLUMNS

NUM_TENSORS = 20
"""Tensors whose figures are kept before the first bad one, that one included."""
_NAN, _INF, _L2 = (STATS_COLUMNS.index(name) - 2 for name in ("nan", "inf", "l2"))

LARGEST_NORM = torch.finfo(torch.float32).max ** 0.5
"""The square of a larger norm overflows float32."""

Row = list[Any]


@dataclass(frozen=True)
class Pass:
    """What a forward and backward pass was made of, beside the parameters."""

    taken: Taken
    randomness: Randomness
    trained_in: int | None = None
    """The epoch for which its rows were changed."""
    hidden_state: States | None = None
    """Where its stateful layers began, where there are some."""
    part: StepPart | None = None
    """Its place in its step, where several micro-batches make one."""


@dataclass
class Found:
    """Where the numbers of a step first were not finite."""

    layer: str | None = None
    """The layer, or the data field, or ``loss``; None: nothing was found."""
    tensor: str | None = None
    """The leaf or the parameter, as a probe would call it."""
    kind: str | None = None
    phase: str | None = None
    """``forward``, ``backward``, or ``update`` where the parameters were bad before the step."""
    num_pass: int = 0
    """In which of the step's passes."""
    bad_rows: Tensor | None = None
    """Which rows of its batch; None: the tensor has none."""
    counts: tuple[int, int, int] = (0, 0, 0)
    """NaN, infinities, values in all."""
    rows: list[Row] = field(default_factory=list[Row])
    """The figures of the tensors up to it, in the order in which they were made."""
    fields: list[Row] = field(default_factory=list[Row])
    """The figures of the data fields of its batch, however many tensors ago that was."""
    norm: float | None = None
    """Of a tensor whose values are finite, but whose norm is too large: its l2 norm."""

    @property
    def overflows(self) -> bool:
        """Whether the values are finite and the norm, by itself, is not a float32."""
        return self.norm is not None and self.norm > LARGEST_NORM


class Skipped:
    """The layers and parameters that nobody wants to be looked at."""

    def __init__(self, globs: Sequence[str]) -> None:
        self._globs = globs

    def __contains__(self, name: str) -> bool:
        """Whether a layer, a leaf or a parameter is one of them; what is of a layer goes by it."""
        return any(
            fnmatchcase(one, glob)
            for glob in self._globs
            for one in dict.fromkeys((name, root(name)))
        )


class Replay:
    """Looks for the first bad tensor of passes that were made."""

    def __init__(
        self,
        network: Network,
        loss_fn: Losses,
        rows: Rows,
        skipped: Skipped,
        *,
        hidden_state: HiddenState | None = None,
        scaling: GradScaling | None = None,
    ) -> None:
        self._network = network
        self._scaling = scaling
        self._hidden_state = hidden_state
        self._loss_fn = loss_fn
        self._rows = rows
        self._skipped = skipped

    def find(self, passes: Sequence[Pass]) -> Found:
        """Look in the parameters, then in each pass: data, forward, loss, backward.

        Where every value is finite, and so a norm of them is not: the first gradient whose own norm
        overflows, or the parameter's gradient with the largest norm.
        """
        found = self.in_parameters()
        if found.layer is not None:
            return found
        largest = Found()
        for number, one in enumerate(passes):
            with untouched(self._network, one.randomness.device), alone(self._hidden_state):
                one.randomness.restore()
                if self._hidden_state is not None and one.hidden_state is not None:
                    self._hidden_state.put(one.hidden_state)
                search = _Search(self._skipped)
                self._run(self._rows.again(one.taken, one.trained_in), one.part, search)
            found = search.found
            found.num_pass = search.largest.num_pass = number
            if found.layer is not None:
                return found
            largest = larger(largest, search.largest)
        return largest

    @torch.no_grad()
    def in_parameters(self) -> Found:
        """The first parameter that is not finite."""
        for name, parameter in self._network.named_parameters():
            if name not in self._skipped and not is_finite(parameter):
                search = _Search(self._skipped)
                search.see(name.rpartition(".")[0] or name, name, "param", "update", parameter)
                return search.found
        return Found()

    def _run(self, batch: dict[str, Tensor], part: StepPart | None, search: "_Search") -> None:
        search.num_rows = next(iter(batch.values())).shape[0]
        for name, tensor in batch.items():
            search.see(name, name, "input", "forward", tensor)
        handles = self._hook(search)
        try:
            # A step that fails in a layer is looked at as far as it comes.
            with contextlib.suppress(LayerFailed, RuntimeError), torch.enable_grad():
                loss = loss_of(self._loss_fn, self._network(batch), part).total
                search.see("loss", "loss", "output", "forward", loss)
                if search.found.layer is None:
                    (loss if self._scaling is None else loss * self._scaling.scale).backward()
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, search: "_Search") -> list[Any]:
        names: dict[nn.Module, list[str]] = {}
        for name, module in self._network.layers.items():
            names.setdefault(module, []).append(name)
        handles: list[Any] = [
            module.register_forward_hook(_on_output(search, iter(called)))
            for module, called in names.items()
        ]
        for name, parameter in self._network.named_parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(_on_grad(search, name))
                handles.append(handle)
        return handles


class _Search:
    """Sees tensors in the order in which a pass makes them, up to the first bad one."""

    def __init__(self, skipped: Skipped) -> None:
        self._skipped = skipped
        self._rows: deque[Row] = deque(maxlen=NUM_TENSORS)
        self._fields: list[Row] = []
        self.num_rows = 0
        self.found = Found()
        self.largest = Found()
        """The gradient that makes a norm overflow while all values are finite."""

    def see(self, layer: str, name: str, kind: str, phase: str, tensor: Tensor) -> None:
        """Look at a tensor that is still what it was."""
        if self.found.layer is not None or not tensor.is_floating_point():
            return
        figures = summarize(tensor.detach())
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
        """The rows of the batch that pass a test; None: the tensor has none."""
        if tensor.layout is not torch.strided or not tensor.dim():
            return None
        if tensor.shape[0] != self.num_rows or not tensor.numel():
            return None
        return test(tensor.detach().reshape(self.num_rows, -1)).nonzero().reshape(-1)


def _largest(rows: Tensor) -> Tensor:
    """Which rows overflow by themselves; none does: the one with the largest norm."""
    norms = torch.linalg.vector_norm(rows.double(), dim=1)
    return norms >= min(LARGEST_NORM, float(norms.max()))


def larger(first: Found, second: Found) -> Found:
    """Of two gradients that are finite the one to blame for a norm that is not.

    The first that overflows by itself; none does: of the parameters' gradients, whose norm it is,
    the largest.
    """
    if first.overflows or second.norm is None:
        return first
    if second.overflows:
        return second
    if second.kind != "param_grad":
        return first
    return second if first.norm is None or second.norm > first.norm else first


def _on_output(search: _Search, names: Iterator[str]) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        layer = next(names)
        for leaf, tensor in leaves(layer, output):
            search.see(layer, leaf, "output", "forward", tensor)
            if tensor.requires_grad:
                watch_gradient(tensor, _on_gradient(search, layer, leaf))

    return hook


def _on_gradient(search: _Search, layer: str, leaf: str) -> Callable[[Tensor], None]:
    return lambda gradient: search.see(layer, leaf, "output_grad", "backward", gradient)


def _on_grad(search: _Search, name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            layer = name.rpartition(".")[0] or name
            search.see(layer, name, "param_grad", "backward", parameter.grad)

    return hook


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are; waits for the device."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def described(found: Found, readers: Mapping[str, Sequence[str]]) -> str:
    """Where it was, in words; ``readers``: the layers that read a layer."""
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
            back = " and ".join(repr(name) for name in readers.get(found.layer or "", ())) or "loss"
            thing = f"the gradient by the output of {found.tensor!r}, which {back} gives back,"
            return f"In the backward pass {thing} was not finite: {what}."
        case _:
            thing = f"the gradient of {found.tensor!r}"
            return f"In the backward pass {thing} was not finite: {what}."


def _of_norm(found: Found) -> str:
    """Where a norm overflowed, in words."""
    if found.norm is None:
        return "Run again, the step's tensors all are finite: a norm or a sum of them is not."
    by = "the output" if found.kind == "output_grad" else "the parameter"
    which = "The first gradient whose own norm does" if found.overflows else "The largest one"
    return (
        "All values of the step are finite, but their norm overflows float32. "
        f"{which} is that with respect to {by} {found.tensor!r}, with the norm {found.norm:.3g}."
    )
