"""The resources that a running service uses, sampled repeatedly from outside.

A *line* is what is followed over time: one process that is never killed (``api one``), the middle
one of all processes of a kind (``every api``), or the store. Processes that are young do not count
for their kind: what they take is not yet what they will take.
"""

import contextlib
import os
import statistics
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import psutil
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from tests.acceptance.services import Cluster
from tests.soak.flat import Bound

MIB = 2**20
GROWN_UP_S = 15.0
KINDS = {
    "engine.process.fork_server": "fork_server",
    "engine.process.planner": "planner",
    "api": "api",
    "worker": "worker",
}
BOUNDS = {
    "rss_mib": Bound(16, 0.08),
    "pss_mib": Bound(16, 0.25),
    "descriptors": Bound(16, 0.3),
    "threads": Bound(16),
    "processes": Bound(2),
    "wal_mib": Bound(8),
    "database_mib": Bound(16, 0.1),
    "dead_rows": Bound(20_000),
    "work_mib": Bound(16),
    "artifacts_mib": Bound(32, 0.15),
    "shared_mib": Bound(1),
}
"""How much each figure may grow in the evaluated time.

When an API dies, its clients and their connections move to the other one, so what an API still
holds after all clients have left is checked separately. The memory of all processes together
depends on how many fork servers are running, so each kind of process has its own narrow bound. An
API has up to forty threads for requests and releases idle ones.
"""


class Samples:
    """A thread that looks every few seconds until it is stopped."""

    def __init__(self, cluster: Cluster, spared: frozenset[str], every_s: float) -> None:
        self._cluster = cluster
        self._spared = spared
        self._every_s = every_s
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._began = time.monotonic()
        self.lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        """By line and figure: seconds since the beginning, and what it was."""
        self.seen: set[tuple[int, float]] = set()
        """Every process of the service that was ever sampled: id and start time."""
        self.pids: dict[str, set[int]] = defaultdict(set)
        """By line of one process: more than one if it was replaced."""
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let it end, and raise what went wrong with it."""
        self._stopping.set()
        self._thread.join(60)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._every_s):
                self._look(time.monotonic() - self._began)
        except BaseException as error:  # raised in the thread that asks for the samples
            self._error = error

    def _look(self, at: float) -> None:
        kinds: dict[str, list[dict[str, float]]] = defaultdict(list)
        num, pss = 0, 0.0
        for kind, name, process in processes(self._cluster):
            with contextlib.suppress(psutil.Error):
                created = process.create_time()
                self.seen.add((process.pid, created))
                figures = figures_of(process)
                num, pss = num + 1, pss + figures["pss_mib"]
                if name in self._spared and kind != "rank":
                    self.pids[f"{kind} {name}"].add(process.pid)
                    self._note(at, f"{kind} {name}", figures)
                if kind == "rank" or time.time() - created > GROWN_UP_S:
                    kinds[kind].append(figures)
        for kind, found in kinds.items():
            middle = {name: statistics.median(one[name] for one in found) for name in found[0]}
            self._note(at, f"every {kind}", middle)
        self._note(at, "service", {"pss_mib": pss, "processes": num})
        self._note(at, "store", store_figures(self._cluster))

    def _note(self, at: float, line: str, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.lines[line, name].append((at, value))


def judged(line: str, figure: str) -> bool:
    """Whether a figure says something of that line.

    A fork server shares its pages with its ranks, so that its share of them says how many ranks
    there are; and ranks of different jobs, what the jobs are. The other figure of those is judged.
    """
    if figure == "rss_mib":
        return "rank" not in line
    if figure == "pss_mib":
        return line == "service" or "rank" in line
    return figure in BOUNDS


def processes(cluster: Cluster) -> list[tuple[str, str, psutil.Process]]:
    """Every process of a cluster: its kind, the API or worker that it belongs to, and itself."""
    found: list[tuple[str, str, psutil.Process]] = []
    for name, started in [*cluster.apis.items(), *cluster.workers.items()]:
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(started.pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    found.append((kind_of(process, top), name, process))
    if cluster.broker.pid is not None:
        with contextlib.suppress(psutil.Error):
            found.append(("broker", "broker", psutil.Process(cluster.broker.pid)))
    return found


def kind_of(process: psutil.Process, top: psutil.Process) -> str:
    """What a process of the service is for."""
    words = process.cmdline()
    module = next((after for before, after in pairwise(words) if before == "-m"), "")
    kind = KINDS.get(module, "helper")
    return "rank" if kind == "fork_server" and process.ppid() != top.pid else kind


def figures_of(process: psutil.Process) -> dict[str, float]:
    """What one process takes."""
    with process.oneshot():
        memory = process.memory_full_info()
        return {
            "rss_mib": memory.rss / MIB,
            "pss_mib": memory.pss / MIB,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }


def store_figures(cluster: Cluster) -> dict[str, float]:
    """What the service keeps on disk and in shared memory."""
    sizes = {
        "work_mib": sum(size_of(path) for path in cluster.directory.glob("*/work/*/job_*")),
        "artifacts_mib": size_of(cluster.directory / "artifacts"),
        "shared_mib": sum(size_of(path) for path in Path("/dev/shm").glob("torch_*")),  # noqa: S108
    }
    return {name: size / MIB for name, size in sizes.items()} | database_figures(cluster)


def database_figures(cluster: Cluster) -> dict[str, float]:
    """The size of the database and of its write-ahead log; of PostgreSQL the dead rows too."""
    if cluster.database_url.startswith("sqlite"):
        path = Path(cluster.database_url.removeprefix("sqlite:///"))
        sizes = {"database_mib": path, "wal_mib": path.with_name(path.name + "-wal")}
        return {name: size_of(file) / MIB for name, file in sizes.items()}
    asked = {
        "database_mib": "SELECT pg_database_size(current_database()) / 1048576.0",
        "wal_mib": "SELECT sum(size) / 1048576.0 FROM pg_ls_waldir()",
        "dead_rows": "SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables",
    }
    engine = create_engine(cluster.database_url)
    try:
        with engine.connect() as connection:
            rows = {name: connection.scalar(text(query)) for name, query in asked.items()}
        return {name: float(value or 0) for name, value in rows.items()}
    finally:
        engine.dispose()


def is_locked(cluster: Cluster) -> bool:
    """Whether anybody who is no longer there still holds something in the database."""
    sqlite = cluster.database_url.startswith("sqlite")
    engine = create_engine(cluster.database_url, connect_args={"timeout": 0} if sqlite else {})
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    try:
        with engine.connect() as connection:
            if sqlite:
                connection.exec_driver_sql("BEGIN EXCLUSIVE")
                return False
            return connection.scalar(text(others)) != 1
    except OperationalError:
        return True
    finally:
        engine.dispose()


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; what goes meanwhile has none."""
    try:
        if not path.is_dir():
            return path.stat().st_size
        with os.scandir(path) as entries:
            return sum(size_of(Path(entry.path)) for entry in entries)
    except OSError:
        return 0


def held(process: psutil.Process, cluster: Cluster) -> dict[str, int]:
    """What a process has open, by sort: sockets, pipes and files, those of the database apart.

    How many connections to the database its pool has open depends on the most that were ever used
    at once; it has a limit, and is none of what a client leaves behind.
    """
    counts: dict[str, int] = defaultdict(int)
    database = cluster.database_url.removeprefix("sqlite:///")
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if not target.startswith(database):
                counts[target.partition(":")[0] if ":" in target else "file"] += 1
    return dict(counts)


def alive(seen: set[tuple[int, float]]) -> list[int]:
    """Which of these processes are still there."""
    found: list[int] = []
    for pid, created in seen:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
