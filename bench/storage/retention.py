"""Measures the size of events and values in PostgreSQL: ``python -m bench.storage.retention``.

It ships events of two values as a worker does, twenty per shipment, and asks PostgreSQL for the
size of the tables with their indexes. From that it calculates the size for 80 jobs with 20 events
per second each, with the retention of the settings. Then it deletes them in three ways. Prints JSON
lines.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import text, update

from models.database import Database
from models.jobs.shipments import Batch
from models.migrate import migrate
from models.observations.events import NewEvent
from models.purge import Purge
from models.settings import Settings
from models.storage.artifacts import LocalArtifacts
from models.tables import Event, Job, now
from tests.integration.store.factories import make_job, make_worker, running, ship
from tests.running import Postgres

JOBS, EVENTS_PER_S, VALUES = 80, 20, ("loss", "throughput/samples_per_s")
PER_SHIPMENT = 20
_TABLES = {"events": ("events",), "values": ("metrics", "metric_spans")}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.storage.retention")
    parser.add_argument("--events", type=int, default=200_000)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ghpg", dir="/tmp") as directory:
        server = Postgres(Path(directory) / "server")
        database = Database(server.url)
        try:
            measure(database, Path(directory), given.events)
        finally:
            database.close()
            server.close()
    return 0


def measure(database: Database, home: Path, count: int) -> None:
    migrate(database, lock_file=home / "migrate.lock")
    make_worker(database)
    job = make_job(database)
    claim = running(database, job)
    before = sizes(database)
    began = time.perf_counter()
    for first in range(0, count, PER_SHIPMENT):
        batch = batch_of(first, PER_SHIPMENT)
        assert ship(database, claim, batch, (first, first + PER_SHIPMENT))
    seconds = time.perf_counter() - began
    after = sizes(database)
    taken = {name: (after[name] - before[name]) / count for name in after}
    report("shipped", events=count, events_per_s=round(count / seconds), bytes_per_event=taken)
    settings = Settings(home=home)
    for days in (1, 30, 365):
        report("calculated", days=days, **extrapolated(taken, settings, days))
    delete_in_turn(database, settings, job.id)


def batch_of(first: int, num: int) -> Batch:
    batch = Batch()
    for step in range(first, first + num):
        values = dict.fromkeys(VALUES, 1 / (step + 1.7))
        payload = {"step": step, "epoch": step // 1000, "values": values}
        batch.events.append(NewEvent("metrics", now(), payload, step))
        row = {"step": step, "epoch": step // 1000}
        batch.metrics += [row | {"name": name, "value": value} for name, value in values.items()]
    return batch


def sizes(database: Database) -> dict[str, int]:
    query = text("SELECT pg_total_relation_size(to_regclass(:name))")
    with database.read() as tx:
        return {
            what: sum(tx.scalars(query, {"name": name}).one() for name in names)
            for what, names in _TABLES.items()
        }


def extrapolated(taken: dict[str, float], settings: Settings, days: int) -> dict[str, float]:
    """Return the GB after ``days`` days, if every job ran all the time or had ended just now."""
    per_day = JOBS * EVENTS_PER_S * 86400
    kept = {"events": settings.keep_values_days, "values": settings.keep_metrics_days}
    found = {
        what: per_day * taken[what] * min(days, kept[what] or days) / 1e9 for what in sorted(taken)
    }
    forever = {f"{what}_for_ever": per_day * taken[what] * days / 1e9 for what in sorted(taken)}
    return {f"{name}_gb": round(size, 1) for name, size in (found | forever).items()}


def delete_in_turn(database: Database, settings: Settings, job: str) -> None:
    """Delete old events of a running job, its values once it has ended, and a whole table."""
    with database.write() as tx:
        tx.execute(text("CREATE TABLE partition AS SELECT * FROM events"))
        past = now() - timedelta(days=30)
        tx.execute(update(Event).values(at=past))
        tx.execute(update(Job).where(Job.id == job).values(created_at=past))
    store = LocalArtifacts(settings.artifacts)
    began = time.perf_counter()
    found = Purge(settings, database, store).run()
    rates(found.rows, "values", time.perf_counter() - began)
    with database.write() as tx:
        past = now() - timedelta(days=2 * (settings.keep_metrics_days or 1))
        tx.execute(update(Job).where(Job.id == job).values(state="succeeded", ended_at=past))
    began = time.perf_counter()
    found = Purge(settings, database, store).run()
    rates(found.rows, "metrics", time.perf_counter() - began)
    began = time.perf_counter()
    with database.write() as tx:
        tx.execute(text("DROP TABLE partition"))
    report("deleted", of="a partition", seconds=round(time.perf_counter() - began, 3))


def rates(rows: dict[str, int], what: str, seconds: float) -> None:
    rate = round(rows.get(what, 0) / seconds)
    report("deleted", of=what, rows=rows.get(what, 0), rows_per_s=rate)


def report(what: str, **figures: Any) -> None:
    sys.stdout.write(json.dumps({"bench": "retention", "measured": what} | figures) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
