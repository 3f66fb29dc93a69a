"""The text of a numpy slice, such as ``0:4,:,::2``, read strictly. Pure."""

import re
from types import EllipsisType

from api.answers import bad_parameter
from glasshouse.errors import InvalidRequest

Index = int | slice | EllipsisType
MAX_AXES = 32
_INTEGER = r"-?[0-9]{1,15}"
_PART = re.compile(
    rf"(?P<index>{_INTEGER})"
    rf"|(?P<start>{_INTEGER})?:(?P<stop>{_INTEGER})?(?::(?P<step>{_INTEGER})?)?"
)


def parse(text: str, shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Read a slice of a tensor of this shape; a range that is too long is cut, as in numpy.

    Raises:
        InvalidRequest: it has another form, too many axes, or an index out of range.
    """
    parts = [part.strip(" ") for part in text.split(",")]
    if len(parts) > MAX_AXES:
        raise _wrong(f"more than {MAX_AXES} axes")
    found = tuple(_part(part) for part in parts)
    dots = [place for place, index in enumerate(found) if index is Ellipsis]
    if len(dots) > 1:
        raise _wrong("... may stand only once")
    if len(found) - len(dots) > len(shape):
        raise _wrong(f"{len(found) - len(dots)} axes, but the tensor has {len(shape)}")
    for place, index in enumerate(found):
        if isinstance(index, int):
            after_dots = bool(dots) and place > dots[0]
            axis = len(shape) - (len(found) - place) if after_dots else place
            _check(index, axis, shape[axis])
    return found


def _part(text: str) -> Index:
    if text == "...":
        return Ellipsis
    match = _PART.fullmatch(text)
    if match is None:
        raise _wrong(f"{text[:40]!r} is not a number, start:stop, or start:stop:step")
    if match["index"] is not None:
        return int(match["index"])
    start, stop, step = (
        None if match[name] is None else int(match[name]) for name in ("start", "stop", "step")
    )
    if step == 0:
        raise _wrong("a step may not be 0")
    return slice(start, stop, step)


def _check(index: int, axis: int, size: int) -> None:
    if not -size <= index < size:
        raise _wrong(f"index {index} is out of range for axis {axis}, which has size {size}")


def _wrong(detail: str) -> InvalidRequest:
    return bad_parameter("slice", f"{detail}; write it as in numpy, e.g. 0:4,:,::2")
