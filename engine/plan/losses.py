"""Plan the losses of a job: what fits, their lengths, and what cannot be split.

Knows the words of a job and torch's meta device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.core.problems import Findings, SpecProblems, one
from engine.core.tensor_names import lengths_of, root
from engine.data.batches.batch_counts import BatchCounts
from engine.losses.loss_sums import OF_CLASSES, reduced
from engine.losses.losses import Losses, build_loss, pointer_of, try_loss
from engine.losses.micro_batches import MicroBatches, is_known_before
from engine.network.network import needed_layers
from engine.network.sequence_lengths import Steps, steps_of
from engine.network.shapes import FieldShape, Trace, trace
from glasshouse.spec import Loss, TrainJob

_STEPWISE = (
    nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss, nn.GaussianNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss,
    nn.MarginRankingLoss,
)  # fmt: skip
"""These compare value by value: axis 1 of their operands may be steps."""
_STEPWISE_OF_VECTORS = (
    nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss, nn.MultiLabelSoftMarginLoss,
)  # fmt: skip
"""These compare along the last axis: axis 1 may be steps if it is not the last."""


class _Compared(NamedTuple):
    """A loss with everything that a plan knows of it."""

    loss: Loss
    pointer: str
    criterion: nn.Module
    operands: list[Tensor]
    steps: Mapping[str, Steps]
    """The axes of its inputs that are as long as a row of a sequence."""
    shapes: Mapping[str, FieldShape]

    @property
    def has_classes(self) -> bool:
        """Whether its targets are classes, of which some may be ignored."""
        is_of_classes = isinstance(self.criterion, OF_CLASSES) and len(self.operands) == 2
        return is_of_classes and not self.operands[1].is_floating_point()

    @property
    def ignores(self) -> int | None:
        """The class that is ignored."""
        return int(self.criterion.ignore_index) if self.has_classes else None  # pyright: ignore[reportArgumentType]


def plan_losses(
    spec: TrainJob,
    shapes: Mapping[str, FieldShape],
    traced: Trace,
    batch_size: int,
    findings: Findings,
) -> tuple[TrainJob, Tensor]:
    """Return the job with each loss's lengths filled in, and its loss on the meta device.

    Raises:
        SpecProblems: a loss does not fit its inputs, or depends on no parameter.
    """
    terms: list[Tensor] = []
    resolved: list[Loss] = []
    known = [name for name in spec.loss_inputs if name in traced.values]
    all_steps = steps_of(traced, shapes, batch_size, known)
    for number, item in enumerate(spec.losses):
        pointer = pointer_of(number if isinstance(spec.loss, tuple) else None)
        operands = operands_of(item.inputs, f"{pointer}/inputs", traced, findings)
        fields = [shapes.get(name) for name in item.inputs]
        terms.append(try_loss(item, operands, fields, pointer))
        if not terms[-1].requires_grad:
            detail = "the loss depends on no parameter of the network: there is nothing to train"
            raise one(f"{pointer}/inputs", detail, "no_gradient")
        steps = {name: all_steps[name] for name in item.inputs if name in all_steps}
        compared = _Compared(item, pointer, build_loss(item, pointer), operands, steps, shapes)
        resolved.append(_with_lengths(compared, traced, findings))
        _check_padding(compared, resolved[-1], traced, findings)
        _check_rows(spec, compared, traced, batch_size, findings)
        _check_targets(spec, compared._replace(loss=resolved[-1]), traced, findings)
    _check_batch_norm(spec, findings)
    found = tuple(resolved) if isinstance(spec.loss, tuple) else resolved[0]
    return spec.model_copy(update={"loss": found}), sum(terms[1:], terms[0])


def operands_of(
    names: Sequence[str], pointer: str, traced: Trace, findings: Findings
) -> list[Tensor]:
    """Return the operands of a loss or a metric, on the meta device.

    Raises:
        SpecProblems: there is no such layer or field.
    """
    for number, name in enumerate(names):
        if name not in traced.values:
            known = ", ".join(list(traced.values)[:30])
            detail = f"there is no layer or data field {name!r}; there are: {known}"
            findings.problem(f"{pointer}/{number}", detail, "unknown_input")
    findings.stop()
    return [traced.values[name] for name in names]


def waiting_bytes(
    spec: TrainJob, pace: BatchCounts | None, batch: Callable[[], dict[str, Tensor]]
) -> int:
    """Return the bytes of a step's batches that exist before it begins, except the first.

    ``pace``: the number of batches of an epoch, if known.
    """
    most = spec.accumulate if pace is None else min(spec.accumulate, pace.batches)
    if most < 2 or MicroBatches(spec, Losses.of(spec)).are_rows:
        return 0
    return (most - 1) * sum(item.nbytes for item in batch().values())


# --- lengths -----------------------------------------------------------------------------------


def _with_lengths(compared: _Compared, traced: Trace, findings: Findings) -> Loss:
    loss = compared.loss
    if loss.lengths is None:
        field = _field_of(compared)
        return loss if field is None else loss.model_copy(update={"lengths": lengths_of(field)})
    if loss.lengths is False:
        return loss
    name = str(loss.lengths)
    if name in compared.shapes and compared.shapes[name].is_sequence:
        name = lengths_of(name)
    _check_asked(name, compared, traced, findings)
    return loss.model_copy(update={"lengths": name})


def _field_of(compared: _Compared) -> str | None:
    """Return the sequence field of a loss's steps; None: it compares no steps."""
    loss, steps = compared.loss, compared.steps
    if compared.has_classes:
        target = loss.inputs[1]
        field = steps[target].field if target in steps else None
        shape = compared.shapes.get(target)
        is_ignored = shape is not None and shape.padding_value == compared.ignores
        return None if is_ignored else field
    if not _may_be_stepwise(compared) or any(item.field is None for item in steps.values()):
        return None
    return next((steps[name].field for name in reversed(loss.inputs) if name in steps), None)


