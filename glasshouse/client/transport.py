"""One request and its answer: key, timeouts, retries, and errors of the right class.

What is retried, at most twice: connection errors, 408, 429, 502 and 504; 409 and 503 only when
the problem says ``retryable``. A creating POST sends the same Idempotency-Key on each try.
"""

import platform
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx2

import glasshouse
from glasshouse import jsonio
from glasshouse.client.address import Address
from glasshouse.errors import APIConnectionError, APIError, APIStatusError, APITimeoutError

API = "/api/v1"
MAX_RETRY_AFTER_S = 120.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 8.0
_ALWAYS_RETRIED = frozenset({408, 429, 502, 504})
_RETRIED_WHEN_TOLD = frozenset({409, 503})

Body = bytes | Callable[[], Iterable[bytes]]
"""Bytes, or a function that opens the stream of them anew for each try."""
Params = Mapping[str, Any]
Primitive = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Request:
    """One request, which may be sent several times."""

    method: str
    path: str
    """Under the service's address, e.g. ``/api/v1/jobs``."""
    params: Params = field(default_factory=dict[str, Any])
    """None is left out; a list gives the parameter once for each of its items."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Body | None = None
    timeout_s: float | None = None
    """How long to wait for bytes of the answer; None: the client's own."""

    @classmethod
    def creating(cls, path: str, body: Body, media_type: str, params: Params) -> "Request":
        """Make a POST that creates something once, however often it is sent."""
        headers = {"Content-Type": media_type, "Idempotency-Key": uuid.uuid4().hex}
        return cls("POST", path, params, headers, body)


