"""Whether lower or higher values of a metric are better, inferred from its name."""

import re
from collections.abc import Iterable
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


def sources_of(series: Iterable[str]) -> frozenset[str]:
    """The names of the validation sources of a job; empty if it has one without a name.

    Args:
        series: all series of the job, or all of its evaluations. Each source has a loss:
            ``validation/loss`` without a name, ``validation/<name>/loss`` with one.
    """
    names = [*series]
    if "validation/loss" in names:
        return frozenset()
    places = [name.split("/") for name in names if name.startswith("validation/")]
    return frozenset(place[1] for place in places if place[2:] == ["loss"])


@lru_cache(maxsize=4096)
def direction_of(metric: str, sources: frozenset[str] = frozenset()) -> Direction | None:
    """Whether the best value of a metric is its lowest or its highest.

    Args:
        metric: a series as a job reports it: ``loss``, ``validation/accuracy``,
            ``validation/MulticlassF1Score/3``.
        sources: the names of its validation sources, from `sources_of`.

    Returns:
        ``min``, ``max``, or None if it cannot be inferred.
    """
    path = metric.removeprefix("validation/")
    source, _, rest = path.partition("/")
    if path != metric and source in sources:
        path = rest
    name = path.partition("/")[0].partition("(")[0]
    words = {word.lower() for word in _WORDS.findall(name)}
    if words & _LOWER or name in _LOWER_NAMES:
        return "min"
    return "max" if words & _HIGHER else None
