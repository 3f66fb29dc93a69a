"""Runs of a job with several processes, forked as a worker forks them."""

import json
import multiprocessing
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from engine.core.spool import read_frames
from tests.unit.engine.runs import DEVICE, planned, write_job
from worker.processes.fork_server import COMMAND, ForkServerClient, rank_directory
from worker.processes.rank import Rank

LIMIT_S = 120.0
ON_DEVICE = (sys.executable, "-P", "-m", "tests.accelerator.fork_server")
"""Starts a fork server whose ranks have the simulated accelerator."""


def forking() -> ForkServerContext:
    """Starts processes that have imported what a rank needs, which takes seconds of CPU time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine.process.rank", "torch._dynamo"])
    return context


@contextmanager
def fork_server_in(
    directory: Path, command: Sequence[str] = ON_DEVICE if DEVICE == "simulated" else COMMAND
) -> Generator[ForkServerClient]:
    """A fork server that ends with its ranks."""
    server = ForkServerClient(log_path=directory / "fork-server.log", command=command)
    server.start()
    try:
        assert server.wait_ready(60)
        yield server
    finally:
        server.close()


def start(
    server: ForkServerClient, directory: Path, job: dict[str, Any], table: Path, **more: Any
) -> list[Rank]:
    """Plan a job and start its processes."""
    meta = json.loads((table / "meta.json").read_text())
    return start_resolved(server, directory, planned(job, meta)["spec"], table, **more)


def start_resolved(
    server: ForkServerClient,
    directory: Path,
    resolved: dict[str, Any],
    table: Path,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> list[Rank]:
    """Start the processes of a resolved spec. ``table``: of the dataset ``ds_1``."""
    size = resolved["parallel"]["processes"] or 1
    ranks: list[Rank] = []
    for rank in range(size):
        own = rank_directory(directory, rank)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        group = {"rank": rank, "size": size, "store": str(directory / "store")}
        write_job(own, resolved, table, group=group, **more)
        ranks.append(server.fork(directory, env or {}, rank))
    return ranks


def finish(ranks: list[Rank], directory: Path) -> list[list[dict[str, Any]]]:
    """The records of each process, all of which end."""
    found: list[list[dict[str, Any]]] = []
    for number, rank in enumerate(ranks):
        exit_ = rank.wait(LIMIT_S)
        rank.close()
        log = "".join(path.read_text() for path in sorted((directory / "logs").iterdir()))
        assert exit_ is not None, log
        found.append(read_frames(rank_directory(directory, number) / "spool", 0, 10**6)[0])
        assert found[-1], (str(exit_), log)
    return found


def run_processes(
    server: ForkServerClient, directory: Path, job: dict[str, Any], table: Path, **more: Any
) -> list[dict[str, Any]]:
    """Run a job with its processes to success; the records of process 0."""
    ranks = start(server, directory, job, table, **more)
    records = finish(ranks, directory)
    assert [item[-1]["state"] for item in records] == ["succeeded"] * len(ranks), [
        item[-1] for item in records
    ]
    assert all([item["type"] for item in others] == ["end"] for others in records[1:])
    return records[0]
