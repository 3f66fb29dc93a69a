"""The rows with the largest loss, with their targets and predictions.

Shape suffixes: B = rows of a batch, K = worst rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.evaluation.classification import Classification
from engine.inference.classes import Classes
from engine.losses.losses import Losses

_MAX_VALUES = 16
"""Targets and predictions with more values for a row are not listed."""


def row_losses(losses: Losses, values: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of each row, [B]: the weighted sum of the job's losses.

    Raises:
        ValueError: a loss does not give a value for each row.
    """
    each = [term.of_rows(given) for term, given in losses.split(losses.operands(values))]
    return losses.weighted(each)


class Shown(NamedTuple):
    """What a worst sample has besides its loss: from which layer and field."""

    scores: str
    target: str
    classification: Classification | None
    classes: Classes | None
    """The names of the classes; None: the classes are numbers."""

    def entries(self, values: Mapping[str, Tensor], rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return target and prediction of some rows of a batch."""
        x, target = values[self.scores], values[self.target]
        if any(len(item) <= max(rows, default=0) for item in (x, target)):
            return [{} for _ in rows]
        return [self._entry(x[row].float().cpu(), target[row].cpu()) for row in rows]

    def _entry(self, x: Tensor, target: Tensor) -> dict[str, Any]:
        is_of_class = self.classification is not None and not self.classification.is_binary
        if not is_of_class or target.dim():
            both = {"target": target, "prediction": x}
            few = {name: item for name, item in both.items() if item.numel() <= _MAX_VALUES}
            return {name: item.tolist() for name, item in few.items()}
        best = int(x.argmax())
        found: dict[str, Any] = {"target": int(target), "prediction": best}
        if self.classes is not None and self.classes.named is not None:
            known = len(self.classes.named)
            places = {"target_class": int(target), "prediction_class": best}
            found |= {n: self.classes.names(at) for n, at in places.items() if 0 <= at < known}
        return found


class WorstSamples:
    """Keeps the rows with the largest losses; NaN counts as larger than all."""

    def __init__(self, count: int, shown: Shown) -> None:
        self._count = count
        self._shown = shown
        self._found: list[dict[str, Any]] = []
        self._losses = torch.empty(0, dtype=torch.float64)

    def add(self, loss_B: Tensor, numbers_B: Tensor, values: Mapping[str, Tensor]) -> None:
        """Take the rows of a batch; of equal losses the first rows are kept."""
        loss_B = loss_B.double().cpu()
        both = torch.cat([self._losses, loss_B])
        order_K = torch.sort(both, descending=True, stable=True).indices[: self._count]
        before = len(self._found)
        places = order_K.tolist()
        fresh = [place - before for place in places if place >= before]
        entries = iter(self._shown.entries(values, fresh))
        numbers, losses = numbers_B.tolist(), both.tolist()
        self._found = [
            self._found[place]
            if place < before
            else {"row": numbers[place - before], "loss": losses[place], **next(entries)}
            for place in places
        ]
        self._losses = both[order_K]

    def result(self) -> list[dict[str, Any]]:
        """Return the worst rows, the worst first."""
        return self._found
