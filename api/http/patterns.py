"""Regular expressions from the network, matched in linear time by RE2.

``re`` backtracks: ``(a+)+$`` would not return within a lifetime. RE2 has no look-around and no back
references. It releases the interpreter while it matches, so the event loop continues to run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import re2 as untyped_re2  # pyright: ignore[reportMissingTypeStubs]

from api.http.answers import bad_parameter

re2: Any = untyped_re2
MAX_MEMORY_BYTES = 1 << 20
"""Limits the size of a compiled pattern to about 16,000 instructions."""
_UNCLOSED, _UNOPENED, _NO_BRACKET, _TRAILING, _TOO_LARGE = (
    "missing )",
    "unexpected )",
    "missing ]",
    "trailing \\",
    "pattern too large - compile failed",
)
_FIXES = {
    _UNCLOSED: r"close the group with ')', or write '\(' for the character",
    _UNOPENED: r"remove the ')', or write '\)' for the character",
    _NO_BRACKET: r"close the set with ']', or write '\[' for the character",
    _TRAILING: r"write '\\' for the character",
    _TOO_LARGE: "use fewer and smaller repetitions",
    "no argument for repetition operator": r"put what repeats before it, or write '\' before it "
    "for the character",
    "bad repetition operator": "put the part with the first repetition into a group",
    "invalid repetition size": "a count is at most 1000, and so is the product of nested counts",
    "invalid perl operator": "look-around and conditions are not supported; use a plain group",
    "invalid escape sequence": r"back references and Python's \Z are not supported (use \z); "
    r"write '\\' for a backslash",
    "invalid character class range": "a range is from the lower to the higher character; named "
    r"sets are \d, \w, \s, \pL or [[:alpha:]]",
    "invalid named capture group": "a group's name is written (?P<name>…) and is a word",
}
Search = Callable[[bytes], bool]


class _Refusal(NamedTuple):
    """An error of RE2."""

    kind: str
    part: str
    """The part of the pattern that is wrong; for some kinds the whole pattern."""


def compiled(name: str, pattern: str) -> Search:
    """Compile the value of a query parameter. Return whether UTF-8 bytes contain a match.

    Raises:
        InvalidRequest: RE2 does not take it. The error has the position and the fix.
    """
    regex = _compile(pattern)
    if not isinstance(regex, _Refusal):
        return lambda line: regex.search(line) is not None
    fix = _FIXES.get(regex.kind, "see https://github.com/google/re2/wiki/Syntax")
    position = _position(pattern, regex)
    part = f" '{regex.part[:50]}'" if regex.part not in ("", pattern) else ""
    where = "" if position is None else f" at position {position} (the first is 0)"
    raise bad_parameter(name, f"{regex.kind}{part}{where}; {fix}.", "invalid_pattern")


def _compile(pattern: str) -> Any:
    """Return a compiled pattern or a refusal."""
    options = re2.Options()
    options.max_mem = MAX_MEMORY_BYTES
    options.never_capture = True
    options.log_errors = False
    try:
        return re2.compile(pattern.encode("utf-8", "replace"), options)
    except re2.error as error:
        said: bytes = error.args[0]
    finally:
        re2.purge()  # its cache would keep the state machines of 128 patterns
    kind, _, part = said.decode("utf-8", "replace").partition(": ")
    return _Refusal(kind, part)


def _position(pattern: str, refusal: _Refusal) -> int | None:
    """Return the character at which a pattern is wrong; None if that is no single place.

    RE2 says what is wrong but not where. It reads from left to right, so the shortest beginning
    of the pattern that has the same error ends with the part that is wrong.
    """
    kind = refusal.kind
    if kind == _TOO_LARGE:
        return None
    if kind == _UNCLOSED:
        return _unclosed(pattern)
    if kind in (_NO_BRACKET, _TRAILING):
        return len(pattern) - max(1, len(refusal.part))
    low, high = 1, len(pattern)
    while low < high:
        middle = (low + high) // 2
        shorter = _compile(pattern[:middle])
        if isinstance(shorter, _Refusal) and (
            shorter == refusal or kind == shorter.kind == _UNOPENED
        ):
            high = middle
        else:
            low = middle + 1
    return low - 1 if kind == _UNOPENED else pattern.rfind(refusal.part, 0, low)


def _unclosed(pattern: str) -> int:
    """Return the place of the last group that is not closed."""
    opened = [0]
    place = 0
    while place < len(pattern):
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            end = pattern.find("]", place + (3 if pattern[place + 1 : place + 2] == "^" else 2))
            place = max(place, end)
        elif pattern[place] == "(":
            opened.append(place)
        elif pattern[place] == ")":
            opened.pop()
        place += 1
    return opened[-1]
