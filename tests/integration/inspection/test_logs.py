"""The log of a job over HTTP: filters of lines, the last lines, cursors, and waiting."""

import shutil
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis

import glasshouse as gh
from api.http.patterns import compiled
from api.rendering import log_search
from api.rendering.log_search import LineFilter, Range
from api.schemas import inspection
from glasshouse.errors import InvalidRequest
from models.database import Database
from models.jobs import jobs
from models.jobs.shipments import Batch
from models.observations import log_batches
from models.observations.events import NewEvent
from models.tables import now
from tests.conftest import empty_postgres
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Broker, Writer, checked, problem

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "net.py", line 3, in forward',
    "ValueError: größer als 🙂",
]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Database]:
    """A database of either kind, for all tests here."""
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("logs") / "test.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        opened = Database(f"sqlite:///{path}")
    else:
        opened = Database(empty_postgres(request))
    yield opened
    opened.close()


@pytest.fixture
def printer(database: Database, redis: Redis) -> Writer:
    """The writer of a new job."""
    return Writer(database, redis).begin()


@pytest.fixture(scope="module")
def root(home: Path, broker: Broker, database: Database) -> Generator[httpx2.Client]:
    """A client of an API on the database."""
    api = Api(home, database.url, broker.url)
    _, secret = services.make_key(database, "ada")
    with closing(services.client(api.url, secret)) as opened:
        yield opened
    api.kill()


@pytest.fixture
def http(root: httpx2.Client, printer: Writer) -> Generator[httpx2.Client]:
    """The client, at the job of the printer."""
    before = root.base_url
    root.base_url = f"{before}jobs/{printer.job.id}"
    yield root
    root.base_url = before


def lines(http: httpx2.Client, **params: Any) -> list[str]:
    answer = http.get("/logs", params=params)
    assert answer.status_code == 200, answer.text
    assert "x-has-more" not in answer.headers
    return answer.text.split("\n")[:-1]


def entries(http: httpx2.Client, **params: Any) -> list[dict[str, Any]]:
    answer = http.get("/logs", params=params, headers={"Accept": "application/json"})
    return checked(answer, inspection.PrintedList)["data"]


def test_logs_come_as_text_and_as_json(http: httpx2.Client, printer: Writer) -> None:
    for number in range(300):
        printer.print(f"line {number}", f"a|b {number}", rank=number % 2)
    text = http.get("/logs")
    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert len(text.text.splitlines()) == 600
    assert lines(http, tail=3) == ["a|b 298", "line 299", "a|b 299"]
    assert len(lines(http, rank=1)) == 300
    assert entries(http)[0]["lines"] == ["line 0", "a|b 0"]
    assert entries(http)[0]["levels"] == ["info", "info"]
    last = text.headers["x-last-seq"]
    assert lines(http, after=last) == []
    printer.print("more")
    assert lines(http, after=last) == ["more"]
    assert lines(http, before=last, tail=1) == ["a|b 298"]
    assert problem(http.get("/logs?after=-1")) == (400, "invalid_cursor")
    assert problem(http.get("/logs?before=1000000")) == (400, "invalid_cursor")


def test_lines_are_filtered_before_the_last_are_taken(http: httpx2.Client, printer: Writer) -> None:
    for number in range(200):
        printer.print(f"line {number}", f"WARNING: number {number}", rank=number % 4)
    assert lines(http, grep=r"line \d*7$", tail=2, rank="1,3") == ["line 187", "line 197"]
    assert lines(http, grep="(?i)WARNing.* 1[0-9]$", rank=[1, 3]) == [
        f"WARNING: number {number}" for number in range(11, 20, 2)
    ]
    assert lines(http, grep="99", level="warning", rank=3) == [
        "WARNING: number 99",
        "WARNING: number 199",
    ]
    assert lines(http, rank=7) == []  # a rank that has not printed is no error
    assert lines(http, rank=7, tail=5) == []
    assert lines(http, grep="no such text", tail=5) == []
    assert entries(http, level="error") == []
    assert len(lines(http, tail=1_000_000)) == 400


def test_a_level_gives_its_lines_and_those_above(http: httpx2.Client, printer: Writer) -> None:
    printer.print("DEBUG:net:a", "plain", "a.py:1: UserWarning: old", '  warn("old")', *TRACEBACK)
    printed = lines(http)
    assert lines(http, level="debug") == printed
    assert lines(http, level="info") == printed[1:]
    assert lines(http, level="warning") == printed[2:]
    assert lines(http, level="error") == TRACEBACK
    (entry,) = entries(http, level="warning", grep="old")
    assert (entry["lines"], entry["levels"]) == (printed[2:4], ["warning", "warning"])
    assert problem(http.get("/logs?level=loud")) == (422, "invalid_request")


