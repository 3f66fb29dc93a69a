"""Which of several formats a client gets, by its ``Accept`` header. Pure."""

from collections.abc import Mapping

from fastapi import Request

from glasshouse.errors import NotAcceptable


def choose(request: Request, offers: Mapping[str, str]) -> str:
    """The offer that the client likes best; the first one when it does not care.

    Args:
        request: what was asked.
        offers: media type → name of the format, the default first.

    Raises:
        NotAcceptable: it takes none of them.
    """
    header = request.headers.get("accept", "").strip()
    if not header:
        return next(iter(offers.values()))
    wishes = _wishes(header)
    liked = {media: _quality(media, wishes) for media in offers}
    best = max(offers, key=lambda media: liked[media])  # the first of equals
    if liked[best][0] <= 0:
        known = ", ".join(offers)
        raise NotAcceptable(f"This can be had as {known}.", formats=list(offers))
    return offers[best]


def _wishes(header: str) -> dict[str, float]:
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


def _quality(media: str, wishes: Mapping[str, float]) -> tuple[float, int]:
    """How much it is liked; of equals, one that is named before one that a star stands for."""
    patterns = (media, media.partition("/")[0] + "/*", "*/*")
    for stars, pattern in enumerate(patterns):
        if pattern in wishes:
            return wishes[pattern], -stars
    return 0.0, 0


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 <= value <= 1.0 else 0.0
