"""Streams over a real API, database and broker."""

import itertools
import random
import threading
from collections.abc import Callable

import httpx2
import pytest
from redis import Redis

from models.database import Database
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Broker, Message, Writer, messages
from tests.waiting import until


def read(client: httpx2.Client, path: str, **options: object) -> list[Message]:
    """A stream to its end, without the hello."""
    with client.stream("GET", path, **options) as answer:  # pyright: ignore[reportArgumentType]
        if answer.status_code == 204:
            return []
        assert answer.status_code == 200, answer.read()
        return [message for message in messages(answer.iter_lines()) if message.event != "hello"]


def test_a_stream_begins_with_hello_and_ends_with_end(ada: httpx2.Client, writer: Writer) -> None:
    writer.losses([1.0, 0.5])
    writer.finish()
    with ada.stream("GET", f"/jobs/{writer.job.id}/stream") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        hello, *log = messages(answer.iter_lines())
    job = ada.get(f"/jobs/{writer.job.id}/events").json()["data"]
    assert (hello.event, hello.id) == ("hello", None)
    assert hello.data["seq"] == len(log)
    assert hello.data["snapshot"]["state"] == "succeeded"
    assert [message.data for message in log] == job
    assert [message.id for message in log] == [str(n) for n in range(1, len(log) + 1)]
    assert log[-1].event == "end"


