import json
import os
import subprocess
import sys

import pytest

from models.telemetry import tracing
from models.telemetry.tracing import Tracing

HERE = "http://127.0.0.1:9"  # where nobody listens
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in (*tracing.ENDPOINTS, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_without_tracing_loads_and_sends_nothing():
    code = (
        "import sys; from models.telemetry import tracing; t = tracing.Tracing('x')\n"
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
    assert tracing.missing_packages() == ["no_such.package"]
    assert Tracing("x").provider is None


SPANS = """
import json, sys, time
from opentelemetry import trace
from models.telemetry import tracing
traced, found = tracing.Tracing("x"), []
for parent in json.loads(sys.argv[1]):
    with traced.span("a", parent=parent), traced.span("b"):
        found.append([tracing.traceparent(), tracing.log_fields()])
    assert tracing.traceparent() is None
    assert not trace.get_current_span().get_span_context().is_valid
try:
    with traced.span("a", job="j") as span:
        raise ValueError("a text of the user's")
except ValueError:
    failed = [span._span.status.description, span._span.to_json()]
began = time.monotonic()
traced.close()
print(json.dumps([found, failed, time.monotonic() - began]))
"""


@pytest.mark.long
def test_spans_are_in_the_trace_they_are_given_or_begin_one_and_an_end_waits_for_nobody():
    """In a separate process, because the exporter's threads keep retrying for a while."""
    parents = [PARENT, "", "nonsense", PARENT.replace("0af7", "xyzw")]
    done = subprocess.run(
        [sys.executable, "-c", SPANS, json.dumps(parents)],
        env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": HERE},
        capture_output=True,
        text=True,
        check=True,
    )
    found, (why, told), waited_s = json.loads(done.stdout)
    traces = [traceparent.split("-")[1] for traceparent, _ in found]
    assert traces[0] == PARENT.split("-")[1]
    assert len(set(traces)) == len(parents)
    assert [fields for _, fields in found] == [{"trace_id": trace} for trace in traces]
    assert why == "ValueError"
    assert "glasshouse.job" in told
    assert "of the user" not in told
    assert waited_s < 4
