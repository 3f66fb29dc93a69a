"""Losses by torch's names and arguments, one or several with weights.

Knows torch; knows nothing of data or jobs. Checked before anything runs.
"""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss  # pyright: ignore[reportPrivateUsage]

from engine import arguments
from engine.layers import LayerFailed
from engine.precision import dtype_name, in_float32
from engine.problems import one
from engine.shapes import FieldShape, tiny
from glasshouse.nearest import did_you_mean
from glasshouse.spec import Loss, TrainJob

_CLASS_TARGETS = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)


@cache
def loss_classes() -> dict[str, type[nn.Module]]:
    """Every torch.nn loss, by name."""
    return {
        name: cls
        for name, cls in sorted(vars(nn).items())
        if isinstance(cls, type) and issubclass(cls, _Loss) and name != "NLLLoss2d"
    }


class Losses(nn.Module):
    """What training makes small: the weighted sum of one or several of torch's losses.

    Called with what they compare, one after the other.
    """

    def __init__(self, specs: Sequence[Loss], names: Sequence[str] = ()) -> None:
        """``names``: under which each is told by itself; empty: only their sum is.

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
        self.are_sums = [is_sum(criterion) for criterion in self.criteria]
        """Whether each is the sum over the rows, not their mean."""
        self._parts = [
            slice(*both) for both in pairwise(accumulate((len(s.inputs) for s in specs), initial=0))
        ]
        self.told: dict[str, Tensor] = {}
        """What each came to in the last call, without its weight."""

    @staticmethod
    def of(job: TrainJob) -> "Losses":
        """The losses of a job."""
        return Losses(job.losses, job.loss_names)

    def forward(self, *inputs: Tensor, share: float | None = None) -> Tensor:
        """The sum; ``share``: how much of a step's rows a batch has, which a mean counts by."""
        if not self.names:
            loss: Tensor = self.criteria[0](*inputs)
            return loss if share is None or self.are_sums[0] else loss * share
        terms = self.each(inputs, share)
        self.told = {f"loss/{name}": t.detach() for name, t in zip(self.names, terms, strict=True)}
        return self.weighted(terms)

    def each(self, inputs: Sequence[Tensor], share: float | None = None) -> list[Tensor]:
        """Each loss by itself, without its weight."""
        terms: list[Tensor] = [criterion(*given) for criterion, given in self.split(inputs)]
        if share is None:
            return terms
        return [t if s else t * share for t, s in zip(terms, self.are_sums, strict=True)]

    def split(self, inputs: Sequence[Tensor]) -> list[tuple[nn.Module, Sequence[Tensor]]]:
        """Each loss with what it compares."""
        pairs = zip(self.criteria, self._parts, strict=True)
        return [(criterion, inputs[part]) for criterion, part in pairs]

    def weighted(self, terms: Sequence[Tensor]) -> Tensor:
        """The sum of the losses with their weights."""
        first, *rest = [
            term if weight == 1 else term * weight
            for term, weight in zip(terms, self.weights, strict=True)
        ]
        return sum(rest, first)

    def summed(self, inputs: Sequence[Tensor], num_rows: int) -> Tensor:
        """Each loss of a batch as the sum over its rows, float64 of shape [losses]."""
        try:
            terms = self.each([in_float32(item) for item in inputs])
        except Exception as cause:
            raise LayerFailed("loss", cause) from cause
        factors = [1 if is_sum else num_rows for is_sum in self.are_sums]
        return torch.stack([t.double() * f for t, f in zip(terms, factors, strict=True)])

    def figures(self, sums: Tensor, num_rows: int) -> dict[str, float]:
        """``loss``, and each by itself where they have names, from sums over so many rows."""
        terms: list[float] = [
            item if is_sum else item / num_rows
            for item, is_sum in zip(sums.tolist(), self.are_sums, strict=True)
        ]
        total = sum(w * t for w, t in zip(self.weights, terms, strict=True))
        parts = zip(self.names, terms, strict=False)
        return {"loss": total, **{f"loss/{name}": term for name, term in parts}}


def pointer_of(number: int | None) -> str:
    """Where a loss stands in a spec: alone, or one of several."""
    return "/loss" if number is None else f"/loss/{number}"


def build_loss(loss: Loss, pointer: str = "/loss") -> nn.Module:
    """Make the loss of a spec.

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


def is_sum(loss_fn: nn.Module) -> bool:
    """Whether a loss is the sum over its rows; else it is their mean."""
    return getattr(loss_fn, "reduction", "mean") == "sum"


def loss_of(
    loss_fn: Losses,
    values: Mapping[str, Tensor],
    inputs: Sequence[str],
    share: float | None = None,
) -> Tensor:
    """Compute the loss of a batch from the network's outputs and the fields.

    ``share``: how much of a step's rows it has, where several batches make a step.

    Raises:
        LayerFailed: it cannot be computed; the layer is then called ``loss``.
    """
    try:
        loss: Tensor = loss_fn(*[in_float32(values[name]) for name in inputs], share=share)
        return loss
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
        SpecProblems: it does not fit its inputs, or does not give one number to minimise.
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
            warnings.simplefilter("error")  # torch only warns when shapes differ but broadcast
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
    """The argument of a loss that its failure is due to, or its inputs."""

    def attempt(**some: Any) -> Tensor:
        return _run_loss(build_loss(Loss(type=loss.type, args=some, inputs=loss.inputs)), inputs)

    at = f"{pointer}/args"
    found = arguments.blame(attempt, dict(loss.args), at) if loss.args else ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return found if len(found) > len(at) and _works(attempt) else f"{pointer}/inputs"


def _works(attempt: Callable[..., Any]) -> bool:
    with contextlib.suppress(Exception):
        attempt()
        return True
    return False


def _run_loss(criterion: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    try:
        return criterion.to("meta")(*inputs)
    except NotImplementedError:  # no meta kernel: one tiny batch of real numbers
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
