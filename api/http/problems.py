"""Convert every error into an RFC 9457 problem document. Only this module maps errors to HTTP."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.http.answers import Json
from glasshouse import errors
from glasshouse.errors import FieldProblem, ServiceError
from glasshouse.spec.error_locations import pointer
from glasshouse.spec.error_messages import said

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
    """Return the members of the document."""
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


def answer(error: ServiceError, scope: Any) -> Response:
    """Return the response for a failed request.

    Args:
        error: what went wrong.
        scope: of the request; empty if it could not be read.
    """
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
    document = problem_of(error, request_id_of(scope))
    if is_inference_protocol(scope.get("path", "")):
        document["error"] = _in_one_text(error)
    return Problem(Json(document).body, status_code=error.status, headers=headers)


def is_inference_protocol(path: str) -> bool:
    """Return whether a path is of the Open Inference Protocol, whose errors have ``error``."""
    return path == "/v2" or path.startswith("/v2/")


def _in_one_text(error: ServiceError) -> str:
    return f"{error.detail} {error.advice}" if error.advice else error.detail


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)  # noqa: S101 (registered for this class)
    return answer(error, request.scope)


async def _parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101
    found = [
        FieldProblem(pointer([*entry["loc"]]), said(entry), str(entry["type"]))
        for entry in error.errors()
    ]
    names = ", ".join(problem.pointer for problem in found)
    wrong = errors.InvalidRequest(f"Parameters of the request are wrong: {names}", problems=found)
    return answer(wrong, request.scope)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    cls = _BY_STATUS.get(error.status_code, ServiceError)
    if cls is errors.RouteNotFound:
        return answer(cls("No route matches this path."), request.scope)
    if cls is errors.MethodNotAllowed:
        return _not_allowed(request)
    return answer(cls(str(error.detail)), request.scope)


def _not_allowed(request: Request) -> Response:
    allow = allowed_methods(request.app, request.scope)
    if request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": ", ".join(allow)})
    detail = f"This path takes {', '.join(allow)}, not {request.method[:20]}."
    return answer(errors.MethodNotAllowed(detail, allow=allow), request.scope)


def allowed_methods(app: FastAPI, scope: Any) -> list[str]:
    """Return the methods that the request's path supports."""
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
    """Return the id of the current request."""
    return str(scope.get("state", {}).get("request_id", ""))


def install(app: FastAPI) -> None:
    """Make the app respond to every error with a problem document."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _parameters)
    app.add_exception_handler(HTTPException, _http)
