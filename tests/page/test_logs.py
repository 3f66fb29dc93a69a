"""The log of a job: it is followed as it grows, and keeps its scroll position."""

import re
from collections.abc import Callable, Generator
from contextlib import suppress

import httpx2
import pytest
from playwright.sync_api import Locator, Page, expect

import glasshouse as gh
from models.database import Database
from models.observations import events
from models.observations.events import NewEvent
from models.tables import now
from tests.acceptance.services import LocalService
from tests.page.browser import Witness
from tests.page.specs import small

Axe = Callable[[Page], None]
Print = Callable[[int, str, list[str]], None]


@pytest.fixture
def running(client: gh.Client, digits: str) -> Generator[gh.Job]:
    job = client.jobs.create(small(digits, "printing", stop={"steps": 10**7}))
    yield job
    job.cancel()
    with suppress(gh.JobCancelled):
        job.wait(timeout=60)


@pytest.fixture
def printed(running: gh.Job, local_service: LocalService) -> Generator[Print]:
    """Store printed lines for a rank, as a worker does."""
    database = Database(f"sqlite:///{local_service.home / 'glasshouse.db'}")

    def store(rank: int, stream: str, lines: list[str]) -> None:
        payload = {"rank": rank, "stream": stream, "lines": lines}
        with database.write() as tx:
            events.append(tx, running.id, [NewEvent("log", now(), payload)])

    yield store
    database.close()


def line(page: Page, text: str) -> Locator:
    return page.get_by_role("log").locator(".line").filter(has_text=text)


def test_lines_are_followed_and_filtered_by_rank(page: Page, running: gh.Job, printed: Print):
    printed(0, "stdout", ["zero begins"])
    page.goto(f"/jobs/{running.id}/logs")
    expect(line(page, "zero begins")).to_contain_text("0 stdout")
    follow = page.get_by_label("follow")
    expect(follow).to_be_checked()
    printed(1, "stderr", [f"one says {number}." for number in range(300)])
    expect(line(page, "one says 299.")).to_be_in_viewport()
    expect(line(page, "one says 299.")).to_contain_text("1 stderr")

    page.get_by_role("log").hover()
    page.mouse.wheel(0, -3000)
    expect(follow).not_to_be_checked()
    stays = page.get_by_role("log").evaluate("log => log.scrollTop")
    printed(0, "stdout", ["zero continues"])
    expect(page.get_by_text(re.compile(r"^302 lines$"))).to_be_visible()
    assert page.get_by_role("log").evaluate("log => log.scrollTop") == stays
    expect(line(page, "zero continues")).not_to_be_in_viewport()
    follow.check()
    expect(line(page, "zero continues")).to_be_in_viewport()

    page.get_by_label("rank").select_option("0")
    lines = page.get_by_role("log").locator(".line")
    expect(lines).to_have_count(2)
    printed(1, "stdout", ["one is not asked for"])
    printed(0, "stdout", ["zero ends"])
    expect(lines).to_have_count(3)
    expect(lines.last).to_contain_text("zero ends")
    page.reload()
    expect(lines).to_have_count(3)
    page.get_by_label("Lines that contain").fill("begins")
    page.get_by_role("button", name="Search").click()
    expect(lines).to_have_count(1)
    printed(0, "stdout", ["zero begins once more", "and this is not wanted"])
    expect(lines).to_have_count(2)


def test_the_log_is_searched_by_the_service(
    page: Page, running: gh.Job, printed: Print, http: httpx2.Client
):
    printed(0, "stderr", ["epoch 1", "NonFinite: the loss", "epoch 2", "again NonFinite"])
    page.goto(f"/jobs/{running.id}/logs")
    lines = page.get_by_role("log").locator(".line")
    everything = http.get(f"/jobs/{running.id}/logs", headers={"Accept": "text/plain"}).text
    count = page.get_by_text(re.compile(r"^\d+ lines$"))
    expect(count).to_have_text(f"{len(everything.splitlines())} lines")
    page.get_by_label("Lines that contain").fill("NonFinite")
    page.get_by_role("button", name="Search").click()
    wanted = [line for line in everything.splitlines() if "NonFinite" in line]
    assert 0 < len(wanted) < len(everything.splitlines())
    expect(lines).to_have_count(len(wanted))
    for line, text in zip(lines.all(), wanted, strict=True):
        expect(line).to_contain_text(text.strip())
    expect(page).to_have_url(re.compile("text=NonFinite"))
    page.reload()
    expect(lines).to_have_count(len(wanted))
    page.get_by_label("stream").select_option("stdout")
    expect(page.get_by_text("No line passes these filters.")).to_be_visible()


def test_the_address_of_the_page_has_the_filters(page: Page, running: gh.Job, printed: Print):
    printed(0, "stdout", ["plain (a+)+", "ERROR: zero", "plain aa"])
    page.goto(f"/jobs/{running.id}/logs")
    expect(line(page, "plain aa")).to_be_visible()
    expect(page.get_by_label("rank")).to_have_count(0)  # there is one
    printed(2, "stderr", ["a.py:3: UserWarning: two", "  warn()", "ERROR: two"])
    lines = page.get_by_role("log").locator(".line")
    expect(line(page, "UserWarning: two")).to_contain_text("2 stderr warning")
    page.get_by_label("level").select_option("warning and above")
    expect(lines).to_have_count(4)
    page.get_by_label("rank").select_option("2")
    expect(lines).to_have_count(3)
    page.get_by_label("level").select_option("error")
    expect(lines).to_have_count(1)
    page.get_by_label("since").select_option("10 minutes")
    expect(page).to_have_url(re.compile(r"level=error&rank=2&since=10m$"))
    page.reload()
    expect(lines).to_have_count(1)
    printed(2, "stderr", ["plain", "ERROR: more"])
    expect(lines).to_have_count(2)
    expect(lines.last).to_contain_text("2 stderr error ERROR: more")


def test_a_text_is_searched_as_it_is_and_a_pattern_as_one(
    page: Page, running: gh.Job, printed: Print, witness: Witness
):
    printed(0, "stdout", ["plain (a+)+$", "aa!", "aaa"])
    page.goto(f"/jobs/{running.id}/logs")
    lines = page.get_by_role("log").locator(".line")
    page.get_by_label("Lines that contain").fill("(a+)+$")
    page.get_by_role("button", name="Search").click()
    expect(lines).to_have_count(1)
    expect(lines.locator("mark")).to_have_text("(a+)+$")
    page.get_by_label("regular expression").check()
    expect(lines).to_have_count(1)
    expect(lines.last).to_contain_text("aaa")
    expect(page.get_by_text(re.compile(r"^1 lines that match “\(a\+\)\+\$”$"))).to_be_visible()
    expect(page).to_have_url(re.compile("grep="))
    witness.expect("status of 422")
    page.get_by_label("Lines that match").fill("a(")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_text("missing ) at position 1").first).to_be_visible()
    page.get_by_label("regular expression").uncheck()
    expect(page.get_by_text("No line passes these filters.")).to_be_visible()


def test_the_filters_have_names(page: Page, running: gh.Job, printed: Print, axe: Axe):
    printed(1, "stderr", ["ERROR: one", "W1125 10:00:00.000000 1 a.cpp:1] two"])
    page.goto(f"/jobs/{running.id}/logs?rank=1&level=warning&grep=one|two")
    expect(page.get_by_role("log").locator(".line")).to_have_count(2)
    axe(page)
