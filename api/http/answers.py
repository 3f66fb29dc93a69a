"""Write responses: JSON with NaN and Inf by name, lists, entity tags."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Query, Request
from starlette.responses import Response

from glasshouse import jsonio
from glasshouse.errors import FieldProblem, InvalidCursor, InvalidRequest, PreconditionFailed
from glasshouse.ids import is_id

MAX_LIMIT = 1000
_EXTRA = re.compile(r"\+[^\"]*(?=\")")


class Json(Response):
    """A JSON response. NaN and infinities become their names, never null and never a 500."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode as JSON."""
        return jsonio.dumps(content).encode("utf-8", "replace")


def time_text(value: datetime | None) -> str | None:
    """Format a time as RFC 3339 in UTC with milliseconds."""
    if value is None:
        return None
    return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z"


class ListPage(NamedTuple):
    """The requested part of a list."""

    limit: int
    after: str | None
    """The opaque cursor from the previous page."""

    def after_id(self, prefix: str) -> str | None:
        """Return the cursor of a list that is ordered by id.

        Raises:
            InvalidCursor: It is not a cursor from such a list.
        """
        if self.after is not None and not is_id(self.after, prefix):
            raise InvalidCursor("The value of 'after' is not a cursor that a list gave as 'next'.")
        return self.after


async def read_page(
    limit: Annotated[
        int,
        Query(ge=1, description="Entries per page. The maximum is 1000."),
    ] = 50,
    after: Annotated[
        str | None,
        Query(max_length=200, description="The cursor `next` of the previous page."),
    ] = None,
) -> ListPage:
    """Read ``?limit=&after=``."""
    return ListPage(min(limit, MAX_LIMIT), after)


Paged = Annotated[ListPage, Depends(read_page)]


def list_of(data: Sequence[Any], *, cursor: str | None) -> dict[str, Any]:
    """Return the envelope of a list. ``cursor`` is None on the last page."""
    return {"object": "list", "data": list(data), "has_more": cursor is not None, "next": cursor}


def page_of(rows: Sequence[Any], page: ListPage, entries: Sequence[Any]) -> dict[str, Any]:
    """Return the envelope of a list ordered by id, from up to ``limit + 1`` rows."""
    more = len(rows) > page.limit
    cursor = rows[page.limit - 1].id if more else None
    return list_of(entries[: page.limit], cursor=cursor)


def etag(*parts: object, extra: str | None = None) -> str:
    """Return a strong entity tag.

    ``extra``: of a part of the representation that is none of the resource's own state, so that
    ``If-Match`` ignores it.
    """
    end = "" if extra is None else f"+{extra}"
    return '"' + "-".join(str(part) for part in parts) + end + '"'


def _named(header: str) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}


def is_fresh(request: Request, tag: str) -> bool:
    """Return whether the client already has this version (``If-None-Match``)."""
    header = request.headers.get("if-none-match")
    return header is not None and (header.strip() == "*" or tag in _named(header))


def not_modified(tag: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return 304 with the tag."""
    return Response(
        status_code=304,
        headers={"ETag": tag, "Cache-Control": "private, no-cache"} | dict(headers or {}),
    )


def tagged(
    request: Request, content: Any, tag: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the content with its tag, or 304 if the client already has it."""
    if is_fresh(request, tag):
        return not_modified(tag, headers)
    kept = {"ETag": tag, "Cache-Control": "private, no-cache"} | dict(headers or {})
    return Json(content, headers=kept)


def check_match(request: Request, tag: str) -> None:
    """Check ``If-Match``.

    Raises:
        PreconditionFailed: The resource has another version now.
    """
    header = request.headers.get("if-match")
    if header is None or header.strip() == "*":
        return
    if _EXTRA.sub("", tag) not in {_EXTRA.sub("", one) for one in _named(header)}:
        raise PreconditionFailed(
            f"The version is {tag} now, not {header.strip()[:200]}; read it again."
        )


def bad_parameter(name: str, detail: str, code: str = "invalid_value") -> InvalidRequest:
    """Return the 422 error of a query parameter."""
    return InvalidRequest(
        f"The query parameter {name!r} is wrong: {detail}",
        problems=[FieldProblem(f"/query/{name}", detail, code)],
    )
