"""The level of each line that a process prints: debug, info, warning or error.

A line has the level that it states, in one of the usual formats: Python's ``logging`` and
``warnings``, glog and torch's C++ code, NCCL, structured JSON. A traceback is ``error`` from its
first to its last line. Any other line is ``info``, on stdout and on stderr.
"""

import re
from collections.abc import Sequence
from typing import Any

from glasshouse.events import LogLevel

_HEAD_CHARACTERS = 500
"""A level is stated within this many characters, which also bounds the time of each pattern."""
_WORDS: dict[str, LogLevel] = {
    **dict.fromkeys(("TRACE", "DEBUG", "VERBOSE"), "debug"),
    **dict.fromkeys(("INFO", "NOTICE"), "info"),
    **dict.fromkeys(("WARN", "WARNING"), "warning"),
    **dict.fromkeys(("ERROR", "CRITICAL", "FATAL", "EXCEPTION", "SEVERE"), "error"),
}
_LETTERS: dict[str, LogLevel] = {
    **dict.fromkeys("DV", "debug"),
    "I": "info",
    "W": "warning",
    **dict.fromkeys("EFC", "error"),
}
_ANY = "|".join(_WORDS)
_RANK = re.compile(r"\[(?:rank|default)\d+\]: ?")
"""What torch.distributed and torchrun write before the lines of a rank."""
_GLOG = re.compile(
    r"\[?([DVIWEFC])(?:\d{4}|\d{8}) \d\d:\d\d:\d\d"  # W1125 10:00:00.000000 123 file.cpp:1]
    r"|\[([DVIWEFC]) [^\s:]+:\d+\]"  # [W file.cpp:1]
)
_FIRST_WORD = re.compile(rf"({_ANY})(?=[:\s|]|\]|$)|\[\s*({_ANY})\s*[\]|:]", re.IGNORECASE)
_TIME = re.compile(
    r"[\[(]?(?:\d{4}[-/]\d\d[-/]\d\d[T ,])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[\])]?"
)
_NAMED = re.compile(rf"[\w.]+ - ({_ANY}) - ")
_SEPARATOR = re.compile(r"[\s\[\]|():,]+(?:- )*")
_WORDS_AFTER_TIME = 4
_JSON = re.compile(r'\{.*"(?:level|levelname|log_level|severity)"\s*:\s*"(\w+)"')
_NCCL = re.compile(r"\bNCCL (TRACE|INFO|WARN|ERROR)\b")
_WARNING = re.compile(r"(?:.*:\d+: )?(?:\w+\.)*\w*Warning: |warning: ")
_TRACEBACK = re.compile(
    r"(?:\s*\+ )?(?:Exception Group )?Traceback \(most recent call last\):"
    r"|Exception (?:ignored in|in thread)|Fatal Python error: "
)
_INNER = re.compile(
    r"[\s|+]|$|During handling of the above|The above exception was|Traceback \(most recent"
    r"|Exception raised from |frame #\d+: |Thread 0x|Current thread 0x|Extension modules: "
)
"""Lines of a traceback besides that of the exception."""
_ERROR = re.compile(
    r"(?:\w+\.)*\w*(?:Error|Exception)(?::|$)|glasshouse\.errors\.[\w.]+: "
    r"|terminate called |Segmentation fault"
)


class LevelReader:
    """Finds the levels of the lines of one stream, in order.

    It remembers whether a traceback or a warning has not ended, because those are several lines.
    """

    def __init__(self) -> None:
        self._block: LogLevel | None = None
        self._named = False
        """The line that names the exception was seen: the next one may end the traceback."""

    def level(self, line: str) -> LogLevel:
        """Return the level of the next line."""
        if not line and self._block is None:
            return "info"
        text = _without_rank(line[:_HEAD_CHARACTERS])
        if _TRACEBACK.match(text):
            self._block, self._named = "error", "Traceback" not in text
            return "error"
        if self._block is not None and self._continues(text):
            return self._block
        self._block = None
        if _ERROR.match(text):
            self._block, self._named = "error", True
            return "error"
        stated = _stated(text)
        if stated is None and _WARNING.match(text):
            self._block = stated = "warning"
        return stated or "info"

    def levels(self, lines: Sequence[str]) -> list[LogLevel]:
        """Return the levels of the next lines."""
        return [self.level(line) for line in lines]

    def _continues(self, text: str) -> bool:
        """Return whether a line belongs to the block before it."""
        if self._block == "warning":  # the line of source that caused it, at most
            self._block = "warning" if text.startswith("  ") else None
            return self._block is not None
        if _INNER.match(text):
            self._named = self._named and not text.startswith(("During", "The above", "Traceback"))
            return True
        if self._named:
            return False
        self._named = True  # the first line that is not indented names the exception
        return True


def levels_of(event: dict[str, Any]) -> list[LogLevel]:
    """Return the level of each line of a ``log`` event.

    Events of earlier releases have none. Their levels are found from their own lines: a traceback
    that began in the event before them is not recognized.
    """
    levels: list[LogLevel] = event.get("levels") or []
    lines = event["lines"]
    return levels if len(levels) == len(lines) else LevelReader().levels(lines)


def _without_rank(text: str) -> str:
    found = _RANK.match(text)
    return text[found.end() :] if found else text


def _stated(text: str) -> LogLevel | None:
    """Return the level that a line states itself, if it does."""
    if found := _GLOG.match(text):
        return _LETTERS[found[1] or found[2]]
    if (found := _FIRST_WORD.match(text)) and (found[2] or found[1].isupper()):
        return _WORDS[(found[1] or found[2]).upper()]
    if found := _NAMED.match(text):
        return _WORDS[found[1]]
    if found := _TIME.match(text):
        return _after_time(text[found.end() :])
    if text.startswith("{") and (found := _JSON.match(text)):
        return _WORDS.get(found[1].upper())
    found = _NCCL.search(text)
    return _WORDS[found[1]] if found else None


def _after_time(text: str) -> LogLevel | None:
    """Return the level among the first words after a time: ``- name - WARNING - text``."""
    bracketed = re.match(rf"\s*\[\s*({_ANY})\s*\]", text, re.IGNORECASE)
    if bracketed:
        return _WORDS[bracketed[1].upper()]
    words = [
        word for word in _SEPARATOR.split(text, _WORDS_AFTER_TIME + 1) if word not in ("", "-")
    ]
    for word in words[:_WORDS_AFTER_TIME]:
        if word in _WORDS:
            return _WORDS[word]
    found = _NCCL.search(text)
    return _WORDS[found[1]] if found else None
