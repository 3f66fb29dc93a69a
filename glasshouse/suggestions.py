"""Suggestions for misspelled names: "did you mean Linear?"."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_CUTOFF = 0.7
_TIE = 0.08
"""Names whose similarity is lower than the best match by more than this are not suggested."""
_MOST = 3
_OTHER_WORDS = {
    "learningrate": "lr",
    "learnrate": "lr",
    "gpu": "cuda",
    "kind": "type",
    "class": "type",
    "device": "type",
    "dense": "Linear",
    "fc": "Linear",
    "fullyconnected": "Linear",
    "concat": "cat",
    "concatenate": "cat",
    "params": "args",
    "arguments": "args",
}
"""Words of other libraries and of other places of this API, by what they mean here."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known names most similar to a misspelled one, best first; at most three.

    Upper and lower case, underscores and hyphens make no difference.
    """
    by_form: dict[str, str] = {}
    for item in known:
        by_form.setdefault(_form(item), item)
    wanted = _form(name)
    if wanted in by_form:
        return [by_form[wanted]]
    other = _form(_OTHER_WORDS.get(wanted, ""))
    if other in by_form:
        return [by_form[other]]
    scored = sorted(((_likeness(wanted, form), form) for form in by_form), reverse=True)
    best = scored[0][0] if scored else 0.0
    close = [form for score, form in scored if score >= max(_CUTOFF, best - _TIE)]
    return [by_form[form] for form in close[:_MOST]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean Linear?"``, or "" if no known name is similar."""
    found = nearest(name, known)
    return f"; did you mean {either(found)}?" if found else ""


def either(words: Iterable[str]) -> str:
    """``a, b or c``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _form(name: str) -> str:
    return "".join(char for char in name.lower() if char not in "_- ")


def _likeness(wanted: str, form: str) -> float:
    score = SequenceMatcher(None, wanted, form).ratio()
    is_part = min(len(wanted), len(form)) >= 4 and (wanted in form or form in wanted)
    return max(score, _CUTOFF) if is_part else score
