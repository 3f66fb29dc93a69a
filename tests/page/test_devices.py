"""The devices: the jobs that use them, the queue, and draining a worker."""

from collections.abc import Callable, Generator
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.page.browser import Screenshot
from tests.page.endless import endless, running
from tests.waiting import until

Axe = Callable[[Page], None]


@pytest.fixture
def crowded(client: gh.Client, http: httpx2.Client, digits: str) -> Generator[list[gh.Job]]:
    """A job that uses all cores, and a queued one."""
    cores = len(http.get("/devices").json()["data"])
    devices = {"type": "cpu", "threads": cores}
    jobs = [client.jobs.create(endless(digits, name, devices=devices)) for name in ("has", "waits")]
    with running(*jobs):
        until(lambda: client.jobs.get(jobs[0].id).state == "running", 240)
        yield jobs


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_devices_and_the_queue_show_the_values_of_the_api(
    page: Page,
    http: httpx2.Client,
    crowded: list[gh.Job],
    axe: Axe,
    size: tuple[int, int],
    screenshot: Screenshot,
):
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto("/devices")
    has, waits = crowded
    (worker,) = http.get("/workers").json()["data"]
    card = page.get_by_role("region", name=f"Worker {worker['id']}")
    expect(card).to_contain_text("active")
    expect(card.get_by_role("link", name=has.id)).to_have_attribute("href", f"/jobs/{has.id}")
    row = page.get_by_role("table", name="Queued jobs").locator("tbody tr")
    (queued,) = http.get("/queue").json()["data"]
    expect(row).to_have_count(1)
    expect(row.get_by_role("link", name="waits")).to_have_attribute("href", f"/jobs/{waits.id}")
    expect(row).to_contain_text(queued["reason"])
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        axe(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= size[0]
    screenshot("devices")


def test_a_worker_is_drained_after_a_confirmation(browser: Browser):
    with (
        LocalService.temporary() as local_service,  # not the shared one
        local_service.client() as client,
        browser.new_context(base_url=local_service.url) as profile,
    ):
        drained(profile.new_page(), client)


def drained(page: Page, client: gh.Client) -> None:
    page.goto(client.browser_link())
    page.goto("/devices")
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert [worker_state(one) for one in client.workers.list()] == ["active"]
    page.get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(page.get_by_text("draining: accepts no new jobs")).to_be_visible()
    assert [worker_state(one) for one in client.workers.list()] == ["draining"]
    expect(page.get_by_role("button", name="Drain")).to_have_count(0)


def worker_state(worker: Any) -> str:
    return worker.data["state"]
