"""The checks behind ``/readyz``. They run in parallel, and none can delay the response for long.

A check that takes longer than three seconds is reported as failed. It is not started again until
it has ended.
"""

import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

from api.app_state import AppState
from glasshouse.errors import ServiceError, StorageFull
from glasshouse.versions import LEAST_BROKER, SAFE_SQLITE, numbers
from models import marks, startup
from models.fleet import heartbeats
from models.storage import integrity
from models.storage.disk_space import remote_kind

LIMIT_S = 3.0
SWEPT_S = 60.0
"""Without a sweep for this long, nothing finds lost jobs and lost wake-ups."""
_FRESH_S = 1.0
_VERSIONS_S = 60.0
WELL = "ok"
Status = Literal["ok", "degraded", "down"]


@dataclass(frozen=True, slots=True)
class Report:
    """The health of the service, as seen by one API process."""

    checks: dict[str, str]
    """By name: ``ok``, or the problem."""
    warnings: dict[str, str]
    """What works, but should be fixed."""

    @property
    def status(self) -> Status:
        """``down``: this process cannot serve requests; ``degraded``: another check failed."""
        if any(self.checks.get(name, WELL) != WELL for name in ("database", "schema", "draining")):
            return "down"
        return "ok" if all(found == WELL for found in self.checks.values()) else "degraded"


class Readiness:
    """Runs the checks at most once a second, because ``/readyz`` needs no key."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="readyz")
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[str]] = {}
        self._last: tuple[float, Report] | None = None
        self._warned: tuple[float, dict[str, str]] | None = None
        self._checks: dict[str, Callable[[], str]] = {
            "database": self._database,
            "schema": self._schema,
            "database_write": self._write,
            "integrity": self._integrity,
            "broker": self._broker,
            "workers": self._workers,
            "sweepers": self._sweepers,
            "planner": self._planner,
            "disk": self._disk,
        }

    def report(self) -> Report:
        """Run the checks, or return the result of the last second."""
        with self._lock:
            if self._last is not None and time.monotonic() - self._last[0] < _FRESH_S:
                return self._last[1]
            checks = self._look()
            if self._app_state.draining.is_set():
                checks["draining"] = "this process is about to end"
            report = Report(checks, self._warnings(checks))
            self._last = time.monotonic(), report
            return report

    def close(self) -> None:
        """Start no more checks."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> dict[str, str]:
        for name, check in self._checks.items():
            if name not in self._under_way:
                self._under_way[name] = self._pool.submit(check)
        done, _ = wait(self._under_way.values(), LIMIT_S)
        found: dict[str, str] = {}
        for name in self._checks:
            future = self._under_way[name]
            if future not in done:
                found[name] = f"no answer within {LIMIT_S:g} s"
                continue
            del self._under_way[name]
            found[name] = _result(future)
        return found

    def _database(self) -> str:
        try:
            self._app_state.database.ping()
        except ServiceError:
            return "the database does not answer"
        return WELL

    def _schema(self) -> str:
        with self._app_state.database.read() as tx:
            return startup.mismatch(startup.revision(tx)) or WELL

    def _write(self) -> str:
        database = self._app_state.database
        try:
            with database.write() as tx:
                written = marks.note(tx, "readyz", "api")
            with database.read() as tx:
                found = marks.read(tx, "readyz")
        except StorageFull:
            return "the disk of the database is full; reading works"
        except ServiceError:
            return "the database takes no writes"
        return WELL if found is not None and found[0] >= written else "what was written is not read"

    def _integrity(self) -> str:
        with self._app_state.database.read() as tx:
            found = integrity.found_last(tx)
        return WELL if found == integrity.WHOLE else "the last look found the database damaged"

    def _broker(self) -> str:
        return WELL if self._app_state.notifier.reaches_broker() else "the broker does not answer"

    def _signs(self) -> list[heartbeats.WorkerHealth]:
        settings = self._app_state.settings
        with self._app_state.database.read() as tx:
            lease_ms = int(settings.lease_s * 1000)
            return heartbeats.signs(tx, lease_ms=lease_ms, canary_s=settings.canary_s)

    def _workers(self) -> str:
        signs = self._signs()
        if not any(sign.state == "active" for sign in signs):
            return "no worker takes jobs"
        unresponsive = sum(sign.unresponsive for sign in signs)
        if not unresponsive:
            return WELL
        alive = sum(sign.state not in heartbeats.GONE for sign in signs)
        return f"{unresponsive} of {alive} workers do not receive notifications"

    def _sweepers(self) -> str:
        ages = [sign.swept_ago_s for sign in self._signs() if sign.swept_ago_s is not None]
        if ages and min(ages) <= SWEPT_S:
            return WELL
        return f"no worker has looked for lost jobs for {SWEPT_S:g} s"

    def _planner(self) -> str:
        return WELL if self._app_state.planner.is_ready else "the planner is not there"

    def _disk(self) -> str:
        short = self._app_state.space.short()
        return f"the disk is nearly full: {', '.join(short)}" if short else WELL

    def _warnings(self, checks: dict[str, str]) -> dict[str, str]:
        if self._warned is None or time.monotonic() - self._warned[0] >= _VERSIONS_S:
            found = _of_sqlite(self._app_state) if self._app_state.database.is_sqlite else {}
            if checks["broker"] == WELL:
                found |= _of_broker(self._app_state.notifier.broker_version())
                self._warned = time.monotonic(), found
            return found
        return self._warned[1]


def _result(future: Future[str]) -> str:
    try:
        return future.result()
    except ServiceError as error:
        return f"unknown: {error.detail}"


def _of_sqlite(app_state: AppState) -> dict[str, str]:
    found: dict[str, str] = {}
    if sqlite3.sqlite_version_info < SAFE_SQLITE:
        found["sqlite"] = (
            f"SQLite {sqlite3.sqlite_version} has the WAL-reset bug, fixed in "
            f"{'.'.join(map(str, SAFE_SQLITE))}; for data that must not be lost use PostgreSQL"
        )
    kind = remote_kind(app_state.settings.home)
    if kind is not None:
        found["file_system"] = f"SQLite must not be on a file system of the kind {kind}"
    return found


def _of_broker(version: tuple[str, str] | None) -> dict[str, str]:
    if version is None:
        return {}
    product, number = version
    least = LEAST_BROKER[product]
    if numbers(number) >= least:
        return {}
    wanted = ".".join(map(str, least))
    detail = f"{product} {number} has known vulnerabilities; use {wanted} or newer"
    return {"broker_version": detail}
