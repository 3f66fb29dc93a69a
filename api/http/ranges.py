"""Parse a byte range from the Range header (RFC 9110, section 14)."""

import re

from starlette.requests import Request

_RANGE = re.compile(r"bytes=\s*(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))\s*", re.IGNORECASE)


class Unsatisfiable(Exception):
    """The range starts beyond the end."""


def wanted(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """Return the first byte and the one after the last; None to send the whole content.

    Several ranges, other units and unreadable headers get the whole content, as the RFC allows. So
    does a range of content that has changed, according to ``If-Range``.

    Raises:
        Unsatisfiable: The range starts beyond the end.
    """
    asked = request.headers.get("range")
    found = None if asked is None else _RANGE.fullmatch(asked)
    if found is None or request.headers.get("if-range", tag) != tag:
        return None
    first, last, suffix = found.groups()
    if suffix is not None:
        begin, end = max(0, size - int(suffix)), size
    else:
        begin, end = int(first), size if last is None else min(size, int(last) + 1)
        if last is not None and int(last) < begin:
            return None
    if begin >= size or begin >= end:
        raise Unsatisfiable
    return begin, end
