"""Plan an evaluation: check rows, metrics and what is wanted against the training job."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.core.problems import Findings, SpecProblems, one
from engine.evaluation.by_value import MAX_VALUES
from engine.evaluation.classification import Classification, classification_of
from engine.evaluation.evaluated_job import Metrics, evaluated
from engine.evaluation.worst_samples import row_losses
from engine.inference.rows import not_as_trained
from engine.losses.losses import Losses, try_loss
from engine.metrics import epoch_metrics
from engine.metrics.metrics import wanted
from engine.metrics.torch_metrics import build, checked_arguments
from engine.network.network import needed_layers
from engine.network.shapes import FieldShape, Trace, trace
from engine.plan import data as plan_data
from engine.plan import data_memory
from engine.plan.costs import memory, table
from engine.plan.data import Meta, Metas
from engine.plan.losses import operands_of
from engine.plan.metrics import check_accuracies
from glasshouse.spec import EvaluateJob, Trained, TrainJob
from glasshouse.spec.jobs.evaluate_job import Want

MAX_CLASSES = 1000
"""The most classes of a confusion matrix and of curves."""
MAX_STATE_BYTES = 256 * 2**20
"""The most bytes of the states of metrics of all values of a column together."""
_OF_CLASSES: tuple[Want, ...] = ("confusion", "pr_curve", "roc_curve", "calibration")
_TRIED_ROWS = 2


def plan_evaluation(spec: EvaluateJob, datasets: Metas, trained_by: Trained) -> dict[str, Any]:
    """Plan a job that evaluates a trained network.

    Raises:
        SpecProblems: the job cannot run as it is written.
    """
    if not isinstance(trained_by, TrainJob):
        detail = "the weights of this checkpoint were uploaded, and no loss is known for them: name"
        raise one("/checkpoint", f"{detail} a checkpoint of a training job", "no_loss")
    findings = Findings()
    whole = evaluated(spec, trained_by)
    _check_fields(spec, trained_by, findings)
    _check_stateful(spec, trained_by, findings)
    findings.stop()
    datasets = plan_data.seen_as_windows(
        datasets, whole.data.windows, None, plan_data.window_dim(trained_by)
    )
    meta = plan_data.meta_of(spec.data, datasets, "/data", findings)
    _check_columns(spec, whole, meta, findings)
    findings.stop()
    shapes = _shapes(spec, whole, meta, findings)
    num_rows = data_memory.rows_of(spec.data, meta)
    batch_size = min(spec.data.batch_size, num_rows)
    layers = tuple(needed_layers(whole.network, wanted(whole)))
    graph = whole.network.model_copy(update={"layers": layers, "outputs": None})
    traced = trace(graph, shapes, batch_size, findings)
    findings.stop()
    losses = _losses(whole, shapes, traced)
    num_groups = 1 + len(spec.columns)  # each keeps its own scores
    _check_metrics(spec, trained_by, whole, traced, shapes, num_rows * num_groups, findings)
    _check_by(spec, whole, traced, batch_size, findings)
    want = _settle_want(spec, whole, losses, traced, findings)
    findings.stop()
    fields = plan_data.with_sizes(whole.data.fields, shapes)
    data = spec.data.model_copy(update={"fields": fields})
    resolved = spec.model_copy(update={"data": data, "want": want})
    data_bytes = data_memory.inference_bytes(fields, spec.data, whole.data, meta)
    return {
        "spec": resolved.model_dump(mode="json"),
        **table(traced),
        "memory": memory(traced, traced.network(), 0, data_bytes=data_bytes, training=False),
        "parallel": None,
        "probes": [],
        "num_steps": -(-num_rows // spec.data.batch_size),
        "warnings": [item.as_dict() for item in findings.warnings],
    }


def _check_fields(spec: EvaluateJob, trained: TrainJob, findings: Findings) -> None:
    for name, field in (spec.data.fields or {}).items():
        known = trained.data.fields.get(name)
        if known is None:
            detail = f"the training job has no field {name!r}; it has:"
            listed = ", ".join(trained.data.fields)
            findings.problem(f"/data/fields/{name}", f"{detail} {listed}", "unknown_field")
        problem = not_as_trained(field, known)
        if problem is not None:
            findings.problem(f"/data/fields/{name}/{problem[0]}", problem[1], "trained_otherwise")
        elif known is not None and type(field) is not type(known):
            detail = f"field {name!r} is {field.type}, and was {known.type} in training: set type"
            detail += f" to {known.type}"
            findings.problem(f"/data/fields/{name}/type", detail, "trained_otherwise")


def _check_stateful(spec: EvaluateJob, trained: TrainJob, findings: Findings) -> None:
    """Check the batch size if layers carry their state from batch to batch."""
    names = [layer.name for layer in trained.network.layers if layer.stateful]
    mine, theirs = spec.data.batch_size, trained.data.batch_size
    if names and mine != theirs:
        detail = f"layer {names[0]!r} carries its state from batch to batch, so the loss depends on"
        detail += f" the batch size, which was {theirs} in training and is {mine}: set {theirs}"
        findings.problem("/data/batch_size", detail, "stateful")
    if names and spec.data.fraction is not None:
        detail = f"layer {names[0]!r} carries its state from row to row, and a fraction has an"
        findings.problem("/data/fraction", f"{detail} order of its own: remove it", "stateful")


def _check_columns(spec: EvaluateJob, whole: TrainJob, meta: Meta, findings: Findings) -> None:
    """Check that the columns of ``by`` have one value for each row."""
    known = {item["name"]: item for item in meta["columns"]}
    for number, name in enumerate(spec.columns):
        pointer = "/by" if isinstance(spec.by, str) else f"/by/{number}"
        if whole.data.windows is not None:
            detail = f"rows are windows over a text, which have no column {name!r}: remove by"
            findings.problem(pointer, detail, "windows")
        elif name not in known:
            listed = ", ".join(list(known)[:30])
            detail = f"the dataset has no column {name!r}; it has: {listed}"
            findings.problem(pointer, detail, "unknown_column")
        elif known[name]["shape"] or not _is_category(known[name]["dtype"]):
            dtype, shape = known[name]["dtype"], known[name]["shape"]
            detail = f"column {name!r} is {dtype} of shape {shape}: name one with an integer, a"
            findings.problem(pointer, f"{detail} boolean or a text for each row", "no_category")


def _is_category(dtype: str) -> bool:
    return dtype in ("bool", "string") or dtype.startswith(("int", "uint"))


def _shapes(
    spec: EvaluateJob, whole: TrainJob, meta: Meta, findings: Findings
) -> dict[str, FieldShape]:
    shapes = plan_data.field_shapes(whole.data.fields, meta, findings, spec.data)
    findings.stop()
    limited = Findings()
    try:
        shapes = plan_data.limited(whole.data, shapes, limited)
    except SpecProblems as cause:
        detail = f"{cause.problems[0].detail}, in the training job; or name other rows"
        raise one("/data/split", detail, "too_long") from cause
    for item in limited.warnings:
        findings.warn("/data/split", item.detail, item.code)
    return shapes


def _losses(whole: TrainJob, shapes: Mapping[str, FieldShape], traced: Trace) -> Losses:
    """Return the losses, after they were tried on the shapes of the rows."""
    for item in whole.losses:
        operands = operands_of(item.inputs, "/data", traced, Findings())
        try:
            try_loss(item, operands, [shapes.get(name) for name in item.inputs])
        except SpecProblems as cause:
            detail = f"the loss of the training job does not fit these rows: {cause}"
            raise one("/data/dataset", detail, "shape") from cause
    return Losses.of(whole)


def _check_metrics(  # noqa: PLR0913, PLR0917 (two jobs, and what is known of the rows)
    spec: EvaluateJob,
    trained: TrainJob,
    whole: TrainJob,
    traced: Trace,
    shapes: Mapping[str, FieldShape],
    num_rows: int,
    findings: Findings,
) -> None:
    """Check all metrics; a problem of one that the training job names points to that job."""
    own = Findings()
    try:
        check_accuracies(whole, shapes, traced, own)
        own.stop()
        epoch_metrics.check(whole, traced, shapes, num_rows, own)
        own.stop()
    except SpecProblems as cause:
        num_named = Metrics.of(spec, trained).num_named
        for item in cause.problems:
            place = item.pointer.split("/")
            if len(place) > 2 and place[2].isdigit() and int(place[2]) >= num_named:
                detail = f"of the training job's metrics: {item.detail}"
                findings.problem("/metrics", detail, item.code)
            else:
                findings.problem(item.pointer, item.detail, item.code)
    for item in own.warnings:
        findings.warn(item.pointer, item.detail, item.code)
    findings.stop()


def _check_by(
    spec: EvaluateJob, whole: TrainJob, traced: Trace, batch_size: int, findings: Findings
) -> None:
    """Check that losses and metrics can be computed for some rows of a batch, and their memory."""
    if not spec.columns:
        return
    metrics = [name for item in whole.metrics for name in item.inputs]
    for name in dict.fromkeys([*whole.loss_inputs, *metrics]):
        shape = list(traced.values[name].shape)
        if not shape or shape[0] != batch_size:
            detail = f"the first axis of {name!r}, of shape {shape}, is not the rows: the loss or a"
            detail += " metric cannot be computed for some of them: remove by"
            findings.problem("/by", detail, "no_rows_axis")
    size = MAX_VALUES * len(spec.columns) * sum(map(_state_bytes, whole.metrics))
    if size > MAX_STATE_BYTES:
        detail = f"the metrics of {MAX_VALUES} values would take {size} bytes, and may take"
        detail += f" {MAX_STATE_BYTES}: name fewer columns, or evaluate metrics with large states"
        findings.problem("/by", f"{detail} (matrices, curves) in a job without by", "too_large")


def _state_bytes(metric: Any) -> int:
    if not metric.is_of_torchmetrics:
        return 0
    with torch.device("meta"):
        made = build(metric, checked_arguments(metric, ""), checks=True)
    return sum(item.nbytes for item in made.metric_state.values() if isinstance(item, Tensor))


def _settle_want(
    spec: EvaluateJob, whole: TrainJob, losses: Losses, traced: Trace, findings: Findings
) -> tuple[Want, ...]:
    """Return what to compute; by default all that applies."""
    operands = [[traced.values[name] for name in item.inputs] for item in whole.losses]
    found = classification_of(losses.terms, operands)
    check: dict[Want, Callable[[], str | None]] = {
        name: lambda name=name: _why_not(name, found, whole) for name in _OF_CLASSES
    }
    check["worst_samples"] = lambda: _why_no_rows(whole, losses, traced)
    if spec.want is None:
        default: Sequence[Want] = [name for name, why in check.items() if why() is None]
        if spec.worst is not None and "worst_samples" not in default:
            detail = f"there are no worst samples: {check['worst_samples']()}; remove worst"
            findings.problem("/worst", detail, "no_rows")
        return tuple(default)
    for number, name in enumerate(spec.want):
        if (why := check[name]()) is not None:
            detail = f"{name} does not apply: {why}; remove it from want"
            findings.problem(f"/want/{number}", detail, "not_applicable")
    return spec.want


def _why_not(name: Want, found: Classification | None, whole: TrainJob) -> str | None:
    """Return why there are no classes to count; None: there are."""
    if found is None:
        types = ", ".join(item.type for item in whole.losses)
        return f"the loss ({types}) does not compare scores with one class per row or step"
    if name != "confusion" and not found.has_probabilities:
        return f"{whole.losses[found.number].type} takes scores, which are no probabilities"
    if name != "calibration" and found.num_classes > MAX_CLASSES:
        return f"there are {found.num_classes} classes, and the most is {MAX_CLASSES}"
    return None


def _why_no_rows(whole: TrainJob, losses: Losses, traced: Trace) -> str | None:
    """Return why rows have no loss of their own; None: they have."""
    if any(item.lengths for item in whole.losses):
        return None  # the mean of the steps of each row
    values = {name: _few(traced.values[name]) for name in whole.loss_inputs}
    try:
        row_losses(losses, values)
    except Exception as cause:
        return f"the loss has no value for each row ({cause})"
    return None


def _few(item: Tensor) -> Tensor:
    shape = list(item.shape)
    shape[:1] = [min(_TRIED_ROWS, shape[0])] if shape else []
    return torch.zeros(shape, dtype=item.dtype)
