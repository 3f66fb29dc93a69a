"""Media types in requests: what a body is, and what the client accepts."""

from collections.abc import Sequence

from engine.serving.asked import bad


def base_of(content_type: str | None) -> str:
    """Return a media type without its parameters, in lower case."""
    return (content_type or "").partition(";")[0].strip().lower()


def accepted(accept: str | None, offered: Sequence[str]) -> str:
    """Return the offered type that a client prefers; the first one if it has no preference.

    Raises:
        BadRequest: it accepts none (406).
    """
    if not accept or not accept.strip():
        return offered[0]
    weights = [_weight(accept, name) for name in offered]
    best = max(weights)
    if best <= 0:
        detail = f"none of the types in Accept ({accept[:200]!r}) is offered; there are:"
        raise bad(f"{detail} {', '.join(offered)}", "not_acceptable", status=406)
    return offered[weights.index(best)]


def _weight(accept: str, name: str) -> float:
    """Return the weight of a type: that of the most specific range that has it (RFC 9110)."""
    kind = name.partition("/")[0]
    order = {"*/*": 1, f"{kind}/*": 2, name: 3}
    found, weight = 0, 0.0
    for part in accept[:2000].split(","):
        media_range, *parameters = part.strip().lower().split(";")
        rank = order.get(media_range.strip(), 0)
        if rank > found:
            found, weight = rank, _quality(parameters)
    return weight


def _quality(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        key, _, value = parameter.strip().partition("=")
        if key == "q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0
