"""An HTTP connection with limits that uvicorn lacks: time and size of a request's head.

Without them, a head that arrives one byte at a time would hold its connection forever, and an
endless head would fill the memory. Both happen before any code of the app runs.
"""

import asyncio
from asyncio import TimerHandle
from typing import Any, ClassVar

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http import problems
from glasshouse.errors import BadRequest, HeadersTooLarge, RequestTimeout, ServiceError
from models.settings import Settings

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 200
_log: Any = structlog.get_logger("glasshouse.api")


class HeadTooLarge(Exception):
    """The head is too large. Raised through the parser, which then stops."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits."""

    head_timeout_s: ClassVar[float]
    body_timeout_s: ClassVar[float]
    max_connections: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: TimerHandle | None = None
        self._head_bytes = 0
        self._head_too_large = False
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the head of the request."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            _log.warning("too_many_connections", limit=self.max_connections)
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout when the connection closes."""
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the head and pass the data to the parser."""
        if not self._in_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._late is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadersTooLarge(_TOO_LARGE))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Check the number of headers."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._head_too_large = True
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        """Check the size of the complete head and cancel its timeout."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._head_too_large = True
            raise HeadTooLarge
        self._head_is_here()
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Handle the end of the request."""
        self._in_body = False
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head()

    def on_response_complete(self) -> None:
        """Start the timeout for the next head, unless it is already here.

        If the response was sent before the end of the body, keep reading for a while: a client that
        is disconnected while it sends never sees the response.
        """
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Respond to an unparsable request with a problem document, and close the connection."""
        self._refuse(HeadersTooLarge(_TOO_LARGE) if self._head_too_large else BadRequest(msg))

    def _await_head(self) -> None:
        self._head_is_here()
        self._head_bytes = 0
        timeout_s = self.body_timeout_s if self._in_body else self.head_timeout_s
        self._late = self.loop.call_later(timeout_s, self._give_up)

    def _head_is_here(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        self._refuse(RequestTimeout(f"The head did not come within {self.head_timeout_s:g} s."))

    def _refuse(self, error: ServiceError) -> None:
        self._head_is_here()
        if self.transport.is_closing():
            return
        answer = problems.answer(error, {})
        lines = [f"HTTP/1.1 {error.status} {type(error).__name__}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        cycle = getattr(self, "cycle", None)  # None before the first request
        between = cycle is None or cycle.response_complete
        if between and not self._in_body:  # otherwise it would mix with another response
            self.transport.write(head + bytes(answer.body))
        self.transport.close()


_TOO_LARGE = f"The head may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers at most."


def connection_of(settings: Settings) -> type[Connection]:
    """Return a connection class with the limits from the settings."""

    class Bounded(Connection):
        head_timeout_s = settings.head_timeout_s
        body_timeout_s = settings.body_timeout_s
        max_connections = settings.max_connections

    return Bounded
