"""Logs of which retention has deleted the older events, over a real API."""

import httpx2

import glasshouse as gh
from glasshouse.events import GapEvent
from models.database import Database
from models.storage import retention
from tests.integration.inspection import services
from tests.integration.inspection.services import Writer
from tests.integration.inspection.test_streams import read


def forget(database: Database, job: str, upto: int) -> None:
    """Delete the events before a number, as the purge does."""
    with database.write() as tx:
        retention.KINDS[0].some(tx, job, upto - 1)


def test_a_stream_from_an_old_cursor_has_one_gap_and_then_every_event_that_is_kept(
    ada: httpx2.Client, sqlite: Database, writer: Writer
) -> None:
    writer.losses([1.0] * 10)
    writer.finish()
    path = f"/jobs/{writer.job.id}"
    whole = read(ada, f"{path}/stream")
    forget(sqlite, writer.job.id, 6)
    gap, *rest = read(ada, f"{path}/stream", headers={"Last-Event-ID": "2"})
    assert (gap.event, gap.id, gap.data["first_available"]) == ("gap", "5", 6)
    assert rest == whole[5:]
    assert read(ada, f"{path}/stream", headers={"Last-Event-ID": "5"}) == rest
    polled = ada.get(f"{path}/events", params={"after": "2"}).json()
    assert polled["data"] == [gap.data]
    assert (polled["has_more"], polled["next"]) == (True, "5")
    page = ada.get(f"{path}/events", params={"after": polled["next"]}).json()
    assert page["data"] == [message.data for message in rest]


def test_a_gap_comes_though_only_some_types_are_wanted(
    ada: httpx2.Client, sqlite: Database, writer: Writer
) -> None:
    writer.losses([1.0] * 10)
    writer.finish()
    forget(sqlite, writer.job.id, 6)
    path = f"/jobs/{writer.job.id}"
    seen = read(ada, f"{path}/stream", params={"types": "state"})
    assert [message.event for message in seen] == ["gap", "state", "end"]


def test_of_several_jobs_only_the_one_with_a_gap_reports_one(
    ada: httpx2.Client, sqlite: Database, writer: Writer
) -> None:
    writer.losses([1.0] * 10)
    writer.finish()
    other = Writer(sqlite, writer.redis).begin()
    other.finish()
    forget(sqlite, writer.job.id, 6)
    names = [writer.job.id, other.job.id]
    seen = read(ada, "/stream", params={"job": names})
    gaps = [message for message in seen if message.event == "gap"]
    assert [message.data["job"] for message in gaps] == [writer.job.id]
    assert sum(message.event == "end" for message in seen) == 2


def test_the_client_gives_the_gap_out_and_continues_to_the_end(
    ada: httpx2.Client, sqlite: Database, writer: Writer
) -> None:
    writer.losses([1.0] * 10)
    writer.finish()
    forget(sqlite, writer.job.id, 6)
    _, secret = services.make_key(sqlite, "ada")
    url = str(ada.base_url).split("/api/")[0]
    with gh.Client(url, secret) as client:
        job = client.jobs.get(writer.job.id)
        seen = list(job.stream())
        polled = list(job.events())
    assert isinstance(seen[0], GapEvent)
    assert seen[0].first_available == 6
    assert [event.seq for event in seen] == list(range(5, seen[-1].seq + 1))
    assert seen == polled


def test_logs_whose_beginning_is_gone_can_still_be_read(
    ada: httpx2.Client, sqlite: Database, writer: Writer
) -> None:
    writer.losses([1.0] * 10)
    writer.finish()
    forget(sqlite, writer.job.id, 6)
    assert ada.get(f"/jobs/{writer.job.id}/logs").status_code == 200
