"""Probe specs from the arguments of `Job.probe`."""

from collections.abc import Sequence
from typing import Any

_NULL = ("max_overhead",)
"""Fields for which None is a value and not the default."""


def as_probe(
    layers: str | Sequence[str], kinds: str | Sequence[str], want: str | Sequence[str], when: Any
) -> dict[str, Any]:
    """Build a probe as in a spec; a single name becomes a list of one."""
    named = {"layers": layers, "kinds": kinds, "want": want}
    lists = {key: [item] if isinstance(item, str) else list(item) for key, item in named.items()}
    given = {key: value for key, value in when.items() if value is not None or key in _NULL}
    if not given.keys() & {"every", "at", "on"}:
        given["every"] = 1
    return {**lists, **given}
