"""What pydantic finds wrong with a request, in this service's words.

One translation for every field: by the kind of the fault, with what was given, and with what the
model itself says that the field is. Members of a union that all refuse a value become one sentence.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from glasshouse.errors import FieldProblem
from glasshouse.nearest import did_you_mean, either
from glasshouse.spec.places import place_of, pointer
from glasshouse.spec.strict import NAME_PATTERN

Entry = Mapping[str, Any]
"""One of ``ValidationError.errors()``."""

_WANTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
_RANGES = {
    "greater_than": "it must be more than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
}
_PATTERNS = {
    NAME_PATTERN: "a name has letters, digits and underscores, 64 at most, and begins with no digit"
}
_MOST_NAMES = 20
_LONGEST = 240
_TOLD = "told"
"""In the context of an error: its sentence, where it was translated already."""


def problems_in(
    found: Sequence[Entry], body: Any, *roots: type[BaseModel], most: int | None = None
) -> list[FieldProblem]:
    """What is wrong, by JSON Pointer into the body that was read.

    Args:
        found: ``ValidationError.errors()``.
        body: what was read, as JSON is in Python.
        roots: the model that it should have been, or the models.
        most: no more problems than this.
    """
    places: dict[str, list[Entry]] = {}
    for entry in filter(_is_meant, found):
        places.setdefault(pointer(place_of(entry, body)), []).append(entry)
    inner = {place[:end] for place in places for end, sign in enumerate(place) if sign == "/"}
    told: list[FieldProblem] = []
    for place, entries in places.items():
        mistyped = [entry for entry in entries if _wanted(entry)]
        others = [entry for entry in entries if not _wanted(entry)]
        if mistyped and not others and place not in inner:
            told.append(FieldProblem(place, _mistyped(mistyped, roots), mistyped[0]["type"]))
        for detail, code in dict.fromkeys((said(e, *roots), e["type"]) for e in others):
            told.append(FieldProblem(place, detail, code))
    return told if most is None else told[:most]


def _is_meant(entry: Entry) -> bool:
    """Whether a list that is said to be too short is: pydantic counts the items without fault."""
    return entry["type"] != "too_short" or len(entry["input"]) < entry["ctx"]["min_length"]


def said(entry: Entry, *roots: type[BaseModel]) -> str:
    """One of pydantic's errors as a sentence; ``roots`` as in `problems_in`."""
    if (told := _told(entry)) is not None:
        return told
    if _wanted(entry):
        return _mistyped([entry], roots)
    if entry["type"] == "extra_forbidden":
        return _unknown(entry, roots)
    text = _text(str(entry["type"]), entry.get("ctx") or {}) or str(entry["msg"])
    text = text.removeprefix("Value error, ") + _got(entry, text)
    is_counted = entry["type"] in ("too_long", "too_short", "string_pattern_mismatch")
    return text + (_meaning(entry, roots) if is_counted else "")


def _text(kind: str, context: Mapping[str, Any]) -> str | None:  # noqa: PLR0911 (one a kind)
    if kind in _RANGES:
        return _RANGES[kind].format_map({name: _number(of) for name, of in context.items()})
    match kind:
        case "missing" | "union_tag_not_found":
            return "it is missing"
        case "union_tag_invalid":
            tags = str(context["expected_tags"])
            near = did_you_mean(str(context["tag"]), re.findall("'([^']*)'", tags))
            return f"there is no {context['tag']!r}; there is {tags}{near}"
        case "int_parsing_size":
            return "the number is too large"
        case "string_pattern_mismatch":
            pattern = str(context["pattern"])
            return _PATTERNS.get(pattern, f"it does not match {pattern}")
        case "string_too_long":
            return f"it may have {_number(context['max_length'])} characters at most"
        case "string_too_short":
            return _at_least(context["min_length"], "characters")
        case "too_long":
            return _too_long(context)
        case "too_short":
            return _at_least(context["min_length"], "items")
        case _:
            return None


def _too_long(context: Mapping[str, Any]) -> str:
    actual, most = context["actual_length"], _number(context["max_length"])
    count = "more" if actual is None else _number(actual)
    return f"it has {count} items, and may have {most} at most"


def _at_least(count: int, what: str) -> str:
    return "it must not be empty" if count == 1 else f"it needs at least {count} {what}"


