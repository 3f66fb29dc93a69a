"""The request log: its bounds, its pages and its deletion, on both databases."""

from typing import Any

from sqlalchemy import func, select, update

from glasshouse import jsonio
from glasshouse.ids import new_id
from models.database import Database
from models.jobs import jobs, replicas
from models.observations import served_requests
from models.observations.served_requests import RequestFilter
from models.tables import Job, ServedRequest, now

START_MS = 1_700_000_000_000
ALL = RequestFilter()


def serve_job(database: Database, **limits: int) -> Job:
    log = {"max_requests": 10, "max_bytes": 10_000} | limits
    resolved: dict[str, Any] = {"kind": "serve", "request_log": log}
    with database.write() as tx:
        return jobs.add(tx, owner="ada", spec={"kind": "serve"}, resolved=resolved, plan={})


def entry(number: int, size: int = 100, **values: Any) -> dict[str, Any]:
    details = jsonio.dumps({"n": number})
    made = {
        "id": new_id("rec", at_ms=START_MS + number),
        "at": now(),
        "model": "m",
        "version": 1,
        "status": 200,
        "code": None,
        "details": details.ljust(size),
    }
    return made | values


def add(database: Database, job: str, *entries: dict[str, Any]) -> None:
    with database.write() as tx:
        served_requests.add(tx, job, entries)


def numbers(rows: list[ServedRequest]) -> list[int]:
    return [int(row.details.split(":")[1].rstrip("} ")) for row in rows]


def read(database: Database, job: Job, wanted: RequestFilter = ALL, **page: Any) -> Any:
    with database.read() as tx:
        return served_requests.read(tx, job, wanted, **{"after": None, "limit": 100} | page)


def kept(database: Database, job: Job) -> list[int]:
    return numbers(read(database, job).rows)


def test_the_oldest_beyond_the_number_are_dropped(database: Database):
    job, other = serve_job(database), serve_job(database)
    add(database, other.id, entry(0))
    for first in range(0, 28, 4):
        add(database, job.id, *map(entry, range(first, first + 4)))
        assert kept(database, job) == [*range(first + 3, max(-1, first + 3 - 10), -1)]
    add(database, job.id, *map(entry, range(100, 130)))
    assert kept(database, job) == [*range(129, 119, -1)]
    assert kept(database, other) == [0]


def test_the_oldest_beyond_the_bytes_are_dropped(database: Database):
    job = serve_job(database, max_bytes=1000)
    add(database, job.id, entry(0, 300), entry(1, 300), entry(2, 300))
    assert kept(database, job) == [2, 1, 0]
    add(database, job.id, entry(3, 100))
    assert kept(database, job) == [3, 2, 1, 0]  # exactly 1000
    add(database, job.id, entry(4, 20))
    assert kept(database, job) == [4, 3, 2, 1]
    add(database, job.id, entry(5, 990), entry(6, 11))
    assert kept(database, job) == [6]
    with database.read() as tx:
        size = tx.scalars(select(func.sum(func.length(ServedRequest.details)))).one()
    assert size <= 1000


def test_sizes_are_those_of_the_bytes_of_a_text(database: Database):
    job = serve_job(database)
    add(database, job.id, entry(0, details='{"n":0,"t":"ä€"}'))
    (row,) = read(database, job).rows
    assert row.size_bytes == len('{"n":0,"t":"ä€"}'.encode()) > len(row.details)


def test_pages_are_newest_first_and_stay_stable_while_requests_come(database: Database):
    job = serve_job(database, max_requests=100)
    add(database, job.id, *map(entry, range(7)))
    page = read(database, job, limit=3)
    assert (numbers(page.rows), page.cursor) == ([6, 5, 4], page.rows[-1].id)
    add(database, job.id, entry(7))
    page = read(database, job, limit=3, after=page.cursor)
    assert numbers(page.rows) == [3, 2, 1]
    page = read(database, job, limit=3, after=page.cursor)
    assert (numbers(page.rows), page.cursor) == ([0], None)
    assert read(database, job, limit=8).cursor is None


def test_a_page_has_a_limit_in_bytes(database: Database, monkeypatch):
    monkeypatch.setattr(served_requests, "PAGE_BYTES", 250)
    job = serve_job(database, max_requests=100)
    add(database, job.id, *map(entry, range(4)), entry(4, 900))
    found: list[list[int]] = []
    cursor: str | None = None
    while not found or cursor is not None:
        page = read(database, job, after=cursor)
        found.append(numbers(page.rows))
        cursor = page.cursor
    assert found == [[4], [3, 2], [1, 0]]


def test_requests_are_filtered_by_model_and_status(database: Database):
    job = serve_job(database)
    add(database, job.id, entry(0), entry(1, model="n"), entry(2, status=429, code="queue_full"))
    add(database, job.id, entry(3, status=422, model="n"))
    assert numbers(read(database, job, RequestFilter("n")).rows) == [3, 1]
    assert numbers(read(database, job, RequestFilter(None, {422, 429})).rows) == [3, 2]
    assert numbers(read(database, job, RequestFilter("n", {200})).rows) == [1]


def test_further_replicas_record_for_their_serve_job(database: Database):
    job, child = serve_job(database), serve_job(database)
    with database.write() as tx:
        tx.execute(update(Job).where(Job.id == child.id).values(parent=job.id))
        replicas.add_child(tx, child.id, job.id)
        child = jobs.get(tx, child.id, None)
    add(database, job.id, entry(0))
    add(database, child.id, entry(1))
    assert [row.replica for row in read(database, job).rows] == [child.id, job.id]
    assert kept(database, child) == [1]
    add(database, child.id, *map(entry, range(2, 11)))
    assert kept(database, job) == [*range(10, 0, -1)]  # one bound for all replicas
    with database.write() as tx:
        assert served_requests.clear(tx, child) == 10


def test_all_can_be_deleted_and_nothing_is_stored_for_a_deleted_job(database: Database):
    job = serve_job(database)
    add(database, job.id, *map(entry, range(5)))
    with database.write() as tx:
        assert served_requests.clear(tx, job) == 5
    assert kept(database, job) == []
    with database.write() as tx:
        tx.execute(update(Job).where(Job.id == job.id).values(deleted_at=now()))
    add(database, job.id, entry(5))
    assert kept(database, job) == []
