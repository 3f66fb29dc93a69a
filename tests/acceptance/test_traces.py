"""Traces: a real receiver gets one trace of a request and of the attempt that came of it."""

import contextlib
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.acceptance.specs import small
from tests.waiting import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ERROR = 2


class Receiver:
    """Takes OTLP over HTTP, as a collector does, and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            about = {item.key: item.value.string_value for item in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [_as_dict(span, about["service.name"]) for span in scope.spans]

    def named(self, name: str, trace: str | None = None) -> list[dict[str, Any]]:
        found = [span for span in self.spans if span["name"] == name]
        return [span for span in found if trace is None or span["trace"] == trace]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _as_dict(span: Any, service: str) -> dict[str, Any]:
    values = {item.key: item.value for item in span.attributes}
    return {
        "service": service,
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "status": span.status.code,
        "message": span.status.message,
        "from": span.start_time_unix_nano,
        "to": span.end_time_unix_nano,
        "attributes": {k: v.string_value or v.int_value for k, v in values.items()},
    }


@pytest.fixture(scope="module")
def traced() -> Generator[tuple[LocalService, Receiver]]:
    receiver = Receiver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=a-secret-of-the-receiver")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        try:
            with LocalService.temporary() as local_service:
                yield local_service, receiver
        finally:
            receiver.close()


def _run(local_service: LocalService, **changes: Any) -> dict[str, Any]:
    """A job that was submitted in our trace, when it has ended."""
    with local_service.client() as client:
        dataset = client.datasets.create(builtin="digits").id
        with local_service.http(headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}) as http:
            answer = http.post("/jobs", json=small(dataset, **changes))
        assert answer.status_code == 201, answer.text
        job = answer.json()
        with contextlib.suppress(gh.JobFailed):
            client.jobs.get(job["id"]).wait(timeout=120)
    with local_service.http() as http:
        return http.get(f"/jobs/{job['id']}").json()


def test_an_attempt_is_in_the_trace_of_the_request_that_submitted_it(traced):
    local_service, receiver = traced
    job = _run(local_service)
    assert job["state"] == "succeeded"

    def attempts() -> list[dict[str, Any]]:
        found = receiver.named("attempt train", TRACE)
        return [span for span in found if span["attributes"]["glasshouse.job"] == job["id"]]

    (attempt,) = until(attempts, what="the attempt's span")
    (request,) = [s for s in receiver.spans if s["id"] == attempt["parent"]]
    assert request["service"] == "glasshouse-api"
    assert request["parent"] == SPAN
    assert request["attributes"]["http.route"] == "/api/v1/jobs"
    assert request["attributes"]["http.response.status_code"] == 201
    assert attempt["service"] == "glasshouse-worker"
    assert attempt["attributes"]["glasshouse.exit_kind"] == "succeeded"
    assert attempt["attributes"]["glasshouse.attempt"] == 1
    assert attempt["status"] != ERROR
    inside = [span for span in receiver.spans if span["parent"] == attempt["id"]]
    assert [span["name"] for span in inside] == ["launch", "run", "store the end"]
    ends = [attempt["from"], *(time for span in inside for time in (span["from"], span["to"]))]
    assert ends == sorted(ends)
    assert ends[-1] <= attempt["to"]


def test_a_failure_is_reported_without_what_the_user_wrote(traced):
    local_service, receiver = traced
    job = _run(local_service, name="secret-project", timeout_s=0.01, stop={"steps": 10**6})
    assert job["state"] == "failed"
    (attempt,) = until(
        lambda: [
            span
            for span in receiver.named("attempt train")
            if span["attributes"]["glasshouse.job"] == job["id"]
        ],
        what="the span of the attempt that failed",
    )
    assert attempt["status"] == ERROR
    assert attempt["message"] == attempt["attributes"]["glasshouse.exit_kind"] != "succeeded"
    assert "secret-project" not in json.dumps(receiver.spans)


def test_a_pause_is_no_failure_and_what_continues_is_in_the_same_trace(traced):
    local_service, receiver = traced

    def attempts() -> list[dict[str, Any]]:
        found = receiver.named("attempt train", TRACE)
        mine = [span for span in found if span["attributes"]["glasshouse.job"] == job.id]
        return sorted(mine, key=lambda span: span["attributes"]["glasshouse.attempt"])

    with local_service.client() as client:
        dataset = client.datasets.create(builtin="digits").id
        with local_service.http(headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}) as http:
            made = http.post("/jobs", json=small(dataset, stop={"steps": 10**6})).json()
        job = client.jobs.get(made["id"])
        until(lambda: client.jobs.get(job.id).state == "running", what="its start")
        job.pause()
        until(lambda: client.jobs.get(job.id).state == "paused", what="the pause")
        (paused,) = until(attempts, what="the span of the paused attempt")
        job.resume()
        until(lambda: client.jobs.get(job.id).state == "running", what="its going on")
        job.cancel()
        until(lambda: len(attempts()) == 2, what="the span of the second attempt")
    cancelled = attempts()[1]
    assert paused["attributes"]["glasshouse.exit_kind"] == "paused"
    assert cancelled["attributes"]["glasshouse.exit_kind"] == "cancelled"
    assert ERROR not in {paused["status"], cancelled["status"]}
    assert paused["parent"] == cancelled["parent"]


def test_query_strings_are_not_exported_and_health_checks_are_no_spans(traced):
    local_service, receiver = traced
    with local_service.http() as http:
        http.get("/jobs", params={"label": "whose=nobodys-business"})
        http.get(f"{local_service.url}/readyz")
        http.get(f"{local_service.url}/metrics")
        http.get("/jobs", params={"limit": "7"})

    def queries() -> list[str] | None:
        found = [span["attributes"].get("url.query") for span in receiver.spans]
        told = [query for query in found if query is not None]
        return told if len(told) == 2 else None  # the last request's span is here

    assert until(queries, what="the spans of two queries") == ["REDACTED", "REDACTED"]
    assert "nobodys-business" not in json.dumps(receiver.spans)
    paths = {span["attributes"].get("url.path") for span in receiver.spans}
    assert not paths & {"/readyz", "/metrics", "/livez"}


def test_log_lines_say_which_trace_they_belong_to(traced):
    local_service, _ = traced
    job = _run(local_service)
    logs = {path.stem: path.read_text() for path in (local_service.home / "logs").glob("*.log")}
    lines = [
        json.loads(line)
        for text in logs.values()
        for line in text.splitlines()
        if line.startswith("{")
    ]
    ended = [x for x in lines if x.get("event") == "attempt_ended" and x.get("job") == job["id"]]
    asked = [x for x in lines if x.get("event") == "request" and x.get("route") == "/api/v1/jobs"]
    assert {line["trace_id"] for line in ended} == {TRACE}
    assert TRACE in {line["trace_id"] for line in asked}
    assert "a-secret-of-the-receiver" not in "".join(logs.values())