def test_streaming_and_polling_give_the_same_bytes_while_events_are_written(
    database: Database, redis: Redis, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(database, "ada")
    writer = Writer(database, redis).begin()
    generator = random.Random(1)  # noqa: S311

    def write() -> None:
        for _ in range(150):
            writer.losses([generator.random() for _ in range(generator.randint(1, 20))])
        writer.finish()

    with services.client(serve(database).url, secret) as client:
        thread = threading.Thread(target=write)
        thread.start()
        path = f"/jobs/{writer.job.id}"
        log = read(client, f"{path}/stream")
        thread.join()
        polled: list[str] = []
        after = "0"
        while True:
            page = client.get(f"{path}/events", params={"after": after, "limit": 97})
            texts = page.text[len('{"object":"list","data":[') : page.text.rindex('],"has_more"')]
            polled.append(texts)
            if not page.json()["has_more"]:
                break
            after = page.json()["next"]
    assert [message.data["seq"] for message in log] == list(range(1, len(log) + 1))
    assert ",".join(polled) == ",".join(message.text for message in log)


def test_reconnecting_at_200_random_points_loses_and_doubles_nothing(
    ada: httpx2.Client, writer: Writer
) -> None:
    generator = random.Random(2)  # noqa: S311

    def write() -> None:
        for _ in range(300):
            writer.losses([generator.random() for _ in range(10)])
        writer.finish()

    thread = threading.Thread(target=write)
    thread.start()
    got: list[int] = []
    last: str | None = None
    cuts = 0
    ended = False
    while not ended:
        headers = {} if last is None else {"Last-Event-ID": last}
        params = {"after": "1"}  # the header wins
        with ada.stream(
            "GET", f"/jobs/{writer.job.id}/stream", params=params if last else {}, headers=headers
        ) as answer:
            keep = generator.randint(1, 20)
            for message in messages(answer.iter_lines()):
                if message.event == "hello":
                    continue
                got.append(message.data["seq"])
                last = message.id
                keep -= 1
                ended = message.event == "end"
                if keep == 0 or ended:
                    break
        cuts += 1
    thread.join()
    assert cuts > 200
    assert got == list(range(1, len(got) + 1))
    again = ada.get(f"/jobs/{writer.job.id}/stream", headers={"Last-Event-ID": str(len(got))})
    assert again.status_code == 204


def test_events_come_without_redis_too_only_later(
    ada: httpx2.Client, writer: Writer, broker: Broker
) -> None:
    writer.losses([1.0])
    with ada.stream("GET", f"/jobs/{writer.job.id}/stream") as answer:
        log = messages(answer.iter_lines())
        seen: list[int] = []
        while len(seen) < 5:
            message = next(log)
            seen += [message.data["seq"]] if message.event != "hello" else []
        broker.kill()
        writer.losses([0.5])
        assert next(log).data["values"]["loss"] == 0.5
        broker.start()
        writer.finish()
        assert [message.event for message in log] == ["state", "end"]


def test_only_the_wanted_types_come_and_always_the_end(ada: httpx2.Client, writer: Writer) -> None:
    writer.losses([1.0] * 600)
    writer.print("hello")
    writer.losses([1.0] * 600)
    writer.finish()
    path = f"/jobs/{writer.job.id}/stream"
    assert [m.event for m in read(ada, path, params={"types": "log"})] == ["log", "end"]
    both = read(ada, path, params=[("types", "log,state"), ("types", "attempt")])
    assert {message.event for message in both} == {"log", "state", "attempt", "end"}
    assert ada.get(path, params={"types": "los"}).status_code == 422


@pytest.mark.parametrize(
    "cursor", ["-1", "9223372036854775808", "99", "x", "1.5", " 1", "\u0661", "1\t"]
)
def test_an_invalid_cursor_is_refused(ada: httpx2.Client, writer: Writer, cursor: str) -> None:
    path = f"/jobs/{writer.job.id}"
    for answer in (
        ada.get(f"{path}/stream", params={"after": cursor}),
        ada.get(f"{path}/events", params={"after": cursor}),
        ada.get("/stream", params={"job": writer.job.id, "after": f"{writer.job.id}:{cursor}"}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_cursor")
    with_break = ada.get(f"{path}/stream", params={"after": "1\r\nid: 7"})
    assert with_break.status_code == 400


def _many(
    client: httpx2.Client, names: list[str], cursor: str | None, keep: int
) -> list[Message] | None:
    headers = {} if cursor is None else {"Last-Event-ID": cursor}
    params = [("job", name) for name in names]
    with client.stream("GET", "/stream", params=params, headers=headers) as answer:
        if answer.status_code == 204:
            return None
        log = (message for message in messages(answer.iter_lines()) if message.event != "hello")
        return list(itertools.islice(log, keep))


def test_several_jobs_come_in_one_stream_and_resume_from_pairs(
    ada: httpx2.Client, sqlite: Database, redis: Redis
) -> None:
    writers = [Writer(sqlite, redis).begin() for _ in range(3)]

    def write() -> None:
        for _ in range(60):
            for writer in writers:
                writer.losses([1.0, 2.0])
        for writer in writers:
            writer.finish()

    thread = threading.Thread(target=write)
    thread.start()
    names = [writer.job.id for writer in writers]
    got: dict[str, list[int]] = {name: [] for name in names}
    cursor: str | None = None
    cuts = 0
    while (log := _many(ada, names, cursor, keep=40)) is not None:
        for message in log:
            got[message.data["job"]].append(message.data["seq"])
            cursor = message.id
        cuts += 1
    thread.join()
    assert cuts > 5
    for seqs in got.values():
        assert seqs == list(range(1, len(seqs) + 1))
        assert len(seqs) > 120
    foreign = ada.get("/stream", params={"job": names[0], "after": f"{names[1]}:1"})
    assert foreign.status_code == 400


def test_a_job_of_another_owner_cannot_be_watched(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(sqlite, "eve")
    with services.client(serve(sqlite).url, secret) as eve:
        for path in (f"/jobs/{writer.job.id}/stream", f"/stream?job={writer.job.id}"):
            answer = eve.get(path)
            assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


def test_the_number_of_streams_of_a_key_is_limited(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    with services.client(serve(sqlite, max_streams_per_key="2").url, secret) as client:
        path = f"/jobs/{writer.job.id}/stream"
        with client.stream("GET", path) as one, client.stream("GET", path) as two:
            lines = one.iter_lines(), two.iter_lines()  # closed streams would not count
            assert [next(each) for each in lines] == ["event: hello"] * 2
            third = client.get(path)
            assert third.status_code == 429
            assert "retry-after" in third.headers

        def there_is_room() -> bool:
            with client.stream("GET", path) as again:
                return again.status_code == 200

        until(there_is_room)


def test_a_silent_stream_sends_pings(
    sqlite: Database, writer: Writer, serve: Callable[..., Api]
) -> None:
    _, secret = services.make_key(sqlite, "ada")
    with (
        services.client(serve(sqlite, stream_ping_s="0.2").url, secret) as client,
        client.stream("GET", f"/jobs/{writer.job.id}/stream") as answer,
    ):
        pings = 0
        for line in answer.iter_lines():
            pings += line == ": ping"
            if pings == 3:
                break
