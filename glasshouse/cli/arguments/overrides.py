"""``-s optimizer.args.lr=0.001``: sets values of a spec by their path."""

from typing import Any, cast

from glasshouse import jsonio


def apply(spec: dict[str, Any], text: str) -> None:
    """Set one ``path=value`` in a spec. The value is JSON, or else a plain string.

    Raises:
        ValueError: it has no ``=``, or the path goes through a value without fields.
    """
    path, found, value = text.partition("=")
    if not found or not path:
        raise ValueError(f"-s {text!r} is not of the form optimizer.args.lr=0.001")
    *way, last = path.split(".")
    place: Any = spec
    for number, name in enumerate(way):
        place = _step(place, name, ".".join(way[: number + 1]))
    _put(place, last, _value(value), path)


def _value(text: str) -> Any:
    try:
        return jsonio.loads(text)
    except ValueError:
        return text


def _step(place: Any, name: str, path: str) -> Any:
    if isinstance(place, list):
        return cast("list[Any]", place)[_index(cast("list[Any]", place), name, path)]
    if isinstance(place, dict):
        return cast("dict[str, Any]", place).setdefault(name, {})
    raise ValueError(f"-s: {path} is of type {type(place).__name__} and has no fields")


def _put(place: Any, name: str, value: Any, path: str) -> None:
    if isinstance(place, list):
        items = cast("list[Any]", place)
        items[_index(items, name, path)] = value
    elif isinstance(place, dict):
        place[name] = value
    else:
        raise ValueError(f"-s: {path} is of type {type(place).__name__} and has no fields")


def _index(items: list[Any], name: str, path: str) -> int:
    """The index of a list entry, given by its number or by its ``name`` (of a layer)."""
    for number, item in enumerate(items):
        if isinstance(item, dict) and cast("dict[str, Any]", item).get("name") == name:
            return number
    if name.isascii() and name.isdigit() and int(name) < len(items):
        return int(name)
    raise ValueError(f"-s: {path}: none of the {len(items)} entries is {name!r}")
