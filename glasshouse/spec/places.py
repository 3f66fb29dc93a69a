"""Where in a request it is that pydantic found something wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from glasshouse.spec.strict import WrongAt

Place = list[int | str]


def place_of(entry: Mapping[str, Any], body: Any) -> Place:
    """The place of one of pydantic's errors in the JSON body that it read.

    Pydantic's own has the names of a union's members in it (``dense``, ``float``, ``[key]``); what
    the body lacks is none of its places, except a field that is missing or left at its default.
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
    """As much of a place as the body has, and one field more."""
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
