"""Metrics over all rows of each evaluation, and the checks of those of torchmetrics in the plan.

Their state is accumulated over the batches and computed once, so the value does not depend on the
batch size. Knows jobs and files; ``engine.metrics.torch_metrics`` has the classes.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.precision import dtype_name
from engine.core.problems import Findings, one
from engine.core.spool import Emit, report_dropped
from engine.core.tensor_artifact import Artifacts
from engine.distributed.group import ALONE, Group
from engine.metrics.metrics import metric_names
from engine.metrics.torch_metrics import (
    Given,
    RunningAccuracy,
    RunningMetric,
    build,
    checked_arguments,
    metric_classes,
    metric_parameters,
    num_values,
    running,
)
from engine.network.shapes import FieldShape, Trace
from glasshouse.spec import Metric, TrainJob

MAX_BYTES = 256 * 2**20
"""Most bytes that the metrics of a job together may keep between the batches of an evaluation."""
_TRIED_ELEMENTS = 32_000_000
_AS_PROBABILITIES = {"Sigmoid", "Softmax", "sigmoid", "softmax"}
_PER_BATCH = ("Binary", "Multilabel")

# --- while it runs ---------------------------------------------------------------------------


class EpochMetrics:
    """The metrics of a job, over one evaluation after the other."""

    def __init__(self, job: TrainJob, directory: Path, emit: Emit) -> None:
        named = zip(metric_names(job.metrics), job.metrics, strict=True)
        fields = job.data.fields
        metrics = [running(name, item, fields) for name, item in named if item.is_evaluated]
        self._metrics = sorted(metrics, key=lambda item: item.metric.is_of_torchmetrics)
        self._artifacts = Artifacts(directory, "metrics", emit, "tensors of metrics")
        self._emit = emit
        early, scheduler, best = job.stop.early, job.scheduler, job.checkpoint.keep_best
        monitored = [item.metric for item in (early, scheduler, best) if item is not None]
        self._monitored = [name for name in monitored if name is not None]
        self._failed: dict[str, Exception] = {}
        self._tensors: dict[str, Tensor] = {}
        """Results of the newest evaluation that are not numbers."""

    def update(self, values: Mapping[str, Tensor]) -> None:
        """Add the network's outputs for a batch; a failing metric does not stop the others."""
        for item in self._metrics:
            if item.name not in self._failed:
                try:
                    item.update([values[name] for name in item.metric.inputs])
                except Exception as error:  # for example targets that its class does not take
                    self._failed[item.name] = error

    def finish(self, prefix: str, group: Group = ALONE) -> dict[str, float]:
        """Return the values over the rows of one source, by series without the prefix.

        A metric that could not be computed is NaN and is reported. ``prefix``: of the source, from
        `Data.validations`. ``group``: the processes that have the rows together.
        """
        if not group.is_alone:
            self._share_failures(group)
        of = prefix.removeprefix("validation").removeprefix("/")
        series: dict[str, float] = {}
        for item in self._metrics:
            try:
                if item.name in self._failed:
                    raise self._failed[item.name]
                given = _given(item, group)
                series |= {name: float(part) for name, part in given.series.items()}
                tensors = given.tensors.items()
                self._tensors |= {f"{of}/{name}" if of else name: part for name, part in tensors}
            except Exception as error:
                series |= self._without(prefix, item.name)
                what = f"metric {item.name} of the evaluation{' of ' if of else ''}{of}"
                report_dropped(self._emit, what, error)
            item.reset()
        self._failed.clear()
        return series

    def keep(self, step: int, group: Group = ALONE) -> None:
        """Write the tensors of an evaluation, if there are any, to a file.

        With several sources, their names begin with that of the source: ``clean/confusion``.
        """
        tensors, self._tensors = self._tensors, {}
        if tensors and group.is_first:
            self._artifacts.keep(step, lambda: tensors)

    def _share_failures(self, group: Group) -> None:
        """Let a metric fail in all processes if it has failed in one."""
        own = {name: f"{type(error).__name__}: {error}" for name, error in self._failed.items()}
        found = group.gather(own)
        everywhere = {name: text for share in reversed(found) for name, text in share.items()}
        for name, text in group.broadcast(everywhere).items():
            self._failed.setdefault(name, ValueError(text))

    def _without(self, prefix: str, name: str) -> dict[str, float]:
        """Return NaN for each series of a failed metric, so that its consumers get a value."""
        monitored = [item.removeprefix(f"{prefix}/") for item in self._monitored]
        found = [item for item in monitored if item == name or item.startswith(f"{name}/")]
        return dict.fromkeys(found or [name], math.nan)


