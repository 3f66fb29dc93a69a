"""One running service and one Chromium for all dashboard tests; a new profile for each test."""

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

import glasshouse as gh
from tests.acceptance.services import ROOT, LocalService
from tests.conftest import absent
from tests.page.browser import (
    AXE,
    SIZES,
    WAIT_MS,
    Screenshot,
    Witness,
    find_chromium,
    findings,
    fits,
    launch,
    photograph,
)

SCREENSHOTS = os.environ.get("SCREENSHOTS")
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="session")
def built() -> Path:
    """The built dashboard."""
    place = ROOT / "dashboard" / "dist"
    if not (place / "index.html").is_file():
        absent("The dashboard (make page)")
    return place


@pytest.fixture(scope="session")
def browser(built: Path) -> Generator[Browser]:
    """A headless Chromium."""
    path = find_chromium()
    if path is None:
        absent("Chromium (Debian, Ubuntu: apt install chromium)")
        return
    with sync_playwright() as playwright:
        started = launch(playwright, path)
        yield started
        started.close()


@pytest.fixture(scope="session")
def local_service(built: Path) -> Generator[LocalService]:
    """The service, as ``glasshouse up`` runs it."""
    with LocalService.temporary() as started:
        yield started


@pytest.fixture(scope="session")
def client(local_service: LocalService) -> Generator[gh.Client]:
    """The Python client of the service."""
    with local_service.client() as opened:
        yield opened


@pytest.fixture(scope="session")
def http(local_service: LocalService) -> Generator[httpx2.Client]:
    """A plain HTTP client of the service, below ``/api/v1``."""
    with local_service.http() as opened:
        yield opened


@pytest.fixture(scope="session")
def digits(client: gh.Client) -> str:
    """The id of the built-in digits."""
    return client.datasets.create(builtin="digits").id


@pytest.fixture
def witness(local_service: LocalService) -> Generator[Witness]:
    """Record console errors and requests of the test's pages; fail the test for unexpected ones."""
    made = Witness(local_service.url)
    yield made
    made.judge()


@pytest.fixture
def profile(
    browser: Browser, local_service: LocalService, witness: Witness
) -> Generator[BrowserContext]:
    """A new browser profile: no cookies, no storage, light colors, a wide window."""
    width, height = SIZES["wide"]
    options: dict[str, Any] = {"viewport": {"width": width, "height": height}}
    options |= {"color_scheme": "light", "reduced_motion": "reduce", "service_workers": "block"}
    with browser.new_context(
        base_url=local_service.url, locale="en-GB", timezone_id="UTC", **options
    ) as made:
        made.set_default_timeout(WAIT_MS)
        witness.follow(made)
        yield made


@pytest.fixture
def stranger(profile: BrowserContext) -> Page:
    """A blank tab without a session."""
    return profile.new_page()


@pytest.fixture
def page(stranger: Page, client: gh.Client) -> Page:
    """A tab with a session, opened by a one-time link; it shows the jobs."""
    stranger.goto(client.browser_link())
    return stranger


@pytest.fixture
def axe() -> Callable[[Page], None]:
    """Fail for serious or critical findings of axe-core."""
    if not AXE.is_file():
        absent("axe-core (make page)")

    def check(page: Page) -> None:
        assert findings(page) == []

    return check


@pytest.fixture
def screenshot(page: Page) -> Screenshot:
    """Screenshots for the documentation, if ``SCREENSHOTS`` names a folder."""

    def take(name: str, *, page: Page = page, full: bool = False) -> None:
        fits(page)
        if SCREENSHOTS is not None:
            folder = Path(SCREENSHOTS)
            folder.mkdir(parents=True, exist_ok=True)
            photograph(page, folder, name, full=full)

    return take
