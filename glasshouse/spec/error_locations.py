"""Locations of pydantic's errors in the body of a request."""

from collections.abc import Mapping, Sequence
from typing import Any

from glasshouse.spec.strict import WrongAt

Place = list[int | str]


def place_of(entry: Mapping[str, Any], body: Any) -> Place:
    """The location of a pydantic error in the JSON body.

    pydantic's own location also contains the names of union members (``dense``, ``float``,
    ``[key]``). Parts that the body does not contain are removed, except a field that is missing or
    unset.
    """
    kept: Place = []
    here = body
    context: Mapping[str, Any] = entry.get("ctx") or {}
    error = context.get("error")
    for number, part in enumerate(entry["loc"]):
        if _has(here, part):
            here = here[part]
            kept.append(part)
        elif entry["type"] == "missing" and number + 1 == len(entry["loc"]):
            kept.append(part)
    if isinstance(error, WrongAt):
        kept += _within(here, error.place)
    if str(entry["type"]).startswith("union_tag"):  # the fault is in the field that decides
        kept.append(str(entry["ctx"]["discriminator"]).strip("'"))
    return kept


def pointer(place: Sequence[int | str]) -> str:
    """A JSON Pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in place)


def _within(here: Any, place: Sequence[int | str]) -> Place:
    """The part of a location that the body contains, and at most one more field."""
    kept: Place = []
    for part in place:
        if not _has(here, part):
            is_left_out = isinstance(here, dict) and len(kept) + 1 == len(place)
            return [*kept, part] if is_left_out and isinstance(part, str) else kept
        here = here[part]
        kept.append(part)
    return kept


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)  # pyright: ignore[reportUnknownArgumentType]
    return isinstance(value, dict) and part in value
