"""Measures statistics of a long job: bytes on disk, the time of a fold, the time of a query.

``python -m bench.storage.stats`` fills a SQLite database through `models`, as a supervisor does,
and prints one JSON line. It takes about two minutes of a core and 3 GB of disk.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from sqlalchemy import text

from models.database import Database
from models.migrate import migrate
from models.observations import stats, stats_folding, unfolded_stats
from models.observations.stats_bytes import Block, StatsArrays, StoredSeries, pack_block
from models.observations.unfolded_stats import StatsOwner
from models.tables import StatsBlock
from tests.integration.inspection import services
from tests.integration.inspection.services import Api, Broker
from tests.integration.store import factories

STEPS_PER_SHIPMENT = 10


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.storage.stats")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tensors", type=int, default=200)
    given = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="gh", dir="/tmp"))
    database = Database(f"sqlite:///{home / 'glasshouse.db'}")
    broker = Broker(home)
    try:
        migrate(database, lock_file=home / "migrate.lock")
        broker.start()
        print(json.dumps(measure(database, home, broker, given.steps, given.tensors)), flush=True)
    finally:
        broker.kill()
        database.close()
        shutil.rmtree(home)
    return 0


def over_http(database: Database, home: Path, broker: Broker, path: str) -> dict[str, float]:
    """Return the times of queries for one layer of the whole job over HTTP."""
    api = Api(home, database.url, broker.url)
    found: dict[str, float] = {}
    arrow = {"Accept": "application/vnd.apache.arrow.stream"}
    try:
        with services.client(api.url, services.make_key(database, "ada")[1]) as client:

            def get(query: str, headers: dict[str, str] | None = None) -> None:
                client.get(f"{path}?layer=layer7&{query}", headers=headers).raise_for_status()

            found["http_1000_points_ms"] = timed(lambda: get(""), 9)
            found["http_one_figure_ms"] = timed(lambda: get("stat=mean"), 9)
            every = "max_points=1000000"
            found["http_every_point_json_ms"] = timed(lambda: get(every), 5)
            found["http_every_point_arrow_ms"] = timed(lambda: get(every, arrow), 5)
    finally:
        api.stop()
    return found


def measure(
    database: Database, home: Path, broker: Broker, num_steps: int, tensors: int
) -> dict[str, object]:
    factories.make_worker(database)
    job = factories.make_job(database)
    claim = factories.running(database, job)
    filler = Filler(database, StatsOwner(job.id, claim.fence), tensors)
    for step in range(0, num_steps, STEPS_PER_SHIPMENT):
        filler.ship(step)
    unfolded = timed(lambda: filler.query("layer7"), 5)  # the worst case: a tail of blocks
    newest_ms = timed(filler.newest, 5)
    while filler.is_left():
        filler.fold()
    values = num_steps * tensors * len(stats.FIGURES)
    with database.write() as tx:
        chunks = tx.scalar(text("SELECT sum(length(data)) FROM stats_chunks"))
        pages, size = (tx.scalar(text(f"PRAGMA {name}")) for name in ("page_count", "page_size"))
    on_disk = pages * size
    return {
        "bench": "stats",
        "steps": num_steps,
        "tensors": tensors,
        "query_one_layer_ms": timed(lambda: filler.query("layer7"), 9),
        "query_one_layer_cpu_ms": timed(lambda: filler.query("layer7"), 9, time.process_time),
        **over_http(database, home, broker, f"/jobs/{job.id}/stats"),
        "query_with_unfolded_blocks_ms": unfolded,
        "query_100_steps_ms": timed(lambda: filler.query("layer7", num_steps // 2), 9),
        "newest_of_all_ms": newest_ms,
        "chunk_bytes_per_value": round(chunks / values, 2),
        "file_bytes_per_value": round(on_disk / values, 2),
        "ship_ms_per_step": round(1000 * filler.shipping_s / num_steps, 3),
        "fold_ms_per_step": round(1000 * filler.folding_s / num_steps, 3),
        "fold_transaction_median_ms": round(1000 * statistics.median(filler.locked_s), 1),
        "fold_transaction_p99_ms": round(
            1000 * sorted(filler.locked_s)[int(len(filler.locked_s) * 0.99)], 1
        ),
        "fold_transaction_longest_ms": round(1000 * max(filler.locked_s), 1),
    }


class Filler:
    """Fills a job with statistics that are noise, which compresses worse than real training."""

    def __init__(self, database: Database, owner: StatsOwner, tensors: int) -> None:
        self._database = database
        self._owner = owner
        self._names = [StoredSeries(f"layer{n}", "output", "train") for n in range(tensors)]
        self._random = np.random.default_rng(0)
        self.shipping_s = self.folding_s = 0.0
        self.locked_s: list[float] = []

    def ship(self, step: int) -> None:
        num = STEPS_PER_SHIPMENT * len(self._names)
        numbers = np.tile(np.arange(len(self._names), dtype=np.uint32), STEPS_PER_SHIPMENT)
        steps = np.repeat(np.arange(step, step + STEPS_PER_SHIPMENT), len(self._names))
        values = self._random.normal(size=(len(stats.FIGURES), num))
        began = time.perf_counter()
        with self._database.write() as tx:
            tx.add(
                StatsBlock(
                    job=self._owner.job,
                    attempt=1,
                    form="stats",
                    from_step=step,
                    to_step=step + STEPS_PER_SHIPMENT - 1,
                    data=pack_block(Block(self._names, numbers, StatsArrays(steps, values))),
                )
            )
        self.shipping_s += time.perf_counter() - began
        with self._database.read() as tx:
            due = unfolded_stats.is_due(tx, self._owner.job)
        if due:
            self.fold()

    def fold(self) -> None:
        began = time.perf_counter()
        with self._database.read() as tx:
            fold = stats_folding.read(tx, self._owner.job)
        assert fold is not None
        number = self._locked(lambda tx: stats_folding.begin(tx, self._owner))
        for portion in fold.portions():
            some = portion
            self._locked(lambda tx: stats_folding.store(tx, self._owner, number, some))  # noqa: B023
        self._locked(lambda tx: stats_folding.finish(tx, self._owner, number, fold.blocks))
        self.folding_s += time.perf_counter() - began

    def _locked(self, act: Callable[..., int | None]) -> int:
        began = time.perf_counter()
        with self._database.write() as tx:
            done = act(tx)
        self.locked_s.append(time.perf_counter() - began)
        assert done
        return done

    def query(self, layer: str, step: int | None = None) -> None:
        with self._database.read() as tx:
            end = None if step is None else step + 99
            ((_, found),) = stats.query(
                tx, self._owner.job, layer=layer, from_step=step, to_step=end
            )
        assert len(found.steps) >= 100

    def newest(self) -> None:
        with self._database.read() as tx:
            assert len(stats.newest(tx, self._owner.job)) == len(self._names)

    def is_left(self) -> bool:
        with self._database.read() as tx:
            return unfolded_stats.is_left(tx, self._owner.job)


def timed(
    act: Callable[[], None], times: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median of some runs, ms. CPU time as ``clock`` is less disturbed by other load."""
    found: list[float] = []
    for _ in range(times):
        began = clock()
        act()
        found.append(clock() - began)
    return round(1000 * statistics.median(found), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
