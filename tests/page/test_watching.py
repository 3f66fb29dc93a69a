"""A short run of ``tests/page/watching.py``, and the faults that it detects."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import httpx2
import pytest
from playwright.sync_api import Page, expect

import glasshouse as gh
from tests.conftest import absent
from tests.page import tabs
from tests.page.browser import find_chromium
from tests.page.chromium import Chromium
from tests.page.tabs import VIEWS, Tab, long_tasks
from tests.page.test_job import spec
from tests.page.watching import LongTask, Plan, grown, json_lines, longest, table, watch
from tests.soak.flat import Bound, judge
from tests.waiting import until

HOLD = """<script>
  const end = performance.now() + 120;
  while (performance.now() < end);
  console.error('a fault');
  throw new Error('another');
</script>"""


@pytest.fixture(scope="module")
def chromium(built: Path) -> str:
    """The path of Chromium."""
    path = find_chromium()
    if path is None:
        absent("Chromium (Debian, Ubuntu: apt install chromium)")
    return path or ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_watch_finds_no_differences_and_no_growth(chromium: str):
    report = watch(Plan(minutes=0.75, longest_ms=0), chromium)
    assert report["wrong"] == [], table(report)
    assert report["compared"] == dict.fromkeys(VIEWS, 4)
    lines = {(row["line"], row["figure"]) for row in report["figures"]}
    assert {(name, "heap_mib") for name in VIEWS} <= lines
    assert ("all tabs", "renderers_mib") in lines
    assert len(json_lines(report)) == 1 + len(report["figures"])


def test_a_number_that_differs_from_the_api_is_reported(
    page: Page, client: gh.Client, digits: str, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
):
    job = client.jobs.create(spec(digits, "compared")).wait(timeout=120)
    tab = Tab("job", job.id)
    page.goto(tab.path)
    expect(page.locator("[data-group=loss]")).to_be_visible()
    until(lambda: tab.difference(page.evaluate, http) is None)
    right = VIEWS["job"].expected(http, job.id)
    wrong = right | {"loss": [*right["loss"][:-1], 0.5]}
    view = SimpleNamespace(shown=VIEWS["job"].shown, expected=lambda _http, _job: wrong, path="")
    monkeypatch.setitem(tabs.VIEWS, "job", view)
    assert f"loss, place {len(wrong['loss']) - 1}: " in str(tab.difference(page.evaluate, http))


def test_events_without_an_attached_session_are_reported_later(chromium: str):
    with Chromium.started(chromium) as browser:
        window = browser.open(f"data:text/html,{quote(HOLD)}")
        said = until(lambda: browser.said(window))
        assert "a fault" in said[0]
        assert "Error: another" in said[1]
        look = partial(browser.evaluate, window)
        assert max(duration for _, duration in long_tasks(look)) >= 120
        assert look("() => document.visibilityState") == "visible"
        assert browser.renderers_mib > 1


def test_each_part_has_its_longest_task_and_sleep_is_not_a_task():
    tasks = [LongTask("job", "load", 60.4), LongTask("job", "load", 120.2)]
    rows = longest(tasks)
    assert rows == [{"tab": "job", "part": "load", "num": 2, "longest_ms": 120}]
    assert not LongTask("job", "asleep", 5000).is_of_a_tab(5000)


def test_growth_over_the_bound_is_reported():
    samples = [(60.0 * minute, 80.0 + minute) for minute in range(20)]
    verdict = judge("all tabs", "renderers_mib", samples, Bound(12))
    assert verdict is not None
    assert not verdict.is_flat
    words = "all tabs: renderers_mib grew by 19.0 (from 82.5, 1.0 a minute), 12.0 are allowed"
    assert grown(verdict) == words