def test_events_of_releases_without_levels_have_them_too(
    http: httpx2.Client, printer: Writer
) -> None:
    printer.print("plain", *TRACEBACK, levels=False)
    assert lines(http, level="error") == TRACEBACK
    assert entries(http)[0]["levels"] == ["info", "error", "error", "error"]


def test_patterns_match_unicode(http: httpx2.Client, printer: Writer) -> None:
    printer.print("größer als 🙂", "grosser als :)", "数据 3")
    assert lines(http, grep="gr.{2}ßer") == []
    assert lines(http, grep="gr.ßer|^数.") == ["größer als 🙂", "数据 3"]
    assert lines(http, grep=r"\p{Han}{2} \d$") == ["数据 3"]
    assert lines(http, grep="als .$") == ["größer als 🙂"]
    assert lines(http, grep="") == lines(http)


def test_since_is_a_time_or_how_long_ago(http: httpx2.Client, printer: Writer) -> None:
    time_now = now()
    for minutes in (90, 20, 5):
        printer.print(f"{minutes} min ago", at=time_now - timedelta(minutes=minutes))
    assert lines(http, since="10m") == ["5 min ago"]
    assert lines(http, since="1h10m") == ["20 min ago", "5 min ago"]
    assert lines(http, since="1d", tail=2, grep="0") == ["90 min ago", "20 min ago"]
    at = time_now - timedelta(minutes=20)
    assert lines(http, since=at.isoformat()) == ["20 min ago", "5 min ago"]
    later = (at + timedelta(milliseconds=1)).isoformat()
    assert lines(http, since=later) == ["5 min ago"]
    for wrong in ("yesterday", "10", "10 m", "-5m", "2026-13-01", "9" * 9 + "w"):
        answer = http.get("/logs", params={"since": wrong})
        assert problem(answer) == (422, "invalid_request"), wrong
        assert answer.json()["errors"][0]["pointer"] == "/query/since"


@pytest.mark.parametrize("wrong", ["x", "-1", "1.5", "1000001", "0,x", "٣"])
def test_a_rank_is_a_number(http: httpx2.Client, wrong: str) -> None:
    answer = http.get("/logs", params={"rank": wrong})
    assert problem(answer) == (422, "invalid_request")
    assert answer.json()["errors"][0]["pointer"] == "/query/rank"


def test_a_wrong_pattern_is_explained(http: httpx2.Client, printer: Writer) -> None:
    answer = http.get("/logs", params={"grep": "loss (a|b"})
    assert problem(answer) == (422, "invalid_request")
    (error,) = answer.json()["errors"]
    assert (error["pointer"], error["code"]) == ("/query/grep", "invalid_pattern")
    assert "missing ) at position 5" in error["detail"]
    assert r"write '\('" in error["detail"]


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+$", "(.*)*x$", "(a?){500}a{500}b", "(?:a?a?a?a?){200}b"]
)
def test_a_hostile_pattern_ends_soon(http: httpx2.Client, printer: Writer, pattern: str) -> None:
    printer.print("a" * 4095 + "!", "c")
    found: list[list[str]] = []
    search = threading.Thread(target=lambda: found.append(lines(http, grep=pattern)))
    search.start()
    search.join(60)  # with backtracking: years
    assert found == [[]]


