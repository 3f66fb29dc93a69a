"""Choose a response format from the ``Accept`` header. Pure functions."""

from collections.abc import Mapping

from fastapi import Request

from glasshouse.errors import NotAcceptable


def choose(request: Request, offers: Mapping[str, str]) -> str:
    """Return the format that the client prefers; the first offer without a preference.

    Args:
        request: The request.
        offers: Media type → name of the format, the default first.

    Raises:
        NotAcceptable: The client accepts none of them.
    """
    header = request.headers.get("accept", "").strip()
    if not header:
        return next(iter(offers.values()))
    qualities = _quality_values(header)
    liked = {media: _quality(media, qualities) for media in offers}
    best = max(offers, key=lambda media: liked[media])  # the first one wins a tie
    if liked[best][0] <= 0:
        known = ", ".join(offers)
        raise NotAcceptable(f"This can be had as {known}.", formats=list(offers))
    return offers[best]


def _quality_values(header: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in header.split(","):
        media, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                quality = _number(value.strip())
        found[media] = quality
    return found


def _quality(media: str, qualities: Mapping[str, float]) -> tuple[float, int]:
    """Return the quality of a media type. In a tie, an explicit type beats a wildcard."""
    patterns = (media, media.partition("/")[0] + "/*", "*/*")
    for stars, pattern in enumerate(patterns):
        if pattern in qualities:
            return qualities[pattern], -stars
    return 0.0, 0


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 <= value <= 1.0 else 0.0
