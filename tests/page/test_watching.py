"""The long watch of ``tests/page/watching.py``, for less than a minute, and that it sees faults."""

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
from tests.page.watching import LongTask, Plan, grown, longest, table, told, watch
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
    """Where Chromium is."""
    path = find_chromium()
    if path is None:
        absent("Chromium (Debian, Ubuntu: apt install chromium)")
    return path or ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_watched_for_a_short_time_is_shown_as_it_is_and_weighs_nothing(chromium: str):
    report = watch(Plan(minutes=0.75, longest_ms=0), chromium)
    assert report["wrong"] == [], table(report)
    assert report["compared"] == dict.fromkeys(VIEWS, 4)
    lines = {(row["line"], row["figure"]) for row in report["figures"]}
    assert {(name, "heap_mib") for name in VIEWS} <= lines
    assert ("all tabs", "renderers_mib") in lines
    assert len(told(report)) == 1 + len(report["figures"])


def test_a_number_that_is_not_the_apis_is_told_of(
    page: Page, client: gh.Client, digits: str, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
):
    job = client.jobs.create(spec(digits, "compared")).wait(timeout=120)
    tab = Tab("job", job.id)
    page.goto(tab.path)
    expect(page.locator("[data-group=loss]")).to_be_visible()
    until(lambda: tab.difference(page.evaluate, http) is None)
    right = VIEWS["job"].told(http, job.id)
    wrong = right | {"loss": [*right["loss"][:-1], 0.5]}
    view = SimpleNamespace(shown=VIEWS["job"].shown, told=lambda _http, _job: wrong, path="")
    monkeypatch.setitem(tabs.VIEWS, "job", view)
    assert f"loss, place {len(wrong['loss']) - 1}: " in str(tab.difference(page.evaluate, http))


def test_what_happened_while_nobody_was_attached_is_heard_of_later(chromium: str):
    with Chromium.started(chromium) as browser:
        window = browser.open(f"data:text/html,{quote(HOLD)}")
        said = until(lambda: browser.said(window))
        assert "a fault" in said[0]
        assert "Error: another" in said[1]
        look = partial(browser.evaluate, window)
        assert max(duration for _, duration in long_tasks(look)) >= 120
        assert look("() => document.visibilityState") == "visible"
        assert browser.renderers_mib > 1


def test_each_part_has_its_longest_task_and_what_slept_is_none():
    tasks = [LongTask("job", "load", 60.4), LongTask("job", "load", 120.2)]
    rows = longest(tasks)
    assert rows == [{"tab": "job", "part": "load", "num": 2, "longest_ms": 120}]
    assert not LongTask("job", "asleep", 5000).is_of_a_tab(5000)


def test_what_grows_by_more_than_it_may_is_told_with_its_bound():
    samples = [(60.0 * minute, 80.0 + minute) for minute in range(20)]
    verdict = judge("all tabs", "renderers_mib", samples, Bound(12))
    assert verdict is not None
    assert not verdict.is_flat
    words = "all tabs: renderers_mib grew by 19.0 (from 82.5, 1.0 a minute), 12.0 are allowed"
    assert grown(verdict) == words
