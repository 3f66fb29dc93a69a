"""Compute a loss as a fraction: the numerator and the denominator of torch's mean.

The mean over a dataset, and over a step of several micro-batches, is the sum of the numerators over
the sum of the denominators. It is not the mean of the batches' means: their denominators differ
whenever targets are ignored, classes have weights or sequences have lengths. Depends on torch, not
on specs, data or jobs.

Shape suffixes: B = rows, T = steps of the longest row, S = the steps of all rows together.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from engine.distributed.group import Group
from engine.network.lengths import Lengths, is_padding

OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
"""These divide by the weights of the targets that are not ignored, if targets are classes."""
Denominator = Tensor | float
"""The denominator of a loss over a batch or a step: rows or steps, known on the host; or the sum of
the targets' weights, float64 on the device."""


@dataclass(frozen=True)
class LossSums:
    """Each loss of some rows as a fraction. The sums of different rows can be added."""

    numerators: Tensor
    """float64 of shape [losses]; for ``reduction: "sum"`` the value of the loss."""
    denominators: Tensor
    """float64 of shape [losses]."""

    def __add__(self, other: Self) -> "LossSums":
        """Return the sums over the rows of both."""
        return LossSums(self.numerators + other.numerators, self.denominators + other.denominators)

    def over(self, group: Group) -> "LossSums":
        """Return the sums over the rows of all processes."""
        if group.is_alone:
            return self
        both = torch.stack([self.numerators, self.denominators])
        return LossSums(*group.sum_of_rows(both).unbind())


@dataclass(frozen=True)
class LateDenominator:
    """A micro-batch's loss whose denominator is known only after the forward pass."""

    number: int
    """Index of the micro-batch in its step."""
    count: int
    """Number of micro-batches in the step."""
    is_empty: dict[int, Tensor]
    """By index: whether a micro-batch had nothing to compare. Shared by all of the step."""

    def noted(self, value: Tensor, is_empty: Tensor) -> Tensor:
        """Return what the micro-batch adds to the loss: NaN from the last if all were empty."""
        self.is_empty[self.number] = is_empty
        if self.number + 1 < self.count:
            return value
        is_all_empty = torch.stack([*self.is_empty.values()]).all()
        return value + torch.where(is_all_empty, torch.nan, 0.0).to(value.dtype)


@dataclass(frozen=True)
class StepPart:
    """The denominators of each loss for a micro-batch: its own, and those of the whole step.

    ``late``: the losses whose loss weight is computed from rows instead; empty if there are none.
    """

    own: tuple[Denominator, ...]
    whole: tuple[Denominator, ...]
    late: tuple[LateDenominator | None, ...] = ()
    counts: bool = True
    """False: this process has no row of the batch, runs another's, and adds 0 to the step."""


def total(parts: Sequence[tuple[Denominator, ...]]) -> tuple[Denominator, ...]:
    """Add up the denominators of a step's micro-batches."""
    return tuple(sum(each[1:], each[0]) for each in zip(*parts, strict=True))


