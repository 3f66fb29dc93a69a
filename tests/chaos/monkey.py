"""Kills one process of a service after another, by SIGKILL, and starts what must be there."""

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.acceptance.services import Cluster

TARGETS = ("api", "worker", "fork_server", "rank", "broker")


class Monkey:
    """A thread that kills; ``killed`` counts what it really hit.

    Named APIs and workers are spared, the fork servers with them; their ranks are not.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        seed: int,
        num_kills: float,
        pause_s: tuple[float, float],
        spared: frozenset[str] = frozenset(),
    ) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)  # noqa: S311 (which process dies)
        self._num_kills = num_kills
        self._pause_s = pause_s
        self._apis = sorted(cluster.apis.keys() - spared)
        self._workers = sorted(cluster.workers.keys() - spared)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self.killed: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="monkey", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has killed as many as it was to."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Let it end, and raise what went wrong with it."""
        self._stopping.set()
        self._thread.join(120)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self.killed.total() < self._num_kills:
                if self._stopping.wait(self._random.uniform(*self._pause_s)):
                    return
                target = self._random.choice(TARGETS)
                if getattr(self, f"_kill_{target}")():
                    self.killed[target] += 1
        except BaseException as error:  # raised in the test's own thread
            self._error = error

    def _kill_api(self) -> bool:
        name = self._random.choice(self._apis)
        self._cluster.kill_api(name)
        self._cluster.start_api(name)
        return True

    def _kill_worker(self) -> bool:
        name = self._random.choice(self._workers)
        self._cluster.kill_worker(name)
        self._cluster.start_worker(name)
        return True

    def _kill_broker(self) -> bool:
        self._cluster.broker.kill()
        self._stopping.wait(self._random.uniform(0, 1))
        self._cluster.broker.start()
        return True

    def _kill_fork_server(self) -> bool:
        return self._kill_one(fork_servers(self._cluster, self._workers))

    def _kill_rank(self) -> bool:
        return self._kill_one(ranks(self._cluster))

    def _kill_one(self, found: list[psutil.Process]) -> bool:
        if not found:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            self._random.choice(found).kill()
            return True
        return False


def fork_servers(cluster: Cluster, workers: Iterable[str]) -> list[psutil.Process]:
    """The fork server of each of these workers that has one now."""
    found: list[psutil.Process] = []
    for name in workers:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(cluster.workers[name].pid).children()
            found += [
                item
                for item in children
                if "engine.process.fork_server" in " ".join(item.cmdline())
            ]
    return found


def ranks(cluster: Cluster) -> list[psutil.Process]:
    """The ranks that train now."""
    found: list[psutil.Process] = []
    for fork_server in fork_servers(cluster, list(cluster.workers)):
        with contextlib.suppress(psutil.Error):
            found += fork_server.children()
    return found


def leftovers(cluster: Cluster) -> set[str]:
    """Processes of ours that nobody holds any more, shared memory, directories of attempts."""
    orphans = {
        f"process {process.pid}"
        for process in psutil.process_iter(["cmdline", "ppid"])
        if process.info["ppid"] == 1
        and "engine.process.fork_server" in " ".join(process.info["cmdline"] or ())
    }
    shared = {str(path) for path in Path("/dev/shm").glob("torch_*")}  # noqa: S108
    work = {str(path) for path in cluster.directory.glob("*/work/*/job_*")}
    return orphans | shared | work
