"""The long watch of ``tests/page/watching.py``, for less than a minute, and that it sees faults."""

from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page

import glasshouse as gh
from tests.acceptance.houses import until
from tests.page import tabs
from tests.page.tabs import VIEWS, Tab
from tests.page.test_job import spec
from tests.page.watching import Plan, longest, parts, table, told, watch


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_watched_for_a_short_time_is_shown_as_it_is_and_weighs_nothing(browser: Browser):
    report = watch(Plan(minutes=0.75, longest_ms=0), browser)
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
    tab = Tab("job", page.context.new_page(), job.id)
    until(lambda: tab.difference(http) is None)
    right = VIEWS["job"].told(http, job.id)
    wrong = right | {"loss": [*right["loss"][:-1], 0.5]}
    view = SimpleNamespace(shown=VIEWS["job"].shown, told=lambda *_: wrong)
    monkeypatch.setitem(tabs.VIEWS, "job", view)
    assert f"loss, place {len(wrong['loss']) - 1}: " in str(tab.difference(http))


def test_a_task_that_holds_the_tab_is_heard(page: Page, client: gh.Client, digits: str):
    job = client.jobs.create(spec(digits, "held")).wait(timeout=120)
    tab = Tab("job", page.context.new_page(), job.id)
    tab.note_tasks("load")
    hold = "() => setTimeout(() => { const end = performance.now() + 120;"
    tab.page.evaluate(f"{hold} while (performance.now() < end); }}, 0)")
    tab.page.wait_for_function("() => longTasks.length > 0")
    tab.note_tasks("held")
    held: dict[str, Any] = longest(tab, "held")
    assert "held" in parts(tab)
    assert held["longest_ms"] >= 120