def test_a_search_that_takes_long_says_where_to_continue(
    database: Database, printer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        printer.print(f"line {number}")
    with database.read() as tx:
        last = jobs.get(tx, printer.job.id, None).last_seq
    monkeypatch.setattr(log_search, "SEARCH_S", -1.0)
    for size in (log_batches.BATCH, 2):
        monkeypatch.setattr(log_batches, "BATCH", size)
        wanted = LineFilter(search=compiled("grep", "[36]"))
        seq, parts = 0, list[bytes]()
        steps = 0
        while True:
            steps += 1
            within = Range(printer.job.id, seq, last)
            found = log_search.lines_after(database.read, within, wanted, "text")
            assert found.seq > seq
            seq, parts = found.seq, parts + found.parts
            if found.is_complete:
                break
        assert (b"".join(parts), seq, steps > 1) == (b"line 3\nline 6\n", last, True)

        before, parts = last + 1, list[bytes]()
        while True:
            within = Range(printer.job.id, 0, before - 1)
            found = log_search.last_lines(database.read, within, wanted, "text", 5)
            assert found.is_complete or found.seq < before
            before, parts = found.seq, found.parts + parts
            if found.is_complete:
                break
        assert b"".join(parts) == b"line 3\nline 6\n"


def test_what_fits_no_answer_is_continued(
    database: Database, printer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_search, "MAX_BYTES", 100)
    for number in range(20):
        printer.print(f"line {number:02}" + "x" * 50)
    found = log_search.lines_after(
        database.read, Range(printer.job.id, 0, 10**6), LineFilter(), "text"
    )
    assert (len(found.parts), found.is_complete) == (2, False)
    last = log_search.last_lines(
        database.read, Range(printer.job.id, 0, 10**6), LineFilter(), "text", 15
    )
    assert [part[:7] for part in last.parts] == [b"line 18", b"line 19"]
    assert not last.is_complete


def test_a_log_between_many_other_events_is_read_in_windows(
    database: Database, printer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    printer.print("first")
    printer.ship(
        Batch(events=[NewEvent("probe", now(), {"probe": "p", "action": "x"}) for _ in range(50)])
    )
    printer.print("second")
    printer.print("third")
    with database.read() as tx:
        last = jobs.get(tx, printer.job.id, None).last_seq
    within = Range(printer.job.id, 0, last)
    for window in (1, 2, 3, 7, 100):
        monkeypatch.setattr(log_batches, "WINDOW", window)
        found = log_search.lines_after(database.read, within, LineFilter(), "text")
        assert (b"".join(found.parts), found.is_complete) == (b"first\nsecond\nthird\n", True)
        for num in (1, 2, 3, 4):
            tail = log_search.last_lines(database.read, within, LineFilter(), "text", num)
            assert b"".join(tail.parts).split(b"\n")[:-1] == [b"first", b"second", b"third"][-num:]
            assert tail.is_complete


def test_a_pattern_that_is_too_slow_for_one_event_is_refused(
    monkeypatch: pytest.MonkeyPatch, database: Database, printer: Writer
) -> None:
    printer.print("a", "b")
    monkeypatch.setattr(log_search, "MAX_EVENT_S", -1.0)
    with pytest.raises(InvalidRequest, match="takes too long"):
        log_search.lines_after(
            database.read, Range(printer.job.id, 0, 100), LineFilter(search=lambda _: True), "text"
        )


def test_the_request_waits_for_a_line_that_is_wanted(http: httpx2.Client, printer: Writer) -> None:
    printer.print("begin")
    last = http.get("/logs").headers["x-last-seq"]
    stop = threading.Event()

    def write() -> None:
        for number in range(1000):
            if stop.wait(0.05):
                return
            printer.print(f"ERROR: {number}" if number == 5 else f"nothing {number}")

    writing = threading.Thread(target=write)
    writing.start()
    try:
        params = {"after": last, "level": "error"}
        answer = http.get("/logs", params=params, headers={"Prefer": "wait=50"})
    finally:
        stop.set()
        writing.join()
    assert answer.text == "ERROR: 5\n"
    assert answer.headers["preference-applied"] == "wait=50"
    printer.finish()
    began = time.monotonic()
    after = answer.headers["x-last-seq"]
    over = http.get(
        "/logs", params={"after": after, "level": "error"}, headers={"Prefer": "wait=60"}
    )
    assert (over.text, time.monotonic() - began < 50) == ("", True)


def test_an_answer_that_the_client_has_is_not_sent_again(
    http: httpx2.Client, printer: Writer
) -> None:
    printer.print("a")
    tag = http.get("/logs?grep=a").headers["etag"]
    assert http.get("/logs?grep=a", headers={"If-None-Match": tag}).status_code == 304
    printer.print("b")
    assert http.get("/logs?grep=a", headers={"If-None-Match": tag}).status_code == 200
    tag = http.get("/logs?since=10m").headers["etag"]  # what 10 minutes ago is changes
    assert http.get("/logs?since=10m", headers={"If-None-Match": tag}).status_code == 200


def test_the_client_follows_what_the_filters_leave(
    http: httpx2.Client, printer: Writer, database: Database
) -> None:
    for number in range(5):
        printer.print(f"line {number}", f"ERROR: {number}", rank=number % 2)
    url = str(http.base_url).split("/api/")[0]
    _, secret = services.make_key(database, "ada")
    with gh.Client(url, secret) as client:
        job = client.jobs.get(printer.job.id)
        assert job.logs(rank=[0, 1], level="error", tail=2) == "ERROR: 3\nERROR: 4\n"
        assert job.logs(grep="[24]$", since="10m", rank=0) == "line 2\nERROR: 2\nline 4\nERROR: 4\n"
        followed: Iterator[str] = job.follow(grep="[0-9]", level="error", tail=1)
        assert next(followed) == "ERROR: 4"
        printer.print("line 5", "ERROR: 5")
        assert next(followed) == "ERROR: 5"
        printer.print("ERROR: six", "ERROR: 7")
        printer.finish()
        assert list(followed) == ["ERROR: 7"]
        assert list(job.follow(since="1h", rank=1)) == [
            f"{kind}{number}" for number in (1, 3) for kind in ("line ", "ERROR: ")
        ]
        assert len(list(job.follow([0, 1]))) == 14
