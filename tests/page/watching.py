"""A job watched in three tabs for as long as somebody would: ``python -m tests.page.watching``.

A service of its own runs a job that makes about twenty events a second. A real Chromium shows its
charts, its inside and one of its layers. On the way the network is cut, the service is started
again, and a tab is put to sleep; after each of these, and in the end, the job rests while the
numbers in every tab are compared with the API's. What a tab holds after a collection of garbage
must be flat (``tests/soak/flat.py``), no task may hold its thread for longer than ``--longest``
milliseconds, and nothing may be said in its console but that the service was away. Prints a table,
keeps the figures as JSON with ``--save``, and fails if not all of it is so.
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
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

import glasshouse as gh
from tests.acceptance.houses import ROOT, House, until
from tests.page.browser import SIZES, WAIT_MS, Witness, find_chromium, launch
from tests.page.specs import small
from tests.page.tabs import VIEWS, Tab, asleep, renderers_mib
from tests.soak.flat import Bound, Verdict, judge, thinned

BOUNDS = {
    "heap_mib": Bound(2.0, 0.1),
    "nodes": Bound(300, 0.1),
    "jsEventListeners": Bound(60, 0.1),
    "renderers_mib": Bound(40, 0.1),
}
AWAY = r"ERR_(CONNECTION_\w+|INTERNET_DISCONNECTED|EMPTY_RESPONSE|NETWORK_\w+|SOCKET_\w+)"
TRIAL_BATCH, BATCHES = 128, (8, 1297)
UNDER_WAY = 8
"""So many requests a tab may have sent before it fell asleep, and are heard of later."""
EVENTS_PER_STEP = 2
"""Metrics, and statistics of the layers."""


@dataclass(frozen=True)
class Plan:
    """How long, and what is too long."""

    minutes: float = 30.0
    rate: float = 20.0
    """Events a second, about."""
    longest_ms: float = 100.0
    """What a task may take; 0: whatever it takes."""

    @property
    def seconds(self) -> float:
        """As seconds."""
        return self.minutes * 60

    @property
    def every_s(self) -> float:
        """How often a tab is looked at: enough samples in a short time, too."""
        return min(30.0, self.seconds / 40)

    @property
    def away_s(self) -> float:
        """How long the network is away, and how long a tab sleeps."""
        return min(120.0, self.seconds / 12)


def spec(digits: str, name: str, batch: int, stop: dict[str, Any]) -> dict[str, Any]:
    """Of which every step is watched, and is as long as its batch is large."""
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
    """One watch, from an empty folder to its report."""

    def __init__(self, plan: Plan, browser: Browser, folder: Path) -> None:
        self._plan, self._browser = plan, browser
        self._house = House.up(folder / "home")
        self._calm()
        self._client, self._http = self._house.client(), self._house.http()
        self._witness = Witness(self._house.url)
        self._witness.allow(AWAY)
        self._tabs: list[Tab] = []
        self._lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._compared: dict[str, int] = {}
        self._wrong: list[str] = []
        self._part, self._began = "load", 0.0
        """When it began, but for the time in which the job rested."""

    def run(self) -> dict[str, Any]:
        """Its report."""
        job = self._begin()
        try:
            with self._context() as context:
                self._open(context, job)
                first = job.refresh().data["last_seq"]
                self._watch_noting(context, job)
                lasted_s = time.monotonic() - self._began
                rate = (job.refresh().data["last_seq"] - first) / lasted_s
            job.cancel()
        finally:
            self._client.close()
            self._http.close()
            self._house.down()
        return self._report(lasted_s, rate)

    def _watch_noting(self, context: BrowserContext, job: gh.Job) -> None:
        try:
            self._watch(context, job)
        except Exception as error:  # the report is worth more
            self._wrong.append(f"{self._part}: {type(error).__name__}: {str(error)[:500]}")
        self._note_tasks("")

    def _watch(self, context: BrowserContext, job: gh.Job) -> None:
        self._until(0.2, "before")
        self._cut_off(context)
        self._compare(job, "reconnected")
        self._until(0.45, "after the cut")
        self._start_again(job)
        self._compare(job, "started again")
        self._until(0.7, "after the start")
        self._send_to_sleep()
        self._compare(job, "woken")
        self._until(1.0, "after the sleep")
        self._compare(job, "in the end")

    def _calm(self) -> None:
        """The job gives way to the tabs: it is their time that is measured."""
        stack = json.loads((self._house.home / "runtime.json").read_text())["pid"]
        for process in psutil.Process(stack).children(recursive=True):
            if "engine.nursery" in process.cmdline():
                process.nice(19)

    def _begin(self) -> gh.Job:
        """The job, whose batches are so large that there are as many events a second as wanted."""
        digits = self._client.datasets.create(builtin="digits").id
        batch = TRIAL_BATCH
        for number in range(2):
            trial = self._client.jobs.create(spec(digits, f"trial {number}", batch, {"steps": 60}))
            trial.wait(timeout=300)
            wanted_s = EVENTS_PER_STEP / self._plan.rate
            batch = min(max(round(batch * wanted_s / self._step_s(trial)), BATCHES[0]), BATCHES[1])
        job = self._client.jobs.create(spec(digits, "watched", batch, {"steps": 10**9}))
        until(lambda: (job.refresh().progress or {}).get("step", 0) > 110, 300, "an evaluation")
        return job

    def _step_s(self, trial: gh.Job) -> float:
        asked = {"types": "metrics", "limit": 1000}
        found = self._http.get(f"/jobs/{trial.id}/events", params=asked).json()["data"]
        times = [datetime.fromisoformat(one["at"]).timestamp() for one in found]
        return statistics.median(later - earlier for earlier, later in pairwise(times))

    @contextmanager
    def _context(self) -> Generator[BrowserContext]:
        """A session that shows the service; what its tabs say is judged in the end."""
        width, height = SIZES["wide"]
        viewport: Any = {"width": width, "height": height}
        with self._browser.new_context(base_url=self._house.url, viewport=viewport) as context:
            context.set_default_timeout(WAIT_MS)
            self._witness.follow(context)
            context.new_page().goto(self._client.browser_link())
            context.pages[0].close()
            yield context

    def _open(self, context: BrowserContext, job: gh.Job) -> None:
        self._began = time.monotonic()
        self._tabs = [Tab(name, context.new_page(), job.id) for name in VIEWS]
        for tab in self._tabs:
            shown = tab.page.locator("[data-group=loss], tr.layer-row, [data-chart]")
            expect(shown.first).to_be_visible()

    def _until(self, share: float, part: str) -> None:
        """Look at the tabs now and then, up to this share of the time."""
        self._note_tasks(part)
        self._for(self._began + share * self._plan.seconds - time.monotonic())

    def _for(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._sample()
            self._tabs[0].page.wait_for_timeout(1000 * max(0.0, min(left, self._plan.every_s)))

    def _sample(self) -> None:
        at = time.monotonic() - self._began
        for tab in self._tabs:
            for figure, value in tab.figures().items():
                self._lines.setdefault((tab.name, figure), []).append((at, value))
        mib = renderers_mib(self._browser)
        self._lines.setdefault(("all tabs", "renderers_mib"), []).append((at, mib))
        say(f"{at:.0f} s: {self._part}, {mib:.0f} MiB, {self._wrong}")

    def _note_tasks(self, part: str) -> None:
        """What was long up to now belongs to the part that ends, what comes to the next."""
        for tab in self._tabs:
            tab.note_tasks(self._part)
        self._part = part

    def _cut_off(self, context: BrowserContext) -> None:
        """No network for a while: the tabs say so, and come back by themselves."""
        self._note_tasks("cut off")
        context.set_offline(True)
        self._says_away()
        self._for(self._plan.away_s)
        context.set_offline(False)
        self._says_nothing()

    def _start_again(self, job: gh.Job) -> None:
        """The service ends and comes back where it was; the job goes on."""
        self._note_tasks("started again")
        attempt, port = job.refresh().data["attempt"], urlsplit(self._house.url).port
        began = time.monotonic()
        self._house.down()
        self._says_away()
        self._house = House.up(self._house.home, port or 0)
        self._calm()
        self._says_nothing()
        until(lambda: job.refresh().data["attempt"] > attempt and job.state == "running", 300)
        self._began += time.monotonic() - began

    def _send_to_sleep(self) -> None:
        """As with a lid that is closed: the tabs stand still, and the job goes on."""
        self._note_tasks("asleep")
        asked = [tab.num_asked for tab in self._tabs]
        with asleep(self._browser):
            time.sleep(self._plan.away_s)
        for tab, before in zip(self._tabs, asked, strict=True):
            if tab.num_asked > before + UNDER_WAY:
                self._wrong.append(f"{tab.name}, asleep, asked {tab.num_asked - before} times")
            with tab.page.expect_request("**/api/**"):  # once awake, by itself
                pass
            tab.forget_tasks(1000 * self._plan.away_s)  # what the sleep itself cut in two

    def _says_away(self) -> None:
        for tab in self._tabs:
            expect(tab.page.locator("div.bar")).to_contain_text("does not answer")

    def _says_nothing(self) -> None:
        for tab in self._tabs:
            expect(tab.page.locator("div.bar")).to_have_count(0)

    def _compare(self, job: gh.Job, when: str) -> None:
        """While the job rests, every tab must come to show what the API says."""
        self._note_tasks("compared")
        began = time.monotonic()
        job.pause()
        until(lambda: job.refresh().state == "paused", 300, "the pause")
        for tab in self._tabs:
            if difference := self._differs(tab):
                self._wrong.append(f"{when}, {tab.name}: {difference}")
            self._compared[tab.name] = self._compared.get(tab.name, 0) + 1
        job.resume()
        until(lambda: job.refresh().state == "running", 300, "the job to go on")
        self._began += time.monotonic() - began

    def _differs(self, tab: Tab) -> str | None:
        deadline = time.monotonic() + WAIT_MS / 1000
        while difference := tab.difference(self._http):
            if time.monotonic() > deadline:
                return difference
            tab.page.wait_for_timeout(250)
        return None

    def _report(self, lasted_s: float, rate: float) -> dict[str, Any]:
        self._wrong += [what for what in self._witness.complaints if not re.search(AWAY, what)]
        if rate < self._plan.rate / 4:
            self._wrong.append(f"only {rate:.1f} events a second")
        verdicts = [self._verdict(*line) for line in sorted(self._lines)]
        found = [verdict for verdict in verdicts if verdict]
        if len(found) < len(verdicts) or not found:
            self._wrong.append("there are too few samples to say what is flat")
        self._wrong += [f"{v.line}: {v.figure} is not flat" for v in found if not v.is_flat]
        tasks = [longest(tab, part) for tab in self._tabs for part in parts(tab)]
        limit = self._plan.longest_ms
        late = [one for one in tasks if limit and one["longest_ms"] > limit]
        self._wrong += [
            f"{one['tab']}, {one['part']}: a task of {one['longest_ms']} ms" for one in late
        ]
        return {
            "watch": asdict(self._plan) | about(self._browser),
            "lasted_s": round(lasted_s),
            "events_per_s": round(rate, 1),
            "compared": self._compared,
            "long_tasks": tasks,
            "figures": [self._told(verdict) for verdict in found],
            "wrong": self._wrong,
        }

    def _verdict(self, line: str, figure: str) -> Verdict | None:
        warm_up_s = self._plan.seconds / 4
        late = [sample for sample in self._lines[line, figure] if sample[0] >= warm_up_s]
        return judge(line, figure, late, BOUNDS[figure])

    def _told(self, verdict: Verdict) -> dict[str, Any]:
        points = thinned(self._lines[verdict.line, verdict.figure], 30)
        pairs = [[round(at / 60, 1), round(value, 1)] for at, value in points]
        return verdict.as_dict() | {"points": pairs}


def parts(tab: Tab) -> list[str]:
    """In which parts of the time a tab had tasks of over 50 ms."""
    return list(dict.fromkeys(part for part, _ in tab.tasks))


def longest(tab: Tab, part: str) -> dict[str, Any]:
    """How many they were, and the longest."""
    found = [duration for when, duration in tab.tasks if when == part]
    return {"tab": tab.name, "part": part, "num": len(found), "longest_ms": round(max(found))}


def about(browser: Browser) -> dict[str, Any]:
    """On what it ran; no path of the machine."""
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    return machine | {"chromium": browser.version}


def told(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The report as lines: one of it all, and one of each figure."""
    whole = {name: value for name, value in report.items() if name != "figures"}
    return [whole, *report["figures"]]


def table(report: dict[str, Any]) -> str:
    """The report for people."""
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
    """Where it stands, on one line that is written over."""
    sys.stderr.write(f"\r{what}   ")
    sys.stderr.flush()


def watch(plan: Plan, browser: Browser) -> dict[str, Any]:
    """Do it; its report."""
    folder = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    try:
        return Watch(plan, browser, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Watch, print, keep; 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.page.watching", description=__doc__)
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="events a second")
    parser.add_argument(
        "--longest", dest="longest_ms", type=float, default=Plan.longest_ms, help="ms; 0: any"
    )
    parser.add_argument("--save", metavar="NAME", help="keep bench/results/NAME.jsonl")
    given = vars(parser.parse_args())
    name = given.pop("save")
    path = find_chromium()
    if path is None:
        parser.error("there is no Chromium (Debian, Ubuntu: apt install chromium)")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = launch(playwright, path)
        report = watch(Plan(**given), browser)
        browser.close()
    sys.stdout.write(f"\n{table(report)}\n")
    if name:
        kept = ROOT / "bench" / "results" / f"{name}.jsonl"
        kept.write_text("".join(json.dumps(line) + "\n" for line in told(report)))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
