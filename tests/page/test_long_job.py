"""A million values of one metric: zooming shows the API's values, without long tasks."""

import math
import random
import re

import httpx2
import pytest
from playwright.sync_api import Page, expect

import glasshouse as gh
from models.database import Database
from models.observations import metrics
from tests.acceptance.services import LocalService
from tests.page.specs import small
from tests.page.tabs import HEAR_LONG_TASKS, table_of
from tests.page.test_job import chart

NUM = 1_000_000
PORTION = 50_000
PEAK, HOLE = 617_283, 400_001
"""The step of an outlier, and the step of a NaN."""


@pytest.fixture(scope="module")
def long(client: gh.Client, digits: str, local_service: LocalService) -> gh.Job:
    """An ended job, with a million additional values."""
    job = client.jobs.create(small(digits, "a million")).wait(timeout=120)
    chance = random.Random(0)  # noqa: S311
    database = Database(f"sqlite:///{local_service.home / 'glasshouse.db'}")
    for start in range(0, NUM, PORTION):
        rows = [
            {"step": step, "epoch": 0, "name": "wave", "value": value_of(step, chance)}
            for step in range(start, start + PORTION)
        ]
        with database.write() as tx:
            metrics.add(tx, job.id, 1, rows)
    database.close()
    return job


def value_of(step: int, chance: random.Random) -> float:
    if step == HOLE:
        return math.nan
    return 50.0 if step == PEAK else math.sin(step / 40_000) + chance.gauss(0, 0.1)


def shown(page: Page) -> list[dict[str, str | None]]:
    card = chart(page, "wave")
    rows = table_of(card)
    card.get_by_role("button", name="Table").click()
    return rows


def agree(page: Page, http: httpx2.Client, job: gh.Job, **within: int) -> list[int]:
    """Compare the chart with the API; return its steps."""
    asked = {"name": "wave", "max_points": 1000, **within}
    expected = http.get(f"/jobs/{job.id}/metrics/query", params=asked).json()
    rows = shown(page)
    assert [int(str(row["step"])) for row in rows] == expected["step"]
    wanted = [repr(float(value)) for value in expected["values"]["wave"]]
    assert [repr(float(str(row["wave"]))) for row in rows] == wanted
    return expected["step"]


def drag(page: Page, low: float, high: float) -> tuple[int, int]:
    """Zoom to a part of the chart; return the requested steps."""
    box = chart(page, "wave").locator(".u-over").bounding_box()
    assert box is not None
    with page.expect_response(re.compile(r"metrics/query\?.*wave.*from_step=")) as answered:
        page.mouse.move(box["x"] + box["width"] * low, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * high, box["y"] + 40, steps=8)
        page.mouse.up()
    query = httpx2.URL(answered.value.url).params
    return int(query["from_step"]), int(query["to_step"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_points_are_zoomed_and_equal_the_apis(
    page: Page, long: gh.Job, http: httpx2.Client
):
    page.add_init_script(HEAR_LONG_TASKS)
    page.goto(f"/jobs/{long.id}?q=wave")
    expect(chart(page, "wave").locator(".u-over")).to_be_visible()
    expect(chart(page, "wave")).to_contain_text("1 NaN")
    steps = agree(page, http, long)
    assert {0, NUM - 1, PEAK, HOLE} <= set(steps)
    low, high = 0, NUM - 1
    while high - low > 2000:  # toward the peak, each time to a fifth
        place = (PEAK - low) / (high - low)
        low, high = drag(page, max(0.0, place - 0.1), min(1.0, place + 0.1))
        assert low < PEAK < high
        words = re.compile(rf"over {high - low:,} steps|over {high - low} steps")
        expect(chart(page, "wave").get_by_role("img")).to_have_attribute("aria-label", words)
        assert PEAK in agree(page, http, long, from_step=low, to_step=high)
    longest = max(page.evaluate("longTasks"), default=0)
    print(f"longest task: {longest:.0f} ms")  # noqa: T201 (shown with -s)
    assert longest < 200
