"""Build losses from torch's names and arguments, one or several with weights.

They are checked before anything runs. Depends on torch, not on data or jobs.
"""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss  # pyright: ignore[reportPrivateUsage]

from engine.core import arguments
from engine.core.precision import dtype_name, in_float32
from engine.core.problems import one
from engine.core.tensor_names import host_lengths_of
from engine.losses import own_losses
from engine.losses.loss_sums import LossSums, StepPart, Term
from engine.network.layers import LayerFailed
from engine.network.lengths import Lengths
from engine.network.shapes import FieldShape, tiny
from glasshouse import plugins
from glasshouse.spec import Loss, TrainJob
from glasshouse.suggestions import did_you_mean

_BROADCASTS = "Using a target size"
"""The start of torch's warning when shapes differ and are broadcast; only it is an error."""
_CLASS_TARGETS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)


_TORCH_LOSSES: dict[str, type[nn.Module]] = {
    name: cls
    for name, cls in vars(nn).items()
    if isinstance(cls, type) and issubclass(cls, _Loss) and name != "NLLLoss2d"
}


@cache
def loss_classes() -> dict[str, type[nn.Module]]:
    """Return every loss, by name: torch.nn's, and others."""
    return dict(sorted((_TORCH_LOSSES | other_losses()).items()))


@cache
def other_losses() -> dict[str, type[nn.Module]]:
    """Return the losses that torch does not have: our own, and those of installed packages.

    Raises:
        PluginError: an installed package registers a loss that cannot be used.
    """
    own: dict[str, type[nn.Module]] = {}
    for module in plugins.modules_of(own_losses):
        own |= getattr(module, "LOSSES", {})
    return own | plugins.installed_classes("glasshouse.losses", nn.Module, {*own, *_TORCH_LOSSES})


class LossValue(NamedTuple):
    """The losses of a batch. For a micro-batch: what it adds to the losses of its step."""

    total: Tensor
    """The weighted sum of the losses, which training minimizes."""
    terms: Mapping[str, Tensor] = MappingProxyType({})
    """If losses are reported individually: each without its weight, by its metric's name."""


