"""The chart of a thinned metric, compared with the API's numbers."""

import random

import httpx2
from playwright.sync_api import Page, expect

import glasshouse as gh
from models.database import Database
from models.observations import metrics
from tests.acceptance.services import LocalService
from tests.page.browser import drawn
from tests.page.specs import small
from tests.page.test_job import chart

NUM, STRETCH = 499 * 6, 6
"""Of this many values the service keeps the min and the max of each six."""
STILL = NUM // STRETCH // 2
"""The stretch whose values are all equal, so that only one of them is kept."""

ROWS_OF_THE_LINE = """(canvas) => {
  const probe = document.createElement('canvas').getContext('2d');
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--series-1');
  probe.fillRect(0, 0, 1, 1);
  const wanted = probe.getImageData(0, 0, 1, 1).data;
  const over = canvas.parentElement.querySelector('.u-over').getBoundingClientRect();
  const [at, sharp] = [canvas.getBoundingClientRect(), devicePixelRatio];
  const [left, top] = [(over.left - at.left) * sharp, (over.top - at.top) * sharp].map(Math.round);
  const [width, height] = [over.width * sharp, over.height * sharp].map(Math.round);
  const { data } = canvas.getContext('2d').getImageData(left, top, width, height);
  const part = (x, y, c) => data[4 * (y * width + x) + c];
  const isLine = (x, y) =>
    [0, 1, 2].every((c) => Math.abs(part(x, y, c) - wanted[c]) < 12) && part(x, y, 3) > 200;
  const isBand = (x, y) => part(x, y, 3) > 40 && part(x, y, 3) < 100;
  const found = (test, x) => {
    const rows = Array.from({ length: height }, (_, y) => y).filter((y) => test(x, y));
    return rows.length ? [rows[0], rows.at(-1)] : null;
  };
  const column = (_, x) => ({ line: found(isLine, x), band: found(isBand, x) });
  return Array.from({ length: width }, column);
}"""


def values() -> list[float]:
    """In each stretch one value is 0, one is 1, in any order, and the others are 0.5."""
    chance = random.Random(0)  # noqa: S311
    made: list[float] = []
    for number in range(NUM // STRETCH):
        stretch = [0.5] * STRETCH
        if number != STILL:
            low, high = chance.sample(range(STRETCH), 2)
            stretch[low], stretch[high] = 0.0, 1.0
        made += stretch
    made[0], made[1:STRETCH] = 0.0, [1.0] * (STRETCH - 1)  # the first point is kept
    return made


def test_the_line_of_a_thinned_metric_is_the_middle_of_its_band_all_along(
    page: Page, client: gh.Client, digits: str, local_service: LocalService, http: httpx2.Client
):
    job = client.jobs.create(small(digits, "of extremes")).wait(timeout=120)
    database = Database(f"sqlite:///{local_service.home / 'glasshouse.db'}")
    rows = [
        {"step": step, "epoch": 0, "name": "ends", "value": value}
        for step, value in enumerate(values())
    ]
    with database.write() as tx:
        metrics.add(tx, job.id, 1, rows)
    database.close()
    asked = {"name": "ends", "max_points": 1000}
    expected = http.get(f"/jobs/{job.id}/metrics/query", params=asked).json()
    still = range(STILL * STRETCH, (STILL + 1) * STRETCH)
    assert len(set(still) & set(expected["step"])) == 1  # so the pairs after it are shifted
    ends = expected["values"]["ends"]
    page.goto(f"/jobs/{job.id}?q=ends")
    expect(chart(page, "ends").locator(".u-over")).to_be_visible()
    drawn(page)
    columns = chart(page, "ends").locator(".u-wrap canvas").evaluate(ROWS_OF_THE_LINE)
    joint = len(columns) / 2
    seen = [
        column
        for x, column in enumerate(columns)
        if 5 < x < len(columns) - 5 and abs(x - joint) > 5 and column["line"]
    ]
    assert len(seen) > len(columns) / 2
    bands = [column["band"] for column in seen if column["band"]]  # a line of the grid hides it
    top, bottom = min(band[0] for band in bands), max(band[1] for band in bands)
    middle = top + (bottom - top) * (1 - (min(ends) + max(ends)) / 2)
    assert bottom - top > 50
    for column in seen:
        assert all(abs(row - middle) <= 3 for row in column["line"]), column
