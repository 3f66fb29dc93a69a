"""Jobs that start from a checkpoint: whether they can, and how a fork's spec is made. Pure."""

from collections.abc import Mapping
from typing import Any

_OF_THE_RUN = (
    "/seed",
    "/network",
    "/optimizer/type",
    "/data/train",
    "/data/fields",
    "/data/batch_size",
    "/data/drop_last",
    "/data/shuffle",
    "/data/bucket_by_length",
    "/data/cache",
)
"""What a run cannot go on without: its optimizer's state, generators and position are of these."""


def what_differs(base: Mapping[str, Any], spec: Mapping[str, Any]) -> list[str]:
    """Pointers to what a job has other than the run that it would go on with."""
    return [pointer for pointer in _OF_THE_RUN if _at(base, pointer) != _at(spec, pointer)]


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
