"""Detect whether the first row of a table names its columns. Handles texts only.

A column of numbers settles it: a header has a name above the numbers. In a table with texts only,
the first row counts as names if each of its cells looks like a name, all are unique, and none
occurs again in its column.
"""

import re
from collections.abc import Sequence

MAX_NAME_LENGTH = 64
MAX_NAME_WORDS = 4
_NAME = re.compile(r"[^\W\d](?:[\w .:/()\[\]%#&+-]*[\w)\]%])?")
"""Starts with a letter or an underscore, does not end like a sentence, has no comma, quote or @."""
_VALUES = frozenset(
    {"na", "n/a", "nan", "null", "none", "nil", "missing", "unknown", "true", "false", "yes", "no"}
)
"""Words that are values, even if they look like names."""
_GAPS = frozenset({"na", "n/a", "null", "none", "nil", "missing", "unknown", "?", "-", "."})


def is_gap(cell: str) -> bool:
    """Whether a cell marks a missing value, so it is not a name above a column of numbers."""
    return cell.strip().casefold() in _GAPS


def is_name(cell: str) -> bool:
    """Whether a cell looks like a column name: one or a few words, and not a sentence."""
    text = cell.strip()
    return (
        len(text) <= MAX_NAME_LENGTH
        and len(text.split()) <= MAX_NAME_WORDS
        and text.casefold() not in _VALUES
        and _NAME.fullmatch(text) is not None
    )


def why_no_names(first: Sequence[str], recurring: Sequence[bool]) -> str | None:
    """Explain why the first row of a table of texts is data; None: it names the columns.

    Args:
        first: its cells. Empty ones are ignored, as above the index of a data frame.
        recurring: for each cell, whether its column contains the same text again.
    """
    named = [cell.strip() for cell in first if cell.strip()]
    if not named:
        return "it is empty"
    folded = [cell.casefold() for cell in named]
    for number, cell in enumerate(named):
        if not is_name(cell):
            return f"{cell[:40]!r} does not look like a column name"
        if folded.index(folded[number]) != number:
            return f"{cell[:40]!r} stands there twice"
    for cell, recurs in zip(first, recurring, strict=True):
        if recurs and cell.strip():
            return f"{cell.strip()[:40]!r} occurs again in its column"
    return None
