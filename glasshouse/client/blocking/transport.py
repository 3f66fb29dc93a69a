# Made from glasshouse/client/aio/transport.py by .ci/twins.py: change that file.
"""The HTTP transport: authentication, timeouts, retries and error classes."""

import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx2

import glasshouse
from glasshouse import jsonio
from glasshouse.client.blocking.running import chunks, sleep
from glasshouse.client.connection.address import Address
from glasshouse.client.connection.requests import (
    API,
    Params,
    Request,
    address_of,
    backoff,
    status_error,
    timed,
    wait_after,
    with_json,
)
from glasshouse.errors import APIConnectionError, APIError, APIStatusError, APITimeoutError

CONNECT_S = 5.0
_PIECE_BYTES = 16 * 2**20


class Transport:
    """Sends requests to one service."""

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float = 60.0,
        max_retries: int = 2,
        http: httpx2.Client | None = None,
        owns_http: bool = True,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._sleep: Callable[[float], None] = sleep
        self._owns_http = owns_http
        # each stream holds a connection while its job runs: do not limit the connections
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        # redirects are not followed, so plain HTTP needs no certificates: to load them takes 20 ms
        verify = address.is_encrypted
        self._http = http or httpx2.Client(
            limits=limits, trust_env=not address.is_local, verify=verify
        )
        self._headers = {
            "User-Agent": f"glasshouse/{glasshouse.__version__} python/{platform.python_version()}",
            "Accept": "application/json",
        }
        if address.api_key:
            self._headers["Authorization"] = f"Bearer {address.api_key}"

    def with_options(self, timeout_s: float | None, max_retries: int | None) -> Self:
        """Return a copy with other options that shares, but does not own, the connections."""
        copy = type(self)(
            self.address,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            max_retries=self.max_retries if max_retries is None else max_retries,
            http=self._http,
            owns_http=False,
        )
        copy._sleep = self._sleep
        return copy

    def close(self) -> None:
        """Close the connections if this transport owns them."""
        if self._owns_http:
            self._http.close()

    def send(self, request: Request) -> httpx2.Response:
        """Send a request and read the complete response. 304 is not an error.

        Raises:
            APIConnectionError: the service is unreachable or timed out.
            APIStatusError: the service responded with an error.
        """
        with self.open(request) as response:
            response.read()
            return response

    @contextmanager
    def open(self, request: Request) -> Generator[httpx2.Response]:
        """Send a request and yield the response before its body is read. Raises as `send`."""
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
        """POST an action. Use `create` for requests that create a resource."""
        request = with_json(Request("POST", API + path, params or {}), body)
        return self.decode(self.send(request))

    def create(self, path: str, body: Any, params: Params | None = None) -> Any:
        """POST a new resource, with an idempotency key."""
        encoded = jsonio.dumps(body).encode()
        request = Request.creating(API + path, encoded, "application/json", params or {})
        return self.decode(self.send(request))

    def put(self, path: str, body: Any) -> Any:
        """PUT a complete document."""
        return self.decode(self.send(with_json(Request("PUT", API + path), body)))

    def patch(self, path: str, body: Any) -> Any:
        """PATCH with a merge-patch."""
        request = with_json(Request("PATCH", API + path), body, "application/merge-patch+json")
        return self.decode(self.send(request))

    def delete(self, path: str) -> Any:
        """DELETE; return the decoded response, if it has a body."""
        return self.decode(self.send(Request("DELETE", API + path)))

    def download(self, path: str, params: Params | None = None) -> bytes:
        """Download bytes and check that their number matches Content-Length."""
        response = self.send(Request("GET", API + path, params or {}, {"Accept": "*/*"}))
        announced = response.headers.get("content-length")
        encoded = "content-encoding" in response.headers
        if announced is not None and not encoded and int(announced) != len(response.content):
            raise APIError(f"{path}: received {len(response.content)} of {announced} bytes")
        return response.content

    def save(self, path: str, to: Path) -> None:
        """Download into a file, in pieces of 16 MiB; the file appears when it is whole."""
        part = to.with_name(f".{to.name}.part")
        with part.open("wb") as file:
            size: int | None = None
            while size is None or file.tell() < size:
                first = file.tell()
                wanted = {"Accept": "*/*", "Range": f"bytes={first}-{first + _PIECE_BYTES - 1}"}
                response = self.send(Request("GET", API + path, {}, wanted))
                file.write(response.content)
                total = response.headers.get("content-range", "").rpartition("/")[2]
                size = int(total) if total.isdecimal() else file.tell()
        part.replace(to)

    def pages(self, path: str, params: Params | None = None) -> Generator[list[dict[str, Any]]]:
        """Iterate over the pages of a list."""
        asked = dict(params or {})
        while True:
            page = self.get(path, asked)
            yield page["data"]
            if not page.get("has_more") or page.get("next") is None:
                return
            asked["after"] = page["next"]

    def all(self, path: str, params: Params | None = None) -> list[dict[str, Any]]:
        """Return the entries of all pages of a list."""
        return [entry for page in self.pages(path, params) for entry in page]

    def decode(self, response: httpx2.Response) -> Any:
        """Decode the JSON of a response; None if it has no body."""
        if not response.content:
            return None
        try:
            return jsonio.loads(response.content)
        except ValueError as cause:
            kind = response.headers.get("content-type", "no media type")
            raise APIError(
                f"{response.request.url} responded with {kind} instead of JSON. "
                f"Is {self.address.url} the address of a Glasshouse service?"
            ) from cause

    def _send_with_retries(self, request: Request) -> httpx2.Response:
        attempt = 0
        until = None if request.within_s is None else time.monotonic() + request.within_s
        while True:
            try:
                return self._send_once(timed(request, until))
            except APIStatusError as error:
                wait_s = wait_after(error, attempt)
                if wait_s is None or attempt >= self.max_retries or _is_late(until, wait_s):
                    raise
            except APIConnectionError:
                wait_s = backoff(attempt)
                if attempt >= self.max_retries or _is_late(until, wait_s):
                    raise
            self._sleep(wait_s)
            attempt += 1

    def _send_once(self, request: Request) -> httpx2.Response:
        body = request.body
        path, params = address_of(request.path, request.params)
        read_s = self.timeout_s if request.timeout_s is None else request.timeout_s
        try:
            message = self._http.build_request(
                request.method,
                self.address.url + path,
                params=params,
                headers={**self._headers, **request.headers},
                content=body if body is None or isinstance(body, bytes) else chunks(body()),
                timeout=httpx2.Timeout(self.timeout_s, connect=CONNECT_S, read=read_s),
            )
            response = self._http.send(message, stream=True)
            if response.status_code >= 300 and response.status_code != 304:
                response.read()
                response.close()
                raise status_error(response)
        except httpx2.TransportError as cause:
            raise self._connection_error(cause) from cause
        return response

    def _connection_error(self, cause: httpx2.TransportError) -> APIConnectionError:
        reason = str(cause) or type(cause).__name__
        if isinstance(cause, httpx2.TimeoutException):
            return APITimeoutError(f"{self.address.url} did not respond in time ({reason})")
        hint = ". Is it running? Start it with 'glasshouse up'" if self.address.is_local else ""
        return APIConnectionError(f"{self.address.url} is unreachable ({reason}){hint}")


def _is_late(until: float | None, wait_s: float) -> bool:
    """Whether the next try would begin after the time of the whole request."""
    return until is not None and time.monotonic() + wait_s >= until
