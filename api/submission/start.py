"""Jobs that start from a checkpoint: whether they can, and how a fork's spec is made. Pure."""

from collections.abc import Mapping
from typing import Any

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
"""What a run cannot go on without: its optimizer's state, generators and position are of these."""


def what_differs(base: Mapping[str, Any], spec: Mapping[str, Any]) -> list[str]:
    """Pointers to what a job has other than the run that it would go on with."""
    said, mine = _said(base), _said(spec)
    return [pointer for pointer in _OF_THE_RUN if _at(said, pointer) != _at(mine, pointer)]


def _said(spec: Any) -> Any:
    """A spec without what says nothing: a version that did not know a field left it out."""
    if not isinstance(spec, Mapping):
        return spec
    kept = {name: _said(value) for name, value in spec.items()}  # pyright: ignore[reportUnknownVariableType]
    kept = {name: value for name, value in kept.items() if value not in (None, {})}  # pyright: ignore[reportUnknownVariableType]
    if kept.get("on_bad_row") == "fail":
        del kept["on_bad_row"]
    return kept  # pyright: ignore[reportUnknownVariableType]


def merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON merge patch (RFC 7396): null removes, objects are merged, all else replaces."""
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
