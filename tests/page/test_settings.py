"""The settings: API keys, quotas, webhooks, and the service."""

import re
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Locator, Page, expect

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.page.browser import Screenshot, Witness
from tests.page.endless import endless, running
from tests.waiting import until

Axe = Callable[[Page], None]


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name)


def test_a_key_is_shown_once_works_and_is_rejected_after_it_was_revoked(
    page: Page, local_service: LocalService
):
    page.goto("/settings")
    keys = card(page, "API keys")
    keys.get_by_label("Key name").fill("a laptop")
    keys.get_by_label("Scope").select_option("read")
    keys.get_by_role("button", name="Create key").click()
    secret = keys.locator("code.secret").inner_text()
    assert status(local_service, secret) == 200
    keys.get_by_role("button", name="Done").click()
    row = keys.get_by_role("row", name="a laptop")
    expect(row).to_contain_text("read")
    assert secret not in page.content()
    page.get_by_role("button", name="Revoke a laptop").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert status(local_service, secret) == 200
    page.get_by_role("button", name="Revoke a laptop").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("revoked")
    assert status(local_service, secret) == 401


def status(local_service: LocalService, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.get(f"{local_service.url}/api/v1/jobs", headers=headers).status_code


def test_without_the_scope_admin_only_keys_are_hidden(
    stranger: Page, witness: Witness, local_service: LocalService
):
    witness.expect("status of 403")
    with local_service.another_key("ada", "submit").client() as ada:
        stranger.goto(ada.browser_link())
        stranger.goto("/settings")
        keys = card(stranger, "API keys")
        expect(keys).to_contain_text("Only a session with the scope admin")
        expect(keys.get_by_role("button", name="Create key")).to_have_count(0)
        expect(card(stranger, "Quotas").get_by_role("heading")).to_have_text("Quotas of ada")


def test_quotas_and_limits_are_those_of_the_api(page: Page, http: httpx2.Client):
    page.goto("/settings")
    quotas = http.get("/quotas").json()
    waiting = card(page, "Quotas").locator("tr", has_text="queued jobs").locator("td")
    used, limit = quotas["used"]["queued_jobs"], quotas["limits"]["queued_jobs"]
    expect(waiting).to_have_text(["queued jobs", f"{used:,}", f"{limit:,}", "all owners"])
    service_card = card(page, "Service")
    service = http.get("/").json()
    expect(service_card).to_contain_text(service["version"])
    for name in ("dataset_formats", "tensor_kinds", "event_types"):
        expect(service_card).to_contain_text(", ".join(service["capabilities"][name]))
    expect(service_card.locator("dt", has_text="Planner timeout").locator("+ dd")).to_have_text(
        "20 s"
    )


def test_a_webhook_is_created_lists_its_deliveries_and_is_deleted(
    page: Page, witness: Witness, client: gh.Client, http: httpx2.Client, digits: str
):
    witness.expect("status of 422")
    page.goto("/settings")
    hooks = card(page, "Webhooks")
    address = hooks.get_by_label("URL to notify")
    address.fill("https://127.0.0.1/hook")
    hooks.get_by_role("button", name="Add webhook").click()
    expect(hooks.get_by_role("alert")).to_contain_text("/url")
    address.fill("https://hook.invalid/it")
    hooks.get_by_label("job.cancelled").check()
    hooks.get_by_role("button", name="Add webhook").click()
    expect(hooks.locator("code.secret")).to_have_text(re.compile("^whsec_"))
    (made,) = http.get("/webhooks").json()["data"]
    assert (made["url"], made["events"]) == ("https://hook.invalid/it", ["job.cancelled"])
    with running(client.jobs.create(endless(digits, "told"))):
        pass  # it is canceled
    path = f"/webhooks/{made['id']}/deliveries"
    (sent,) = until(lambda: http.get(path).json()["data"], what="the message")
    hooks.get_by_text("https://hook.invalid/it", exact=True).click()
    row = hooks.get_by_role("table", name="Deliveries").locator("tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text(sent["type"])
    hooks.get_by_role("button", name=re.compile("Delete the webhook")).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(hooks.get_by_text("https://hook.invalid/it", exact=True)).to_have_count(0)
    assert http.get("/webhooks").json()["data"] == []


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_settings_have_no_serious_axe_findings(
    page: Page, axe: Axe, size: tuple[int, int], screenshot: Screenshot
):
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto("/settings")
    expect(card(page, "Quotas").get_by_role("table")).to_be_visible()
    for name in ("Dark", "Light"):
        page.get_by_role("radio", name=name).check()
        theme: Any = page.evaluate("() => document.documentElement.dataset.theme")
        assert theme == name.lower()
        axe(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= size[0]
    screenshot("settings")


def test_limits_and_capabilities_have_labels(page: Page, http: httpx2.Client):
    page.goto("/settings")
    service = card(page, "Service")
    expect(service).to_contain_text("Max size of a dataset file")
    expected = http.get("").json()
    names = service.locator("dt").all_inner_texts()
    assert len(names) == 1 + len(expected["limits"]) + len(expected["capabilities"])
    raw = {*expected["limits"], *expected["capabilities"]}
    spaced = {re.sub(r"_(bytes|s)$", "", name).replace("_", " ") for name in raw}
    assert not {*names} & (raw | spaced)
