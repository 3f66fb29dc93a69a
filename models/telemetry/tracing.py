"""OpenTelemetry traces of requests and attempts, exported according to its standard variables.

Off, at no cost, unless ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` is
set. The spans of the API are FastAPI's own. A job stores the trace of the request that submitted it
(``jobs.traceparent``), so that its attempts are in that trace, on any machine.

No span contains client data except the path of a request: no query, body, name or label.
"""

import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXTRA = "pip install 'glasshouse[tracing]'"
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_LEAVE_S = 2.0
"""On exit, a process waits at most this long for an unavailable receiver."""
_log: Any = structlog.get_logger()
_propagator = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int]


def is_wanted() -> bool:
    """Return whether the environment turns tracing on."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not is_off and any(os.environ.get(name) for name in ENDPOINTS)


def missing_packages() -> list[str]:
    """Return the packages that exporting needs and that are not installed."""
    return [name for name in _NEEDED if not _is_installed(name)]


def traceparent() -> str | None:
    """Return the current trace as W3C's ``traceparent``; None: nothing is traced."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent")


def log_fields() -> dict[str, str]:
    """Return the log fields of the current trace, if any."""
    context = trace.get_current_span().get_span_context()
    return {"trace_id": f"{context.trace_id:032x}"} if context.is_valid else {}


class Span:
    """A current span, or nothing if nothing is traced."""

    def __init__(self, span: trace.Span | None) -> None:
        self._span = span

    def tell(self, **attributes: str | int) -> None:
        """Add attributes; each name gets the prefix ``glasshouse.``."""
        if self._span is not None:
            self._span.set_attributes(_prefixed(attributes))

    def failed(self, code: str) -> None:
        """Mark the span as failed. ``code`` is an error code of the service, never a text."""
        if self._span is not None:
            self._span.set_status(StatusCode.ERROR, code)


class Tracing:
    """The spans of one process."""

    def __init__(self, service: str) -> None:
        """``service`` is the value of ``service.name`` unless ``OTEL_SERVICE_NAME`` sets it."""
        self.provider = _provider(service) if is_wanted() else None
        self._tracer = None if self.provider is None else self.provider.get_tracer("glasshouse")

    @contextmanager
    def span(
        self, name: str, *, parent: str | None = None, **attributes: str | int
    ) -> Generator[Span]:
        """Open a span for the block. ``parent``: a ``traceparent``. Default: the enclosing span."""
        if self._tracer is None:
            yield Span(None)
            return
        context = None if parent is None else _propagator.extract({"traceparent": parent})
        kind = SpanKind.INTERNAL if parent is None else SpanKind.CONSUMER
        with self._tracer.start_as_current_span(
            name,
            context,
            kind,
            _prefixed(attributes),
            record_exception=False,
            set_status_on_exception=False,  # it would export the text of the error
        ) as span:
            try:
                yield Span(span)
            except BaseException as error:
                Span(span).failed(type(error).__name__)
                raise

    def close(self) -> None:
        """Export pending spans, but wait only briefly for the receiver."""
        if self.provider is None:
            return
        sending = threading.Thread(target=self.provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(_LEAVE_S)


def _prefixed(attributes: Attributes) -> dict[str, str | int]:
    return {f"glasshouse.{name}": value for name, value in attributes.items()}


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _provider(service: str) -> Any:
    """Return the provider; None, with a log line, if packages are missing."""
    if missing := missing_packages():
        _log.error("tracing_not_installed", missing=missing, fix=EXTRA)
        return None
    from models.telemetry.otlp import make_provider  # noqa: PLC0415 - an extra, and memory, that few want

    return make_provider(os.environ.get("OTEL_SERVICE_NAME") or service)