def _may_be_stepwise(compared: _Compared) -> bool:
    if compared.has_classes or isinstance(compared.criterion, _STEPWISE):
        return True
    is_wide = all(item.dim() > 2 for item in compared.operands)
    return isinstance(compared.criterion, _STEPWISE_OF_VECTORS) and is_wide


def _has_steps(compared: _Compared, lengths: str) -> bool:
    """Return whether axis 1 of the operands can be steps: for classes, that of the targets.

    For a field's lengths it is as long as a row. A layer has lengths only if it knows its steps.
    """
    names = compared.loss.inputs[1:] if compared.has_classes else compared.loss.inputs
    if root(lengths) not in compared.shapes:
        operands = compared.operands[1:] if compared.has_classes else compared.operands
        return any(item.dim() > 1 for item in operands)
    axes = [compared.steps[name].axes for name in names if name in compared.steps]
    return bool(axes) and all(item == [1] for item in axes)


def _check_asked(name: str, compared: _Compared, traced: Trace, findings: Findings) -> None:
    pointer, found = f"{compared.pointer}/lengths", traced.values.get(name)
    kind = compared.loss.type
    if found is None:
        what = f"{name!r} is no lengths: there is no such layer, and no such sequence field"
        findings.problem(pointer, what, "unknown_input")
    elif found.dim() != 1 or found.dtype != torch.int64:
        detail = f"{name!r} is no lengths: lengths are one int64 per row, and its shape is"
        findings.problem(pointer, f"{detail} {list(found.shape)}", "shape")
    elif not _may_be_stepwise(compared) or not _has_steps(compared, name):
        shapes = " and ".join(str(list(item.shape)) for item in compared.operands)
        detail = f"{kind} of inputs of shape {shapes} has no steps on axis 1: leave lengths out"
        findings.problem(pointer, detail, "no_steps")


