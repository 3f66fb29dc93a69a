"""The short way of prediction requests: from the HTTP server to a replica and back.

The middleware, routing and dependencies of other requests take several times as long as the rest
of a prediction on the API's side. Here a usual request gets the same checks with less work; one
that is unusual in any way takes the long way, to the route in ``api/routes/serving/predict.py``.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http import problems
from api.http.access import Caller, Keyring
from api.http.middleware import SECURITY_HEADERS, Seen, host_name, with_deadline
from api.serving import inference_protocol
from api.serving.connection import Reply
from api.serving.predictions import error_of, head_of, headers_of
from api.serving.replicas import Replicas
from glasshouse.errors import ServiceError
from models.settings import Settings

log: Any = structlog.get_logger("glasshouse.api")

_PREDICT = re.compile(r"/api/v1/models/([A-Za-z0-9_.@:-]{1,300})/predict")
_INFER = re.compile(r"/v2/models/([A-Za-z0-9_.@:-]{1,300})/infer")
PREDICT_ROUTE = "/api/v1/models/{name}/predict"
INFER_ROUTE = "/v2/models/{name}/infer"
_UNUSUAL = frozenset(
    {b"origin", b"transfer-encoding", b"expect", b"x-request-id", b"traceparent", b"cookie"}
    | {b"content-encoding"}
)
"""Headers with which a request takes the long way."""
_WATCH_AFTER_S = 0.05
"""Whether the client is still there is watched only if the answer takes longer."""
_HEADERS = tuple(
    (name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()
)
CLIENT_GONE = 499


class _Unusual(Exception):
    """The request takes the long way."""


class _Usual(NamedTuple):
    """A request that takes the short way."""

    route: str
    reference: str
    caller: Caller
    headers: dict[bytes, bytes]
    query: dict[str, str]


class DirectPredictions:
    """Answers usual prediction requests; ``otherwise`` gets all others."""

    def __init__(
        self,
        replicas: Replicas,
        keyring: Keyring,
        settings: Settings,
        hosts: frozenset[str],
        seen: Seen,
    ) -> None:
        self._replicas, self._keyring, self._settings = replicas, keyring, settings
        self._hosts, self._seen = hosts, seen

    def takes(self, scope: Scope) -> bool:
        """Return whether a request is a prediction."""
        return (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"].endswith(("/predict", "/infer"))
        )

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, otherwise: ASGIApp
    ) -> None:
        """Handle one request."""
        try:
            usual = self._read_head(scope)
        except _Unusual:
            await otherwise(scope, receive, send)
            return
        began, request_id = time.perf_counter(), f"req_{secrets.token_hex(12)}"
        try:
            self._keyring.check_rate(usual.caller)
            head, timeout_s = self._head_of(usual)
            head["request_id"] = request_id
            body = await _body(receive, self._settings.body_timeout_s)
            reply = None
            if body is not None:
                asking = self._replicas.ask(
                    usual.caller.owner, usual.reference, head, body, timeout_s
                )
                reply = await _unless_left(asking, receive)
            if reply is None:
                self._report(usual.route, CLIENT_GONE, began, request_id)
                return
            if reply.head["status"] != 200:
                raise error_of(reply)
            await _send(reply, request_id, send)
            self._seen("POST", usual.route, 200, time.perf_counter() - began)
        except ServiceError as error:
            scope.setdefault("state", {})["request_id"] = request_id
            found = problems.answer(error, scope)
            found.headers["X-Request-Id"] = request_id
            found.headers.update(SECURITY_HEADERS)
            await found(scope, receive, send)
            self._report(usual.route, error.status, began, request_id)

    def _head_of(self, usual: _Usual) -> tuple[dict[str, Any], float]:
        """Return the head of the frame, and how long the client waits, seconds."""
        usual_s = self._settings.predict_timeout_s
        if usual.route == INFER_ROUTE:
            return inference_protocol.head_of(usual.headers), usual_s
        return head_of(usual.headers, usual.query, usual_s)

    def _read_head(self, scope: Scope) -> _Usual:
        """Return who asks for which model, the headers and the query.

        Raises:
            _Unusual: a part of it is not as in usual requests.
        """
        path = scope["path"]
        is_predict = path.endswith("/predict")
        matched = (_PREDICT if is_predict else _INFER).fullmatch(path)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if matched is None or len(headers) != len(scope["headers"]):
            raise _Unusual
        if not _UNUSUAL.isdisjoint(headers):
            raise _Unusual
        accepted = headers.get(b"accept-encoding", b"").decode("latin-1")
        if not is_predict and inference_protocol.wanted_coding(accepted) is not None:
            raise _Unusual
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > self._settings.max_predict_bytes:
            raise _Unusual
        if host_name(headers.get(b"host", b"").decode("latin-1")) not in self._hosts:
            raise _Unusual
        kind, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        caller = self._keyring.known(secret.strip()) if kind.lower() == "bearer" else None
        if caller is None or "read" not in caller.scopes:
            raise _Unusual
        text = scope["query_string"].decode("latin-1")
        query = dict(parse_qsl(text, keep_blank_values=True)) if text else {}
        if "\0" in "".join(query.values()):
            raise _Unusual
        route = PREDICT_ROUTE if is_predict else INFER_ROUTE
        return _Usual(route, matched[1], caller, headers, query)

    def _report(self, route: str, status: int, began: float, request_id: str) -> None:
        seconds = time.perf_counter() - began
        self._seen("POST", route, status, seconds)
        log.info(
            "request",
            method="POST",
            route=route,
            status=status,
            ms=round(seconds * 1000, 1),
            request_id=request_id,
        )


async def _body(receive: Receive, patience_s: float) -> bytes | None:
    """Return the whole body, whose length the server has checked; None: the client is gone.

    Raises:
        RequestTimeout: it does not come in time.
    """
    message = await receive()
    if message["type"] != "http.request":
        return None
    if not message.get("more_body"):
        return message.get("body", b"")
    parts = [message.get("body", b"")]
    limited = with_deadline(receive, patience_s)
    while message.get("more_body"):
        message = await limited()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def _unless_left(asking: Awaitable[Reply], receive: Receive) -> Reply | None:
    """Return the reply; None if the client disconnects before."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101 (inside a coroutine)
    watching: list[asyncio.Task[None]] = []
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    timer = loop.call_later(_WATCH_AFTER_S, lambda: watching.append(loop.create_task(watch())))
    try:
        return await asking
    except asyncio.CancelledError:
        if not has_left:
            raise
        task.uncancel()
        return None
    finally:
        timer.cancel()
        for one in watching:
            one.cancel()


async def _send(reply: Reply, request_id: str, send: Send) -> None:
    headers = [
        (b"content-type", str(reply.head["content_type"]).encode("latin-1")),
        (b"content-length", b"%d" % len(reply.body)),
        (b"x-request-id", request_id.encode()),
        *_HEADERS,
        *((name.encode(), value.encode("latin-1")) for name, value in headers_of(reply).items()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