def _given(item: RunningMetric | RunningAccuracy, group: Group) -> Given:
    """Return the result over all processes; in a pipeline only some of them have the rows."""
    if not group.is_staged or isinstance(item, RunningAccuracy):
        return item.compute(group)
    own, failure = Given({}, {}), None
    if group.counts:
        try:
            own = item.compute(group)
        except Exception as error:  # the others wait for the result
            failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    source = group.num_peers - 1
    found = group.broadcast({"failure": text, "series": [*own.series]}, source)
    if found["failure"] is not None:
        raise failure or ValueError(found["failure"])
    both = group.of_rows({**own.series, **{f"/{name}": x for name, x in own.tensors.items()}})
    series = {name: both.pop(name) for name in found["series"]}
    return Given(series, {name.removeprefix("/"): item for name, item in both.items()})


# --- before anything runs --------------------------------------------------------------------


def load_for(spec: Mapping[str, Any]) -> None:
    """Import torchmetrics if a spec, which is not checked yet, may need it.

    Called before a time limit starts: an interrupted import would stay broken.
    """
    metrics = spec.get("metrics")
    for item in metrics if isinstance(metrics, list) else ():
        name = item.get("type") if isinstance(item, dict) else None
        if isinstance(name, str) and name[:1].isupper():
            metric_classes()
            return


def check(
    spec: TrainJob,
    traced: Trace,
    fields: Mapping[str, FieldShape],
    num_rows: int,
    findings: Findings,
) -> dict[str, list[str]]:
    """Try each metric on a few rows; return the series that each creates, by its name.

    ``num_rows``: rows of an evaluation. Metrics that do not fit or keep too much become findings.
    """
    found: dict[str, list[str]] = {}
    total = 0
    for number, (name, metric) in enumerate(
        zip(metric_names(spec.metrics), spec.metrics, strict=True)
    ):
        if not metric.is_of_torchmetrics:
            continue
        checked_arguments(metric, f"/metrics/{number}")
        if spec.evaluate is None and metric.interval is None:
            missing = "data.validation" if spec.data.validation is None else "evaluate"
            detail = f"{metric.type} would never be computed: name {missing} for it, or every"
            findings.problem(f"/metrics/{number}", detail, "never")
            continue
        tried = _Trial(metric, f"/metrics/{number}", traced, fields, findings)
        given, kept = tried.run(name)
        found[name] = list(given.series)
        total += math.ceil(kept * num_rows)
        tried.check_kept(total, num_rows)
        if metric.every is not None and given.tensors:
            shapes = ", ".join(str(list(item.shape)) for item in given.tensors.values())
            detail = f"{metric.type} gives tensors of shape {shapes}, which are kept of evaluations"
            findings.problem(f"/metrics/{number}/every", f"{detail} only: leave it out", "tensor")
    names = [part for name in metric_names(spec.metrics) for part in found.get(name, [name])]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        detail = f"two metrics give the series {twice[0]!r}; name one of them otherwise"
        findings.problem("/metrics", detail, "duplicate")
    return found


