"""A real Chromium, and a witness of what a page does that it should not."""

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
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # whatever asks further, fails
]
WAIT_MS = 60_000
SIZES = {"wide": (1280, 800), "phone": (390, 844)}
NUM_COLOURS = 64
"""Of a picture for the documentation; its file is then a third of what it was."""
SERIOUS = ("serious", "critical")


def find_chromium() -> str | None:
    """The Chromium of this machine."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def launch(playwright: Playwright, path: str) -> Browser:
    """Start it, without a window, with a new profile."""
    return playwright.chromium.launch(executable_path=path, args=FLAGS)


@dataclass
class Witness:
    """What the pages of one test said and asked for."""

    origin: str
    complaints: list[str] = field(default_factory=list[str])
    """Errors of the console, exceptions, violations of the policy, requests to elsewhere."""
    _expected: list[re.Pattern[str]] = field(default_factory=list[re.Pattern[str]])
    _allowed: list[re.Pattern[str]] = field(default_factory=list[re.Pattern[str]])

    def follow(self, context: BrowserContext) -> None:
        """Hear whatever the pages of a context say."""
        context.on("console", self._console)
        context.on("weberror", lambda error: self.complaints.append(f"exception: {error.error}"))
        context.on("request", self._request)
        context.on("page", self._page)

    def expect(self, pattern: str) -> None:
        """A complaint that belongs to what is tested. It must come."""
        self._expected.append(re.compile(pattern))

    def allow(self, pattern: str) -> None:
        """A complaint that may come, or not: it depends on who is faster."""
        self._allowed.append(re.compile(pattern))

    def judge(self) -> None:
        """Fail if there was a complaint that was not expected, or none that was."""
        for pattern in self._expected:
            assert any(map(pattern.search, self.complaints)), f"nothing said {pattern.pattern!r}"
        known = [*self._expected, *self._allowed]
        unknown = [one for one in self.complaints if not any(p.search(one) for p in known)]
        assert not unknown, "\n".join(unknown)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":  # violations of the policy are such, too
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
    """Wait until the page has been drawn once more."""
    page.evaluate(
        "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
    )


def findings(page: Page) -> list[dict[str, Any]]:
    """What axe-core finds wrong that is serious or critical, each with where it is.

    It runs in a world of its own beside the page's script, so that the page keeps its policy.
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
  const clear = (colour) => /, 0\\)$|^transparent$/.test(colour);
  const framed = !clear(it.borderTopColor) && it.borderTopWidth !== '0px';
  return !framed && clear(it.backgroundColor) && it.textDecorationLine === 'none';
}).map((one) => one.textContent)"""


def bare_words(page: Page) -> list[str]:
    """Buttons that look like words: no frame, no ground, no line below."""
    return page.evaluate(_WORDS)


class Screenshot(Protocol):
    """Takes pictures of a page, where they are wanted (``SCREENSHOTS`` names a folder).

    Fails in any case where the page does not fit on a phone.
    """

    def __call__(self, name: str, *, page: Page = ..., full: bool = False) -> None:
        """``NAME-light-wide.png``, ``-dark-wide``, ``-light-phone``, ``-dark-phone``."""
        ...


@contextmanager
def as_on(page: Page, size: str) -> Generator[None]:
    """Make the window as large as a device's; then as it was."""
    before = page.viewport_size
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    drawn(page)
    yield
    if before is not None:
        page.set_viewport_size(before)
        drawn(page)


def fits(page: Page) -> None:
    """Fails where a page is wider than a phone; what is inside of it may scroll by itself."""
    with as_on(page, "phone"):
        wide = page.evaluate("() => document.documentElement.scrollWidth")
        assert wide <= SIZES["phone"][0], f"on a phone the page is {wide} wide"


def photograph(page: Page, folder: Path, name: str, *, full: bool) -> None:
    """All four pictures of a page; then it is as it was."""
    for size in SIZES:
        with as_on(page, size):
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                drawn(page)
                shot = page.screenshot(full_page=full, animations="disabled")
                small = Image.open(io.BytesIO(shot)).convert("RGB").quantize(NUM_COLOURS, dither=0)
                small.save(folder / f"{name}-{scheme}-{size}.png", optimize=True)
    page.emulate_media(color_scheme="light")
    drawn(page)