class Losses(nn.Module):
    """The weighted sum of one or several of torch's losses, which training minimizes.

    Call it with the `operands` of all losses, in order.
    """

    def __init__(self, specs: Sequence[Loss], names: Sequence[str] = ()) -> None:
        """``names``: the names to report each loss by; empty: only the sum is reported.

        Raises:
            SpecProblems: torch has no such loss, or it refuses its arguments.
        """
        super().__init__()
        alone = len(specs) == 1
        self.criteria = nn.ModuleList(
            build_loss(spec, pointer_of(None if alone else number))
            for number, spec in enumerate(specs)
        )
        self.names = tuple(names)
        self.weights = [spec.weight for spec in specs]
        both = zip(self.criteria, specs, strict=True)
        self.terms = [Term(item, has_lengths=bool(spec.lengths)) for item, spec in both]
        self._reads = [
            (name, bool(spec.lengths) and number + 1 == len(spec.reads))
            for spec in specs
            for number, name in enumerate(spec.reads)
        ]
        """The names of all operands, and whether each is lengths."""
        ends = accumulate((len(spec.reads) for spec in specs), initial=0)
        self._slices = [slice(*both) for both in pairwise(ends)]

    @staticmethod
    def of(job: TrainJob) -> "Losses":
        """Build the losses of a job."""
        return Losses(job.losses, job.loss_names)

    def forward(self, *operands: Any, part: StepPart | None = None) -> LossValue:
        """Compute the loss of a batch as torch does; with ``part``, of a micro-batch of a step."""
        if not self.names and part is None:
            return LossValue(self.terms[0].value(operands))
        split = self.split(operands)
        if part is None:
            each = [term.value(given) for term, given in split]
        else:
            late = part.late or (None,) * len(split)
            shares = zip(split, part.own, part.whole, late, strict=True)
            each = [term.within(given, own, whole, x) for (term, given), own, whole, x in shares]
            each = each if part.counts else [0 * item for item in each]
        if not self.names:
            return LossValue(each[0])
        named = zip(self.names, each, strict=True)
        return LossValue(self.weighted(each), {f"loss/{n}": t.detach() for n, t in named})

    def operands(self, values: Mapping[str, Tensor]) -> list[Any]:
        """Return what the losses compare, and the lengths that they use, in the order of a call."""
        return [
            Lengths(values[name], values.get(host_lengths_of(name)))
            if is_lengths
            else in_float32(values[name])
            for name, is_lengths in self._reads
        ]

    def split(self, operands: Sequence[Any]) -> list[tuple[Term, Sequence[Any]]]:
        """Return each loss with its operands."""
        pairs = zip(self.terms, self._slices, strict=True)
        return [(term, operands[part]) for term, part in pairs]

    def weighted(self, each: Sequence[Tensor]) -> Tensor:
        """Return the weighted sum of the losses."""
        first, *rest = [
            term if weight == 1 else term * weight
            for term, weight in zip(each, self.weights, strict=True)
        ]
        return sum(rest, first)

    def sums(self, values: Mapping[str, Tensor], num_rows: int) -> LossSums:
        """Return the losses of a batch of ``num_rows`` rows as fractions.

        Raises:
            LayerFailed: they cannot be computed. The layer's name is then ``loss``.
        """
        try:
            split = self.split(self.operands(values))
            found = [term.fraction(given, num_rows) for term, given in split]
            like = found[0][0]
            below = [x if isinstance(x, Tensor) else torch.full_like(like, x) for _, x in found]
            return LossSums(torch.stack([above for above, _ in found]), torch.stack(below))
        except Exception as cause:
            raise LayerFailed("loss", cause) from cause

    def figures(self, sums: LossSums) -> dict[str, float]:
        """Return ``loss``, and each named loss: numerators over denominators.

        NaN if a denominator is 0: nothing was compared, and torch's mean is NaN then too.
        """
        is_sum = torch.tensor([term.is_sum for term in self.terms], device=sums.numerators.device)
        below = sums.denominators.masked_fill(is_sum, 1.0)
        terms: list[float] = (sums.numerators / below).tolist()
        weighted = sum(w * t for w, t in zip(self.weights, terms, strict=True))
        parts = zip(self.names, terms, strict=False)
        return {"loss": weighted, **{f"loss/{name}": term for name, term in parts}}


def pointer_of(number: int | None) -> str:
    """Return the JSON pointer of a loss in a spec; None: the only one."""
    return "/loss" if number is None else f"/loss/{number}"


def without_lengths(job: TrainJob) -> TrainJob:
    """Return the job with losses that compare all steps, as if no row were padded."""
    losses = tuple(item.model_copy(update={"lengths": None}) for item in job.losses)
    return job.model_copy(update={"loss": losses if isinstance(job.loss, tuple) else losses[0]})


def build_loss(loss: Loss, pointer: str = "/loss") -> nn.Module:
    """Build the loss of a spec.

    Raises:
        SpecProblems: torch has no such loss, or it refuses its arguments.
    """
    cls = loss_classes().get(loss.type)
    if cls is None:
        known = loss_classes()
        meant = did_you_mean(loss.type, known) or f"; it has: {', '.join(known)}"
        raise one(f"{pointer}/type", f"torch.nn has no loss {loss.type!r}{meant}", "unknown")
    at = f"{pointer}/args"
    args = arguments.check(arguments.parameters(cls), dict(loss.args), at, loss.type)
    try:
        made = cls(**args)
    except Exception as cause:
        where = arguments.blame(cls, args, at)
        raise one(where, f"{loss.type} refuses its arguments: {cause}", "args") from cause
    if any(item.requires_grad for item in made.parameters()):
        detail = f"{loss.type} has parameters of its own, which no optimizer would train"
        raise one(f"{pointer}/type", detail, "unsupported")
    return made


