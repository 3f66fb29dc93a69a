"""Requests of the client: retry rules and the errors of responses.

By default, these are retried at most twice: connection errors, 408, 429, 502 and 504; 409 and 503
only if the problem has ``retryable``. A creating POST sends the same Idempotency-Key each time.
"""

import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast
from urllib.parse import parse_qsl

import httpx2

from glasshouse import jsonio
from glasshouse.errors import APIStatusError
from glasshouse.spec.model_names import ModelReference, parse_model_reference

API = "/api/v1"
MAX_RETRY_AFTER_S = 120.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 8.0
ANSWER_S = 5.0
"""How much longer than the service the client waits for its answer that the time is up."""
_LEAST_S = 0.001
_ALWAYS_RETRIED = frozenset({408, 429, 502, 504})
_RETRIED_IF_RETRYABLE = frozenset({409, 503})

_ID = re.compile(r"[\w.~@:-]+")

Body = bytes | Callable[[], Iterable[bytes]]
"""Bytes, or a function that reopens the stream for each try."""
Params = Mapping[str, Any]
Primitive = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Request:
    """One request, which may be sent several times."""

    method: str
    path: str
    """The path, such as ``/api/v1/jobs``."""
    params: Params = field(default_factory=dict[str, Any])
    """Query parameters. None is skipped; a list repeats the parameter."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Body | None = None
    timeout_s: float | None = None
    """The read timeout, in seconds. None: the timeout of the client."""
    within_s: float | None = None
    """The time of all tries together, in seconds. Each sends what is left as ``timeout_s``, so that
    the service does not compute what nobody waits for. None: no limit."""

    @classmethod
    def creating(cls, path: str, body: Body, media_type: str, params: Params) -> "Request":
        """Build a POST with an idempotency key, which creates one resource even if retried."""
        headers = {"Content-Type": media_type, "Idempotency-Key": uuid.uuid4().hex}
        return cls("POST", path, params, headers, body)


def timed(request: Request, until: float | None) -> Request:
    """Return the request for a try that must end ``until``, by ``time.monotonic``."""
    if until is None:
        return request
    left_s = max(_LEAST_S, until - time.monotonic())
    params = {**request.params, "timeout_s": round(left_s, 3)}
    return replace(request, params=params, timeout_s=left_s + ANSWER_S)


def backoff(attempt: int) -> float:
    """Seconds to wait after a failed try: 0.5 s doubling to 8 s, minus up to 25 % jitter."""
    return min(FIRST_DELAY_S * 2**attempt, MAX_DELAY_S) * random.uniform(0.75, 1.0)  # noqa: S311


def with_json(request: Request, body: Any, media_type: str = "application/json") -> Request:
    """Return the request with a JSON body. None: without a body."""
    if body is None:
        return request
    headers = {**request.headers, "Content-Type": media_type}
    return replace(request, headers=headers, body=jsonio.dumps(body).encode())


def query(params: Params) -> list[tuple[str, Primitive]]:
    """The query parameters as one pair per value."""
    pairs: list[tuple[str, Primitive]] = []
    for name, value in params.items():
        items = cast("Sequence[Any]", value if isinstance(value, (list, tuple)) else [value])
        pairs.extend((name, item) for item in items if item is not None)
    return pairs


def address_of(path: str, params: Params) -> tuple[str, list[tuple[str, Primitive]]]:
    """Split the query off a path and merge it with the parameters."""
    bare, _, written = path.partition("?")
    return bare, [*parse_qsl(written, keep_blank_values=True), *query(params)]


def id_in_path(name: str, what: str) -> str:
    """Check an id that becomes part of a path.

    Raises:
        ValueError: it is not an id. A slash or a question mark would change the path.
    """
    if _ID.fullmatch(name):
        return name
    more = ""
    if what == "dataset":
        more = f". To use a file, upload it: client.datasets.upload({name!r})"
    raise ValueError(f"{name!r} is not a valid {what} id{more}")


def model_in_path(reference: str) -> ModelReference:
    """Read a reference to a version of a model that becomes part of a path.

    Raises:
        ValueError: it is none. A slash or a question mark would change the path.
    """
    wanted = parse_model_reference(reference)
    if wanted is None:
        detail = f"{reference!r} is no reference to a model: write name, name@alias or name:version"
        raise ValueError(detail)
    return wanted


def status_error(response: httpx2.Response) -> APIStatusError:
    """The error for a response whose body has been read."""
    problem: dict[str, Any] | None = None
    if "json" in response.headers.get("content-type", ""):
        try:
            problem = jsonio.loads(response.content)
        except ValueError:
            problem = None
    if not isinstance(problem, dict):  # for example, the error page of a proxy
        problem = {"title": response.reason_phrase, "status": response.status_code}
    named = response.headers.get("x-request-id")
    if named is not None:  # also set for responses that are not problem documents
        problem = {"request_id": named, **problem}
    error = APIStatusError.of(response.status_code, problem)
    error.retry_after_s = _retry_after(response.headers.get("retry-after"))
    return error


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number or an HTTP date."""
    if not value:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def wait_after(error: APIStatusError, attempt: int) -> float | None:
    """Seconds until the next try; None if the request must not be retried."""
    status = error.status_code
    if status not in _ALWAYS_RETRIED and not (status in _RETRIED_IF_RETRYABLE and error.retryable):
        return None
    if error.retry_after_s is None:
        return backoff(attempt)
    return error.retry_after_s if error.retry_after_s <= MAX_RETRY_AFTER_S else None