class Transport:
    """Sends requests to one service."""

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float = 60.0,
        max_retries: int = 2,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.address = address
        self.max_retries = max_retries
        self._sleep = sleep
        self._timeout_s = timeout_s
        headers = {
            "User-Agent": f"glasshouse/{glasshouse.__version__} python/{platform.python_version()}",
            "Accept": "application/json",
        }
        if address.api_key:
            headers["Authorization"] = f"Bearer {address.api_key}"
        self._http = httpx2.Client(
            base_url=address.url,
            headers=headers,
            timeout=httpx2.Timeout(timeout_s, connect=5.0),
            trust_env=not address.is_local,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(self, request: Request) -> httpx2.Response:
        """Send a request and read the whole answer; 304 is an answer, not an error.

        Raises:
            APIConnectionError: the service could not be reached, or not in time.
            APIStatusError: it answered with an error.
        """
        with self.open(request) as response:
            response.read()
            return response

    @contextmanager
    def open(self, request: Request) -> Generator[httpx2.Response]:
        """Send a request and give its answer with the body unread. Errors as in `send`."""
        response = self._send_with_retries(request)
        try:
            yield response
        except httpx2.TransportError as cause:
            raise self._connection_error(cause) from cause
        finally:
            response.close()

    def get(self, path: str, params: Params | None = None) -> Any:
        """GET a JSON document."""
        return self.decode(self.send(Request("GET", API + path, params or {})))

    def post(self, path: str, body: Any = None, params: Params | None = None) -> Any:
        """POST an action; what creates something goes through `create`."""
        request = _with_json(Request("POST", API + path, params or {}), body)
        return self.decode(self.send(request))

    def create(self, path: str, body: Any, params: Params | None = None) -> Any:
        """POST something new, once."""
        encoded = jsonio.dumps(body).encode()
        request = Request.creating(API + path, encoded, "application/json", params or {})
        return self.decode(self.send(request))

    def put(self, path: str, body: Any) -> Any:
        """PUT a whole document in the place of another."""
        return self.decode(self.send(_with_json(Request("PUT", API + path), body)))

    def patch(self, path: str, body: Any) -> Any:
        """PATCH with a merge-patch."""
        request = _with_json(Request("PATCH", API + path), body, "application/merge-patch+json")
        return self.decode(self.send(request))

    def delete(self, path: str) -> Any:
        """DELETE; gives what is answered, if anything is."""
        return self.decode(self.send(Request("DELETE", API + path)))

    def pages(self, path: str, params: Params | None = None) -> Generator[dict[str, Any]]:
        """Walk a list from its first page to its last."""
        query = dict(params or {})
        while True:
            page = self.get(path, query)
            yield from page["data"]
            if not page.get("has_more") or page.get("next") is None:
                return
            query["after"] = page["next"]

    def decode(self, response: httpx2.Response) -> Any:
        """Read the JSON of an answer; None when it has no body."""
        if not response.content:
            return None
        try:
            return jsonio.loads(response.content)
        except ValueError as cause:
            kind = response.headers.get("content-type", "no media type")
            raise APIError(
                f"{response.request.url} answered with {kind}, which is not JSON; "
                f"is {self.address.url} the address of a Glasshouse service?"
            ) from cause

    def _send_with_retries(self, request: Request) -> httpx2.Response:
        attempt = 0
        while True:
            try:
                return self._send_once(request)
            except APIStatusError as error:
                wait_s = _wait_after(error, attempt)
                if wait_s is None or attempt >= self.max_retries:
                    raise
            except APIConnectionError:
                if attempt >= self.max_retries:
                    raise
                wait_s = backoff(attempt)
            self._sleep(wait_s)
            attempt += 1

    def _send_once(self, request: Request) -> httpx2.Response:
        body = request.body
        extensions: dict[str, Any] = {}
        if request.timeout_s is not None:
            timeout = httpx2.Timeout(self._timeout_s, connect=5.0, read=request.timeout_s)
            extensions["timeout"] = timeout.as_dict()
        try:
            message = self._http.build_request(
                request.method,
                request.path,
                params=_query(request.params),
                headers=dict(request.headers),
                content=body if body is None or isinstance(body, bytes) else body(),
                extensions=extensions or None,
            )
            response = self._http.send(message, stream=True)
            if response.status_code >= 300 and response.status_code != 304:
                response.read()
                response.close()
                raise _status_error(response)
        except httpx2.TransportError as cause:
            raise self._connection_error(cause) from cause
        return response

    def _connection_error(self, cause: httpx2.TransportError) -> APIConnectionError:
        reason = str(cause) or type(cause).__name__
        if isinstance(cause, httpx2.TimeoutException):
            return APITimeoutError(f"{self.address.url} did not answer in time ({reason})")
        hint = "; is it running? Start it with 'glasshouse up'" if self.address.is_local else ""
        return APIConnectionError(f"{self.address.url} could not be reached ({reason}){hint}")


def backoff(attempt: int) -> float:
    """Seconds to wait after a failed try: 0.5 s doubling to 8 s, less up to a quarter."""
    return min(FIRST_DELAY_S * 2**attempt, MAX_DELAY_S) * random.uniform(0.75, 1.0)  # noqa: S311


def _with_json(request: Request, body: Any, media_type: str = "application/json") -> Request:
    if body is None:
        return request
    headers = {**request.headers, "Content-Type": media_type}
    return replace(request, headers=headers, body=jsonio.dumps(body).encode())


def _query(params: Params) -> list[tuple[str, Primitive]]:
    pairs: list[tuple[str, Primitive]] = []
    for name, value in params.items():
        items = cast("Sequence[Any]", value if isinstance(value, (list, tuple)) else [value])
        pairs.extend((name, item) for item in items if item is not None)
    return pairs


def _status_error(response: httpx2.Response) -> APIStatusError:
    problem: Any = None
    if "json" in response.headers.get("content-type", ""):
        try:
            problem = jsonio.loads(response.content)
        except ValueError:
            problem = None
    if not isinstance(problem, dict):  # a proxy's page, for one
        problem = {"title": response.reason_phrase, "status": response.status_code}
    error = APIStatusError.of(response.status_code, problem)  # pyright: ignore[reportUnknownArgumentType]
    error.retry_after_s = _retry_after(response.headers.get("retry-after"))
    return error


def _retry_after(value: str | None) -> float | None:
    """Seconds, from a number of them or a date."""
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


def _wait_after(error: APIStatusError, attempt: int) -> float | None:
    """Seconds until the next try; None when there should be none."""
    status = error.status_code
    if status not in _ALWAYS_RETRIED and not (status in _RETRIED_WHEN_TOLD and error.retryable):
        return None
    if error.retry_after_s is None:
        return backoff(attempt)
    return error.retry_after_s if error.retry_after_s <= MAX_RETRY_AFTER_S else None
