"""The frame of the dashboard: sessions, content security policy, and keyboard use."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

import glasshouse as gh
from tests.acceptance.services import LocalService
from tests.page.browser import Witness, findings

LOCKED = r"status of 401"
Axe = Callable[[Page], None]


def unlocking(page: Page) -> None:
    """Wait until the dashboard prompts for a key."""
    expect(page.get_by_role("heading", name="Open Glasshouse")).to_be_visible()


def inside(page: Page) -> None:
    """Wait until the dashboard shows the jobs."""
    expect(page).to_have_url(re.compile(r"/jobs$"))
    expect(page.get_by_role("link", name="Jobs", exact=True)).to_have_attribute(
        "aria-current", "page"
    )
    expect(page.get_by_role("heading", name="Open Glasshouse")).to_have_count(0)


def ask_now(page: Page) -> None:
    """Make the dashboard refresh everything, as it does when the network is back."""
    page.evaluate("() => dispatchEvent(new Event('online'))")


@pytest.mark.parametrize("path", ["/", "/jobs/job_x", "/settings"])
def test_without_a_session_the_dashboard_prompts_for_a_key(
    stranger: Page, witness: Witness, path: str
):
    witness.expect(LOCKED)
    stranger.goto(path)
    unlocking(stranger)


def test_a_key_opens_the_dashboard(stranger: Page, witness: Witness, local_service: LocalService):
    witness.expect(LOCKED)
    stranger.goto("/jobs")
    stranger.get_by_label("API key").fill(f" {local_service.key}\n")
    stranger.get_by_role("button", name="Open").click()
    inside(stranger)
    assert local_service.key not in stranger.content()
    assert local_service.key not in str(
        stranger.evaluate("() => ({...localStorage, ...sessionStorage})")
    )


def test_a_wrong_key_is_rejected_and_can_be_corrected(
    stranger: Page, witness: Witness, local_service: LocalService
):
    witness.expect(LOCKED)
    stranger.goto("/jobs")
    stranger.get_by_label("API key").fill("gh_wrong")
    stranger.get_by_role("button", name="Open").click()
    expect(stranger.get_by_role("alert")).to_contain_text("key")
    stranger.get_by_label("API key").fill(local_service.key)
    stranger.get_by_role("button", name="Open").click()
    inside(stranger)


def test_the_one_time_link_opens_the_jobs_once(page: Page, profile, client: gh.Client):
    inside(page)
    (cookie,) = profile.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    link = client.browser_link()
    assert profile.request.get(link).ok
    assert profile.request.get(link).status == 401


def test_a_view_that_an_update_removed_prompts_for_a_reload(page: Page, witness: Witness):
    inside(page)
    witness.expect("status of 404")
    page.route("**/assets/*.js", lambda route: route.fulfill(status=404))
    page.get_by_role("link", name="Devices", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("the service was updated")
    page.unroute("**/assets/*.js")
    page.get_by_role("button", name="Reload the page").click()
    expect(page).to_have_url(re.compile(r"/devices$"))
    expect(page.locator("main")).to_contain_text("cpu:0")


def test_a_used_link_explains_what_to_do(
    stranger: Page, profile, client: gh.Client, witness: Witness, axe: Axe
):
    link = client.browser_link()
    stranger.goto(link)
    inside(stranger)
    profile.clear_cookies()
    witness.expect(LOCKED)
    answer = stranger.goto(link)
    assert answer is not None
    assert answer.status == 401
    expect(stranger.get_by_role("heading")).to_contain_text("has been used")
    expect(stranger.get_by_text("glasshouse open")).to_be_visible()
    axe(stranger)
    stranger.get_by_role("link", name="go to the page").click()
    unlocking(stranger)


def test_an_ended_session_prompts_for_a_key(
    stranger: Page, witness: Witness, client: gh.Client, local_service: LocalService
):
    key = client.keys.create("browser", ["read"], "local")
    with gh.Client(local_service.url, key.data["key"]) as own:
        stranger.goto(own.browser_link())
    inside(stranger)
    client.keys.delete(key.id)
    witness.expect(LOCKED)
    ask_now(stranger)
    unlocking(stranger)


@pytest.mark.parametrize(
    "script",
    [
        "() => document.body.append(made('script', {textContent: 'window.ran = true'}))",
        "() => document.body.insertAdjacentHTML('beforeend', '<b id=x onclick=ran=true>')"
        " || document.getElementById('x').click()",
        "() => document.body.append(made('a', {href: 'javascript:window.ran=true', id: 'x'}))"
        " || document.getElementById('x').click()",
        "() => document.body.append(made('iframe', {srcdoc: '<script>top.ran=true</script>'}))",
        "() => document.head.append(made('script', {src: 'data:text/javascript,window.ran=true'}))",
    ],
    ids=["inline", "handler", "address", "frame", "data"],
)
def test_an_injected_script_does_not_run(page: Page, witness: Witness, script: str):
    inside(page)
    witness.expect("Content Security Policy")
    made = "(kind, with_) => Object.assign(document.createElement(kind), with_)"
    with page.expect_console_message(lambda said: "Content Security Policy" in said.text):
        page.evaluate(f"() => {{ const made = {made}; return ({script})(); }}")
    assert page.evaluate("() => window.ran") is None


def test_the_dashboard_can_send_requests_to_its_service_only(page: Page, witness: Witness):
    inside(page)
    witness.expect("Content Security Policy")
    failed = page.evaluate(
        "() => fetch('http://127.0.0.2:9/', {mode: 'no-cors'}).then(() => false, () => true)"
    )
    assert failed


def test_a_request_to_another_origin_is_detected(page: Page, witness: Witness):
    inside(page)
    witness.expect(r"leaves the origin: GET http://127\.0\.0\.2:9/")
    witness.expect("console: ")
    page.goto("data:text/html,<img src='http://127.0.0.2:9/'>")


def test_the_theme_is_selected_and_stored(page: Page):
    inside(page)
    background = "() => getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(background)
    page.get_by_label("Theme").select_option("dark")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    inside(page)
    assert page.evaluate(background) == dark
    page.get_by_label("Theme").select_option("system")
    assert page.evaluate(background) == light
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"(wanted) => ({background})() === wanted", arg=dark)


def test_the_first_tab_stop_skips_the_navigation(page: Page):
    inside(page)
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_shell_has_no_serious_axe_findings(page: Page, axe: Axe, scheme: str):
    inside(page)
    page.get_by_label("Theme").select_option(scheme)
    axe(page)


def test_the_key_prompt_has_no_serious_axe_findings(stranger: Page, witness: Witness, axe: Axe):
    witness.expect(LOCKED)
    stranger.goto("/jobs")
    unlocking(stranger)
    axe(stranger)


def test_axe_reports_a_missing_alternative_text(page: Page):
    inside(page)
    page.evaluate("() => document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\">')")
    assert [one["rule"] for one in findings(page)] == ["image-alt"]