def _number(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"{value:,}" if isinstance(value, int) and value >= 1000 else str(value)


def translated(error: ValidationError, root: type[BaseModel]) -> ValidationError:
    """The same errors of a part of a body, told in words of the part's own model.

    The validation of the whole body does not know that model, and would say less.
    """
    lines: list[InitErrorDetails] = []
    for entry in error.errors(include_url=False):
        context = {**(entry.get("ctx") or {}), _TOLD: said(entry, root)}
        kind = PydanticCustomError(entry["type"], "{" + _TOLD + "}", context)  # pyright: ignore[reportArgumentType]
        lines.append(InitErrorDetails(type=kind, loc=entry["loc"], input=entry["input"]))
    return ValidationError.from_exception_data(error.title, lines)


def _told(entry: Entry) -> str | None:
    """A sentence that is in our words already."""
    context: dict[str, Any] = entry.get("ctx") or {}
    return context.get(_TOLD)


def _wanted(entry: Entry) -> str | None:
    """What the field takes, where it is of another type or none of its words."""
    if _told(entry) is not None:
        return None
    if entry["type"] == "literal_error":
        words = {"True": "true", "False": "false", "None": "null"}
        expected = str(entry["ctx"]["expected"])
        return words.get(expected, expected)
    return _WANTED.get(str(entry["type"]))


def _mistyped(entries: Sequence[Entry], roots: Sequence[type[BaseModel]]) -> str:
    wanted = list(dict.fromkeys(filter(None, map(_wanted, entries))))
    text = f"give {either(wanted)}"
    return text + _got(entries[0], text, _meant(entries)) + _meaning(entries[0], roots)


def _meant(entries: Sequence[Entry]) -> str:
    """Which of the words that a field takes is like the one that was given."""
    value = entries[0].get("input")
    literals = [str(one["ctx"]["expected"]) for one in entries if one["type"] == "literal_error"]
    words = [word for text in literals for word in re.findall("'([^']*)'", text)]
    return did_you_mean(value, words) if isinstance(value, str) else ""


def _got(entry: Entry, text: str, meant: str = "") -> str:
    value = entry.get("input")
    if entry["type"] == "missing" or not isinstance(value, (str, int, float, type(None))):
        return ""
    is_json = value is None or isinstance(value, bool)
    shown = json.dumps(value) if is_json else repr(value)
    if isinstance(value, str) and shown in text:
        return ""
    return f" (got {shown if len(shown) <= 80 else shown[:77] + '…'}{meant})"


def _meaning(entry: Entry, roots: Sequence[type[BaseModel]]) -> str:
    """What the model says of the field, in whole sentences and not without end."""
    field, _ = _walk(roots, entry["loc"])
    if field is None or not field.description:
        return ""
    text = " ".join(field.description.replace("``", "").split())
    while len(text) > _LONGEST and ". " in text:
        text = text.rpartition(". ")[0] + "."
    return f": {text}"


def _unknown(entry: Entry, roots: Sequence[type[BaseModel]]) -> str:
    *place, name = entry["loc"]
    _, models = _walk(roots, place)
    known = sorted({str(field) for model in models for field in _fields(model)})
    if not known:
        return "there is no such field"
    if near := did_you_mean(str(name), known):
        return f"there is no such field{near}"
    more = " …" if len(known) > _MOST_NAMES else ""
    return f"there is no such field; there is {', '.join(known[:_MOST_NAMES])}{more}"


def _walk(
    roots: Sequence[type[BaseModel]], place: Sequence[int | str]
) -> tuple[FieldInfo | None, list[type[BaseModel]]]:
    """The field at a place of pydantic's, if it is one, and the models that are looked for there.

    A part that is no field is an index, a key, or the tag of a union's member.
    """
    models, field = list(roots), None
    for part in place:
        fields = [_fields(model)[part] for model in models if part in _fields(model)]
        if fields:
            field = fields[0] if len({one.description for one in fields}) == 1 else None
            models = [model for one in fields for model in _models(one.annotation)]
        else:
            models = [model for model in models if part in _tags(model)] or models
    return field, models


def _fields(model: type[BaseModel]) -> dict[int | str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _tags(model: type[BaseModel]) -> set[Any]:
    """By what pydantic calls the model where it is a member of a union."""
    found: set[Any] = {model.__name__}
    for field in model.model_fields.values():
        if get_origin(field.annotation) is Literal:
            found.update(get_args(field.annotation))
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _models(part)
