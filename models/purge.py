"""Delete expired data: ``python -m models.purge [--dry-run] [--json]``.

Each transaction is small. After each, the purge pauses longer than the transaction took, up to a
limit, so that others get most of the database. It can be stopped at any time and continues with the
next run.
"""

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from glasshouse import jsonio
from models.database import Database, Transaction
from models.jobs import checkpoints
from models.settings import Settings
from models.storage import datasets, pending_deletions, retention
from models.storage.artifacts import Artifacts, open_artifacts
from models.storage.retention import KINDS, Deleted, DependentRows
from models.tables import now

REST = 3.0
"""Length of a pause, as a multiple of the transaction's duration."""
LEAST_REST_S = 0.01
MOST_REST_S = 0.5
"""Other processes get the database in this time. On an overloaded machine, where each transaction
takes a second, longer pauses would let the purge fall behind new data forever."""
ORPHAN_AFTER_S = 86400.0
"""A younger file without a row may belong to a process that has not written the row yet."""
_JOBS_AT_ONCE = 100


@dataclass(slots=True)
class Purged:
    """What was deleted, or would be deleted."""

    rows: dict[str, int] = field(default_factory=dict[str, int])
    bytes: dict[str, int] = field(default_factory=dict[str, int])
    files: int = 0
    orphans: int = 0

    def add(self, name: str, rows: int, size: int = 0) -> None:
        """Count rows of one kind."""
        if rows:
            self.rows[name] = self.rows.get(name, 0) + rows
        if size:
            self.bytes[name] = self.bytes.get(name, 0) + size

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "rows": self.rows,
            "bytes": self.bytes,
            "files": self.files,
            "orphans": self.orphans,
        }


