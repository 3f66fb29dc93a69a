"""Tabs that look at a job for long: what they weigh, how long they were busy, what they show."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil
from playwright.sync_api import Browser, CDPSession, Locator, Page

from glasshouse import jsonio

LAYER = "fc2"
LOSSES = ["loss", "validation/loss"]
POINTS, LAYER_POINTS = 1000, 500
"""How many points the page asks for, of a metric and of a layer."""
STATS = "mean,std,min,max,l2,absmax,zeros,nan,inf,p01,p05,p25,p50,p75,p95,p99"
CELLS = ("mean", "std", "zeros")

HEAR_LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((it) => longTasks.push(it.duration)))
  .observe({type: 'longtask', buffered: true});
"""
READ_TABLE = """(table) => {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const value = (cell) => cell.dataset.value === undefined ? null : cell.dataset.value;
  return [...table.tBodies[0].rows].map((row) => Object.fromEntries([...row.cells].map(
    (cell, place) => [names[place], place ? value(cell) : cell.textContent])));
}"""
READ_LAYERS = """(rows) => Object.fromEntries(rows.map((row) => [row.dataset.layer,
  Object.fromEntries([...row.querySelectorAll('td[data-of]')].map(
    (cell) => [cell.dataset.of, cell.dataset.value || null]))]))"""

Shown = dict[str, list[float | None]]
"""By name, a column of numbers; that of the steps is called ``step``."""


@dataclass(frozen=True)
class View:
    """A page of a job, what it shows in numbers, and what the API says of the same."""

    path: str
    shown: Callable[[Page], Shown]
    told: Callable[[httpx2.Client, str], Shown]


def table_of(card: Locator) -> list[dict[str, str | None]]:
    """All pages of a chart's table: of each row the x, and by series the value or None."""
    card.get_by_role("button", name="Table").click()
    found: list[dict[str, str | None]] = []
    while True:
        found += card.locator("table").evaluate(READ_TABLE)
        later = card.get_by_role("button", name="Later")
        if later.count() == 0 or later.is_disabled():
            return found
        later.click()


def _chart(page: Page, card: str, names: dict[str, str]) -> Shown:
    place = page.locator(card)
    rows = table_of(place)
    place.get_by_role("button", name="Table").click()  # back to the chart
    columns = {name: [_number(row[label]) for row in rows] for label, name in names.items()}
    return {"step": [_number(row["step"]) for row in rows], **columns}


def _losses(http: httpx2.Client, job: str) -> Shown:
    asked = {"name": LOSSES, "max_points": POINTS}
    told = http.get(f"/jobs/{job}/metrics/query", params=asked).json()
    return {name: _numbers(column) for name, column in told["values"].items()} | {
        "step": _numbers(told["step"])
    }


def _layer(http: httpx2.Client, job: str) -> Shown:
    asked = {"layer": LAYER, "kind": "output", "stat": STATS, "max_points": LAYER_POINTS}
    found = http.get(f"/jobs/{job}/stats", params=asked).json()["data"]
    (series,) = [one for one in found if one["phase"] == "train"]
    columns = {name: _numbers(series["values"][name]) for name in ("l2", "absmax")}
    return columns | {"step": _numbers(series["step"])}


def _table_of_layers(page: Page) -> Shown:
    cells = page.locator("tr.layer-row").evaluate_all(READ_LAYERS)
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
        "", lambda page: _chart(page, "[data-group=loss]", {name: name for name in LOSSES}), _losses
    ),
    "inside": View("/inside", _table_of_layers, _layers),
    "layer": View(
        f"/layers/{LAYER}?kind=output",
        lambda page: _chart(
            page, "[data-chart=Size]", {"L2 norm": "l2", "largest magnitude": "absmax"}
        ),
        _layer,
    ),
}


@dataclass
class Tab:
    """One of the views, open for as long as it is watched."""

    name: str
    page: Page
    job: str
    session: CDPSession = field(init=False)
    tasks: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Those of over 50 ms: in which part of the time, and their milliseconds."""
    num_asked: int = 0
    """How many requests it has made."""

    def __post_init__(self) -> None:
        """Open it."""
        self.session = self.page.context.new_cdp_session(self.page)
        self.page.on("request", self._count)
        self.page.add_init_script(HEAR_LONG_TASKS)
        self.page.goto(f"/jobs/{self.job}{VIEWS[self.name].path}")

    def _count(self, _: object) -> None:
        self.num_asked += 1

    def note_tasks(self, part: str) -> None:
        """Take down the long tasks since the last time."""
        found = self.page.evaluate("() => longTasks.splice(0)")
        self.tasks += [(part, duration) for duration in found]

    def forget_tasks(self, over_ms: float) -> None:
        """Those that are so long that nobody can have done them."""
        self.page.evaluate(
            "(over) => { longTasks = longTasks.filter((it) => it < over) }", 0.9 * over_ms
        )

    def figures(self) -> dict[str, float]:
        """What it holds, once what nobody needs any more is given back."""
        self.session.send("HeapProfiler.collectGarbage")
        heap = self.session.send("Runtime.getHeapUsage")
        counted = self.session.send("Memory.getDOMCounters")
        figures = {"heap_mib": heap["usedSize"] / 2**20}
        return figures | {name: float(counted[name]) for name in ("nodes", "jsEventListeners")}

    def difference(self, http: httpx2.Client) -> str | None:
        """How what it shows differs from what the API says; None: it does not."""
        view = VIEWS[self.name]
        shown, told = view.shown(self.page), view.told(http, self.job)
        if shown.keys() != told.keys():
            return f"shows {sorted(shown)} and not {sorted(told)}"
        for name, column in told.items():
            if len(column) != len(shown[name]):
                return f"{name}: {len(shown[name])} numbers and not {len(column)}"
            for place, (mine, right) in enumerate(zip(shown[name], column, strict=True)):
                if repr(mine) != repr(right):  # of NaN, too
                    return f"{name}, place {place}: {mine} and not {right}"
        return None if any(told.values()) else "there is nothing to show"


def renderers(browser: Browser) -> list[psutil.Process]:
    """The processes behind all tabs."""
    session = browser.new_browser_cdp_session()
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    return [psutil.Process(one["id"]) for one in found if one["type"] == "renderer"]


def renderers_mib(browser: Browser) -> float:
    """What they have in memory for themselves."""
    return sum(process.memory_full_info().uss for process in renderers(browser)) / 2**20


@contextmanager
def asleep(browser: Browser) -> Generator[None]:
    """While the block lasts the tabs stand still, as when the machine sleeps."""
    stopped = renderers(browser)
    try:
        for process in stopped:
            process.suspend()
        yield
    finally:
        for process in stopped:
            process.resume()
