"""The text of a numpy slice, such as ``0:4,:,::2``, read strictly."""

import re
from types import EllipsisType

Index = int | slice | EllipsisType
MAX_AXES = 32
MAX_CHARACTERS = 200
_INTEGER = r"-?[0-9]{1,15}"
_PART = re.compile(
    rf"(?P<index>{_INTEGER})"
    rf"|(?P<start>{_INTEGER})?:(?P<stop>{_INTEGER})?(?::(?P<step>{_INTEGER})?)?"
)


class BadSlice(ValueError):
    """The text is not a slice, or the slice is out of range."""


def read(text: str) -> tuple[Index, ...]:
    """Parse a slice without a shape.

    Raises:
        BadSlice: it has another form.
    """
    parts = [part.strip(" ") for part in text.split(",")]
    if len(parts) > MAX_AXES:
        raise _wrong(f"more than {MAX_AXES} axes")
    found = tuple(_part(part) for part in parts)
    if found.count(...) > 1:
        raise _wrong("... may stand only once")
    return found


def parse(text: str, shape: tuple[int, ...]) -> tuple[Index, ...]:
    """Parse a slice of a tensor of this shape; ranges are clipped to the shape, as in numpy.

    Raises:
        BadSlice: it has another form, too many axes, an index out of range, or a range that has
            nothing of its axis.
    """
    found = read(text)
    for index, (axis, size) in zip(spelt_out(found, len(shape)), enumerate(shape), strict=True):
        where = f"axis {axis}, which has size {size}"
        if isinstance(index, int):
            if not -size <= index < size:
                raise _wrong(f"index {index} is out of range for {where}")
        elif size and not range(*index.indices(size)):
            raise _wrong(f"{_shown(index)} has nothing of {where}")
    return found


def _shown(index: slice) -> str:
    parts = (
        [index.start, index.stop] if index.step is None else [index.start, index.stop, index.step]
    )
    return ":".join("" if part is None else str(part) for part in parts)


def spelt_out(index: tuple[Index, ...], num_axes: int) -> list[int | slice]:
    """One index for each axis, without ``...``.

    Raises:
        BadSlice: there are more of them than axes.
    """
    dots = [place for place, item in enumerate(index) if item is Ellipsis]
    num_missing = num_axes - (len(index) - len(dots))
    if num_missing < 0:
        raise _wrong(f"{len(index) - len(dots)} axes, but the tensor has {num_axes}")
    place = dots[0] if dots else len(index)
    whole = [slice(None)] * num_missing
    given = [item for item in index if not isinstance(item, EllipsisType)]
    return [*given[:place], *whole, *given[place:]]


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


def _wrong(detail: str) -> BadSlice:
    return BadSlice(f"{detail}; write it as in numpy, e.g. 0:4,:,::2")
