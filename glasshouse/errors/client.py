"""Errors that the client raises: error responses, failed jobs, modules that cannot be traced."""

from collections.abc import Generator
from typing import Any, ClassVar

from glasshouse.errors.base import FieldProblem, GlasshouseError


class APIError(GlasshouseError):
    """The service is unreachable or responded with an error."""


class APIConnectionError(APIError):
    """The service is unreachable."""


class APITimeoutError(APIConnectionError):
    """The service did not respond in time."""


def _items(problem: dict[str, Any]) -> list[dict[str, Any]]:
    return problem.get("errors") or []


class APIStatusError(APIError):
    """The service responded with an error status."""

    status: ClassVar[int | None] = None

    def __init__(self, detail: str, *, status_code: int, problem: dict[str, Any]) -> None:
        lines = [detail]
        places = [
            str(FieldProblem(item.get("pointer", ""), item.get("detail", ""), ""))
            for item in _items(problem)
        ]
        lines.extend(f"  {place}" for place in places if place != detail)
        if problem.get("hint"):
            lines.append(f"  hint: {problem['hint']}")
        super().__init__("\n".join(lines))
        self.status_code = status_code
        self.problem = problem
        """The whole problem document."""
        self.retry_after_s: float | None = None
        """Seconds to wait before the next try, from ``Retry-After``; None if it is not set."""

    @property
    def code(self) -> str | None:
        """The problem's stable code."""
        return self.problem.get("code")

    @property
    def request_id(self) -> str | None:
        """The id to quote when asking for help."""
        return self.problem.get("request_id")

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return bool(self.problem.get("retryable"))

    @staticmethod
    def of(status_code: int, problem: dict[str, Any]) -> "APIStatusError":
        """Create an error of the class for a status."""
        known = {cls.status: cls for cls in _all_below(APIStatusError)}
        fallback = InternalServerError if status_code >= 500 else BadRequestError
        cls = known.get(status_code, fallback)
        detail = problem.get("detail") or problem.get("title") or f"HTTP status {status_code}"
        return cls(str(detail), status_code=status_code, problem=problem)


def _all_below(cls: type[APIStatusError]) -> Generator[type[APIStatusError]]:
    for below in cls.__subclasses__():
        yield below
        yield from _all_below(below)


class BadRequestError(APIStatusError):
    """400: the request could not be read."""

    status = 400


class MethodNotAllowedError(BadRequestError):
    """405: this path does not support this method."""

    status = 405


class NotAcceptableError(BadRequestError):
    """406: the requested response format is not supported."""

    status = 406


class RequestTimeoutError(BadRequestError):
    """408: the request was not received completely in time."""

    status = 408


class MisdirectedRequestError(BadRequestError):
    """421: the service does not serve the host in the address."""

    status = 421


class HeadersTooLargeError(BadRequestError):
    """431: the request headers are larger than the limit."""

    status = 431


class AuthenticationError(APIStatusError):
    """401: the API key is missing or invalid."""

    status = 401


class PermissionDeniedError(APIStatusError):
    """403: the API key does not have the required scope."""

    status = 403


class NotFoundError(APIStatusError):
    """404: the resource does not exist, or belongs to another owner."""

    status = 404


class ConflictError(APIStatusError):
    """409: the state of the resource does not allow this."""

    status = 409


class PreconditionFailedError(APIStatusError):
    """412: the resource has changed in the meantime."""

    status = 412


class PayloadTooLargeError(APIStatusError):
    """413: the body is larger than the limit."""

    status = 413


class UnsupportedMediaError(APIStatusError):
    """415: the body has the wrong media type."""

    status = 415


class UnprocessableEntityError(APIStatusError):
    """422: the request is well-formed but invalid."""

    status = 422


class RateLimitError(APIStatusError):
    """429: too many requests."""

    status = 429


class InternalServerError(APIStatusError):
    """500: an unexpected error in the service."""

    status = 500


class BadGatewayError(InternalServerError):
    """502: a proxy received no valid response from the service."""

    status = 502


class GatewayTimeoutError(InternalServerError):
    """504: a proxy received no response from the service in time."""

    status = 504


class ServiceUnavailableError(APIStatusError):
    """503: the service is temporarily unavailable."""

    status = 503


class CannotTrace(GlasshouseError):
    """A module does something that cannot be expressed as a graph of layers."""

    def __init__(
        self,
        reason: str,
        /,
        *,
        file: str | None = None,
        line: int | None = None,
        source: str | None = None,
    ) -> None:
        where = "" if file is None else f"{file}:{line}: "
        shown = "" if source is None else f"\n    {source}"
        super().__init__(f"{where}{reason}{shown}")
        self.reason = reason
        self.file = file
        """The file of the user's code that cannot be traced; None if it is not known."""
        self.line = line
        """The line in that file."""
        self.source = source
        """The text of the line."""


_WITHOUT_LOG = ("data", "nonfinite")
"""Categories of failures whose message is complete, so that the log is not shown."""


class JobFailed(GlasshouseError):
    """The job failed."""

    def __init__(self, job_id: str, error: dict[str, Any]) -> None:
        where = ", ".join(
            f"{key} {error[key]}" for key in ("rank", "layer", "step") if error.get(key) is not None
        )
        lines = [f"{job_id} failed: {error.get('message', '')}" + (f" ({where})" if where else "")]
        if error.get("hint"):
            lines.append(f"hint: {error['hint']}")
        if error.get("log_tail") and error.get("category") not in _WITHOUT_LOG:
            lines.append(f"last lines of the log:\n{error['log_tail']}")
        super().__init__("\n".join(lines))
        self.job_id = job_id
        self.error = error
        """The ``error`` of the job, as in ``GET /jobs/{id}``."""


class JobCancelled(GlasshouseError):
    """The job was canceled."""


class WaitTimeout(GlasshouseError):
    """The wait timed out. The job is not canceled."""
