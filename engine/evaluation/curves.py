"""Counts from which the confusion matrix and the curves of a classifier follow, batch by batch.

torchmetrics compares every score with every threshold, which for a thousand classes takes gigabytes
for a batch. Here the scores between two thresholds are counted; the curves are the same as its
binned ones.

Shape suffixes: S = compared values, C = classes (of a binary classifier one: class 1), T =
thresholds.
"""

from typing import Any

import torch
from torch import Tensor

NUM_THRESHOLDS = 200
_AT_ONCE = 1 << 22
"""Scores that are counted at once."""


class Confusion:
    """The number of targets of each class by predicted class."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        shape = (num_classes, num_classes)
        self.counts_CC = torch.zeros(shape, dtype=torch.int64, device=device)
        """Rows are true classes, columns are predicted classes."""

    def add(self, predicted_S: Tensor, target_S: Tensor) -> None:
        """Count some predictions."""
        size = len(self.counts_CC)
        found = torch.bincount(target_S * size + predicted_S, minlength=size * size)
        self.counts_CC += found.reshape(size, size)


class ScoreCounts:
    """The number of scores of each class between thresholds, of members and of all others."""

    def __init__(self, num_classes: int, device: torch.device) -> None:
        """``num_classes``: 1 for a binary classifier, whose score is that of class 1."""
        self.thresholds_T = torch.linspace(0, 1, NUM_THRESHOLDS, device=device)
        shape = (num_classes, NUM_THRESHOLDS + 1)
        self._positives = torch.zeros(shape, dtype=torch.int64, device=device)
        self._all = torch.zeros(shape, dtype=torch.int64, device=device)

    def add(self, prob_SC: Tensor, target_S: Tensor) -> None:
        """Count some scores."""
        num_classes = len(self._all)
        prob_SC = prob_SC.reshape(-1, num_classes)
        size = max(1, _AT_ONCE // num_classes)
        for part_SC, target in zip(prob_SC.split(size), target_S.split(size), strict=True):
            # the number of thresholds that the score reaches
            place_SC = torch.bucketize(part_SC.contiguous(), self.thresholds_T, right=True)
            place_SC += torch.arange(num_classes, device=place_SC.device) * (NUM_THRESHOLDS + 1)
            self._all += _counted(place_SC.flatten(), self._all)
            if num_classes == 1:
                own = place_SC[:, 0][target == 1]
            else:
                own = place_SC.gather(1, target[:, None])[:, 0]
            self._positives += _counted(own, self._positives)

    def rates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return precision, recall and false positive rate, float64 [C, T], of scores >= threshold.

        A recall without members of the class, and a rate without others, is NaN. The precision of
        no predictions is 1.
        """
        true_CT, predicted_CT = _reaching(self._positives), _reaching(self._all)
        positives_C1 = self._positives.sum(1, keepdim=True).double()
        negatives_C1 = self._all.sum(1, keepdim=True) - positives_C1
        is_none_CT = predicted_CT == 0
        precision_CT = (true_CT / predicted_CT).masked_fill(is_none_CT, 1.0)
        return precision_CT, true_CT / positives_C1, (predicted_CT - true_CT) / negatives_C1

    def pr_curve(self) -> dict[str, Any]:
        """Return precision and recall by class and threshold, and the average precision.

        Average precision is the sum of precisions, each weighted by the increase of recall.
        """
        precision_CT, recall_CT, _ = self.rates()
        none_C1 = torch.zeros_like(recall_CT[:, :1])
        steps_CT = recall_CT - torch.cat([recall_CT[:, 1:], none_C1], dim=1)
        average_C = (steps_CT * precision_CT).sum(1)
        return {
            "thresholds": _rounded(self.thresholds_T),
            "precision": _rounded(precision_CT),
            "recall": _rounded(recall_CT),
            "average_precision": average_C.tolist(),
            "mean_average_precision": float(average_C.nanmean()),
        }

    def roc_curve(self) -> dict[str, Any]:
        """Return true and false positive rates by class and threshold, and the area under them.

        The area is that of trapezoids: of scores between the same thresholds, half of the pairs of
        a member and another count as ordered.
        """
        _, true_CT, false_CT = self.rates()
        end_C1 = torch.zeros_like(true_CT[:, :1])  # above all scores
        true, false = torch.cat([true_CT, end_C1], 1), torch.cat([false_CT, end_C1], 1)
        area_C = -torch.trapezoid(true, false)
        return {
            "thresholds": _rounded(self.thresholds_T),
            "true_positive_rate": _rounded(true_CT),
            "false_positive_rate": _rounded(false_CT),
            "auroc": area_C.tolist(),
            "mean_auroc": float(area_C.nanmean()),
        }


def _counted(places: Tensor, like: Tensor) -> Tensor:
    return torch.bincount(places, minlength=like.numel()).reshape(like.shape)


def _reaching(counts: Tensor) -> Tensor:
    """Return the number of scores that reach each threshold, float64."""
    return counts[:, 1:].flip(1).cumsum(1).flip(1).double()


def _rounded(x: Tensor) -> Any:
    """Return nested lists with six decimals."""
    return x.double().round(decimals=6).tolist()
