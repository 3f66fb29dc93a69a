"""One stretch of an answer's bytes, as the request's Range asks for it (RFC 9110, section 14)."""

import re

from starlette.requests import Request

_RANGE = re.compile(r"bytes=\s*(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))\s*", re.IGNORECASE)


class Unsatisfiable(Exception):
    """The range lies behind the end."""


def wanted(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """The first byte, and the one behind the last; None where the whole is to be sent.

    Several ranges at once, units that are not bytes and what cannot be read are answered with the
    whole, as the RFC allows. So is a range of something that has changed, by ``If-Range``.

    Raises:
        Unsatisfiable: the range lies behind the end.
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