def loss_of(
    loss_fn: Losses, values: Mapping[str, Tensor], part: StepPart | None = None
) -> LossValue:
    """Compute the loss of a batch from the network's outputs and the fields.

    ``part``: its place in its step, if the step has several micro-batches.

    Raises:
        LayerFailed: it cannot be computed. The layer's name is then ``loss``.
    """
    try:
        found: LossValue = loss_fn(*loss_fn.operands(values), part=part)
        return found
    except Exception as cause:
        raise LayerFailed("loss", cause) from cause


def try_loss(
    loss: Loss,
    inputs: Sequence[Tensor],
    fields: Sequence[FieldShape | None],
    pointer: str = "/loss",
) -> Tensor:
    """Run a loss on meta tensors.

    Raises:
        SpecProblems: it does not fit its inputs, or does not give one number to minimize.
    """
    criterion = build_loss(loss, pointer)
    reduction = getattr(criterion, "reduction", "mean")
    if reduction not in {"mean", "sum"} and not (
        reduction == "batchmean" and isinstance(criterion, nn.KLDivLoss)
    ):
        detail = f"reduction {reduction!r} does not give one number to minimise; use mean or sum"
        raise one(f"{pointer}/args/reduction", detail, "reduction")
    _check_classes(loss, criterion, inputs, fields, pointer)
    shapes = " and ".join(
        f"{list(item.shape)} ({dtype_name(item.dtype)}) from {name!r}"
        for name, item in zip(loss.inputs, inputs, strict=True)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", _BROADCASTS)
            result = _run_loss(criterion, inputs)
    except MemoryError:
        raise
    except Exception as cause:
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0][:300]
        detail = f"{loss.type} does not fit its inputs of shape {shapes} (torch: {reason})"
        raise one(_blamed(loss, inputs, pointer), detail, "shape") from cause
    if result.dim() != 0:
        raise one(pointer, f"{loss.type} gives {list(result.shape)}, not one number", "shape")
    return result


def _blamed(loss: Loss, inputs: Sequence[Tensor], pointer: str) -> str:
    """Return the pointer of the argument that makes a loss fail, or of its inputs."""

    def attempt(**some: Any) -> Tensor:
        return _run_loss(build_loss(Loss(type=loss.type, args=some, inputs=loss.inputs)), inputs)

    at = f"{pointer}/args"
    found = arguments.blame(attempt, dict(loss.args), at) if loss.args else ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if len(found) > len(at):
            with contextlib.suppress(Exception):
                attempt()
                return found
        return f"{pointer}/inputs"


def _run_loss(criterion: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    if isinstance(criterion, nn.CTCLoss):  # it reads lengths, which meta tensors do not have
        zeros: list[Tensor] = []
        for item in inputs:  # of scores [steps, rows, classes] two steps do
            shape = (min(2, item.shape[0]), *item.shape[1:]) if item.dim() == 3 else item.shape
            zeros.append(torch.zeros(shape, dtype=item.dtype, requires_grad=item.requires_grad))
        return criterion(*zeros)
    try:
        return criterion.to("meta")(*inputs)
    except NotImplementedError:  # no meta kernel: use a tiny batch of real numbers
        return criterion.to_empty(device="cpu")(*[tiny(item) for item in inputs])


def _check_classes(
    loss: Loss,
    criterion: nn.Module,
    inputs: Sequence[Tensor],
    fields: Sequence[FieldShape | None],
    pointer: str,
) -> None:
    if not isinstance(criterion, _CLASS_TARGETS) or len(inputs) != 2 or inputs[0].dim() < 2:
        return
    scores, target = inputs
    num_classes, field = scores.shape[1], fields[1]
    if target.dtype == torch.int64 and field is not None and (field.dim or 0) > num_classes:
        detail = f"field {loss.inputs[1]!r} has {field.dim} classes, but {loss.inputs[0]!r} of "
        detail += f"shape {list(scores.shape)} has scores for {num_classes}"
        raise one(f"{pointer}/inputs/1", detail, "classes")
    weight = getattr(criterion, "weight", None)
    if isinstance(weight, Tensor) and list(weight.shape) != [num_classes]:
        detail = f"weight has shape {list(weight.shape)}; there are {num_classes} classes"
        raise one(f"{pointer}/args/weight", detail, "shape")
