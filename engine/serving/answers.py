"""The answers of requests: what the network computed, or why it could not."""

import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.inference.blocks import Column
from engine.serving import responses
from engine.serving.queue import Pending

Answer = tuple[dict[str, Any], bytes]
"""The head and the body."""


def refusal(status: int, code: str, detail: str, **more: Any) -> Answer:
    """Return the answer to a request that is not computed."""
    return {"status": status, "code": code, "detail": detail, **more}, b""


def answered(
    request: Pending, columns: Mapping[str, Column], queued_s: float, compute_s: float
) -> Callable[[], None]:
    """Encode the outputs of a request; return what sends them.

    Args:
        request: the request.
        columns: its outputs, by ``<layer>/<field>``.
        queued_s: how long it waited, seconds.
        compute_s: how long its batch was computed, seconds.
    """
    version = request.version
    timing = {"queue_ms": round(queued_s * 1e3, 3), "compute_ms": round(compute_s * 1e3, 3)}
    head, body = responses.write(request.asked, columns, version.inputs, version.origin)
    return partial(
        request.answer, {"status": 200, "timing": timing, **version.origin, **head}, body
    )


def failed(request: Pending, error: Exception) -> Callable[[], None]:
    """Log why the network failed on a request; return what sends the refusal."""
    traceback.print_exception(error)
    detail = f"The network failed on this request: {type(error).__name__}: {error}"
    return partial(request.answer, *refusal(500, "prediction_failed", detail[:500]))
