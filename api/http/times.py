"""Times in query parameters: an ISO 8601 time, or how long ago."""

import re
from datetime import UTC, datetime, timedelta

from api.http.answers import bad_parameter

_AGO = re.compile(r"(?:[0-9]{1,9}[smhdw])+", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_LOST_PLUS = re.compile(r"(T.*) ([0-9]{2}:?[0-9]{2})")


def time_of(name: str, text: str, now: datetime) -> datetime:
    """Return the time that a query parameter names, in UTC.

    ``2026-11-25T10:00:00Z`` is a time; without an offset it is UTC. ``10m``, ``2h30m`` and ``1d``
    are so long before ``now``.

    Raises:
        InvalidRequest: It is neither.
    """
    try:
        if _AGO.fullmatch(text):
            parts = re.findall(r"([0-9]+)([smhdw])", text)
            return now - sum(
                (timedelta(**{_UNITS[unit]: int(number)}) for number, unit in parts), timedelta()
            )
        # the '+' of an offset means a space in a URL
        found = datetime.fromisoformat(_LOST_PLUS.sub(r"\1+\2", text))
        utc = found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC)
        utc.timestamp()
    except (ValueError, OverflowError):
        raise bad_parameter(
            name,
            f"{text[:100]!r} is no time; write an ISO 8601 time such as 2026-01-31T10:00:00Z, or "
            "how long ago, such as 10m, 2h30m or 1d.",
        ) from None
    return utc
