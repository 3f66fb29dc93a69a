"""Translates pydantic's validation errors into the messages of this service.

There is one translation for each kind of error. A message contains the value that was given and,
where that helps, the description of the field. If no member of a union accepts a value, the errors
of all members become one message.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from glasshouse.errors import FieldProblem
from glasshouse.spec.error_locations import place_of, pointer
from glasshouse.spec.model_names import MODEL_NAME_PATTERN
from glasshouse.spec.strict import NAME_PATTERN
from glasshouse.suggestions import did_you_mean, either

Entry = Mapping[str, Any]
"""One of ``ValidationError.errors()``."""

_WANTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
_RANGES = {
    "greater_than": "it must be greater than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
}
_PATTERNS = {
    NAME_PATTERN: "a name has at most 64 letters, digits and underscores, and no digit first",
    MODEL_NAME_PATTERN: "a name has at most 100 letters, digits, '_', '-' and '.', and begins with "
    "a letter, a digit or '_'",
}
_DESCRIBED = ("missing", "too_long", "too_short", "string_pattern_mismatch")
"""Errors whose message has the description of the field."""
_MOST_NAMES = 20
_LONGEST = 240
_MESSAGE = "translation"
"""The key of the message in the context of an error that was already translated."""


def problems_in(
    found: Sequence[Entry], body: Any, *roots: type[BaseModel], most: int | None = None
) -> list[FieldProblem]:
    """The problems of a request, with JSON Pointers into its body.

    Args:
        found: ``ValidationError.errors()``.
        body: the parsed JSON body.
        roots: the model that the body was validated with, or the models.
        most: the maximum number of problems.
    """
    places: dict[str, list[Entry]] = {}
    for entry in filter(_is_real, found):
        places.setdefault(pointer(place_of(entry, body)), []).append(entry)
    inner = {place[:end] for place in places for end, sign in enumerate(place) if sign == "/"}
    problems: list[FieldProblem] = []
    for place, entries in places.items():
        mistyped = [entry for entry in entries if _wanted(entry)]
        others = [entry for entry in entries if not _wanted(entry)]
        if mistyped and not others and place not in inner:
            problems.append(FieldProblem(place, _mistyped(mistyped, roots), mistyped[0]["type"]))
        for detail, code in dict.fromkeys((said(e, *roots), e["type"]) for e in others):
            problems.append(FieldProblem(place, detail, code))
    return problems if most is None else problems[:most]


def _is_real(entry: Entry) -> bool:
    """Whether a ``too_short`` error is real: pydantic counts only the items that are valid."""
    return entry["type"] != "too_short" or len(entry["input"]) < entry["ctx"]["min_length"]


def said(entry: Entry, *roots: type[BaseModel]) -> str:
    """The message of one pydantic error; ``roots`` as in `problems_in`."""
    if (message := _translated(entry)) is not None:
        return message
    if _wanted(entry):
        return _mistyped([entry], roots)
    if entry["type"] == "extra_forbidden":
        return _unknown(entry, roots)
    text = _text(str(entry["type"]), entry.get("ctx") or {}) or str(entry["msg"])
    text = text.removeprefix("Value error, ") + _got(entry, text)
    return text + (_description(entry, roots) if entry["type"] in _DESCRIBED else "")


def _text(kind: str, context: Mapping[str, Any]) -> str | None:  # noqa: PLR0911 (one a kind)
    if kind in _RANGES:
        return _RANGES[kind].format_map({name: _number(of) for name, of in context.items()})
    match kind:
        case "missing" | "union_tag_not_found":
            return "this field is required"
        case "union_tag_invalid":
            tags = str(context["expected_tags"])
            near = did_you_mean(str(context["tag"]), re.findall("'([^']*)'", tags))
            return f"{context['tag']!r} is not one of {tags}{near}"
        case "int_parsing_size":
            return "the number is too large"
        case "string_pattern_mismatch":
            pattern = str(context["pattern"])
            return _PATTERNS.get(pattern, f"it does not match {pattern}")
        case "string_too_long":
            return f"it can have at most {_number(context['max_length'])} characters"
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
    return f"it has {count} items, and can have at most {most}"


def _at_least(count: int, what: str) -> str:
    return "it must not be empty" if count == 1 else f"it needs at least {count} {what}"


def _number(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"{value:,}" if isinstance(value, int) and value >= 1000 else str(value)


def translated(error: ValidationError, root: type[BaseModel]) -> ValidationError:
    """The errors of a part of a body, with messages from the part's own model.

    The validation of the whole body does not have that model, and its messages would contain less.
    """
    lines: list[InitErrorDetails] = []
    for entry in error.errors(include_url=False):
        context = {**(entry.get("ctx") or {}), _MESSAGE: said(entry, root)}
        kind = PydanticCustomError(entry["type"], "{" + _MESSAGE + "}", context)  # pyright: ignore[reportArgumentType]
        lines.append(InitErrorDetails(type=kind, loc=entry["loc"], input=entry["input"]))
    return ValidationError.from_exception_data(error.title, lines)


def _translated(entry: Entry) -> str | None:
    """The message of an error that was already translated."""
    context: dict[str, Any] = entry.get("ctx") or {}
    return context.get(_MESSAGE)


def _wanted(entry: Entry) -> str | None:
    """What the field accepts, for a value of the wrong type or not among its literals."""
    if _translated(entry) is not None:
        return None
    if entry["type"] == "literal_error":
        words = {"True": "true", "False": "false", "None": "null"}
        expected = str(entry["ctx"]["expected"])
        return words.get(expected, expected)
    return _WANTED.get(str(entry["type"]))


def _mistyped(entries: Sequence[Entry], roots: Sequence[type[BaseModel]]) -> str:
    wanted = list(dict.fromkeys(filter(None, map(_wanted, entries))))
    text = f"give {either(wanted)}"
    return text + _got(entries[0], text, _suggestion(entries)) + _description(entries[0], roots)


def _suggestion(entries: Sequence[Entry]) -> str:
    """A suggestion: the accepted literal that is most similar to the value."""
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


def _description(entry: Entry, roots: Sequence[type[BaseModel]]) -> str:
    """The description of the field, in whole sentences up to a maximum length."""
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
    return f"there is no such field; the fields are {', '.join(known[:_MOST_NAMES])}{more}"


def _walk(
    roots: Sequence[type[BaseModel]], place: Sequence[int | str]
) -> tuple[FieldInfo | None, list[type[BaseModel]]]:
    """The field at a location of pydantic, if it is a field, and the models there.

    A part of the location that is not a field is an index, a key, or the tag of a union member.
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
    """The names that pydantic uses for the model as a member of a union."""
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
