"""Watch a running job in three browser tabs for a long time: ``python -m tests.page.watching``.

A separate service runs a job with about twenty events a second. A real Chromium shows its charts,
its Inside view and one of its layers, each in a window. Meanwhile the network is cut, the service
is restarted, and the tabs are suspended; after each of these, and at the end, the job is paused
and the numbers in every tab are compared with the API's. No debugger is attached otherwise
(``chromium.py``). The memory of the renderers, and of each tab after garbage collection, must be
flat (``tests/soak/flat.py``) once the charts are full; no task may block a tab for longer than
``--longest`` milliseconds; and the console may only have errors about the unavailable service.
Prints a table, saves the measurements as JSON with ``--save``, and fails if any check fails.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

import glasshouse as gh
from models.database import Database
from models.observations import metrics
from tests.acceptance.services import ROOT, LocalService
from tests.page.browser import WAIT_MS, find_chromium
from tests.page.chromium import Chromium
from tests.page.specs import small
from tests.page.tabs import POINTS, VIEWS, Look, Tab, long_tasks
from tests.soak.flat import Bound, Verdict, judge, thinned
from tests.waiting import until

PER_MINUTE = {"heap_mib": 0.05, "nodes": 5.0, "jsEventListeners": 1.0, "renderers_mib": 0.5}
"""The allowed growth per minute: in eight hours 24 MiB for a tab's heap, and 240 for the memory of
all three tabs."""
NOISE = {"heap_mib": 1.0, "nodes": 50.0, "jsEventListeners": 15.0, "renderers_mib": 12.0}
"""The allowed growth for any duration: the browser decides when to collect garbage."""
AWAY = r"ERR_(CONNECTION_\w+|INTERNET_DISCONNECTED|EMPTY_RESPONSE|NETWORK_\w+|SOCKET_\w+)"
TRIAL_BATCH, BATCHES = 128, (8, 1297)
EVENTS_PER_STEP = 2
"""Metrics, and statistics of the layers."""
IS_SHOWN = "() => !!document.querySelector('[data-group=loss], tr.layer-row, [data-chart]')"
SAYS_AWAY = "() => !!document.querySelector('div.bar')?.textContent.includes('is unavailable')"
EACH_SECOND = ("system/", "throughput/", "time/")


@dataclass(frozen=True)
class LongTask:
    """A task that blocked a tab for over 50 ms."""

    tab: str
    part: str
    duration_ms: float

    def is_of_a_tab(self, slept_ms: float) -> bool:
        """Whether it is a task of the tab; the suspension of a tab also appears as a long task."""
        return self.duration_ms < 0.9 * slept_ms


@dataclass(frozen=True)
class Plan:
    """The duration and the limits of a watch."""

    minutes: float = 30.0
    rate: float = 20.0
    """Approximate events per second."""
    longest_ms: float = 100.0
    """The longest allowed task; 0: no limit."""

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.minutes * 60

    @property
    def every_s(self) -> float:
        """The interval between samples: enough samples also in a short watch."""
        return min(30.0, self.seconds / 40)

    @property
    def warm_up_s(self) -> float:
        """The time that is excluded: caches fill, code is compiled."""
        return self.seconds / 4

    @property
    def away_s(self) -> float:
        """How long the network is unavailable, and how long a tab is suspended."""
        return min(120.0, self.seconds / 12)


def spec(digits: str, name: str, batch: int, stop: dict[str, Any]) -> dict[str, Any]:
    """A job whose every step is watched; the batch size sets the duration of a step."""
    layers: list[dict[str, Any]] = [{"name": "flat", "type": "Flatten", "inputs": ["image"]}]
    for number in range(1, 4):
        layers += [
            {"name": f"fc{number}", "type": "Linear", "args": {"out_features": 512}},
            {"name": f"relu{number}", "type": "ReLU"},
        ]
    layers.append({"name": "fc", "type": "Linear", "args": {"out_features": 10}})
    probe = {"layers": ["*"], "kinds": ["output", "param", "param_grad"], "every": 1}
    made = small(
        digits,
        name,
        network={"type": "graph", "layers": layers, "outputs": ["fc"]},
        metrics=[{"type": "accuracy", "inputs": ["fc", "label"]}],
        optimizer={"type": "SGD", "args": {"lr": 0.001}},
        probes=[probe | {"max_overhead": None}],
        devices={"type": "cpu", "threads": 1},
        evaluate={"every_steps": 100},
        stop=stop,
    )
    validation = {"dataset": digits, "split": "validation"}
    return made | {"data": made["data"] | {"batch_size": batch, "validation": validation}}


class Watch:
    """A watch, from an empty folder to its report."""

    def __init__(self, plan: Plan, chromium: Chromium, folder: Path) -> None:
        self._plan, self._chromium = plan, chromium
        self._house = LocalService.up(folder / "home")
        self._calm()
        self._client, self._http = self._house.client(), self._house.http()
        self._tabs: list[Tab] = []
        self._parts: list[tuple[float, str]] = []
        """Their starts, in seconds since 1970."""
        self._tasks: list[LongTask] = []
        self._lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._compared: dict[str, int] = {}
        self._wrong: list[str] = []
        self._began = 0.0
        """The start, excluding the time in which the job was paused."""

    def run(self) -> dict[str, Any]:
        """Run the watch and return its report."""
        job = self._begin()
        try:
            self._open(job)
            first = job.refresh().data["last_seq"]
            self._watch_noting(job)
            lasted_s = time.monotonic() - self._began
            rate = (job.refresh().data["last_seq"] - first) / lasted_s
            job.cancel()
        finally:
            self._client.close()
            self._http.close()
            self._house.down()
        return self._report(lasted_s, rate)

    def _watch_noting(self, job: gh.Job) -> None:
        try:
            self._watch(job)
        except Exception as error:  # still return a report
            part = self._parts[-1][1]
            self._wrong.append(f"{part}: {type(error).__name__}: {str(error)[:500]}")
        for tab in self._tabs:
            said = [what for what in self._chromium.said(tab.window) if not re.search(AWAY, what)]
            self._wrong += [f"{tab.name}: {what}" for what in dict.fromkeys(said)]

    def _watch(self, job: gh.Job) -> None:
        self._until(0.2, "before")
        self._cut_off()
        self._compare(job, "reconnected")
        self._until(0.45, "after the cut")
        self._start_again(job)
        self._compare(job, "started again")
        self._until(0.7, "after the start")
        self._send_to_sleep()
        self._compare(job, "woken")
        self._until(1.0, "after the sleep")
        self._compare(job, "in the end")
        self._tasks = [
            LongTask(tab.name, self._part_at(began), duration)
            for tab in self._tabs
            for began, duration in long_tasks(self._look(tab))
        ]

    def _calm(self) -> None:
        """Lower the priority of the job: the time of the tabs is measured."""
        stack = json.loads((self._house.home / "runtime.json").read_text())["pid"]
        for process in psutil.Process(stack).children(recursive=True):
            if "engine.process.fork_server" in process.cmdline():
                process.nice(19)

    def _begin(self) -> gh.Job:
        """Create the job with a batch size that gives the planned event rate."""
        digits = self._client.datasets.create(builtin="digits").id
        batch = TRIAL_BATCH
        for number in range(2):
            trial = self._client.jobs.create(spec(digits, f"trial {number}", batch, {"steps": 60}))
            trial.wait(timeout=300)
            wanted_s = EVENTS_PER_STEP / self._plan.rate
            batch = min(max(round(batch * wanted_s / self._step_s(trial)), BATCHES[0]), BATCHES[1])
        job = self._client.jobs.create(spec(digits, "watched", batch, {"steps": 10**9}))
        begun = POINTS + POINTS // 10
        until(lambda: (job.refresh().progress or {}).get("step", 0) > begun, 600, "a beginning")
        self._fill(job, begun)
        return job

    def _fill(self, job: gh.Job, begun: int) -> None:
        """Fill the once-a-second metrics with as many points as a chart shows.

        Otherwise the charts would fill for seventeen minutes, and their memory would grow.
        """
        found = self._http.get(f"/jobs/{job.id}/metrics").json()["data"]
        rows = [
            {"step": step, "epoch": 0, "name": one["name"], "value": step / begun}
            for one in found
            if one["name"].startswith(EACH_SECOND)
            for step in range(begun)
        ]
        database = Database(f"sqlite:///{self._house.home / 'glasshouse.db'}")
        with database.write() as tx:
            metrics.add(tx, job.id, 1, rows)
        database.close()

    def _step_s(self, trial: gh.Job) -> float:
        asked = {"types": "metrics", "limit": 1000}
        found = self._http.get(f"/jobs/{trial.id}/events", params=asked).json()["data"]
        times = [datetime.fromisoformat(one["at"]).timestamp() for one in found]
        return statistics.median(later - earlier for earlier, later in pairwise(times))

    def _look(self, tab: Tab) -> Look:
        return partial(self._chromium.evaluate, tab.window)

    def _open(self, job: gh.Job) -> None:
        """Open a session with a one-time link, then the tabs."""
        blank = list(self._chromium.windows)
        link = self._chromium.open(self._client.browser_link())
        listed = f"{self._house.url}/jobs"
        until(lambda: self._chromium.windows[link].startswith(listed), what="a session")
        self._began = time.monotonic()
        self._begin_part("load")
        for name in VIEWS:  # one by one: loading them together is not measured
            window = self._chromium.open(f"{self._house.url}{Tab(name, job.id).path}")
            tab = Tab(name, job.id, window)
            until(partial(self._look(tab), IS_SHOWN), what=name)
            self._tabs.append(tab)
        for window in [*blank, link]:
            self._chromium.close(window)

    def _until(self, share: float, part: str) -> None:
        """Sample the tabs regularly, up to this fraction of the duration."""
        self._begin_part(part)
        ends = self._began + share * self._plan.seconds
        while (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, self._plan.every_s))  # no debugger is attached
            self._sample()

    def _sample(self) -> None:
        at = time.monotonic() - self._began
        mib = self._chromium.renderers_mib
        self._lines.setdefault(("all tabs", "renderers_mib"), []).append((at, mib))
        for tab in self._tabs:
            for figure, value in self._held(tab).items():
                self._lines.setdefault((tab.name, figure), []).append((at, value))
        say(f"{at:.0f} s: {self._parts[-1][1]}, {mib:.0f} MiB, {self._wrong}")

    def _held(self, tab: Tab) -> dict[str, float]:
        """The memory of a tab after garbage collection."""
        asked = ("HeapProfiler.collectGarbage", "Runtime.getHeapUsage", "Memory.getDOMCounters")
        _, heap, counted = self._chromium.ask(tab.window, *asked)
        figures = {"heap_mib": heap["usedSize"] / 2**20}
        return figures | {name: float(counted[name]) for name in ("nodes", "jsEventListeners")}

    def _begin_part(self, part: str) -> None:
        """Begin a part, to which later long tasks belong."""
        self._parts.append((time.time(), part))

    def _part_at(self, moment: float) -> str:
        before = (part for began, part in reversed(self._parts) if began <= moment)
        return next(before, self._parts[0][1])

    def _cut_off(self) -> None:
        """Cut the network for a while: the tabs report it and reconnect."""
        self._begin_part("cut off")
        with self._chromium.offline(*(tab.window for tab in self._tabs)):
            self._says_away()
            time.sleep(self._plan.away_s)
        self._says_nothing()

    def _start_again(self, job: gh.Job) -> None:
        """Restart the service at the same address; the job continues."""
        self._begin_part("started again")
        attempt, port = job.refresh().data["attempt"], urlsplit(self._house.url).port
        began = time.monotonic()
        self._house.down()
        self._says_away()
        self._house = LocalService.up(self._house.home, port or 0)
        self._calm()
        self._says_nothing()
        until(lambda: job.refresh().data["attempt"] > attempt and job.state == "running", 300)
        self._began += time.monotonic() - began

    def _send_to_sleep(self) -> None:
        """Suspend the tabs, as a closed laptop does, while the job continues.

        The comparison afterwards shows that each tab refreshes.
        """
        self._begin_part("asleep")
        with self._chromium.asleep():
            time.sleep(self._plan.away_s)

    def _says_away(self) -> None:
        for tab in self._tabs:
            until(
                lambda tab=tab: self._look(tab)(SAYS_AWAY), what=f"{tab.name}: the connection bar"
            )

    def _says_nothing(self) -> None:
        for tab in self._tabs:
            until(
                lambda tab=tab: not self._look(tab)(SAYS_AWAY), what=f"{tab.name}: the reconnection"
            )

    def _compare(self, job: gh.Job, when: str) -> None:
        """While the job is paused, every tab must eventually show the API's numbers."""
        self._begin_part("compared")
        began = time.monotonic()
        job.pause()
        until(lambda: job.refresh().state == "paused", 300, "the pause")
        for tab in self._tabs:
            if difference := self._differs(tab):
                self._wrong.append(f"{when}, {tab.name}: {difference}")
            self._compared[tab.name] = self._compared.get(tab.name, 0) + 1
        job.resume()
        until(lambda: job.refresh().state == "running", 300, "the job to continue")
        self._began += time.monotonic() - began

    def _differs(self, tab: Tab) -> str | None:
        deadline = time.monotonic() + WAIT_MS / 1000
        while difference := tab.difference(self._look(tab), self._http):
            if time.monotonic() > deadline:
                return difference
            time.sleep(0.25)
        return None

    def _report(self, lasted_s: float, rate: float) -> dict[str, Any]:
        if rate < self._plan.rate / 4:
            self._wrong.append(f"only {rate:.1f} events a second")
        verdicts = [self._verdict(*line) for line in sorted(self._lines)]
        found = [verdict for verdict in verdicts if verdict]
        if len(found) < len(verdicts) or not found:
            self._wrong.append("there are too few samples to judge what is flat")
        self._wrong += [grown(verdict) for verdict in found if not verdict.is_flat]
        slept_ms = 1000 * self._plan.away_s
        tasks = longest([one for one in self._tasks if one.is_of_a_tab(slept_ms)])
        limit = self._plan.longest_ms
        self._wrong += [
            f"{one['tab']}, {one['part']}: a task of {one['longest_ms']} ms, {limit:g} are allowed"
            for one in tasks
            if limit and one["longest_ms"] > limit
        ]
        return {
            "watch": asdict(self._plan) | about(self._chromium),
            "lasted_s": round(lasted_s),
            "events_per_s": round(rate, 1),
            "compared": self._compared,
            "long_tasks": tasks,
            "figures": [self._as_line(verdict) for verdict in found],
            "wrong": self._wrong,
        }

    def _verdict(self, line: str, figure: str) -> Verdict | None:
        samples = self._lines[line, figure]
        late = [sample for sample in samples if sample[0] >= self._plan.warm_up_s]
        minutes = (self._plan.seconds - self._plan.warm_up_s) / 60
        bound = Bound(max(NOISE[figure], PER_MINUTE[figure] * minutes))
        return judge(line, figure, late, bound)

    def _as_line(self, verdict: Verdict) -> dict[str, Any]:
        points = thinned(self._lines[verdict.line, verdict.figure], 30)
        pairs = [[round(at / 60, 1), round(value, 1)] for at, value in points]
        return verdict.as_dict() | {"per_minute": per_minute(verdict), "points": pairs}


