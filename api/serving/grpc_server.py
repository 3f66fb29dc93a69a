"""The gRPC form of the Open Inference Protocol, on its own port of the API process.

``grpcio`` is optional, and imported only here and only if ``GLASSHOUSE_GRPC_PORT`` is set.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import orjson
import structlog

from api.http.access import Caller, Keyring
from api.http.middleware import Seen
from api.serving import grpc_translation
from api.serving.connection import Reply
from api.serving.grpc_messages import SERVICE, message_classes
from api.serving.inference_protocol import reference_of
from api.serving.predictions import error_of
from api.serving.replicas import Replicas
from api.serving.served_models import index_of
from glasshouse.errors import InternalError, KeyInvalid, KeyMissing, ScopeTooSmall, ServiceError
from glasshouse.frames import MAX_FRAME_BYTES
from models.settings import Settings

log: Any = structlog.get_logger("glasshouse.api")
MISSING = "GLASSHOUSE_GRPC_PORT needs grpcio: pip install 'glasshouse[grpc]', or unset it"
STOP_S = 5.0
MAX_STREAMS = 1000
"""The most requests of one connection at once."""
_NO_COMPRESSION = 1
"""The set of gRPC's codings that has only "identity": a compressed message has no bounded size."""
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""gRPC's status codes by those of HTTP."""


def is_available() -> bool:
    """Return whether ``grpcio`` and ``protobuf`` are installed."""
    try:
        return find_spec("grpc") is not None and find_spec("google.protobuf") is not None
    except ModuleNotFoundError:  # there is no google at all
        return False


class GrpcParts(NamedTuple):
    """What the methods use of the API."""

    settings: Settings
    replicas: Replicas
    keyring: Keyring
    seen: Seen
    is_ready: Callable[[], bool]
    server: Mapping[str, Any]
    """The metadata of the server."""