class Term:
    """One loss of a job: its value over a batch, and that value as a fraction."""

    def __init__(self, criterion: nn.Module, *, has_lengths: bool = False) -> None:
        """``criterion``: one of torch's losses.

        With ``has_lengths`` the last operand is `Lengths`, and only the steps within them are
        compared. Steps are axis 1 of the other operands, but axis 2 of class scores.
        """
        self.criterion = criterion
        self.has_lengths = has_lengths
        self._reduction = str(getattr(criterion, "reduction", "mean"))
        # torch's CTCLoss divides each row by its target's length only for the mean.
        self._is_of_rows = isinstance(criterion, nn.CTCLoss) or self._reduction == "batchmean"
        self._summing = reduced(criterion, "sum")

    @property
    def is_sum(self) -> bool:
        """Whether the loss is the sum over the rows; if not, it is their mean."""
        return self._reduction == "sum"

    def value(self, operands: Sequence[Any]) -> Tensor:
        """Return the loss of a batch as torch computes it."""
        if self.has_lengths and self._reduction == "batchmean":
            return self._summed(operands) / len(operands[0])
        found: Tensor = self.criterion(*_of_flat_rows(self.criterion, self.compared(operands)))
        return found

    def denominator(self, operands: Sequence[Any], num_rows: int) -> Denominator:
        """Return the denominator of a batch's mean: rows, steps or the sum of target weights.

        It is exact up to a constant factor, such as the number of values per row. Of the operands
        only class targets and lengths are read.
        """
        if self.is_sum or self._is_of_rows:
            return float(num_rows)
        if isinstance(self.criterion, OF_CLASSES) and not operands[1].is_floating_point():
            return _weight_of(self.criterion, self._target(operands))
        if self.has_lengths:
            return float(operands[-1].on_host.sum())
        return float(num_rows)

    def fraction(self, operands: Sequence[Any], num_rows: int) -> tuple[Tensor, Denominator]:
        """Return the loss of a batch as a numerator, in float64, and a denominator."""
        below = self.denominator(operands, num_rows)
        if self.is_sum:
            return self.value(operands).double(), below
        if isinstance(below, Tensor) or not below:  # a batch with nothing to compare: 0 / 0
            return self._summed(operands).double(), below
        return self.value(operands).double() * below, below

    def within(
        self,
        operands: Sequence[Any],
        own: Denominator,
        whole: Denominator,
        late: LateDenominator | None = None,
    ) -> Tensor:
        """Return what a micro-batch adds to its step's loss: 0 if it has nothing to compare."""
        if self.is_sum:
            return self.value(operands)
        if late is not None:  # its mean times its fraction of the rows, with 0 instead of 0 / 0
            below = self.denominator(operands, 1)
            if isinstance(below, Tensor):
                is_empty = below == 0
                above = self._summed(operands)
                mean = above / below.masked_fill(is_empty, 1.0).to(above.dtype)
            else:
                mean = self.value(operands) if below else self._summed(operands)
                is_empty = torch.full((), not below, dtype=torch.bool, device=mean.device)
            return late.noted(mean * (own / whole), is_empty)
        if isinstance(whole, Tensor):
            above = self._summed(operands)
            return above / whole.to(above)
        return self.value(operands) * (own / whole) if own else self._summed(operands)

    def of_rows(self, operands: Sequence[Any]) -> Tensor:
        """Return each row's own loss, [B]: the mean if the loss has several values per row.

        Raises:
            ValueError: the loss does not give a value for each row.
        """
        criterion = self.criterion
        if not isinstance(getattr(criterion, "reduction", None), str):
            raise ValueError(f"{type(criterion).__name__} has no reduction to leave out")
        operands = [item.detach() if isinstance(item, Tensor) else item for item in operands]
        tensors = [item for item in operands if isinstance(item, Tensor) and item.dim()]
        num_rows = tensors[0].shape[0]
        compared = self.compared(operands)
        each: Tensor = reduced(criterion, "none")(*compared)
        if self.has_lengths and each.dim():
            is_packed = compared[0].shape[:2] != operands[0].shape[:2]
            return _mean_of_steps(each, operands[-1].of_rows, is_packed=is_packed)
        if each.dim() == 0 or each.shape[0] != num_rows:
            what = f"gives {list(each.shape)} without its reduction for {num_rows} rows"
            raise ValueError(f"{type(criterion).__name__} {what}")
        return each.reshape(num_rows, -1).mean(dim=1) if each.dim() > 1 else each

    def compared(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands without the padding of rows."""
        if not self.has_lengths:
            return operands
        *inputs, lengths = operands
        if isinstance(self.criterion, OF_CLASSES):
            return [inputs[0], self._target(operands)]
        num_steps = max(item.shape[1] for item in inputs if item.dim() > 1)
        _check_steps(lengths, num_steps)
        if lengths.are_all(num_steps):
            return inputs
        # The indices of unpadded steps in the flat batch of B times T, without blocking.
        is_behind_BT = is_padding(lengths.on_host, num_steps)
        index_S = (~is_behind_BT).reshape(-1).nonzero().reshape(-1)
        index_S = index_S.to(lengths.of_rows.device, non_blocking=True)
        return [_packed(item, num_steps, index_S) for item in inputs]

    def _summed(self, operands: Sequence[Any]) -> Tensor:
        found: Tensor = self._summing(*_of_flat_rows(self.criterion, self.compared(operands)))
        return found

    def _target(self, operands: Sequence[Any]) -> Tensor:
        """Return the class targets, with ``ignore_index`` past the end of each row."""
        target: Tensor = operands[1]
        if not self.has_lengths:
            return target
        _check_steps(operands[-1], target.shape[1])
        if operands[-1].are_all(target.shape[1]):
            return target
        is_behind_BT = is_padding(operands[-1].of_rows, target.shape[1])
        wide = is_behind_BT.reshape(*is_behind_BT.shape, *(1,) * (target.dim() - 2))
        return target.masked_fill(wide, int(self.criterion.ignore_index))  # pyright: ignore[reportArgumentType]


def _of_flat_rows(criterion: nn.Module, operands: Sequence[Any]) -> Sequence[Any]:
    """Return class scores [B, C, T] that are [B, T, C] in memory as [B T, C]; the targets alike.

    The mean and the sum stay the same up to rounding, and torch computes them several times faster:
    for the other form it copies the scores, and its kernels read them with large strides.
    """
    if not isinstance(criterion, OF_CLASSES) or operands[0].dim() < 3:
        return operands
    scores, target = operands
    last = scores.movedim(1, -1)
    is_of_classes = not target.is_floating_point()
    like = last[..., 0] if is_of_classes else scores
    if scores.is_contiguous() or not last.is_contiguous() or target.shape != like.shape:
        return operands
    flat = target.flatten() if is_of_classes else target.movedim(1, -1).flatten(0, -2)
    return [last.flatten(0, -2), flat]


def reduced(criterion: nn.Module, reduction: str) -> nn.Module:
    """Return the loss with another reduction. It shares tensors, such as class weights."""
    twin = copy.copy(criterion)
    twin._forward_hooks = type(criterion._forward_hooks)()  # pyright: ignore[reportPrivateUsage]
    twin.reduction = reduction  # pyright: ignore[reportArgumentType]
    return twin


def _weight_of(criterion: nn.Module, target: Tensor) -> Tensor:
    """Sum the weights of the targets that are not ignored, float64; does not block."""
    counts = target.ne(int(criterion.ignore_index))  # pyright: ignore[reportArgumentType]
    weight = criterion.weight
    if not isinstance(weight, Tensor):
        return counts.sum(dtype=torch.float64)
    weight = weight.to(target.device)  # targets of a step are read before they are with the loss
    return (weight[target.where(counts, 0)] * counts).sum(dtype=torch.float64)


def _check_steps(lengths: Lengths, num_steps: int) -> None:
    if (longest := int(lengths.on_host.max())) > num_steps:
        raise ValueError(f"its lengths reach {longest}, and axis 1 of its inputs has {num_steps}")


def _packed(item: Tensor, num_steps: int, index_S: Tensor) -> Tensor:
    """Return the unpadded steps of all rows as one axis."""
    if item.dim() == 1:
        item = item[:, None]
    if item.shape[1] == 1 != num_steps:  # one value for all steps of a row
        item = item.expand(item.shape[0], num_steps, *item.shape[2:])
    return item.flatten(0, 1).index_select(0, index_S)


def _mean_of_steps(each: Tensor, lengths_B: Tensor, *, is_packed: bool) -> Tensor:
    """Return the mean over each row's steps, [B]; 0 for a row without steps."""
    if is_packed:
        each_S = each.reshape(each.shape[0], -1).mean(dim=1)
        rows_B = torch.arange(len(lengths_B), device=each.device)
        rows_S = torch.repeat_interleave(rows_B, lengths_B, output_size=len(each_S))
        total_B = each_S.new_zeros(len(lengths_B)).index_add_(0, rows_S, each_S)
    else:  # padding contributes 0
        total_B = each.reshape(*each.shape[:2], -1).mean(dim=2).sum(dim=1)
    return total_B / lengths_B.clamp(min=1)
