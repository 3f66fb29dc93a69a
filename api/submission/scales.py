"""Check whether columns of very different scale reach the network unnormalized.

It reads only the statistics that were computed when a dataset was stored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

RATIO = 100.0
"""Smaller differences are not worth a warning."""
_PASSED_ON = frozenset({"cat", "concat", "stack", "flatten", "Flatten", "reshape", "Identity"})
"""Layers that pass values through unchanged."""
_DENSE = ("dense", "dense_sequence")

Figures = Mapping[str, Mapping[str, Any]]
"""Column → its entry in ``stats.json``, for the training split."""


class _Size(NamedTuple):
    rms: float
    column: str


def scale_warning(
    resolved: Mapping[str, Any], columns: Sequence[Mapping[str, Any]], figures: Figures
) -> dict[str, str] | None:
    """Return a plan's warning, or None.

    The size of a column is its root mean square times its field's ``scale``. Columns are ignored if
    they contain only 0 and 1, are normalized, by the data or by batch normalization, or are not
    read by any layer.

    Args:
        resolved: The job's spec with every default filled in.
        columns: The columns of the training dataset.
        figures: Their statistics.
    """
    data = resolved["data"]
    dtypes = {column["name"]: str(column["dtype"]) for column in columns}
    sizes: list[_Size] = []
    fields: list[str] = []
    for name in sorted(_read_raw(resolved["network"]["layers"], data["fields"])):
        field = data["fields"][name]
        if field["type"] in _DENSE and name not in data["normalize"]:
            found = list(_sizes(name, field, dtypes, figures))
            sizes += found
            fields += [name] if found else []
    if len(sizes) < 2 or max(sizes).rms < RATIO * min(sizes).rms:
        return None
    return _warning(min(sizes), max(sizes), fields)


def _warning(least: _Size, most: _Size, fields: Sequence[str]) -> dict[str, str]:
    shown = ", ".join(f'"{name}": {{"type": "standard"}}' for name in fields[:10])
    detail = (
        f"the column {most.column!r} has values of about {most.rms:.3g}, and {least.column!r} of"
        f" about {least.rms:.3g}, {most.rms / least.rms:.3g} times less, and nothing normalizes"
        f' them: few networks learn well from that; write "normalize": {{{shown}}} into data'
    )
    return {"pointer": "/data/normalize", "detail": detail, "code": "uneven_scale"}


def _sizes(
    name: str, field: Mapping[str, Any], dtypes: Mapping[str, str], figures: Figures
) -> Iterator[_Size]:
    for column in field.get("columns") or [field.get("column") or name]:
        known = figures.get(column, {})
        mean, std, scale = known.get("mean"), known.get("std"), field.get("scale")
        is_flag = known.get("min") in (0, 1) and known.get("max") in (0, 1)
        if not isinstance(mean, int | float) or not isinstance(std, int | float) or is_flag:
            continue  # texts, columns without values, and statistics that are NaN or Inf
        factor = scale if scale is not None else 1 / 255 if dtypes.get(column) == "uint8" else 1.0
        rms = math.hypot(mean, std) * abs(factor)
        if 0 < rms < math.inf:
            yield _Size(rms, column)


def _read_raw(layers: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> set[str]:
    """Return the fields that some layer computes with unchanged."""
    behind = {name: {name} for name in fields}
    found: set[str] = set()
    before = next(iter(fields))
    for layer in layers:
        reads = [behind.get(name, set[str]()) for name in layer.get("inputs") or [before]]
        values = set[str]().union(*reads)
        is_passed_on = layer["type"] in _PASSED_ON
        if not is_passed_on and not layer["type"].startswith("BatchNorm"):
            found |= values
        before = layer["name"]
        behind[before] = values if is_passed_on else set()
    return found
