"""The list of jobs shows the values of the API, with its filters in the URL."""

import re

import httpx2
import pytest
from playwright.sync_api import Locator, Page, expect

import glasshouse as gh
from models.database import Database
from models.jobs import jobs
from models.settings import Settings
from tests.acceptance.services import LocalService
from tests.page.browser import SIZES, bare_words, fits
from tests.page.endless import endless, running
from tests.page.specs import small

MANY = 1000


@pytest.fixture(scope="module")
def ended(client: gh.Client, digits: str) -> gh.Job:
    """A job that has ended."""
    job = client.jobs.create(small(digits, "ended one", labels={"list": "yes"}))
    return job.wait(timeout=120)


def row_of(page: Page, job: gh.Job) -> Locator:
    return page.locator(f"tr[data-job={job.id}]")


def test_a_row_shows_the_values_of_the_api(page: Page, ended: gh.Job, http: httpx2.Client):
    expected = http.get(f"/jobs/{ended.id}").json()
    row = row_of(page, ended)
    expect(row.get_by_role("link", name="ended one")).to_have_attribute("href", f"/jobs/{ended.id}")
    expect(row).to_contain_text("succeeded")
    steps = expected["progress"]["step"]
    expect(row.get_by_role("progressbar")).to_have_attribute("aria-valuenow", str(steps))
    loss = float(row.locator("td").nth(4).inner_text())
    assert loss == pytest.approx(expected["summary"]["loss"]["last"], rel=1e-3)
    line = row.get_by_role("img")
    expect(line).to_have_attribute("aria-label", re.compile(r"^loss from [\d.]+ to [\d.]+$"))


def test_jobs_are_filtered_by_label_name_and_state_in_the_url(page: Page, ended: gh.Job):
    page.get_by_label("Label").fill("list:yes")
    expect(page).to_have_url(re.compile(r"label=list%3Ayes"))
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Search").fill("nothing like this")
    expect(page.get_by_text("No job matches these filters.")).to_be_visible()
    page.get_by_label("Search").fill("ended o")
    expect(row_of(page, ended)).to_be_visible()
    page.get_by_label("State").select_option("failed")
    expect(page.get_by_text("No job matches these filters.")).to_be_visible()
    page.get_by_label("State").select_option("ended")
    expect(row_of(page, ended)).to_be_visible()
    page.reload()
    expect(row_of(page, ended)).to_be_visible()
    expect(page.get_by_label("Search")).to_have_value("ended o")


def test_a_running_job_is_live_and_is_paused_resumed_and_canceled(
    page: Page, client: gh.Client, digits: str
):
    job = client.jobs.create(small(digits, "long one", stop={"epochs": 100_000}))
    row = row_of(page, job)
    expect(row).to_contain_text("running")
    done = row.get_by_role("progressbar")
    before = int(done.get_attribute("aria-valuenow") or 0)
    expect(done).not_to_have_attribute("aria-valuenow", str(before))
    row.get_by_role("button", name="Pause").click()
    expect(row).to_contain_text("paused")
    row.get_by_role("button", name="Resume").click()
    expect(row).to_contain_text("running")
    row.get_by_role("button", name="Cancel").click()
    expect(row).to_contain_text("cancelled")
    assert job.refresh().state == "cancelled"


def test_a_job_with_nan_has_a_badge_with_the_layer(page: Page, client: gh.Client, digits: str):
    guard = {"nonfinite": {"check": ["loss"], "action": "fail"}}
    wild = {"type": "SGD", "args": {"lr": 1e38}}
    job = client.jobs.create(small(digits, "wild one", optimizer=wild, guards=guard))
    with pytest.raises(gh.JobFailed):
        job.wait(timeout=120)
    row = row_of(page, job)
    expect(row).to_contain_text("failed")
    layer = (job.refresh().error or {})["layer"]
    expect(row.locator(".badge.bad").last).to_have_text(f"NaN · {layer}")


def test_selected_jobs_are_compared_and_deleted(
    page: Page, client: gh.Client, digits: str, ended: gh.Job
):
    other = client.jobs.create(small(digits, "to go", seed=2, labels={"list": "yes"}))
    other.wait(timeout=120)
    page.goto("/jobs?label=list:yes")
    row_of(page, other).get_by_role("checkbox").check()
    row_of(page, ended).get_by_role("checkbox").check()
    link = page.get_by_role("link", name="Compare", exact=True).last
    expect(link).to_have_attribute("href", f"/compare?jobs={other.id},{ended.id}")
    row_of(page, ended).get_by_role("checkbox").uncheck()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete 1").click()
    expect(row_of(page, other)).to_have_count(0)
    with pytest.raises(gh.NotFoundError):
        client.jobs.get(other.id)


