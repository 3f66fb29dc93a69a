"""What clients of the API see of a job that went on from a checkpoint."""

import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from redis import Redis

import glasshouse as gh
from api.schemas import inspection
from models.database import Database
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Message, Writer, messages, problem
from tests.integration.inspection.test_streams import read
from tests.waiting import until


def pairs(log: list[Message]) -> list[tuple[int, int]]:
    """Attempt and step of each of its metrics."""
    told = [message.data for message in log if message.event == "metrics"]
    return [(event["attempt"], event["step"]) for event in told]


def crashed(writer: Writer) -> Writer:
    """Steps 0 to 4, then from 3 on again to 6, then from 2 on to 3."""
    writer.losses([1.0] * 5)
    writer.begin_again(3)
    writer.losses([2.0] * 4)
    writer.begin_again(2)
    writer.losses([3.0] * 2)
    return writer


SHOWN = [(1, 0), (1, 1), (3, 2), (3, 3)]
WHOLE = [*[(1, step) for step in range(5)], *[(2, step) for step in range(3, 7)], (3, 2), (3, 3)]


def test_later_readers_see_one_run_and_attempt_all_shows_everything(
    ada: httpx2.Client, writer: Writer
) -> None:
    path = f"/jobs/{crashed(writer).job.id}"
    writer.finish()
    log = read(ada, f"{path}/stream")
    assert pairs(log) == SHOWN
    polled = services.checked(ada.get(f"{path}/events?limit=1000"), inspection.EventList)["data"]
    assert [message.data for message in log] == polled
    begun = [message.data["resumed_from_step"] for message in log if message.event == "attempt"]
    assert begun == [None, 3, 2]
    assert [message.event for message in log].count("end") == 1
    assert log[-1].event == "end"

    everything = read(ada, f"{path}/stream?attempt=all")
    assert pairs(everything) == WHOLE
    assert [m.data["seq"] for m in everything] == list(range(1, len(everything) + 1))
    polled = ada.get(f"{path}/events?limit=1000&attempt=all").json()["data"]
    assert [message.data for message in everything] == polled
    second = read(ada, f"{path}/stream?attempt=2")
    assert pairs(second) == [(2, step) for step in range(3, 7)]
    assert second[-1].event == "end"  # so that the reader knows that the stream has ended
    only = ada.get(f"{path}/events?limit=1000&attempt=2").json()["data"]
    assert {event["attempt"] for event in only} == {2}


def test_metrics_checkpoints_and_the_rest_are_those_of_one_run(
    ada: httpx2.Client, writer: Writer
) -> None:
    path = f"/jobs/{crashed(writer).job.id}"
    columns = services.checked(ada.get(f"{path}/metrics/query?name=loss"), inspection.Columns)
    assert columns["step"] == [0, 1, 2, 3]
    assert columns["values"]["loss"] == [1.0, 1.0, 3.0, 3.0]
    assert "attempt" not in columns
    (loss, _) = services.checked(ada.get(f"{path}/metrics"), inspection.MetricList)["data"]
    assert (loss["count"], loss["max"], loss["last_step"]) == (4, 3.0, 3)
    query = f"{path}/metrics/query?name=loss&attempt=all"
    columns = services.checked(ada.get(query), inspection.Columns)
    assert sorted(zip(columns["attempt"], columns["step"], strict=True)) == sorted(WHOLE)
    assert columns["step"] == sorted(columns["step"])
    text = ada.get(query, headers={"Accept": "text/csv"}).text.splitlines()
    assert text[0] == "step,epoch,attempt,loss"
    assert len(text) == 1 + len(WHOLE)
    columns = ada.get(f"{path}/metrics/query?name=loss&attempt=2").json()
    assert columns["values"]["loss"] == [2.0] * 4
    kept = services.checked(ada.get(f"{path}/checkpoints"), inspection.CheckpointList)["data"]
    assert [(row["attempt"], row["step"], row["state"]) for row in kept] == [(2, 2, "complete")]


