"""Streams that are cut: nothing is lost, nothing comes twice."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import glasshouse as gh
from glasshouse import jsonio
from tests.stub_api import events, job, job_of, problem

Connect = Callable[..., gh.Client]


class Streamed:
    """Streams the events of one job and cuts each connection at a given place."""

    def __init__(self, records: list[dict[str, Any]], cuts: list[int]) -> None:
        self.records = records
        self.cuts = cuts
        self.asked: list[tuple[str | None, str | None]] = []
        self.types: list[str | None] = []

    @property
    def route(self) -> Route:
        return Route("/api/v1/jobs/job_1/stream", self.stream)

    def stream(self, request: Request) -> Response:
        resume = request.headers.get("last-event-id")
        self.asked.append((resume, request.query_params.get("after")))
        self.types.append(request.query_params.get("types"))
        after = int(resume or request.query_params.get("after") or 0)
        body = b": ping\n\n" + frame("hello", {"job": job(), "seq": len(self.records)}, None)
        wanted = (request.query_params.get("types") or "").split(",")
        for record in self.records:
            if record["seq"] > after and (wanted == [""] or record["type"] in wanted):
                body += frame(record["type"], record, record["seq"])
        if after >= len(self.records):
            return Response(status_code=204)
        if self.cuts:
            body = body[: self.cuts.pop(0)]
        return StreamingResponse(iter([body]), media_type="text/event-stream")


def frame(event: str, data: Any, seq: int | None) -> bytes:
    id_line = "" if seq is None else f"id: {seq}\n"
    return f"{id_line}event: {event}\ndata: {jsonio.dumps(data)}\n\n".encode()


def seqs(stream: Any) -> list[int]:
    return [event.seq for event in stream]


def test_a_stream_gives_every_event_once_and_ends(connect: Connect):
    streamed = Streamed(events(), [])
    assert seqs(job_of(connect(streamed.route)).stream()) == list(range(1, 31))
    assert streamed.asked == [(None, "0")]


@pytest.mark.usefixtures("quick")
@pytest.mark.long
def test_a_stream_cut_at_200_points_loses_and_doubles_nothing(connect: Connect):
    records = events(60)
    streamed = Streamed(records, [])
    client = connect(streamed.route)
    whole = len(b"".join(frame(r["type"], r, r["seq"]) for r in records)) + 500
    for cut in range(200):
        streamed.cuts = [whole * cut // 200, whole * ((cut * 37) % 200) // 200, 0]
        assert seqs(job_of(client).stream()) == list(range(1, 61)), cut


@pytest.mark.usefixtures("quick")
def test_a_reconnect_names_the_last_event_it_has(connect: Connect):
    streamed = Streamed(events(), [900, 900])
    seqs(job_of(connect(streamed.route)).stream())
    resumed = [resume for resume, _ in streamed.asked[1:]]
    assert all(resume is None or int(resume) >= 1 for resume in resumed)
    assert [after for _, after in streamed.asked[1:]] == [resume or "0" for resume in resumed]


def test_events_that_the_service_sends_again_are_dropped(connect: Connect):
    records = events()
    streamed = Streamed(sorted([*records, *records[:9]], key=lambda r: r["seq"]), [])
    assert seqs(job_of(connect(streamed.route)).stream()) == list(range(1, 31))


def test_a_stream_starts_after_a_known_event(connect: Connect):
    streamed = Streamed(events(), [])
    assert seqs(job_of(connect(streamed.route)).stream(after=27)) == [28, 29, 30]


def test_a_stream_that_is_over_is_empty(connect: Connect):
    assert seqs(job_of(connect(Streamed(events(), []).route)).stream(after=30)) == []


def test_a_stream_of_some_types_knows_when_it_is_over(connect: Connect):
    streamed = Streamed(events(), [])
    stream = job_of(connect(streamed.route)).stream(types=["state"])
    assert [event.type for event in stream] == ["state", "state"]
    assert streamed.types == ["end,state"]


def test_numbers_that_are_nan_or_inf_arrive_as_numbers(connect: Connect):
    stream = job_of(connect(Streamed(events(), []).route)).stream(types=["metrics"])
    losses = [event.values["loss"] for event in stream]  # pyright: ignore
    assert math.isnan(losses[5])
    assert losses[0] == 2.0


def test_an_event_of_a_later_version_keeps_its_fields(connect: Connect):
    records = events(6)
    records[2] = {**records[2], "type": "hatched", "eggs": 3}
    found = list(job_of(connect(Streamed(records, []).route)).stream())
    assert found[2].type == "hatched"
    assert found[2].eggs == 3  # pyright: ignore


def test_a_job_that_does_not_exist_is_not_asked_for_again(connect: Connect):
    asked: list[str] = []

    def stream(request: Request) -> Response:
        asked.append(request.url.path)
        return problem(404, "job_not_found")

    client = connect(Route("/api/v1/jobs/job_1/stream", stream))
    with pytest.raises(gh.NotFoundError):
        seqs(job_of(client).stream())
    assert len(asked) == 1


@pytest.mark.usefixtures("quick")
def test_a_service_that_stays_unavailable_is_given_up_on(connect: Connect):
    def stream(request: Request) -> Response:
        return problem(503, "draining", retryable=True)

    client = connect(Route("/api/v1/jobs/job_1/stream", stream))
    with pytest.raises(gh.ServiceUnavailableError):
        seqs(job_of(client).stream(give_up_after_s=0.05))


def test_leaving_the_block_closes_the_connection(connect: Connect):
    with job_of(connect(Streamed(events(), []).route)).stream() as stream:
        first = next(iter(stream))
    assert first.seq == 1
    assert list(stream) == []
