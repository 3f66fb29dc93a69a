"""Locates the line of the user's code that a graph cannot express."""

import linecache
import re
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from glasshouse.errors import CannotTrace

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')


class Stopped(Exception):
    """A graph cannot express this; the handler adds the location."""


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int


def place_in_text(stack: str | None) -> Place | None:
    """The innermost line of a printed stack that is neither in torch nor in glasshouse."""
    found = [Place(file, int(line)) for file, line in _FRAME.findall(stack or "")]
    return _last_own(found)


def place_in_traceback(trace: TracebackType | None) -> Place | None:
    """The innermost line of a traceback that is neither in torch nor in glasshouse."""
    found: list[Place] = []
    while trace is not None:
        found.append(Place(trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return _last_own(found)


def _last_own(found: list[Place]) -> Place | None:
    own = [place for place in found if not place.file.startswith((*_OURS, "<eval_with_key>"))]
    return own[-1] if own else None


def refusal(reason: str, place: Place | None) -> CannotTrace:
    """The error, with the line of code."""
    if place is None:
        return CannotTrace(reason)
    source = linecache.getline(place.file, place.line).strip() or None
    return CannotTrace(reason, file=place.file, line=place.line, source=source)
