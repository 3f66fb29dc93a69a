"""The event log: what a client sees of it does not depend on how, or how often, it asks."""

import random

import pytest

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.acceptance.specs import digits_example, lasting
from tests.acceptance.sse import Line, Received, polled

NUM_CUTS = 200


@pytest.fixture(scope="module")
def finished(client: gh.Client, digits: str) -> str:
    """A job that has ended, with events of many types."""
    return client.jobs.create(digits_example(digits, stop={"epochs": 2})).wait(timeout=200).id


def check_the_log_is_whole(events: list[dict]) -> None:
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] for event in events].count("end") == 1
    assert events[-1]["type"] == "end"


def test_numbers_are_dense_and_the_one_end_comes_last(local_service: LocalService, finished: str):
    events = polled(local_service, finished)
    check_the_log_is_whole(events)
    assert {"state", "metrics", "stats", "checkpoint"} <= {event["type"] for event in events}
    assert {event["job"] for event in events} == {finished}


def test_streaming_and_polling_give_the_same_objects(local_service: LocalService, finished: str):
    received = Line(local_service, finished).read()
    assert received.complete
    assert received.messages[0]["event"] == "hello"
    assert received.events == polled(local_service, finished)


def test_after_the_end_there_is_nothing_to_stream(local_service: LocalService, finished: str):
    last = polled(local_service, finished)[-1]["seq"]
    assert Line(local_service, finished, last).read() == Received(204, b"", complete=True)


def test_a_finished_log_may_be_cut_anywhere(local_service: LocalService, finished: str):
    whole = Line(local_service, finished).read()
    chance = random.Random(1)  # noqa: S311
    for _ in range(NUM_CUTS):
        before = Line(local_service, finished).read(chance.randrange(1, len(whole.body)))
        assert not before.complete
        last = before.events[-1]["seq"] if before.events else 0
        rest = Line(local_service, finished, last).read()
        assert before.events + rest.events == whole.events


def test_a_running_log_may_be_cut_200_times(
    local_service: LocalService, client: gh.Client, digits: str
):
    spec = lasting(digits, 800)
    spec["data"]["batch_size"] = 400  # slow enough that the reader catches up with it
    job = client.jobs.create(spec)
    chance = random.Random(2)  # noqa: S311
    events: list[dict] = []
    num_cut = 0
    while not events or events[-1]["type"] != "end":
        limit = chance.randrange(1, 3000) if num_cut < NUM_CUTS else None
        received = Line(local_service, job.id, len(events)).read(limit)
        assert received.status == 200
        num_cut += not received.complete
        events += received.events
    assert num_cut == NUM_CUTS, "the job ended before the line was cut often enough"
    check_the_log_is_whole(events)
    assert events == polled(local_service, job.id)


def test_the_client_gives_the_same_events(
    client: gh.Client, local_service: LocalService, finished: str
):
    job = client.jobs.get(finished)
    streamed = [(event.seq, event.type) for event in job.stream()]
    assert streamed == [(event["seq"], event["type"]) for event in polled(local_service, finished)]
