"""Pure ASGI middleware around all routes: request ids, hosts, origins, sizes, headers, logs."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http import problems
from glasshouse.errors import (
    BadRequest,
    HostNotAllowed,
    InternalError,
    InvalidRequest,
    OriginNotAllowed,
    PayloadTooLarge,
    RequestTimeout,
    RouteNotFound,
    ServiceError,
)
from models.telemetry import tracing

log: Any = structlog.get_logger("glasshouse.api")

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_OUR_ID = re.compile(r"[a-z]{2,4}_[0-9a-z]{26}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DRAINED_BYTES = 64 * 1024**2
_DRAINED_S = 5.0
_SLOWEST_BYTES_PER_S = 4096
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
Seen = Callable[[str, str, int, float], None]
"""Called for each response: method, path template, status, seconds."""


class RequestLog:
    """Outermost: sets the request id, responds to uncaught exceptions, writes the access log."""

    def __init__(self, app: ASGIApp, seen: Seen) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.perf_counter()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            fields = tracing.log_fields()
            with structlog.contextvars.bound_contextvars(request_id=request_id, **fields):
                await self._app(scope, receive, send_with_headers)
        except Exception:
            log.exception("request_failed", request_id=request_id)
            if status == 0:
                answer = problems.answer(InternalError(), scope)
                await answer(scope, receive, send_with_headers)
        finally:
            self._report(scope, status, time.perf_counter() - began, request_id)

    def _report(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        template = getattr(scope.get("route"), "path", None) or "(none)"
        self._seen(scope["method"], template, status, seconds)
        log.info(
            "request",
            method=scope["method"],
            route=template,
            status=status,
            ms=round(seconds * 1000, 1),
            request_id=request_id,
            **tracing.log_fields(),
            **_about(scope),
        )


def _about(scope: Scope) -> dict[str, str]:
    """Return the job or other resource that a request is about, for the log."""
    named = scope.get("path_params", {}).get("id")
    if not isinstance(named, str) or not _OUR_ID.fullmatch(named):
        return {}
    return {"job" if named.startswith("job_") else "about": named}


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


class RequestGuard:
    """Refuses other hosts, other origins, unreadable paths and bodies that are too large."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: frozenset[str],
        max_bytes: Callable[[Scope], int],
        body_timeout_s: float,
    ) -> None:
        self._app = app
        self._body_timeout_s = body_timeout_s
        self._hosts = hosts
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            _check_host(headers, self._hosts)
            _check_origin(headers, scope["scheme"])
            _check_text(scope)
            _check_framing(headers)
            limit = self._max_bytes(scope)
            await _check_length(headers, receive, limit)
        except ServiceError as error:
            answer = problems.answer(error, scope)
            await answer(scope, receive, send)
            return
        counted = _counted(with_deadline(receive, self._body_timeout_s), limit)
        await self._app(scope, counted, send)


def host_names(allowed_hosts: str) -> frozenset[str]:
    """Return the host names that the service answers for."""
    return LOOPBACK | {name.strip().lower() for name in allowed_hosts.split(",") if name.strip()}


def _check_host(headers: Headers, hosts: frozenset[str]) -> None:
    given = headers.getlist("host")
    if len(given) != 1 or host_name(given[0]) not in hosts:
        shown = given[0][:100] if given else ""
        raise HostNotAllowed(f"This service does not answer for the host {shown!r}.")


def host_name(host: str) -> str:
    """Return the host without its port, in lower case."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", host)
    return match.group(1).lower() if match else ""


def _check_origin(headers: Headers, scheme: str) -> None:
    origin = headers.get("origin")
    if origin is None:
        return
    allowed = {f"{scheme}://{headers['host']}", f"https://{headers['host']}"}
    if origin.lower() not in {value.lower() for value in allowed}:
        raise OriginNotAllowed(f"Pages of {origin[:200]!r} may not call this service.")


def _check_text(scope: Scope) -> None:
    # No database text may contain NUL, and no path of the API has control characters.
    if any(ord(char) < 32 or ord(char) == 127 for char in scope["path"]):
        raise RouteNotFound("No route matches this path.")
    if b"%00" in scope["query_string"] or b"\0" in scope["query_string"]:
        raise InvalidRequest("The query holds a NUL character; leave it out.")


def _check_framing(headers: Headers) -> None:
    """Refuse other transfer codings: without decoding them, the end of the body is ambiguous."""
    coding = headers.get("transfer-encoding")
    if coding is not None and coding.strip().lower() != "chunked":
        raise BadRequest("Transfer-Encoding may be 'chunked' and nothing else.")


async def _check_length(headers: Headers, receive: Receive, limit: int) -> None:
    text = headers.get("content-length")
    if text is None or not text.isdigit() or int(text) <= limit:
        return
    if "expect" not in headers:
        await drain(receive, int(text))
    raise _too_large(limit)


async def drain(receive: Receive, length: int) -> None:
    """Read the rest of the body: a client that is disconnected while it sends sees no response."""
    end = time.monotonic() + _DRAINED_S
    if length > _DRAINED_BYTES:
        return
    while time.monotonic() < end:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            return


def with_deadline(receive: Receive, patience_s: float) -> Receive:
    """Limit the wait for a body: a base time, plus time for each byte received.

    Only the time spent waiting for the client counts.
    """
    left_s = patience_s
    done = False

    async def receive_with_deadline() -> Message:
        nonlocal left_s, done
        if done:
            return await receive()
        began = time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            raise RequestTimeout("The rest of the body did not come in time.") from None
        left_s -= time.monotonic() - began
        left_s += len(message.get("body", b"")) / _SLOWEST_BYTES_PER_S
        done = message["type"] != "http.request" or not message.get("more_body")
        return message

    return receive_with_deadline


def _counted(receive: Receive, limit: int) -> Receive:
    """Limit the size of a body without a Content-Length."""
    total = 0

    async def receive_counted() -> Message:
        nonlocal total
        message = await receive()
        if message["type"] == "http.request":
            total += len(message.get("body", b""))
            if total > limit:
                raise _too_large(limit)
        return message

    return receive_counted


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body may have {limit} bytes at most.", limit_bytes=limit)


class Head:
    """Answers HEAD like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        done = False

        async def send_head(message: Message) -> None:
            nonlocal done
            if message["type"] == "http.response.start":
                await send(message)
            elif message["type"] == "http.response.body" and not done:
                done = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif done:
                raise _HeadDone

        async def receive_head() -> Message:
            return {"type": "http.disconnect"} if done else await receive()

        asked = dict(scope, method="GET")
        try:
            await self._app(asked, receive_head, send_head)
        except _HeadDone:
            pass
        finally:
            scope["route"] = asked.get("route")


class _HeadDone(OSError):
    """The head of the response was sent; stop the rest."""


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
