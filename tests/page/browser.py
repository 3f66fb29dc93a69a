"""A real Chromium, and a recorder of console errors and requests to other origins."""

import io
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from PIL import Image
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, Request

ROOT = Path(__file__).parents[2]
AXE = ROOT / "dashboard" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # requests to other hosts fail
]
WAIT_MS = 60_000
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
NUM_COLORS = 64
"""The colors of a screenshot for the documentation; this cuts its file to a third."""
SERIOUS = ("serious", "critical")


def find_chromium() -> str | None:
    """The Chromium of this machine."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def launch(playwright: Playwright, path: str) -> Browser:
    """Start it headless, with a new profile."""
    return playwright.chromium.launch(executable_path=path, args=FLAGS)


@dataclass
class Witness:
    """The console errors and requests of the pages of one test."""

    origin: str
    complaints: list[str] = field(default_factory=list[str])
    """Console errors, exceptions, policy violations, requests to other origins."""
    _expected: list[re.Pattern[str]] = field(default_factory=list[re.Pattern[str]])
    _allowed: list[re.Pattern[str]] = field(default_factory=list[re.Pattern[str]])

    def follow(self, context: BrowserContext) -> None:
        """Record the errors and requests of a context's pages."""
        context.on("console", self._console)
        context.on("weberror", lambda error: self.complaints.append(f"exception: {error.error}"))
        context.on("request", self._request)
        context.on("page", self._page)

    def expect(self, pattern: str) -> None:
        """Expect a complaint; the test fails without it."""
        self._expected.append(re.compile(pattern))

    def allow(self, pattern: str) -> None:
        """Allow a complaint that depends on timing."""
        self._allowed.append(re.compile(pattern))

    def judge(self) -> None:
        """Fail for an unexpected complaint, and for an expected one that is missing."""
        for pattern in self._expected:
            assert any(map(pattern.search, self.complaints)), f"nothing said {pattern.pattern!r}"
        known = [*self._expected, *self._allowed]
        unknown = [one for one in self.complaints if not any(p.search(one) for p in known)]
        assert not unknown, "\n".join(unknown)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":  # policy violations are console errors, too
            at = message.location
            self.complaints.append(f"console: {message.text} ({at['url']}:{at['lineNumber']})")

    def _request(self, request: Request) -> None:
        if not self._is_ours(request.url):
            self.complaints.append(f"leaves the origin: {request.method} {request.url}")

    def _page(self, page: Page) -> None:
        page.set_default_timeout(WAIT_MS)
        page.on("crash", lambda _: self.complaints.append("the page crashed"))
        page.on("websocket", lambda it: self.complaints.append(f"leaves the origin: {it.url}"))

    def _is_ours(self, url: str) -> bool:
        return url.startswith(f"{self.origin}/") or urlsplit(url).scheme in {"data", "blob"}


def drawn(page: Page) -> None:
    """Wait for the next frame."""
    page.evaluate(
        "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
    )


def findings(page: Page) -> list[dict[str, Any]]:
    """The serious and critical findings of axe-core, with their elements.

    axe runs in an isolated world, so that the page keeps its content security policy.
    """
    session = page.context.new_cdp_session(page)
    frame = session.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
    world = session.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": "axe"})
    where = {"contextId": world["executionContextId"], "returnByValue": True}

    def evaluate(expression: str) -> Any:
        asked = {"expression": expression, "awaitPromise": True, **where}
        answer = session.send("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    evaluate(AXE.read_text())
    found = evaluate("axe.run(document, {resultTypes: ['violations']}).then((it) => it.violations)")
    session.detach()
    assert found is not None, "axe did not run"
    return [_short(one) for one in found if one["impact"] in SERIOUS]


def _short(violation: dict[str, Any]) -> dict[str, Any]:
    nodes = violation["nodes"]
    where = [f"{node['target']}: {node['failureSummary']}" for node in nodes[:5]]
    return {"rule": violation["id"], "help": violation["help"], "where": where, "of": len(nodes)}


_WORDS = """() => [...document.querySelectorAll('button')].filter((one) => {
  if (!one.offsetParent || !/\\p{L}{2}/u.test(one.textContent) || one.closest('th')) return false;
  const it = getComputedStyle(one);
  const clear = (color) => /, 0\\)$|^transparent$/.test(color);
  const framed = !clear(it.borderTopColor) && it.borderTopWidth !== '0px';
  return !framed && clear(it.backgroundColor) && it.textDecorationLine === 'none';
}).map((one) => one.textContent)"""


def bare_words(page: Page) -> list[str]:
    """Buttons that look like plain text: no border, no background, no underline."""
    return page.evaluate(_WORDS)


class Screenshot(Protocol):
    """Takes screenshots of a page if ``SCREENSHOTS`` names a folder.

    Always fails if the page does not fit on a phone.
    """

    def __call__(self, name: str, *, page: Page = ..., full: bool = False) -> None:
        """``NAME-light-wide.png``, ``-dark-wide``, ``-light-phone``, ``-dark-phone``."""
        ...


@contextmanager
def as_on(page: Page, size: str) -> Generator[None]:
    """Resize the window to a device's size for the block."""
    before = page.viewport_size
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    drawn(page)
    yield
    if before is not None:
        page.set_viewport_size(before)
        drawn(page)


def fits(page: Page) -> None:
    """Fail if a page is wider than a phone; elements inside of it may scroll."""
    with as_on(page, "phone"):
        wide = page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= SIZES["phone"][0], f"on a phone the page is {wide} wide"


def photograph(page: Page, folder: Path, name: str, *, full: bool) -> None:
    """Take all four screenshots of a page, then restore its size and scheme."""
    for size in SIZES:
        with as_on(page, size):
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                drawn(page)
                shot = page.screenshot(full_page=full, animations="disabled")
                small = Image.open(io.BytesIO(shot)).convert("RGB").quantize(NUM_COLORS, dither=0)
                small.save(folder / f"{name}-{scheme}-{size}.png", optimize=True)
    page.emulate_media(color_scheme="light")
    drawn(page)