def test_a_thousand_jobs_are_live_without_flicker(
    page: Page, local_service: LocalService, digits: str
):
    database = Database(Settings(home=local_service.home).database)
    given = small(digits, "one of many", labels={"many": "yes"})
    with database.write() as tx:
        for _ in range(MANY):
            job = jobs.add(tx, owner="local", spec=given, resolved=given, plan={})
            jobs.request_cancel(tx, job, by="test", force=False)
    try:
        page.goto("/jobs?label=many:yes&limit=1000")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(MANY)
        page.evaluate(_WATCH)
        page.evaluate("() => scrollTo(0, 5000)")
        with page.expect_response(re.compile(r"/api/v1/jobs\?")) as answer:
            first = rows.first.get_attribute("data-job") or ""
            with database.write() as tx:
                jobs.patch(tx, jobs.get(tx, first, None), {"name": "renamed"})
        assert answer.value.ok
        expect(rows.first).to_contain_text("renamed")
        seen = page.evaluate("() => ({...watched, top: scrollY, same: watched.row.isConnected})")
        assert (seen["same"], seen["top"], seen["removed"]) == (True, 5000, 0)
        assert rows.count() == MANY
    finally:
        with database.write() as tx:
            for one in jobs.find(tx, jobs.Filter(labels={"many": "yes"}), after=None, limit=MANY):
                jobs.delete(tx, one)
        database.close()


_WATCH = """() => {
  const body = document.querySelector('tbody');
  window.watched = { row: body.lastElementChild, removed: 0 };
  new MutationObserver((all) => {
    for (const one of all) if (one.target === body) watched.removed += one.removedNodes.length;
  }).observe(body, { childList: true });
}"""


def test_the_list_has_no_serious_axe_findings(page: Page, ended: gh.Job, axe, screenshot):
    expect(row_of(page, ended)).to_be_visible()
    axe(page)
    page.emulate_media(color_scheme="dark")
    axe(page)
    screenshot("jobs")


def test_actions_of_a_job_look_like_buttons(
    page: Page, client: gh.Client, digits: str, ended: gh.Job
):
    job = client.jobs.create(endless(digits, "can be paused"))
    with running(job):
        expect(row_of(page, job).get_by_role("button", name="Pause")).to_be_visible()
        row_of(page, job).get_by_role("checkbox").check()
        expect(page.get_by_role("button", name="Clear")).to_be_visible()
        assert bare_words(page) == []
    page.goto(f"/jobs/{ended.id}")
    expect(page.get_by_role("button", name="CSV").first).to_be_visible()
    assert bare_words(page) == []


def test_the_focus_moves_to_the_view_that_a_link_opened(page: Page, ended: gh.Job):
    row_of(page, ended).get_by_role("link", name="ended one").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="ended one")).to_be_visible()
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.closest('main') !== null")


def test_the_navigation_is_in_one_line_on_a_phone(page: Page, ended: gh.Job):
    page.set_viewport_size({"width": 390, "height": 844})
    for path in ("/jobs", "/compare", "/datasets", "/models", "/devices", "/settings"):
        page.goto(path)
        links = page.get_by_role("navigation", name="Views").get_by_role("link")
        expect(links).to_have_count(6)
        tops = [box["y"] for link in links.all() if (box := link.bounding_box())]
        assert len(set(tops)) == 1, path


def test_selecting_a_job_moves_no_row(page: Page, ended: gh.Job):
    row = row_of(page, ended)
    expect(row).to_be_visible()
    before = row.bounding_box()
    row.get_by_role("checkbox").check()
    expect(page.get_by_role("region", name="Selected jobs")).to_contain_text("1 selected")
    assert row.bounding_box() == before


def test_rows_have_the_same_height_in_every_state(
    page: Page, ended: gh.Job, client: gh.Client, digits: str
):
    devices = {"type": "cpu", "threads": 2}
    first, second = (
        client.jobs.create(endless(digits, name, devices=devices)) for name in ("runs", "waits")
    )
    with running(first, second):
        rows = [row_of(page, one) for one in (ended, first, second)]
        expect(rows[1].get_by_role("button", name="Pause")).to_be_visible()
        expect(rows[2]).to_contain_text("queued")
        for width in (1600, 1280, 1100, 960):  # names and progress wrap at the narrow ones
            page.set_viewport_size({"width": width, "height": 900})
            boxes = [row.bounding_box() for row in rows]
            heights = [box["height"] for box in boxes if box is not None]
            assert len(heights) == 3
            assert max(heights) - min(heights) < 0.1, (width, heights)


def test_a_phone_shows_name_state_progress_and_loss_of_a_job(page: Page, ended: gh.Job):
    width, height = SIZES["phone"]
    page.set_viewport_size({"width": width, "height": height})
    row = row_of(page, ended)
    for part in (".of-state", ".of-loss", ".progress"):
        box = row.locator(part).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= width, part
    expect(row.locator(".of-loss")).to_have_text(re.compile(r"\d"))
    fits(page)
