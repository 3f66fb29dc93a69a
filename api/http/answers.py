"""How answers are written: JSON with named non-finite numbers, lists, entity tags."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Query, Request
from starlette.responses import Response

from glasshouse import jsonio
from glasshouse.errors import FieldProblem, InvalidCursor, InvalidRequest, PreconditionFailed
from glasshouse.ids import is_id

MAX_LIMIT = 1000


class Json(Response):
    """A JSON answer; NaN and the infinities become their names, never null and never a 500."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode."""
        return jsonio.dumps(content).encode("utf-8", "replace")


def time_text(value: datetime | None) -> str | None:
    """RFC 3339, UTC, with milliseconds."""
    if value is None:
        return None
    return f"{value:%Y-%m-%dT%H:%M:%S}.{value.microsecond // 1000:03d}Z"


class ListPage(NamedTuple):
    """The part of a list that was asked for."""

    limit: int
    after: str | None
    """The opaque cursor that the last page gave."""

    def after_id(self, prefix: str) -> str | None:
        """The cursor of a list that goes by ids.

        Raises:
            InvalidCursor: it is none of ours.
        """
        if self.after is not None and not is_id(self.after, prefix):
            raise InvalidCursor("The value of 'after' is not a cursor that a list gave as 'next'.")
        return self.after


async def read_page(
    limit: Annotated[
        int,
        Query(ge=1, description="Entries of one answer; more than 1000 is taken as 1000."),
    ] = 50,
    after: Annotated[
        str | None,
        Query(max_length=200, description="The cursor `next` of the answer before."),
    ] = None,
) -> ListPage:
    """Read ``?limit=&after=``."""
    return ListPage(min(limit, MAX_LIMIT), after)


Paged = Annotated[ListPage, Depends(read_page)]


def list_of(data: Sequence[Any], *, cursor: str | None) -> dict[str, Any]:
    """The envelope of every list; ``cursor`` is None at the end."""
    return {"object": "list", "data": list(data), "has_more": cursor is not None, "next": cursor}


def page_of(rows: Sequence[Any], page: ListPage, entries: Sequence[Any]) -> dict[str, Any]:
    """The envelope of a list by id, made of at most ``limit`` of ``limit + 1`` rows found."""
    more = len(rows) > page.limit
    cursor = rows[page.limit - 1].id if more else None
    return list_of(entries[: page.limit], cursor=cursor)


def etag(*parts: object) -> str:
    """A strong entity tag."""
    return '"' + "-".join(str(part) for part in parts) + '"'


def _named(header: str) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}


def is_fresh(request: Request, tag: str) -> bool:
    """Whether the client has this version already (``If-None-Match``)."""
    header = request.headers.get("if-none-match")
    return header is not None and (header.strip() == "*" or tag in _named(header))


def not_modified(tag: str, headers: Mapping[str, str] | None = None) -> Response:
    """304 with the tag."""
    return Response(
        status_code=304,
        headers={"ETag": tag, "Cache-Control": "private, no-cache"} | dict(headers or {}),
    )


def tagged(
    request: Request, content: Any, tag: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The content with its tag, or 304 when the client has it."""
    if is_fresh(request, tag):
        return not_modified(tag, headers)
    kept = {"ETag": tag, "Cache-Control": "private, no-cache"} | dict(headers or {})
    return Json(content, headers=kept)


def check_match(request: Request, tag: str) -> None:
    """Honour ``If-Match``.

    Raises:
        PreconditionFailed: the thing has another version now.
    """
    header = request.headers.get("if-match")
    if header is not None and header.strip() != "*" and tag not in _named(header):
        raise PreconditionFailed(
            f"The version is {tag} now, not {header.strip()[:200]}; read it again."
        )


def bad_parameter(name: str, detail: str, code: str = "invalid_value") -> InvalidRequest:
    """The 422 of a query parameter."""
    return InvalidRequest(
        f"The query parameter {name!r} is wrong: {detail}",
        problems=[FieldProblem(f"/query/{name}", detail, code)],
    )