def _check_padding(compared: _Compared, resolved: Loss, traced: Trace, findings: Findings) -> None:
    """Warn of a loss that compares padding."""
    if resolved.lengths is not None or not compared.steps:
        return
    if isinstance(compared.criterion, nn.CTCLoss):  # its inputs include lengths
        return
    if compared.has_classes:
        target = compared.loss.inputs[1]
        if target not in compared.steps:
            return
        needed = needed_layers(traced.graph(), [target])
        read = {target, *(root(name) for layer in needed for name in layer.reads)}
        values = {x.padding_value for n, x in compared.shapes.items() if n in read}
        if values == {compared.ignores}:
            return
    detail = f"{compared.loss.type} also compares what stands behind the end of a row, so that its"
    detail += " value depends on which rows a batch has. Name its lengths, where axis 1 of its"
    detail += " inputs are the steps; for classes set the target's padding_value to ignore_index"
    findings.warn(compared.pointer, detail, "padding")


# --- what cannot be split ----------------------------------------------------------------------


def _is_split(spec: TrainJob) -> str | None:
    """Return the setting that splits a step into micro-batches; None: none does."""
    if spec.accumulate > 1:
        return "/accumulate"
    return "/guards/memory/on_oom" if spec.guards.memory.on_oom == "halve_batch" else None


def _check_rows(
    spec: TrainJob, compared: _Compared, traced: Trace, batch_size: int, findings: Findings
) -> None:
    """Warn of a loss that compares rows with each other: it differs by batch size."""
    if not (_is_split(spec) or spec.evaluate) or isinstance(compared.criterion, nn.CTCLoss):
        return
    known = _shapes_of(compared, compared.operands)
    if all([*shape].count(batch_size) < 2 for shape in known):
        return
    try:
        larger = trace(traced.graph(), compared.shapes, batch_size + 1, Findings())
    except SpecProblems:  # it fits batches of one size only, and fails at another
        return
    operands = [larger.values[name] for name in compared.loss.inputs]
    for old, new in zip(known, _shapes_of(compared, operands), strict=True):
        if sum(a != b for a, b in zip(old, new, strict=True)) > 1:
            detail = f"{compared.loss.type} compares the rows of a batch with each other (shape"
            detail += f" {list(old)} for {batch_size} rows): the losses of evaluations depend on"
            detail += " batch_size, and those of micro-batches do not add up to that of a large one"
            findings.warn(f"{compared.pointer}/inputs", detail, "rows_compared")
            return


def _shapes_of(compared: _Compared, operands: Sequence[Tensor]) -> list[torch.Size]:
    """Return the shapes of the inputs, and that of the loss before reduction."""
    shapes = [item.shape for item in operands]
    try:
        unreduced: Tensor = reduced(compared.criterion, "none").to("meta")(*operands)
    except Exception:  # no meta kernel: the inputs alone
        return shapes
    return [*shapes, unreduced.shape]


def _check_targets(spec: TrainJob, compared: _Compared, traced: Trace, findings: Findings) -> None:
    """Warn of targets and lengths that only the forward pass gives, if a step is split."""
    at, loss = _is_split(spec), compared.loss
    read = [loss.inputs[1]] if compared.has_classes else []
    read += [loss.lengths] if loss.lengths else []
    whole = spec.model_copy(update={"network": traced.graph()})
    layers = {root(name): name for name in read if root(name) not in compared.shapes}
    late = [name for layer, name in layers.items() if at and not is_known_before(whole, layer)]
    if at and late:
        detail = f"{late[0]!r}, which {loss.type} divides by, comes from layers with"
        detail += " parameters or dropout, and is not known before a step: each micro-batch counts"
        findings.warn(at, f"{detail} by its rows", "by_rows")


def _check_batch_norm(spec: TrainJob, findings: Findings) -> None:
    if spec.accumulate > 1 and any("BatchNorm" in x.type for x in spec.network.layers):
        detail = "batch normalisation takes its statistics of each micro-batch by itself, so that a"
        findings.warn("/accumulate", f"{detail} step is not that of one large batch", "batch_norm")
