"""Whether lower or higher values of a metric are better, inferred from its name."""

import re
from functools import lru_cache
from typing import Literal

Direction = Literal["min", "max"]

_WORDS = re.compile(r"[A-Z]+\d*(?![a-z])|[A-Z]?[a-z]+\d*")
_LOWER = frozenset(
    [
        "loss",
        "error",
        "errors",
        "err",
        "distance",
        "divergence",
        "perplexity",
        "ppl",
        "diff",
        "difference",
        "deviance",
        "crps",
        "nll",
        "bce",
        "mse",
        "rmse",
        "mae",
        "mape",
        "wer",
        "cer",
        "eer",
    ]
)
_HIGHER = frozenset(
    [
        "accuracy",
        "acc",
        "auroc",
        "auc",
        "precision",
        "recall",
        "f",
        "f1",
        "fbeta",
        "jaccard",
        "iou",
        "kappa",
        "corr",
        "correlation",
        "similarity",
        "match",
        "index",
        "r2",
        "variance",
        "specificity",
        "sensitivity",
        "predictive",
        "correct",
        "dice",
        "bleu",
        "rouge",
        "psnr",
        "ssim",
        "ndcg",
        "mrr",
        "hits",
    ]
)
_LOWER_NAMES = frozenset({"ContinuousRankedProbabilityScore"})


@lru_cache(maxsize=4096)
def direction_of(metric: str) -> Direction | None:
    """Whether the best value of a metric is its lowest or its highest.

    Args:
        metric: a series as a job reports it: ``loss``, ``validation/accuracy``,
            ``validation/MulticlassF1Score/3``.

    Returns:
        ``min``, ``max``, or None if it cannot be inferred.
    """
    name = metric.removeprefix("validation/").partition("/")[0].partition("(")[0]
    words = {word.lower() for word in _WORDS.findall(name)}
    if words & _LOWER or name in _LOWER_NAMES:
        return "min"
    return "max" if words & _HIGHER else None
