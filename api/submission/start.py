"""Jobs that start from a checkpoint: what must match, and how to merge a fork's spec. No SQL."""

from collections.abc import Mapping
from typing import Any

from glasshouse.spec.parallel import num_shares

_OF_THE_RUN = (
    "/seed",
    "/network",
    "/optimizer/type",
    "/optimizer/sparse/type",
    "/data/train",
    "/data/fields",
    "/data/batch_size",
    "/data/drop_last",
    "/data/shuffle",
    "/data/normalize",
    "/data/windows",
    "/data/on_bad_row",
    "/data/bucket_by_length",
    "/data/cache",
)
"""Fields that must match to continue a run: its optimizer state, generators and position depend on
them."""


def what_differs(base: Mapping[str, Any], spec: Mapping[str, Any]) -> list[str]:
    """Return pointers to the fields in which a job differs from the run that it would continue."""
    said, mine = _comparable(_with_global_batch(base)), _comparable(_with_global_batch(spec))
    return [pointer for pointer in _OF_THE_RUN if _at(said, pointer) != _at(mine, pointer)]


def _with_global_batch(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec whose batch size is that of all processes: their number does not matter.

    Nor does it matter which of them, or of their devices, a layer is on.
    """
    data: dict[str, Any] = dict(spec.get("data") or {})
    whole = data.pop("global_batch_size", None) or data.get("batch_size", 0) * num_shares(spec)
    network: dict[str, Any] = dict(spec.get("network") or {})
    if "layers" in network:
        network["layers"] = [
            {name: value for name, value in layer.items() if name not in ("device", "stage")}
            for layer in network["layers"]
        ]
    return {**spec, "network": network, "data": {**data, "batch_size": whole}}


def _comparable(spec: Any) -> Any:
    """Return a spec without defaults, because versions that did not know a field omitted it."""
    if not isinstance(spec, Mapping):
        return spec
    kept = {name: _comparable(value) for name, value in spec.items()}  # pyright: ignore[reportUnknownVariableType]
    kept = {name: value for name, value in kept.items() if value not in (None, {})}  # pyright: ignore[reportUnknownVariableType]
    if kept.get("on_bad_row") == "fail":
        del kept["on_bad_row"]
    return kept  # pyright: ignore[reportUnknownVariableType]


def merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7396): null removes, objects are merged, all else replaces."""
    made = dict(base)
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        elif isinstance(value, Mapping):
            inner = made.get(name)
            made[name] = merged(inner if isinstance(inner, Mapping) else {}, value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            made[name] = value
    return made


def _at(spec: Mapping[str, Any], pointer: str) -> Any:
    found: Any = spec
    for name in pointer.split("/")[1:]:
        found = found.get(name) if isinstance(found, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return found  # pyright: ignore[reportUnknownVariableType]