def test_an_open_stream_sees_what_came_and_then_from_where_it_comes_again(  # noqa: C901
    database: Database, redis: Redis, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(database, "ada")
    writer = Writer(database, redis).begin()
    live: dict[str, list[Message]] = {"": [], "?attempt=all": []}
    url = serve(database).url

    def follow(query: str) -> None:
        with services.client(url, secret) as client:
            path = f"/jobs/{writer.job.id}/stream{query}"
            with client.stream("GET", path) as answer:
                live[query].extend(messages(answer.iter_lines()))

    def late(after: int = 0) -> list[Message]:
        """What a client gets that comes now, beside those that follow."""
        found: list[Message] = []
        with (
            services.client(url, secret) as client,
            client.stream("GET", f"/jobs/{writer.job.id}/stream?after={after}") as answer,
        ):
            for message in messages(answer.iter_lines()):
                found.append(message)
                if message.data["seq"] == last_seq() and message.event != "hello":
                    return found
        return found

    def last_seq() -> int:
        return max((m.data["seq"] for m in live[""] if m.event != "hello"), default=0)

    threads = [threading.Thread(target=follow, args=(query,)) for query in live]
    for thread in threads:
        thread.start()
    until(lambda: all(live.values()))
    writer.losses([1.0] * 5)
    until(lambda: all(len(pairs(seen)) == 5 for seen in live.values()))
    writer.begin_again(3)
    writer.losses([2.0] * 4)
    until(lambda: all(len(pairs(seen)) == 9 for seen in live.values()))
    # the tail that the others watch has what gave way; who comes now must not get it
    assert pairs(late()) == [(1, 0), (1, 1), (1, 2), *[(2, step) for step in range(3, 7)]]
    second = next(m.data["seq"] for m in live[""] if m.data.get("step") == 1)
    assert pairs(late(second)) == [(1, 2), *[(2, step) for step in range(3, 7)]]
    writer.finish()
    for thread in threads:
        thread.join()
    for seen in live.values():
        seqs = [message.data["seq"] for message in seen if message.event != "hello"]
        assert seqs == list(range(1, len(seqs) + 1))
    kept: list[tuple[int, int]] = []
    for message in live[""]:  # what a client does that keeps what it was sent
        if message.event == "attempt" and message.data["resumed_from_step"] is not None:
            kept = [pair for pair in kept if pair[1] < message.data["resumed_from_step"]]
        kept += pairs([message])
    with services.client(url, secret) as client:
        assert kept == pairs(read(client, f"/jobs/{writer.job.id}/stream"))


@pytest.mark.parametrize("attempt", ["0", "-1", "some", "1.5", "ALL", "1,2", "9999999999", "all "])
def test_an_attempt_that_is_none_is_refused(
    ada: httpx2.Client, writer: Writer, attempt: str
) -> None:
    for route in ("events", "stream", "metrics/query", "captures"):
        params: dict[str, Any] = {"attempt": attempt, "name": "loss"}
        answer = ada.get(f"/jobs/{writer.job.id}/{route}", params=params)
        assert problem(answer) == (422, "invalid_request"), route
        assert answer.json()["errors"][0]["pointer"] == "/query/attempt"


def test_the_python_client_reads_one_run_or_all_attempts(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    crashed(writer)
    writer.finish()
    _, secret = services.make_key(sqlite, "ada")
    with gh.Client(serve(sqlite).url, secret) as client:
        job = client.jobs.get(writer.job.id)
        assert job.metrics("loss").steps.tolist() == [0, 1, 2, 3]
        assert len(job.metrics("loss", attempt="all")) == len(WHOLE)
        assert job.metrics("loss", attempt=2).values.tolist() == [2.0] * 4
        shown = [event.seq for event in job.stream()]
        assert shown == [event.seq for event in job.events()]
        whole = [event.seq for event in job.stream(attempt="all")]
        assert whole == list(range(1, len(whole) + 1))
        assert whole == [event.seq for event in job.events(attempt="all")]
        assert set(shown) < set(whole)
