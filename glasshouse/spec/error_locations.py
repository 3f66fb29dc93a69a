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
    location: Place = []
    here = body
    context: Mapping[str, Any] = entry.get("ctx") or {}
    error = context.get("error")
    for number, part in enumerate(entry["loc"]):
        if _has(here, part):
            here = here[part]
            location.append(part)
        elif entry["type"] == "missing" and number + 1 == len(entry["loc"]):
            location.append(part)
    if isinstance(error, WrongAt):
        location += _within(here, error.place)
    if str(entry["type"]).startswith("union_tag"):  # the fault is in the field that decides
        location.append(str(entry["ctx"]["discriminator"]).strip("'"))
    return location


def pointer(place: Sequence[int | str]) -> str:
    """A JSON Pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in place)


def _within(here: Any, place: Sequence[int | str]) -> Place:
    """The part of a location that the body contains, and at most one more field."""
    location: Place = []
    for part in place:
        if not _has(here, part):
            is_missing = isinstance(here, dict) and len(location) + 1 == len(place)
            return [*location, part] if is_missing and isinstance(part, str) else location
        here = here[part]
        location.append(part)
    return location


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)  # pyright: ignore[reportUnknownArgumentType]
    return isinstance(value, dict) and part in value
