"""``make soak``: a service in use and under fire for an hour, and what it takes stays flat.

Workers and two APIs on a broker and a database of their own. Jobs are always in hand, clients
stream their events, and every few seconds a process dies by SIGKILL: rank, fork server, worker,
API, broker. One API and one worker are spared, so that something lives for the whole time. In the
end every job must have ended as if nothing had happened, every client must have seen every event
of its jobs once, memory, descriptors, threads, write-ahead log and folders must be flat
(``flat.py``), and nothing may be left behind. Prints a table, keeps the figures as JSON, and
fails if not all of it is so.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.acceptance.services import ROOT, Cluster
from tests.chaos.monkey import Monkey, leftovers, ranks
from tests.soak.flat import Bound, Verdict, judge, thinned
from tests.soak.samples import BOUNDS, Samples, alive, held, is_locked, judged, size_of
from tests.soak.stream_clients import StreamClients
from tests.soak.work import Work

SPARED = frozenset({"one", "north"})
FINISH_S = 600.0
SETTLE_S = 60.0
SIZES = ("database_mib", "artifacts_mib")
"""They grow with the jobs, until retention deletes as many as are added."""
SLACK = 4
"""Connections of pools, to broker and database, that a spared process may have besides."""


@dataclass(frozen=True)
class Plan:
    """How long, and how hard."""

    minutes: float = 60.0
    workers: int = 4
    clients: int = 100
    database: str = ""
    every_s: float = 5.0
    kills_s: tuple[float, float] = (2.0, 10.0)
    seed: int = 0
    least: int = 0
    """Continue until enough processes have died and enough jobs have ended."""

    @property
    def warm_up_s(self) -> float:
        """What is not judged: caches fill, and the first jobs become old enough to be deleted."""
        return self.minutes * 60 / 4

    @property
    def keep_s(self) -> float:
        """The age at which an ended job is deleted."""
        return max(120.0, self.minutes * 60 / 8)

    @property
    def sizes_settle(self) -> bool:
        """Whether as much is deleted as is added, once it has warmed up."""
        return self.warm_up_s >= 2 * self.keep_s

    @property
    def settings(self) -> dict[str, str]:
        """Of the service: retention, so that the store has a size to stay at."""
        keep = {"KEEP_JOBS_DAYS": f"{self.keep_s / 86400:.6f}"}
        return keep | {"PURGE_EVERY_S": f"{min(60.0, self.keep_s / 2):g}"}


class Soak:
    """One soak, from an empty folder to its report."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        url = plan.database or f"sqlite:///{folder / 'soak.db'}"
        names = ("north", *(f"south{n}" for n in range(1, plan.workers)))
        self._cluster = Cluster(url, worker_names=names, settings=plan.settings)
        self._work = Work(self._cluster, plan.workers * 2, "one", plan.seed)
        self._wrong: list[str] = []
        self._clients: dict[str, Any] = {"told": []}

    def run(self) -> dict[str, Any]:
        """Its report."""
        cluster, plan = self._cluster, self._plan
        try:
            cluster.start()
            self._work.begin()
            before = {name: held(process, cluster) for name, process in self._spared().items()}
            waste = leftovers(cluster)
            with self._fire() as (monkey, samples):
                lasted_s = self._last(monkey)
            self._work.finish(FINISH_S)
            self._settle(before, waste)
            log_mib = sum(size_of(path) for path in cluster.directory.glob("*.log")) / 2**20
        finally:
            cluster.stop()
        self._check_gone(samples)
        verdicts = judge_all(samples, plan)
        self._wrong += [f"{v.line}: {v.figure} is not flat" for v in verdicts if not v.is_flat]
        return {
            "soak": about(plan, cluster),
            "lasted_s": round(lasted_s),
            "killed": dict(monkey.killed),
            "jobs": dict(sorted(self._work.ended.items())),
            "attempts": self._work.num_attempts,
            "pauses": self._work.num_pauses,
            "clients": self._clients,
            "log_mib": round(log_mib, 1),
            "figures": [figure(samples, verdict) for verdict in verdicts],
            "wrong": [*self._work.wrong, *self._wrong],
        }

    def _last(self, monkey: Monkey) -> float:
        """Keep the service busy for as long as is planned; how long that was."""
        began, work = time.monotonic(), self._work
        while not monkey.is_done:  # it would have come to grief
            work.keep_up()
            lasted_s, num_killed = time.monotonic() - began, monkey.killed.total()
            say(f"{lasted_s:.0f} s: {work.ended.total()} jobs, {num_killed} kills, {work.wrong}")
            enough = min(num_killed, work.ended.total()) >= self._plan.least
            if enough and lasted_s >= self._plan.minutes * 60:
                break
        return time.monotonic() - began

    def _spared(self) -> dict[str, psutil.Process]:
        cluster = self._cluster
        found = {"api one": cluster.apis["one"], "worker north": cluster.workers["north"]}
        return {name: psutil.Process(process.pid) for name, process in found.items()}

    @contextlib.contextmanager
    def _fire(self) -> Generator[tuple[Monkey, Samples]]:
        """While the block lasts there are clients, faults, and somebody who takes notes."""
        cluster, plan = self._cluster, self._plan
        crowd = StreamClients(
            plan.clients, [cluster.urls[name] for name in cluster.api_names], cluster.key
        )
        samples = Samples(cluster, SPARED, plan.every_s)
        monkey = Monkey(
            cluster, seed=plan.seed, num_kills=float("inf"), pause_s=plan.kills_s, spared=SPARED
        )
        try:
            yield monkey, samples
        finally:
            for part in (monkey, samples):
                with self._noting(f"{type(part).__name__} failed"):
                    part.stop()
            with self._noting("the clients failed"):
                self._clients = crowd.leave()
        self._wrong += [f"clients: {what}" for what in self._clients["told"]]
        for line, pids in samples.pids.items():
            if len(pids) > 1 and not line.startswith("helper"):
                self._wrong.append(f"{line} was replaced: it had {len(pids)} processes")

    def _settle(self, before: dict[str, dict[str, int]], waste: set[str]) -> None:
        """Nobody asks any more: devices, ranks, folders and descriptors must be free again."""
        cluster = self._cluster
        with self._noting("devices"):
            cluster.await_workers()
        left = patiently(lambda: ranks(cluster))
        self._wrong += [f"a rank is left: {process.pid}" for process in left]
        left = patiently(lambda: leftovers(cluster) - waste)
        self._wrong += [f"left behind: {what}" for what in sorted(left)]
        for name, process in self._spared().items():
            more = patiently(lambda n=name, p=process: grown(before[n], held(p, cluster)))
            self._wrong += [f"{name} still has open: {what}" for what in more]

    def _check_gone(self, samples: Samples) -> None:
        left = patiently(lambda: alive(samples.seen))
        self._wrong += [f"process {pid} outlived the service" for pid in left]
        if is_locked(self._cluster):
            self._wrong.append("the database is locked by nobody who lives")

    @contextlib.contextmanager
    def _noting(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception as error:  # the report is worth more than the first fault
            self._wrong.append(f"{what}: {str(error)[:500]}")


def patiently(look: Any) -> list[Any]:
    """What is still found after a while in which it may go."""
    deadline = time.monotonic() + SETTLE_S
    while found := look():
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return list(found)


def grown(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """Of which sorts there are more descriptors than there were."""
    return [
        f"{count} {sort} and not {before.get(sort, 0)}"
        for sort, count in now.items()
        if count > before.get(sort, 0) + SLACK
    ]


def judge_all(samples: Samples, plan: Plan) -> list[Verdict]:
    """A verdict of every figure that says something and was sampled often enough."""
    found: list[Verdict] = []
    for (line, figure), taken in sorted(samples.lines.items()):
        if not judged(line, figure) or (figure in SIZES and not plan.sizes_settle):
            continue
        late = [(at, value) for at, value in taken if at >= plan.warm_up_s]
        bound = BOUNDS[figure]
        if figure == "descriptors" and "api" in line and not plan.sizes_settle:
            bound = Bound(plan.clients)  # in a short time one death moves all clients to one API
        verdict = judge(line, figure, late, bound)
        if verdict is not None:
            found.append(verdict)
    return found


def figure(samples: Samples, verdict: Verdict) -> dict[str, Any]:
    """A verdict, and what was sampled, also before: pairs of minutes and values, thinned out."""
    points = thinned(samples.lines[verdict.line, verdict.figure], 30)
    pairs = [[round(at / 60, 1), round(value, 1)] for at, value in points]
    return verdict.as_dict() | {"points": pairs}


def about(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What was asked for, and on what; no path of the machine."""
    kind = "sqlite" if cluster.database_url.startswith("sqlite") else "postgresql"
    asked = asdict(plan) | {"database": kind, "warm_up_s": plan.warm_up_s, "keep_s": plan.keep_s}
    return asked | {"cores": os.cpu_count(), "python": platform.python_version()}


def report_lines(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The report as lines: one of it all, and one of each figure."""
    whole = {name: value for name, value in report.items() if name != "figures"}
    return [whole, *report["figures"]]


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"{report['lasted_s']} s, killed {report['killed']}",
        f"jobs {report['jobs']}, attempts {report['attempts']}, pauses {report['pauses']}",
        f"clients { {k: v for k, v in report['clients'].items() if k != 'told'} }",
        "",
        f"{'line':20} {'figure':13} {'first':>9} {'last':>9} {'most':>9} {'per hour':>9} "
        f"{'growth':>8} {'bound':>8}",
    ]
    lines += [
        f"{row['line']:20} {row['figure']:13} {row['first']:9.1f} {row['last']:9.1f} "
        f"{row['most']:9.1f} {row['per_hour']:9.1f} {row['growth']:8.1f} {row['bound']:8.1f} "
        f"{'' if row['flat'] else 'NOT FLAT'}"
        for row in report["figures"]
    ]
    return "\n".join([*lines, "", *(report["wrong"] or ["nothing was wrong"])])


def page(lines: list[dict[str, Any]]) -> str:
    """The kept lines as the table of docs/concepts/restarts.md: what lived for all of the time."""
    whole, *figures = lines
    clients = whole["clients"]
    killed = ", ".join(
        f"{count} {kind}s".replace("ys", "ies") for kind, count in sorted(whole["killed"].items())
    )
    counts = [
        f"{whole['lasted_s'] // 60} minutes, {sum(whole['killed'].values())} kills: {killed}",
        f"{sum(whole['jobs'].values())} jobs in {whole['attempts']} attempts, "
        f"{whole['pauses']} pauses",
        f"{clients['clients']} clients: {clients['opened']:,} streams, "
        f"{clients['events']:,} events, {clients['cut']:,} cut by themselves, "
        f"{clients['lost']:,} by a death",
    ]
    rows = [
        f"| {row['line']}: {row['figure']} | {row['first']:.1f} | {row['last']:.1f} "
        f"| {row['most']:.1f} | {row['per_hour']:.1f} | {'yes' if row['flat'] else '**no**'} |"
        for row in figures
        if not row["line"].startswith("every")
    ]
    head = "| what | first third | last third | most | an hour | flat |\n|---|---|---|---|---|---|"
    return "\n".join([*(f"- {line}" for line in counts), "", head, *rows])


def say(what: str) -> None:
    """Where it stands, on one line that is written over."""
    sys.stderr.write(f"\r{what}   ")
    sys.stderr.flush()


def soak(plan: Plan) -> dict[str, Any]:
    """Run one; its report."""
    folder = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))
    try:
        return Soak(plan, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end(*_: object) -> None:
    """Stop what was started, also when told to end by a signal."""
    raise KeyboardInterrupt


def main() -> int:
    """Run, print, keep; 1 if something was wrong."""
    signal.signal(signal.SIGTERM, end)
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--workers", type=int, default=Plan.workers)
    parser.add_argument("--clients", type=int, default=Plan.clients)
    parser.add_argument("--database", default="", help="a URL (default: a SQLite file)")
    parser.add_argument("--every", dest="every_s", type=float, default=Plan.every_s)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--save", metavar="NAME", help="keep bench/results/NAME.jsonl")
    given = vars(parser.parse_args())
    name = given.pop("save")
    report = soak(Plan(**given))
    sys.stdout.write(f"\n{table(report)}\n")
    if name:
        kept = ROOT / "bench" / "results" / f"{name}.jsonl"
        kept.write_text("".join(json.dumps(line) + "\n" for line in report_lines(report)))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
