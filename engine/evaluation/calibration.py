"""How well the probabilities of a classifier agree with how often it is right.

The expected calibration error is that of Guo et al., 2017, "On Calibration of Modern Neural
Networks". torchmetrics keeps the probabilities of all rows for it; here they are counted in bins.

Shape suffixes: S = compared values, C = classes, N = bins.
"""

from typing import Any

import torch
from torch import Tensor

NUM_BINS = 15


class Calibration:
    """Sums of each bin: values, probabilities, and correct values; and the Brier score."""

    def __init__(self, device: torch.device) -> None:
        self._edges = torch.linspace(0, 1, NUM_BINS + 1, device=device)
        self._sums = torch.zeros(3, NUM_BINS, dtype=torch.float64, device=device)
        self._squares = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, prob_SC: Tensor, target_S: Tensor) -> None:
        """Count some values.

        Of several classes the probability of the predicted one is compared with whether it is the
        true one; of a binary classifier ([S]) that of class 1 with whether the target is 1.
        """
        if prob_SC.dim() == 1:
            prob_S, is_right_S = prob_SC, target_S == 1
            square_S = (prob_SC.double() - target_S) ** 2
        else:
            prob_S, predicted_S = prob_SC.max(1)
            is_right_S = predicted_S == target_S
            p_SC = prob_SC.double()
            own_S = p_SC.gather(1, target_S[:, None])[:, 0]
            square_S = (p_SC**2).sum(1) - 2 * own_S + 1
        self._squares += square_S.sum()
        place_S = torch.bucketize(prob_S.contiguous(), self._edges, right=True) - 1
        place_S = place_S.clamp(0, NUM_BINS - 1)
        ones_S = torch.ones_like(square_S)
        for row, values_S in enumerate((ones_S, prob_S.double(), is_right_S.double())):
            self._sums[row].index_add_(0, place_S, values_S)

    def result(self) -> dict[str, Any]:
        """Return the bins that have values, the calibration errors and the Brier score.

        The Brier score is the mean of the squared differences of the probabilities to 1 for the
        true class and 0 for others: their sum over several classes, and of a binary classifier
        that of class 1 only.
        """
        count_N, prob_N, right_N = self._sums
        total = count_N.sum()
        gap_N = (prob_N - right_N).abs() / count_N
        is_used = (count_N > 0).tolist()
        edges = self._edges.tolist()
        bins = [
            {
                "from": edges[n],
                "to": edges[n + 1],
                "count": int(count_N[n]),
                "confidence": float(prob_N[n] / count_N[n]),
                "accuracy": float(right_N[n] / count_N[n]),
            }
            for n in range(NUM_BINS)
            if is_used[n]
        ]
        return {
            "bins": bins,
            "expected_calibration_error": float((prob_N - right_N).abs().sum() / total),
            "maximum_calibration_error": float(gap_N.nan_to_num(0).max()) if bins else float("nan"),
            "brier_score": float(self._squares / total),
        }
