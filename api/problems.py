"""Every failure as an RFC 9457 problem document. The only place where errors become HTTP."""

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.answers import Json
from glasshouse import errors
from glasshouse.errors import FieldProblem, ServiceError

# The union members that pydantic names in the place of an error, but that no request contains.
_UNION_TAGS = {"train", "infer", "dense", "integer"}
_TYPE_NAME = re.compile(r"[\[\]]|^constrained-|^literal|^json-")
_BY_STATUS: dict[int, type[ServiceError]] = {
    400: errors.BadRequest,
    401: errors.KeyMissing,
    403: errors.Forbidden,
    404: errors.RouteNotFound,
    405: errors.MethodNotAllowed,
    406: errors.NotAcceptable,
    413: errors.PayloadTooLarge,
    415: errors.UnsupportedMedia,
    503: errors.Unavailable,
}


class Problem(Response):
    """A problem document."""

    media_type = "application/problem+json"


def problem_of(error: ServiceError, request_id: str) -> dict[str, Any]:
    """The members of the document."""
    title = (type(error).__doc__ or "").strip().splitlines()[0]
    document: dict[str, Any] = {
        "type": f"/errors/{error.code}",
        "title": title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        "request_id": request_id,
        "retryable": error.retryable,
    }
    if error.problems:
        document["errors"] = [problem.as_dict() for problem in error.problems]
    if error.advice:
        document["hint"] = error.advice
    return error.context | document


def answer(error: ServiceError, request_id: str) -> Response:
    """The answer to a request that failed."""
    headers: dict[str, str] = {}
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status in {429, 503}:
        retry_after_s = 1
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if "allow" in error.context:
        headers["Allow"] = ", ".join(error.context["allow"])
    return Problem(
        Json(problem_of(error, request_id)).body, status_code=error.status, headers=headers
    )


def pointer(place: Sequence[int | str]) -> str:
    """A JSON Pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in place)


def field_problems(found: Sequence[Any], body: Any = None) -> list[FieldProblem]:
    """What pydantic says, by JSON Pointer into the body."""
    return [
        FieldProblem(
            pointer(in_body(_place(entry), body)),
            _detail(entry),
            str(entry["type"]),
        )
        for entry in found
    ]


def _place(entry: Any) -> list[int | str]:
    place = list(entry["loc"])
    if str(entry["type"]).startswith("union_tag"):  # the fault is in the field that decides
        place.append(str(entry["ctx"]["discriminator"]).strip("'"))
    return place


def in_body(place: Sequence[int | str], body: Any) -> list[int | str]:
    """Leave out of pydantic's place what is not in the body: the tags of its unions.

    A part stays when the body has it there; one that the body lacks stays too when it is a
    missing field and not a known tag.
    """
    kept: list[int | str] = []
    here: Any = body
    for part in place:
        if _has(here, part):
            here = here[part]
        elif part in _UNION_TAGS or part == "[key]" or _is_type_name(part):
            continue
        else:
            here = None
        kept.append(part)
    return kept


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)  # pyright: ignore[reportUnknownArgumentType]
    return isinstance(value, dict) and part in value


def _is_type_name(part: int | str) -> bool:
    """Whether pydantic wrote a union's member here (``function-after[…]``, ``constrained-str``)."""
    return (
        isinstance(part, str)
        and re.search(r"[\[\]]|^constrained-|^literal|^json-", part) is not None
    )


def _detail(entry: Any) -> str:
    text = str(entry["msg"]).removeprefix("Value error, ")
    value = entry.get("input")
    if isinstance(value, (str, int, float, bool)) and entry["type"] != "missing":
        shown = repr(value)
        if shown not in text:
            text += f" (got {shown if len(shown) <= 80 else shown[:77] + '…'})"
    return text


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)  # noqa: S101 (registered for this class)
    return answer(error, request_id_of(request.scope))


async def _parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101
    found = [
        FieldProblem(pointer(entry["loc"]), _detail(entry), str(entry["type"]))
        for entry in error.errors()
    ]
    names = ", ".join(problem.pointer for problem in found)
    wrong = errors.InvalidRequest(f"Parameters of the request are wrong: {names}", problems=found)
    return answer(wrong, request_id_of(request.scope))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    cls = _BY_STATUS.get(error.status_code, ServiceError)
    if cls is errors.RouteNotFound:
        return answer(cls("Nothing lives at this path."), request_id_of(request.scope))
    if cls is errors.MethodNotAllowed:
        return _not_allowed(request)
    return answer(cls(str(error.detail)), request_id_of(request.scope))


def _not_allowed(request: Request) -> Response:
    allow = allowed_methods(request.app, request.scope)
    if request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": ", ".join(allow)})
    detail = f"This path takes {', '.join(allow)}, not {request.method[:20]}."
    return answer(errors.MethodNotAllowed(detail, allow=allow), request_id_of(request.scope))


def allowed_methods(app: FastAPI, scope: Any) -> list[str]:
    """The methods that some route has at the path of the request."""
    found: set[str] = set()
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        asked = dict(scope, method=method)
        for router in app.state.routers:
            for route in router.routes:
                match, _ = route.matches(asked)
                if match.value == 2:  # FULL: path and method
                    found.add(method)
    if "GET" in found:
        found.add("HEAD")
    return sorted(found | {"OPTIONS"})


def request_id_of(scope: Any) -> str:
    """The id of the request that is being answered."""
    return str(scope.get("state", {}).get("request_id", ""))


def install(app: FastAPI) -> None:
    """Let the app answer every failure with a problem document."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _parameters)
    app.add_exception_handler(HTTPException, _http)
