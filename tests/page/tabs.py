"""Tabs that watch a job for long: their memory, their long tasks, and what they show."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2
from playwright.sync_api import Locator

from glasshouse import jsonio

LAYER = "fc2"
LOSSES = ["loss", "validation/loss"]
POINTS, LAYER_POINTS = 1000, 500
"""The points that the dashboard requests, of a metric and of a layer."""
STATS = "mean,std,min,max,l2,absmax,zeros,nan,inf,p01,p05,p25,p50,p75,p95,p99"
CELLS = ("mean", "std", "zeros")

HEAR_LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((it) => longTasks.push(it.duration)))
  .observe({type: 'longtask', buffered: true});
"""
KEPT_TASKS = """() => new Promise((done) => {
  const timing = (it) => [(performance.timeOrigin + it.startTime) / 1000, it.duration];
  const observer = new PerformanceObserver((list) => done(list.getEntries().map(timing)));
  observer.observe({type: 'longtask', buffered: true});
  setTimeout(() => (observer.disconnect(), done([])), 1000);
})"""
MOST_KEPT = 200
"""The most long tasks (over 50 ms) of a page that a browser buffers."""
READ_TABLE = """(table) => {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const value = (cell) => cell.dataset.value === undefined ? null : cell.dataset.value;
  return [...table.tBodies[0].rows].map((row) => Object.fromEntries([...row.cells].map(
    (cell, place) => [names[place], place ? value(cell) : cell.textContent])));
}"""
READ_LAYERS = """() => Object.fromEntries([...document.querySelectorAll('tr.layer-row')].map(
  (row) => [row.dataset.layer, Object.fromEntries([...row.querySelectorAll('td[data-of]')].map(
    (cell) => [cell.dataset.of, cell.dataset.value || null]))]))"""
READ_CHART = """async () => {
  const card = document.querySelector(%s);
  const buttons = () => [...card.querySelectorAll('button')];
  const button = (name) => buttons().find((it) => it.textContent === name);
  const press = async (one) => {
    one.click();
    await new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)));
  };
  const rows = [];
  if (!card || !button('Table')) return rows;  // it has no values yet
  await press(button('Table'));
  while (card.querySelector('table')) {
    rows.push(...(%s)(card.querySelector('table')));
    const next = button('Next');
    if (!next || next.disabled) break;
    await press(next);
  }
  await press(button('Table'));  // back to the chart
  return rows;
}"""

Look = Callable[[str], Any]
"""Evaluates a function in a page."""
Shown = dict[str, list[float | None]]
"""Columns of numbers by name; the steps are ``step``."""


@dataclass(frozen=True)
class View:
    """A view of a job, the numbers that it shows, and the numbers of the API."""

    path: str
    shown: Callable[[Look], Shown]
    expected: Callable[[httpx2.Client, str], Shown]


def table_of(card: Locator) -> list[dict[str, str | None]]:
    """All pages of a chart's table: for each row the x, and by series the value or None."""
    card.get_by_role("button", name="Table").click()
    found: list[dict[str, str | None]] = []
    while True:
        found += card.locator("table").evaluate(READ_TABLE)
        following = card.get_by_role("button", name="Next")
        if following.count() == 0 or following.is_disabled():
            return found
        following.click()


def _chart(look: Look, card: str, names: dict[str, str]) -> Shown:
    rows = look(READ_CHART % (json.dumps(card), READ_TABLE))
    columns = {name: [_number(row[label]) for row in rows] for label, name in names.items()}
    return {"step": [_number(row["step"]) for row in rows], **columns}


def _losses(http: httpx2.Client, job: str) -> Shown:
    asked = {"name": LOSSES, "max_points": POINTS}
    expected = http.get(f"/jobs/{job}/metrics/query", params=asked).json()
    return {name: _numbers(column) for name, column in expected["values"].items()} | {
        "step": _numbers(expected["step"])
    }


def _layer(http: httpx2.Client, job: str) -> Shown:
    asked = {"layer": LAYER, "kind": "output", "stat": STATS, "max_points": LAYER_POINTS}
    found = http.get(f"/jobs/{job}/stats", params=asked).json()["data"]
    (series,) = [one for one in found if one["phase"] == "train"]
    columns = {name: _numbers(series["values"][name]) for name in ("l2", "absmax")}
    return columns | {"step": _numbers(series["step"])}


def _table_of_layers(look: Look) -> Shown:
    cells = look(READ_LAYERS)
    return {layer: [_number(row[name]) for name in CELLS] for layer, row in cells.items()}


def _layers(http: httpx2.Client, job: str) -> Shown:
    layers = http.get(f"/jobs/{job}/layers").json()["data"]
    outputs = {layer["name"]: layer["stats"].get("output", {}) for layer in layers}
    return {name: [_number(stats.get(cell)) for cell in CELLS] for name, stats in outputs.items()}


def _number(value: Any) -> float | None:
    return None if value is None else float(jsonio.number(value))


def _numbers(column: list[Any]) -> list[float | None]:
    return [_number(value) for value in column]


VIEWS = {
    "job": View(
        "", lambda look: _chart(look, "[data-group=loss]", {name: name for name in LOSSES}), _losses
    ),
    "inside": View("/inside", _table_of_layers, _layers),
    "layer": View(
        f"/layers/{LAYER}?kind=output",
        lambda page: _chart(
            page, "[data-chart=Norms]", {"L2 norm": "l2", "max magnitude": "absmax"}
        ),
        _layer,
    ),
}


@dataclass(frozen=True)
class Tab:
    """A view of a job."""

    name: str
    job: str
    window: str = ""
    """Its id, if it is one of a `Chromium`."""

    @property
    def path(self) -> str:
        """Below the service's address."""
        return f"/jobs/{self.job}{VIEWS[self.name].path}"

    def difference(self, look: Look, http: httpx2.Client) -> str | None:
        """How its numbers differ from the API's; None: they do not."""
        view = VIEWS[self.name]
        shown, expected = view.shown(look), view.expected(http, self.job)
        if shown.keys() != expected.keys():
            return f"shows {sorted(shown)} and not {sorted(expected)}"
        for name, column in expected.items():
            if len(column) != len(shown[name]):
                return f"{name}: {len(shown[name])} numbers and not {len(column)}"
            for place, (mine, right) in enumerate(zip(shown[name], column, strict=True)):
                if repr(mine) != repr(right):  # of NaN, too
                    return f"{name}, place {place}: {mine} and not {right}"
        return None if any(expected.values()) else "no values are shown"


def long_tasks(look: Look) -> list[tuple[float, float]]:
    """All tasks over 50 ms since it was opened: start in seconds since 1970, duration in ms."""
    found = look(KEPT_TASKS)
    assert len(found) < MOST_KEPT, "too many long tasks: some were not buffered"
    return [(began, duration) for began, duration in found]
