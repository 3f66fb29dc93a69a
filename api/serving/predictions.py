"""The head of a prediction request for a replica, and the response made of its reply."""

from collections.abc import Mapping
from typing import Any

from api.serving.connection import Reply
from api.serving.inference_protocol import JSON_BYTES_HEADER
from glasshouse.errors import (
    BadRequest,
    FieldProblem,
    InvalidRequest,
    NotAcceptable,
    PayloadTooLarge,
    PredictionFailed,
    PredictionTimeout,
    QueueFull,
    ServiceError,
    UnsupportedMedia,
)

MAX_TIMEOUT_S = 600.0
MAX_PRIORITY = 1000
_RESERVED = ("timeout_s", "priority")
_INVALID: dict[int, type[ServiceError]] = {
    400: BadRequest,
    406: NotAcceptable,
    413: PayloadTooLarge,
    415: UnsupportedMedia,
}


def head_of(
    headers: Mapping[bytes, bytes], query: Mapping[str, str], usual_s: float
) -> tuple[dict[str, Any], float]:
    """Return the head of the frame, and how long the client waits, seconds.

    Args:
        headers: of the request, by their names in lower case.
        query: of the request.
        usual_s: how long a client waits that does not say it.

    Raises:
        InvalidRequest: a number of the query is none, or out of range.
    """
    head: dict[str, Any] = {
        "protocol": "predict",
        "content_type": headers.get(b"content-type", b"").decode("latin-1"),
        "accept": headers.get(b"accept", b"").decode("latin-1"),
    }
    if not query:
        return head, usual_s
    head["priority"] = _number(query, "priority", 0, -MAX_PRIORITY, MAX_PRIORITY)
    head["query"] = {key: value for key, value in query.items() if key not in _RESERVED}
    return head, _number(query, "timeout_s", usual_s, 0.001, MAX_TIMEOUT_S)


def headers_of(reply: Reply) -> dict[str, str]:
    """Return the headers of a response with a prediction, except type and length."""
    head = reply.head
    timing: Mapping[str, Any] = head.get("timing", {})
    shown = (f"{name.removesuffix('_ms')};dur={value}" for name, value in timing.items())
    known = {"server-timing": ", ".join(shown)}
    if "job" in head:
        known["x-job-step"] = f"{head['job']}:{head['step']}"
    else:
        known["x-model-version"] = f"{head['model']}:{head['version']}"
    if "json_bytes" in head:
        known[JSON_BYTES_HEADER.lower()] = str(head["json_bytes"])
    return known | head.get("headers", {})


def error_of(reply: Reply) -> ServiceError:
    """Return the error that a replica answered with."""
    head = reply.head
    code, detail = str(head.get("code")), str(head.get("detail"))
    found = [
        FieldProblem(str(one["pointer"]), str(one["detail"]), str(one["code"]))
        for one in head.get("problems", ())
    ]
    if code == "queue_full":
        return QueueFull(detail, retry_after_s=int(head.get("retry_after_s", 1)))
    if code == "invalid_request":
        return _INVALID.get(int(head["status"]), InvalidRequest)(detail, problems=found)
    if code == "prediction_timeout":
        return PredictionTimeout(detail)
    return PredictionFailed(detail)


def _number(query: Mapping[str, str], name: str, default: float, least: float, most: float) -> Any:
    if name not in query:
        return default
    try:
        value = type(default)(query[name])
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        detail = f"{name} is a number from {least:g} to {most:g}, and this is {query[name][:40]!r}"
        problem = FieldProblem(f"/query/{name}", detail, "out_of_range")
        raise InvalidRequest(str(problem), problems=[problem])
    return value
