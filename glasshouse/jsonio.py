"""JSON with NaN and Inf as strings, for encoding and decoding.

Plain JSON has no NaN; most encoders write null or fail. Here, the strings "NaN", "Infinity" and
"-Infinity" are allowed wherever a number is.
"""

import json
import math
from typing import Any

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def dumps(value: Any) -> str:
    """Encode compactly; non-finite floats become their strings, keys keep their order."""
    try:
        return _ENCODER.encode(value)
    except ValueError:  # a non-finite float somewhere: rare, so only then is the value walked
        return _ENCODER.encode(named(value))


def named(value: Any) -> Any:
    """Copy a JSON-like value with each non-finite float replaced by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: named(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [named(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def number(value: Any) -> Any:
    """Turn the name of a non-finite number into that number; return anything else unchanged."""
    return NONFINITE.get(value, value) if isinstance(value, str) else value


def numbers(value: Any) -> Any:
    """Copy a document with the names of non-finite numbers turned into numbers."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return number(value)


def loads(text: str | bytes) -> Any:
    """Decode strictly.

    Raises:
        ValueError: the text is not JSON, or holds a bare NaN or Infinity, or a number that
            overflows a double (``1e999``).
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> float:
    raise ValueError(f'{name} is not JSON; write the string "{name}" where it is allowed')


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} does not fit a double")
    return value