class _Trial:
    """Tries one metric before anything runs."""

    def __init__(
        self,
        metric: Metric,
        pointer: str,
        traced: Trace,
        fields: Mapping[str, FieldShape],
        findings: Findings,
    ) -> None:
        self._metric = metric
        self._pointer = pointer
        self._findings = findings
        self._args = checked_arguments(metric, pointer)
        self._operands = [traced.values[name] for name in metric.inputs]
        self._target = fields.get(metric.inputs[1])
        types = {item.layer.name: item.layer.type for item in traced.layers}
        self._scores = types.get(metric.inputs[0])
        self._takes_thresholds = "thresholds" in metric_parameters(metric.type)

    def run(self, name: str) -> tuple[Given, float]:
        """Return its result and the bytes that it keeps per row.

        Raises:
            SpecProblems: it does not take its arguments or its inputs.
        """
        self._check_state()
        self._check_classes()
        self._check_probabilities()
        few = [self._few(item) for item in self._operands]
        try:
            counted = RunningMetric(name, self._metric, {})
            counted.update(few)
            kept = counted.num_kept / few[0].shape[0]
            counted.update(few)
            return counted.compute(), kept
        except MemoryError:
            raise
        except Exception as cause:
            shapes = " and ".join(
                f"{list(item.shape)} ({dtype_name(item.dtype)}) from {source!r}"
                for source, item in zip(self._metric.inputs, self._operands, strict=True)
            )
            detail = f"{self._metric.type} does not fit its inputs of shape {shapes}:"
            raise one(f"{self._pointer}/inputs", f"{detail} {_line(cause)}", "shape") from cause

    def check_kept(self, total: int, num_rows: int) -> None:
        """Add a finding if the metrics so far keep more than the limit."""
        if total <= MAX_BYTES:
            return
        detail = f"{self._metric.type} keeps the scores of all {num_rows} rows of an evaluation:"
        detail += f" with it the job's metrics keep {total} bytes, and may keep {MAX_BYTES}: "
        if self._takes_thresholds:
            detail += "give it thresholds (100, for one), or fewer rows"
            self._findings.problem(f"{self._pointer}/args/thresholds", detail, "too_large")
        else:
            self._findings.problem(self._pointer, f"{detail}take fewer rows", "too_large")
        self._findings.stop()

    def _check_state(self) -> None:
        """Build it on the meta device: check its inputs and the values of its arguments."""
        try:
            with torch.device("meta"):
                made = build(self._metric, self._args, checks=True)  # checks the arguments too
        except MemoryError:
            raise
        except Exception as cause:
            detail = f"{self._metric.type} refuses its arguments: {_line(cause)}"
            raise one(f"{self._pointer}/args", detail, "args") from cause
        states = [item for item in made.metric_state.values() if isinstance(item, Tensor)]
        if (size := sum(item.nbytes for item in states)) > MAX_BYTES:
            detail = f"{self._metric.type} would take {size} bytes with these arguments;"
            detail += f" the most is {MAX_BYTES}"
            raise one(f"{self._pointer}/args", detail, "too_large")

    def _check_classes(self) -> None:
        most, field = num_values(self._metric, self._args), self._target
        if most is None or field is None or field.dim is None:
            return
        name, padding = self._metric.inputs[1], field.padding_value
        if field.dim > most:
            detail = f"field {name!r} has {field.dim} classes, and {self._metric.type} takes {most}"
            raise one(f"{self._pointer}/args", detail, "classes")
        ignored = self._args.get("ignore_index")
        if not field.is_sequence or ignored == padding:
            return
        detail = f"behind the end of a row of {name!r} stands {padding}, which"
        if 0 <= padding < most:
            detail += " counts as a target: set padding_value and ignore_index both to -100"
            self._findings.warn(f"{self._pointer}/args", detail, "padding")
        else:
            detail += " is no class: set ignore_index to it"
            raise one(f"{self._pointer}/args/ignore_index", detail, "padding")

    def _check_probabilities(self) -> None:
        is_split = self._metric.type.startswith(_PER_BATCH) or self._takes_thresholds
        if is_split and self._scores is not None and self._scores not in _AS_PROBABILITIES:
            detail = f"{self._metric.type} takes scores outside [0, 1] for logits, batch by batch:"
            detail += f" a batch of {self._metric.inputs[0]!r} that happens to lie inside would"
            detail += " count otherwise. Name a Sigmoid or Softmax layer"
            self._findings.warn(f"{self._pointer}/inputs/0", detail, "logits")

    def _few(self, item: Tensor) -> Tensor:
        """Return two rows of zeros; an axis of steps that both inputs have is shortened."""
        shape = list(item.shape)
        if shape:
            shape[0] = min(2, shape[0])
        if math.prod(shape) > _TRIED_ELEMENTS:
            both = set(self._operands[0].shape[1:]) & set(self._operands[1].shape[1:])
            steps = {size for size in both if size not in self._args.values()}
            shape = [2 if size in steps else size for size in shape]
        if math.prod(shape) > _TRIED_ELEMENTS:
            detail = f"two rows of shape {list(item.shape)} are too large to try it on"
            raise one(f"{self._pointer}/inputs", detail, "too_large")
        return torch.zeros(shape, dtype=item.dtype)


def _line(cause: BaseException) -> str:
    return (str(cause).strip() or type(cause).__name__).splitlines()[0][:300]