def per_minute(verdict: Verdict) -> float:
    """The slope of a measurement."""
    return round(verdict.per_hour / 60, 3)


def grown(verdict: Verdict) -> str:
    """The message of a measurement that grew over its bound."""
    return (
        f"{verdict.line}: {verdict.figure} grew by {verdict.growth:.1f} (from {verdict.first:.1f},"
        f" {per_minute(verdict)} a minute), {verdict.bound:.1f} are allowed"
    )


def longest(tasks: Iterable[LongTask]) -> list[dict[str, Any]]:
    """The number of long tasks and the longest, by tab and part."""
    groups: dict[tuple[str, str], list[float]] = {}
    for one in tasks:
        groups.setdefault((one.tab, one.part), []).append(one.duration_ms)
    return [
        {"tab": tab, "part": part, "num": len(found), "longest_ms": round(max(found))}
        for (tab, part), found in groups.items()
    ]


def about(chromium: Chromium) -> dict[str, Any]:
    """The machine and the browser, without paths."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    return machine | {"chromium": chromium.version}


def json_lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The report as JSON lines: a summary, and one line per measurement."""
    whole = {name: value for name, value in report.items() if name != "figures"}
    return [whole, *report["figures"]]


def table(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [
        f"{report['lasted_s']} s, {report['events_per_s']} events/s, compared {report['compared']}",
        "",
        f"{'tab':10} {'figure':17} {'first':>9} {'last':>9} {'most':>9} {'growth':>8} {'bound':>8}",
    ]
    lines += [
        f"{row['line']:10} {row['figure']:17} {row['first']:9.1f} {row['last']:9.1f} "
        f"{row['most']:9.1f} {row['growth']:8.1f} {row['bound']:8.1f} "
        f"{'' if row['flat'] else 'NOT FLAT'}"
        for row in report["figures"]
    ]
    lines += ["", f"{'tab':10} {'part':17} {'tasks over 50 ms':>17} {'longest, ms':>12}"]
    lines += [
        f"{row['tab']:10} {row['part']:17} {row['num']:17} {row['longest_ms']:12}"
        for row in report["long_tasks"]
    ]
    return "\n".join([*lines, "", *(report["wrong"] or ["nothing was wrong"])])


def say(what: str) -> None:
    """Print the progress on one line that is overwritten."""
    sys.stderr.write(f"\r{what}   ")
    sys.stderr.flush()


def watch(plan: Plan, path: str) -> dict[str, Any]:
    """Run a watch with the Chromium at a path; return its report."""
    folder = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    try:
        with Chromium.started(path) as chromium:
            return Watch(plan, chromium, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Watch, print and save the report; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.page.watching", description=__doc__)
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="events per second")
    parser.add_argument(
        "--longest",
        dest="longest_ms",
        type=float,
        default=Plan.longest_ms,
        help="the longest allowed task in ms; 0: no limit",
    )
    parser.add_argument("--save", metavar="NAME", help="save as bench/results/NAME.jsonl")
    given = vars(parser.parse_args())
    name = given.pop("save")
    path = find_chromium()
    if path is None:
        parser.error("Chromium is not installed (Debian, Ubuntu: apt install chromium)")
    report = watch(Plan(**given), path)
    sys.stdout.write(f"\n{table(report)}\n")
    if name:
        kept = ROOT / "bench" / "results" / f"{name}.jsonl"
        kept.write_text("".join(json.dumps(line) + "\n" for line in json_lines(report)))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