class Purge:
    """One pass over all data."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        artifacts: Artifacts,
        *,
        stop: threading.Event | None = None,
        stays_mine: Callable[[Transaction], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._database = database
        self._artifacts = artifacts
        self._stop = stop or threading.Event()
        self._stays_mine = stays_mine
        self._clock = clock
        self._lost = False
        self._done = Purged()

    def run(self) -> Purged:
        """Delete expired data. Ends early when stopped."""
        self.run_deleted()
        before = self._before("keep_values_days")
        if before is not None:
            self._purge_values(before)
        for kind in KINDS:
            before = self._before(f"keep_{kind.name}_days")
            if before is not None:
                self._purge_kind(kind, before)
        before = self._before("keep_jobs_days")
        if before is not None:
            self._purge_jobs(before)
        self._repeat("others", lambda tx: Deleted(retention.forget_small(tx, self._settings, 1000)))
        self._delete_files()
        if not self._over:
            self._done.orphans = len(delete_orphans(self._settings, self._database))
        return self._done

    def run_deleted(self) -> Purged:
        """Delete the data of deleted jobs."""
        self._delete_files()
        while not self._over:
            with self._database.read() as tx:
                due = retention.deleted_jobs(tx, limit=_JOBS_AT_ONCE)
            if not due:
                break
            for job in due:
                self._empty_all(job)
                self._once("jobs", lambda tx, job=job: Deleted(retention.forget_deleted(tx, job)))
        return self._done

    def plan(self) -> Purged:
        """Return what would be deleted, without deleting it."""
        found = Purged()
        with self._database.read() as tx:
            leaving = retention.deleted_jobs(tx, limit=1_000_000)
            before = self._before("keep_jobs_days")
            if before is not None:
                every = retention.jobs_ended_before(tx, before, limit=1_000_000)
                leaving += [job for _, job in every]
            found.add("jobs", len(leaving))
            for kind in KINDS:
                wanted = set(leaving)
                before = self._before(f"keep_{kind.name}_days")
                if before is not None:
                    wanted |= set(retention.ended_before(tx, kind, before, limit=1_000_000))
                for part in _parts(sorted(wanted)):
                    found.add(kind.name, *kind.count(tx, part))
            before = self._before("keep_values_days")
            if before is not None:
                old = retention.jobs_with_old_values(tx, before, limit=1_000_000)
                found.add("values", sum(retention.count_values(tx, job, before) for job in old))
            for name, rows in retention.count_small(tx, self._settings).items():
                found.add(name, rows)
            found.files = len(pending_deletions.find(tx, limit=1_000_000))
        found.orphans = len(orphans(self._settings, self._database))
        return found

    @property
    def _over(self) -> bool:
        """Return whether the purge was stopped or another process has taken the turn."""
        return self._lost or self._stop.is_set()

    def _before(self, setting: str) -> datetime | None:
        days = getattr(self._settings, setting)
        return None if days is None else now() - timedelta(days=days)

    def _purge_values(self, before: datetime) -> None:
        last, chunk = "", self._settings.purge_chunk
        while not self._over:
            with self._database.read() as tx:
                due = retention.jobs_with_old_values(tx, before, limit=_JOBS_AT_ONCE, after=last)
            if not due:
                return
            last = due[-1]
            for job in due:
                self._repeat(
                    "values",
                    lambda tx, job=job: retention.forget_values(tx, job, before, chunk),
                )

    def _purge_kind(self, kind: DependentRows, before: datetime) -> None:
        while not self._over:
            with self._database.read() as tx:
                due = retention.ended_before(tx, kind, before, limit=_JOBS_AT_ONCE)
            deleted = [self._empty(kind, job) for job in due]
            if not any(deleted):
                return

    def _purge_jobs(self, before: datetime) -> None:
        last: tuple[datetime, str] | None = None
        while not self._over:
            with self._database.read() as tx:
                due = retention.jobs_ended_before(tx, before, limit=_JOBS_AT_ONCE, after=last)
            if not due:
                return
            last = due[-1]
            for _, job in due:
                self._empty_all(job)
                self._once(
                    "jobs", lambda tx, job=job: Deleted(retention.forget_job(tx, job, before))
                )

    def _empty_all(self, job: str) -> None:
        for kind in KINDS:
            self._empty(kind, job)

    def _empty(self, kind: DependentRows, job: str) -> bool:
        chunk = self._settings.purge_chunk
        return self._repeat(kind.name, lambda tx: kind.some(tx, job, chunk))

    def _repeat(self, name: str, act: Callable[[Transaction], Deleted]) -> bool:
        """Repeat until nothing is left. Return whether there was anything."""
        any_ = False
        while not self._over:
            done = self._once(name, act)
            if not (done.rows or done.more):
                break
            any_ = True
        return any_

    def _once(self, name: str, act: Callable[[Transaction], Deleted]) -> Deleted:
        if self._over:
            return Deleted()
        with self._database.write() as tx:
            if not self._stays_mine(tx):
                self._lost = True
                return Deleted()
            tx.connection()  # begins: no pause is owed for the wait until here
            began = self._clock()
            done = act(tx)
        held_s = self._clock() - began
        self._done.add(name, done.rows)
        if done.files:
            self._delete_files()
        self._stop.wait(min(MOST_REST_S, max(LEAST_REST_S, REST * held_s)))
        return done

    def _delete_files(self) -> None:
        """Delete the files of deleted rows. After a crash, the next pass deletes the rest."""
        while not self._over:
            with self._database.read() as tx:
                keys = pending_deletions.find(tx, limit=100)
            if not keys:
                return
            for key in keys:
                self._artifacts.delete(key)
            with self._database.write() as tx:
                pending_deletions.gone(tx, keys)
            self._done.files += len(keys)


def orphans(settings: Settings, database: Database) -> list[Path]:
    """Return uploads without a row and aborted files, old enough to belong to no process."""
    root, oldest = settings.artifacts, time.time() - ORPHAN_AFTER_S
    broken_off = [*root.glob("**/.*.incoming"), *root.glob("**/.*.deleted")]
    found = list(_old(broken_off, oldest))
    with database.read() as tx:
        waiting = datasets.pending(tx) | checkpoints.uploaded(tx)
    uploads = [*(root / "uploads").glob("ds_*"), *(root / "checkpoints").glob("ckpt_*")]
    return found + [path for path in _old(uploads, oldest) if path.name not in waiting]


def delete_orphans(settings: Settings, database: Database) -> list[Path]:
    """Delete the orphans and return them."""
    found = orphans(settings, database)
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def _old(paths: Any, oldest: float) -> Generator[Path]:
    for path in paths:
        try:
            if path.lstat().st_mtime < oldest:
                yield path
        except OSError:  # deleted in the meantime
            continue


def _parts(names: Sequence[str]) -> Generator[Sequence[str]]:
    for first in range(0, len(names), 500):
        yield names[first : first + 500]


def main(arguments: Sequence[str]) -> int:
    """Run one pass, or report what it would delete."""
    parser = argparse.ArgumentParser(prog="glasshouse purge", description=__doc__)
    parser.add_argument("--home", type=Path, help="default: $GLASSHOUSE_HOME, or ~/.glasshouse")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    settings = Settings(home=given.home) if given.home else Settings()
    database = Database(settings.database)
    try:
        purge = Purge(settings, database, open_artifacts(settings))
        found = purge.plan() if given.dry_run else purge.run()
    finally:
        database.close()
    if given.json:
        sys.stdout.write(jsonio.dumps({"dry_run": given.dry_run, **found.as_dict()}) + "\n")
        return 0
    verb = "would delete" if given.dry_run else "deleted"
    for name, rows in found.rows.items():
        size = found.bytes.get(name)
        more = f" ({size} bytes)" if size else ""
        sys.stdout.write(f"{verb} {rows} of {name}{more}\n")
    sys.stdout.write(f"{verb} {found.files} files, and {found.orphans} that no row names\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
