"""Derived series: one value of one or two tensors of a step, computed on the device.

Hooks exist only on steps on which a value is due. Every tensor is copied when it is seen, because
an in-place layer, clipping or the optimizer may change it. That time is ``time/derived``. The
probes' governor does not limit it, because a metric is part of what the job computes. The code has
no shape suffixes: tensors may have any shape.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from engine.core.device_groups import on
from engine.core.precision import in_float32
from engine.core.problems import Findings
from engine.core.shards import whole
from engine.core.snapshot import State
from engine.core.spool import Emit, report_dropped
from engine.core.tensor_names import leaves, root
from engine.core.timing import Clock, HostClock, taken_out
from engine.distributed.group import ALONE, Group
from engine.metrics.metrics import metric_names, num_correct
from engine.metrics.torch_metrics import RunningMetric
from engine.network.network import Network
from engine.optim.gradient_scaling import GradScaling
from engine.probes.watched.layer_hooks import watch_gradient, watch_outputs
from glasshouse.spec import Field, Metric

NEVER = 2**62
MAX_FAILURES = 3
_IDLE: AbstractContextManager[None] = nullcontext()


# --- what is computed ------------------------------------------------------------------------


_l2 = torch.linalg.vector_norm
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "mean_abs_diff": lambda a, b: (a - b).abs().mean(),
    "mean_squared_diff": lambda a, b: (a - b).square().mean(),
    "cosine_similarity": lambda a, b: (a * b).sum() / (_l2(a) * _l2(b)),
    "l2_ratio": lambda a, b: _l2(a) / _l2(b),
    "correct_fraction": lambda scores, target: num_correct(scores, target) / target.numel(),
    "mean": torch.mean,
    "l2": _l2,
}
"""Tensors arrive in floating point, except those of ``correct_fraction``, whose targets are
integers."""
_ONE_SHAPE = ("mean_abs_diff", "mean_squared_diff", "cosine_similarity")


def split(reference: str) -> tuple[str, str]:
    """Return the name and the kind that a reference means: ``fc`` is ``fc/output``."""
    name, _, kind = reference.partition("/")
    return name, kind or "output"


class _Series:
    def __init__(self, name: str, metric: Metric, fields: Mapping[str, Field]) -> None:
        self.name = name
        self.metric = metric
        self.every = metric.interval or 1
        self._running = RunningMetric(name, metric, fields) if metric.is_of_torchmetrics else None
        self.needs = [split(reference) for reference in metric.inputs]
        self.is_late = any(kind == "update" for _, kind in self.needs)
        self.num_failures = 0

    def values(
        self, seen: Mapping[tuple[str, str], Tensor], home: torch.device | None
    ) -> dict[str, Tensor]:
        operands = [seen[need] for need in self.needs]
        if home is not None:
            operands = on(home, operands)
        if self._running is not None:
            return self._running.of_batch(operands)
        formula = FORMULAS[self.metric.type]
        if self.metric.type == "correct_fraction":
            return {self.name: formula(*operands).to(torch.float32)}
        wide = (torch.float32, torch.float64)
        return {
            self.name: formula(*(x if x.dtype in wide else x.to(torch.float32) for x in operands))
        }


# --- hooks ----------------------------------------------------------------------------------


class Derived(AbstractContextManager[None]):
    """The derived metrics of a job; a context that watches one forward and backward pass."""

    def __init__(  # noqa: PLR0913 (what is computed, of what, for whom)
        self,
        network: Network,
        metrics: Sequence[Metric],
        emit: Emit,
        clock: Clock | None = None,
        *,
        fields: Mapping[str, Field] | None = None,
        scaling: GradScaling | None = None,
        group: Group = ALONE,
        home: torch.device | None = None,
    ) -> None:
        """Create the series; targets that the job's ``fields`` have checked are not checked again.

        ``scaling``: the scaler of gradients with respect to outputs, if they are scaled. ``group``:
        the processes that have the rows of each step together; the values are right in process 0.
        ``home``: where values are computed if what they read may be on several devices.
        """
        self._group = group
        self._has_rows = self._is_open = True
        self._network = network
        self._home = home
        self._scaling = scaling
        self._emit = emit
        self._clock = clock or HostClock()
        names = metric_names(metrics)
        self._series = [
            _Series(name, metric, fields or {})
            for name, metric in zip(names, metrics, strict=True)
            if metric.type != "accuracy" and metric.interval
        ]
        self._off: list[str] = []
        self._next_due = 0 if self._series else NEVER
        self._values: dict[str, Tensor] = {}
        self._due: list[_Series] = []
        """The series of this step that are not computed yet."""
        self._needs: set[tuple[str, str]] = set()
        self._batch: Mapping[str, Tensor] = {}
        self._seen: dict[tuple[str, str], Tensor] = {}
        self._handles: list[Any] = []

    def at(
        self,
        step: int,
        batch: Mapping[str, Tensor],
        *,
        is_last: bool = True,
        has_rows: bool = True,
    ) -> AbstractContextManager[None]:
        """Watch what is needed of one forward and backward pass, if a value is due.

        Of several batches of a step only the last is watched, when gradients are complete.
        ``has_rows``: whether the batch is a share of the step, and not another process's rows.
        """
        self._has_rows = has_rows
        if step < self._next_due or not is_last:
            return _IDLE
        every = [series.every for series in self._series]
        self._next_due = min(((step // n + 1) * n for n in every), default=NEVER)
        self._due = [series for series in self._series if step % series.every == 0]
        self._needs = {need for series in self._due for need in series.needs}
        self._batch = batch
        return self if self._due else _IDLE

    def look(self, *, on: bool) -> None:
        """Watch the coming forward pass, or leave it out: several run before this ends."""
        self._is_open = on

    def state(self) -> State:
        """Return how often each series has failed, and which are off."""
        failures = {item.name: item.num_failures for item in self._series}
        return {"failures": failures, "off": [*self._off]}

    def restore(self, state: State) -> None:
        """Restore the state; series that were off stay off."""
        self._off = [str(name) for name in state["off"]]
        self._series = [item for item in self._series if item.name not in self._off]
        for series in self._series:
            series.num_failures = int(state["failures"].get(series.name, 0))

    def __enter__(self) -> None:
        with taken_out(self._clock, "derived"):
            self._is_open = True
            self._seen = {
                (name, kind): _copy(self._batch[name])
                for name, kind in self._needs
                if kind == "output" and name in self._batch
            }
            wanted = {root(name) for name, kind in self._needs if kind in ("output", "output_grad")}
            self._handles = watch_outputs(self._network, self._on_output, wanted)

    def _on_output(self, layer: str, output: Any) -> None:
        if not self._is_open:
            return
        with taken_out(self._clock, "derived"):
            for number, (leaf, tensor) in enumerate(leaves(layer, output)):
                for name in {leaf, layer} if number == 0 else {leaf}:
                    self._see(name, tensor)

    def _see(self, name: str, tensor: Tensor) -> None:
        if (name, "output") in self._needs:
            self._seen[name, "output"] = _copy(self._as_part(name, "output", tensor))
        if (name, "output_grad") in self._needs and tensor.requires_grad:

            def see(gradient: Tensor) -> None:
                with taken_out(self._clock, "derived"):
                    scaling = self._scaling
                    found = gradient if scaling is None else scaling.unscaled(gradient)
                    part = self._as_part(name, "output_grad", found)
                    self._seen[name, "output_grad"] = _copy(part)

            self._handles += watch_gradient(tensor, see)

    def _as_part(self, name: str, kind: str, tensor: Tensor) -> Tensor:
        divided = self._network.divided
        return tensor if divided is None else divided.as_part(name, kind, tensor)

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._batch = [], {}
        if error is None:
            with taken_out(self._clock, "derived"):
                self._gather_rows()
                self._read_parameters()
                self._compute([series for series in self._due if not series.is_late])
                self._due = [series for series in self._due if series.is_late]

    def _gather_rows(self) -> None:
        """With several processes: give process 0 the rows of all of them."""
        if self._group.is_alone:
            return
        keys = {f"{kind} {name}": (name, kind) for name, kind in sorted(self._seen)}
        counts = self._group.counts or self._group.is_staged  # its stage is in no other
        rows = slice(None if self._has_rows and counts else 0)
        own = {key: whole(self._seen[what]) for key, what in keys.items()}
        own = {key: item for key, item in own.items() if item.dim()}
        found = self._group.gather_rows({key: item[rows] for key, item in own.items()})
        if self._group.is_first:
            named = [(*key.partition(" ")[::2], item) for key, item in found.items()]
            self._seen = {(name, kind): item for kind, name, item in named}

    def _read_parameters(self) -> None:
        """Collect parameters and gradients before the update, of which some values need a copy."""
        copied = any(series.is_late for series in self._due)
        parameters = dict(self._network.named_parameters())
        for name, kind in self._needs:
            found = parameters.get(name)
            if found is None or kind not in ("param", "param_grad", "update"):
                continue
            tensor = found.grad if kind == "param_grad" else found
            if tensor is not None:
                tensor = whole(tensor)
                self._seen[name, kind] = _copy(tensor) if copied else _dense(tensor)

    def take(self) -> dict[str, Tensor]:
        """Return the values of the step, after its update; they stay on the device."""
        if self._due:
            with taken_out(self._clock, "derived"), torch.no_grad():
                parameters = dict(self._network.named_parameters())
                for name, kind in self._needs:
                    if kind == "update":
                        self._seen[name, kind] = whole(parameters[name]) - self._seen[name, kind]
                self._compute(self._due)
        self._due, self._seen = [], {}
        taken, self._values = self._values, {}
        return taken

    def _compute(self, due: Sequence[_Series]) -> None:
        """Compute values; a failing one does not stop training.

        With several processes none is switched off: all collect the same tensors at each step.
        """
        for series in due if self._group.is_first else ():
            try:
                with torch.no_grad():
                    self._values |= series.values(self._seen, self._home)
            except Exception as error:
                series.num_failures += 1
                more = ""
                if series.num_failures > MAX_FAILURES:
                    continue
                if series.num_failures == MAX_FAILURES and self._group.is_alone:
                    more = f"; it is off after {MAX_FAILURES} failures"
                    self._series = [item for item in self._series if item is not series]
                    self._off.append(series.name)
                report_dropped(self._emit, f"metric {series.name}", error, more)


def _copy(tensor: Tensor) -> Tensor:
    return _dense(tensor).clone()


def _dense(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    return in_float32(source if source.layout is torch.strided else source.to_dense())


# --- before anything runs --------------------------------------------------------------------


def check(
    metrics: Sequence[Metric],
    outputs: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    graded: Callable[[], set[str]],
    findings: Findings,
) -> None:
    """Add findings for the derived metrics that cannot be computed.

    ``outputs`` are the fields and leaves of the trace; ``graded`` returns the leaves and parameters
    to which the loss sends a gradient.
    """

    def operand(reference: str, pointer: str) -> Tensor | None:
        name, kind = split(reference)
        known = outputs if kind in ("output", "output_grad") else parameters
        if name not in known:
            what = "layer or data field" if known is outputs else "parameter"
            hint = ""
            if known is outputs and name in parameters:
                hint = f"; the parameter is {name + '/param'!r}"
            listed = ", ".join(list(known)[:30])
            detail = f"there is no {what} {name!r}{hint}; there are: {listed}"
            findings.problem(pointer, detail, "unknown_input")
            return None
        if kind.endswith("_grad") and not _is_reached(name, known, graded()):
            detail = f"no gradient reaches {name!r}: it has no {kind}"
            findings.problem(pointer, detail, "no_gradient")
            return None
        return known[name]

    for number, metric in enumerate(metrics):
        if not metric.is_evaluated:
            pointer = f"/metrics/{number}/inputs"
            found = [operand(name, f"{pointer}/{n}") for n, name in enumerate(metric.inputs)]
            known = [item for item in found if item is not None]
            if len(known) == len(found):
                _check_shapes(metric, known, pointer, findings)


def _is_reached(name: str, known: Mapping[str, Tensor], graded: set[str]) -> bool:
    """Return whether a tensor has a gradient; a layer's bare name means its first leaf."""
    first = next((leaf for leaf in known if leaf != name and known[leaf] is known[name]), name)
    return name in graded or first in graded


def _check_shapes(
    metric: Metric, found: Sequence[Tensor], pointer: str, findings: Findings
) -> None:
    shapes = " and ".join(str(list(item.shape)) for item in found)
    if metric.type == "correct_fraction":
        scores, target = found
        integers = not (target.is_floating_point() or target.is_complex())
        if not integers or not scores.dim() or scores.shape[:-1] != target.shape:
            detail = "correct_fraction compares scores of shape [..., classes] with integers of"
            findings.problem(pointer, f"{detail} shape [...], not {shapes}", "shape")
    elif metric.type in _ONE_SHAPE and found[0].shape != found[1].shape:
        detail = f"{metric.type} compares tensors of one shape, not {shapes}"
        findings.problem(pointer, detail, "shape")
    if any(item.is_complex() for item in found):
        findings.problem(pointer, f"{metric.type} takes real numbers", "dtype")