async def start(parts: GrpcParts) -> Callable[[], Awaitable[None]]:
    """Listen on ``GLASSHOUSE_GRPC_PORT``; return what ends that.

    Raises:
        ImportError: ``grpcio`` is not installed.
        RuntimeError: the port cannot be bound.
    """
    grpc: Any = import_module("grpc")
    settings = parts.settings
    options = [
        ("grpc.max_receive_message_length", settings.max_predict_bytes),
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.compression_enabled_algorithms_bitset", _NO_COMPRESSION),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=settings.max_connections)
    server.add_generic_rpc_handlers([_handlers(grpc, _Methods(parts, message_classes()))])
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    server.add_insecure_port(f"{host}:{settings.grpc_port}")
    await server.start()

    async def stop() -> None:
        await server.stop(STOP_S)

    return stop


def _handlers(grpc: Any, methods: "_Methods") -> Any:
    calls: dict[str, Callable[[Any, Any, Any], Awaitable[None]]] = {
        "ServerLive": methods.server_live,
        "ServerReady": methods.server_ready,
        "ServerMetadata": methods.server_metadata,
        "ModelReady": methods.model_ready,
        "ModelMetadata": methods.model_metadata,
        "ModelInfer": methods.model_infer,
        "RepositoryIndex": methods.repository_index,
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            _guarded(grpc, methods, name, call),
            request_deserializer=methods.classes[f"{name}Request"].FromString,
            response_serializer=methods.classes[f"{name}Response"].SerializeToString,
        )
        for name, call in calls.items()
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _guarded(
    grpc: Any, methods: "_Methods", name: str, call: Callable[[Any, Any, Any], Awaitable[None]]
) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return a method that ends a call with gRPC's status if it fails, and reports it."""

    async def handle(request: Any, context: Any) -> Any:
        response, began = methods.classes[f"{name}Response"](), time.perf_counter()
        status = 499  # if the client cancels it
        try:
            await call(request, response, context)
            status = 200
        except ServiceError as error:
            status = error.status
            await _abort(grpc, context, error)
        except Exception:
            log.exception("request_failed", route=f"/{SERVICE}/{name}")
            status = 500
            await _abort(grpc, context, InternalError())
        finally:
            methods.report(name, status, time.perf_counter() - began)
        return response

    return handle


async def _abort(grpc: Any, context: Any, error: ServiceError) -> None:
    code = getattr(grpc.StatusCode, _CODES.get(error.status, "INTERNAL"))
    more = (("code", error.code),)
    if error.retry_after_s is not None:
        more += (("retry-after", str(error.retry_after_s)),)
    text = f"{error.detail} {error.advice}" if error.advice else error.detail
    await context.abort(code, text, more)


class _Methods:
    """The methods of the service; each fills its response."""

    def __init__(self, parts: GrpcParts, classes: Mapping[str, Any]) -> None:
        self._parts, self.classes = parts, classes

    async def server_live(self, _request: Any, response: Any, _context: Any) -> None:
        response.live = True

    async def server_ready(self, _request: Any, response: Any, _context: Any) -> None:
        response.ready = await asyncio.to_thread(self._parts.is_ready)

    async def server_metadata(self, _request: Any, response: Any, context: Any) -> None:
        await self._caller(context)
        server = self._parts.server
        response.name, response.version = server["name"], server["version"]
        response.extensions.extend(server["extensions"])

    async def model_ready(self, request: Any, response: Any, context: Any) -> None:
        caller = await self._caller(context)
        reference = reference_of(request.name, request.version or None)
        try:
            await self._parts.replicas.check_ready(caller.owner, reference)
            response.ready = True
        except ServiceError as error:
            if error.status not in {404, 503}:
                raise

    async def model_metadata(self, request: Any, response: Any, context: Any) -> None:
        caller = await self._caller(context)
        reference = reference_of(request.name, request.version or None)
        reply = await self._ask(caller, reference, {"protocol": "metadata"}, b"", context)
        grpc_translation.fill_metadata(response, orjson.loads(reply.body))

    async def model_infer(self, request: Any, response: Any, context: Any) -> None:
        caller = await self._caller(context)
        reference = reference_of(request.model_name, request.model_version or None)
        body, json_bytes = grpc_translation.body_of(request)
        head = {"protocol": "v2", "json_bytes": json_bytes}
        reply = await self._ask(caller, reference, head, body, context)
        grpc_translation.fill_response(response, reply)

    async def repository_index(self, request: Any, response: Any, context: Any) -> None:
        caller = await self._caller(context)
        for entry in index_of(await self._parts.replicas.routes_of(caller.owner)):
            if entry["state"] == "READY" or not request.ready:
                response.models.add(**entry)

    async def _caller(self, context: Any) -> Caller:
        """Return who asks.

        Raises:
            KeyMissing, KeyInvalid, ScopeTooSmall, TooManyRequests: the call may not be made.
        """
        keyring = self._parts.keyring
        metadata: Mapping[str, Any] = dict(context.invocation_metadata() or ())
        authorization = metadata.get("authorization")
        if authorization is None:
            raise KeyMissing
        kind, _, secret = str(authorization).partition(" ")
        if kind.lower() != "bearer":
            raise KeyInvalid("The metadata authorization must be 'Bearer gh_…'.")
        caller = await keyring.check(secret.strip(), "key", _address(context.peer()))
        keyring.check_rate(caller)
        if "read" not in caller.scopes:
            raise ScopeTooSmall("This needs a key with the scope 'read'.")
        return caller

    async def _ask(
        self, caller: Caller, reference: str, head: Mapping[str, Any], body: bytes, context: Any
    ) -> Reply:
        left_s: float | None = context.time_remaining()
        usual_s = self._parts.settings.predict_timeout_s
        patience_s = usual_s if left_s is None or math.isinf(left_s) else min(left_s, usual_s)
        reply = await self._parts.replicas.ask(caller.owner, reference, head, body, patience_s)
        if reply.head["status"] != 200:
            raise error_of(reply)
        return reply

    def report(self, name: str, status: int, seconds: float) -> None:
        """Count a call, and write it to the access log."""
        route = f"/{SERVICE}/{name}"
        self._parts.seen("POST", route, status, seconds)
        ms = round(seconds * 1000, 1)
        log.info("request", method="POST", route=route, status=status, ms=ms)


def _address(peer: str) -> str:
    """Return the address of a peer such as ``ipv4:127.0.0.1:4711``."""
    return peer.partition(":")[2].rpartition(":")[0]
