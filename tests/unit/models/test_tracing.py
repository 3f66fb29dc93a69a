import subprocess
import sys
import time

import pytest
from opentelemetry import trace

from models import tracing
from models.tracing import Tracing

HERE = "http://127.0.0.1:9"  # where nobody listens
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in (*tracing.ENDPOINTS, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def test_untraced_a_process_loads_nothing_and_says_nothing():
    code = (
        "import sys; from models import tracing; t = tracing.Tracing('x')\n"
        "with t.span('a', parent='', b=1) as span: span.tell(c=2); span.failed('d')\n"
        "assert tracing.traceparent() is None and tracing.log_fields() == {}\n"
        "t.close(); print('opentelemetry.sdk' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_standard_variables_turn_it_on_and_off(monkeypatch):
    assert not tracing.is_wanted()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", HERE)
    assert tracing.is_wanted()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not tracing.is_wanted()


def test_what_is_not_installed_is_named_and_nothing_fails(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", HERE)
    monkeypatch.setattr(tracing, "_NEEDED", ("opentelemetry.sdk", "no_such.package"))
    assert tracing.lacks() == ["no_such.package"]
    assert Tracing("x").provider is None


@pytest.mark.parametrize("parent", [PARENT, "", "nonsense", PARENT.replace("0af7", "xyzw")])
def test_a_span_is_in_the_trace_it_is_given_or_begins_one(monkeypatch, parent):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", HERE)
    traced = Tracing("x")
    with traced.span("a", parent=parent), traced.span("b"):
        inner = tracing.traceparent()
        fields = tracing.log_fields()
    assert inner is not None
    (_, found, _, _) = inner.split("-")
    assert (found == PARENT.split("-")[1]) == (parent == PARENT)
    assert fields == {"trace_id": found}
    assert tracing.traceparent() is None
    assert not trace.get_current_span().get_span_context().is_valid


def test_an_end_does_not_wait_for_a_receiver_that_is_away(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", HERE)
    traced = Tracing("x")
    with traced.span("a"):
        pass
    began = time.monotonic()
    traced.close()
    assert time.monotonic() - began < 4
