"""Which loss of a job compares scores with classes, and its scores and classes as flat tensors.

Shape suffixes: B = rows, S = compared values (rows, or the steps of all rows), C = classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.losses.loss_sums import Term
from glasshouse.errors import DataFailed

_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_BINARY = (nn.BCEWithLogitsLoss, nn.BCELoss)


class Compared(NamedTuple):
    """Scores and true classes of some rows."""

    probabilities: Tensor
    """[S, C], or scores if the loss has no probabilities; of a binary loss [S], of class 1."""
    predicted: Tensor
    """The number of the predicted class, [S]."""
    target: Tensor
    """The number of the true class, [S]."""


class Classification(NamedTuple):
    """A loss that compares scores with one class per row or per step."""

    number: int
    """Its index among the losses of the job."""
    num_classes: int
    is_binary: bool
    """Whether there is one score, of class 1."""
    has_probabilities: bool

    def compared(self, term: Term, operands: Sequence[Any]) -> Compared:
        """Return what is compared in a batch, without padding and ignored targets.

        Raises:
            DataFailed: targets of a binary loss are not 0 or 1.
        """
        scores, target = term.compared(operands)[:2]
        if self.is_binary:
            return _compared_binary(term.criterion, scores.flatten(), target.flatten())
        target_S = target.flatten()
        x_SC = scores.detach().movedim(1, -1).reshape(-1, self.num_classes)
        ignored = getattr(term.criterion, "ignore_index", None)
        if ignored is not None:
            is_kept_S = target_S != ignored
            x_SC, target_S = x_SC[is_kept_S], target_S[is_kept_S]
        predicted_S = x_SC.argmax(1)
        if isinstance(term.criterion, nn.CrossEntropyLoss):
            x_SC = x_SC.softmax(1)
        elif isinstance(term.criterion, nn.NLLLoss):
            x_SC = x_SC.exp()
        return Compared(x_SC, predicted_S, target_S)


def _compared_binary(criterion: nn.Module, score_S: Tensor, target_S: Tensor) -> Compared:
    prob_S = score_S.sigmoid() if isinstance(criterion, nn.BCEWithLogitsLoss) else score_S
    is_class_S = (target_S == 0) | (target_S == 1)
    if not is_class_S.all():
        value = float(target_S[~is_class_S][0])
        detail = f"a target of {type(criterion).__name__} is {value:g}, and classes are 0 or 1:"
        raise DataFailed(f'{detail} set want to ["worst_samples"], or correct the targets')
    return Compared(prob_S, (prob_S > 0.5).long(), target_S.long())


def classification_of(
    terms: Sequence[Term], operands: Sequence[Sequence[Any]]
) -> Classification | None:
    """Return the first loss that compares scores with classes; None: there is none.

    ``operands``: those of each loss for a batch, on any device, also the meta device.
    """
    for number, (term, given) in enumerate(zip(terms, operands, strict=True)):
        criterion = term.criterion
        if len(given) < 2:
            continue
        scores, target = given[0], given[1]
        if isinstance(criterion, _OF_CLASSES) and scores.dim() > 1 and target.dtype == torch.int64:
            has_probabilities = not isinstance(criterion, nn.MultiMarginLoss)
            return Classification(number, scores.shape[1], False, has_probabilities)
        is_single = target.shape[1:].numel() == 1 or term.has_lengths
        if isinstance(criterion, _BINARY) and is_single:
            return Classification(number, 2, True, True)
    return None
