"""What a drifted series means, in words."""

from typing import Any

import numpy as np

from engine.serving.drift.histograms import Counts
from engine.serving.drift.reference import SeriesReference
from engine.serving.drift.series import Series, category_name, is_category
from engine.serving.model_inputs import ModelInputs

_MOVED = 0.1
"""A mean has moved if it did by this fraction of the standard deviation."""
_FIELD_CAUSES = (
    "Clients prepare the field differently than the training data: another unit, scale, encoding,"
    " order of columns, or value for what is missing.",
    "What the model is used for has changed: other users, devices, seasons, sources.",
)
_LAYER_CAUSES = (
    "The inputs have drifted: see the findings about fields.",
    "Combinations of values have changed that single fields do not show.",
)
_REMEDIES = (
    "Compare some requests with rows of the training dataset.",
    "Evaluate the version on recent rows with labels; if it has become worse, train on such rows.",
    "If the change is expected, raise drift.min_psi of the serve job.",
)


def finding(  # noqa: PLR0913 (what was compared, and how it came out)
    inputs: ModelInputs,
    version: tuple[str, int],
    series: Series,
    reference: SeriesReference,
    window_B: Counts,
    *,
    mean: float | None,
    psi: float,
    threshold: float,
) -> dict[str, Any]:
    """Return the event of a series that has drifted.

    ``window_B``: the histogram of the served rows; ``mean``: of their finite values.
    """
    rows = int(window_B.sum())
    change = _change(inputs, series, reference, window_B, mean)
    compared = f"PSI {psi:.3g}, threshold {threshold:.3g}, {rows:,} rows"
    message = f"Requests to {version[0]}:{version[1]} differ from its training rows: {change}"
    return {
        "rule": "drift",
        "severity": "warning",
        "model": version[0],
        "version": version[1],
        "series": {"of": series.of, "name": series.name, "measure": series.measure},
        "psi": psi,
        "threshold": threshold,
        "rows": rows,
        "message": f"{message} ({compared}).",
        "causes": list(_FIELD_CAUSES if series.of == "field" else _LAYER_CAUSES),
        "remedies": list(_REMEDIES),
    }


def _change(
    inputs: ModelInputs,
    series: Series,
    reference: SeriesReference,
    window_B: Counts,
    mean: float | None,
) -> str:
    """Return what has changed most."""
    subject = f"of {series.of} {series.name!r}"
    p_B = reference.counts / max(1, reference.counts.sum())
    q_B = window_B / max(1, window_B.sum())
    change_B = (q_B - p_B) * np.log((q_B + 1e-6) / (p_B + 1e-6))
    most = int(change_B.argmax())
    of_rows = f"in {q_B[most]:.1%} of the rows, and in {p_B[most]:.1%} of the training rows"
    if is_category(series):
        known = reference.bins.categories
        if known is None or most == len(known):
            what = "is another value than the frequent ones"
        else:
            what = f"is {category_name(inputs, series, int(known[most]))!r}"
        return f"{_name(series)} {subject} {what} {of_rows}"
    interval = reference.bins.range_of(most)
    if interval is None:
        return f"{_name(series)} {subject} is missing (NaN) {of_rows}"
    least = max(_MOVED * reference.std, 1e-9 * abs(reference.mean))
    if mean is not None and abs(mean - reference.mean) > least:
        moved = f"moved from {reference.mean:.4g} to {mean:.4g} on average"
        return f"{_name(series)} {subject} {moved}"
    low, high = interval
    between = f"at least {low:.4g}" if np.isinf(high) else f"below {high:.4g}"
    between = between if np.isinf(low) or np.isinf(high) else f"between {low:.4g} and {high:.4g}"
    return f"{_name(series)} {subject} is {between} {of_rows}"


def _name(series: Series) -> str:
    names = {
        "value": "the value",
        "mean": "the mean of a row",
        "std": "the standard deviation of a row",
        "rms": "the root mean square of a row",
        "category": "the value",
        "class": "the predicted class",
        "step": "a step, drawn at random,",
        "length": "the length",
        "unknown tokens": "the share of unknown tokens",
    }
    return names.get(series.measure, f"{series.measure!r}")
