"""Create and export spans. Imported only if tracing is on, because it needs an extra."""

from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_QUERY = "url.query"


class _Discreet(SpanProcessor):
    """Redacts queries, because they may contain secrets such as a ticket to a session."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if _QUERY in (span.attributes or {}):
            span.set_attribute(_QUERY, "REDACTED")


def make_provider(name: str) -> TracerProvider:
    """Return a provider that exports spans according to OpenTelemetry's standard variables.

    ``name`` is the service's name.
    """
    resource = Resource.create({"service.name": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(_Discreet())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
