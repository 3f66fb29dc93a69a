"""Check the service from its host: ``python -m models.check``.

Prints a JSON list of findings: name, state (ok, warn, fail), detail, and how to fix it. Used by
``glasshouse doctor``, which itself knows nothing of databases.
"""

import sys
from collections.abc import Generator
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from glasshouse import jsonio
from glasshouse.errors import ServiceError
from glasshouse.spec.error_messages import said
from models import startup
from models.database import Database, Transaction
from models.fleet import heartbeats
from models.settings import Settings
from models.storage import pending_deletions
from models.storage.disk_space import Space, remote_kind
from models.telemetry import tracing

Finding = dict[str, str | None]
_MANY_DOOMED = 10_000


def findings() -> list[Finding]:
    """Check settings, disks, database and tracing."""
    try:
        settings = Settings()
    except ValidationError as error:
        return [_wrong_setting(error)]
    return [*_disks(settings), *_database(settings), *_traces()]


def _wrong_setting(error: ValidationError) -> Finding:
    first = error.errors(include_url=False, include_input=False)[0]
    name = f"GLASSHOUSE_{'_'.join(str(part) for part in first['loc']).upper()}"
    return _found("settings", "fail", f"{name}: {said(first)}", f"Correct or unset {name}.")


def _traces() -> Generator[Finding]:
    if not tracing.is_wanted():
        yield _found("tracing", "ok", f"is off; {tracing.ENDPOINTS[1]} turns it on", None)
    elif missing := tracing.missing_packages():
        detail = f"is asked for, but {' and '.join(missing)} are not installed"
        yield _found("tracing", "fail", detail, tracing.EXTRA)
    else:
        yield _found("tracing", "ok", "traces are sent by OTLP", None)


def _disks(settings: Settings) -> Generator[Finding]:
    space = Space(settings)
    short = space.short()
    if short:
        detail = f"less than GLASSHOUSE_MIN_FREE_BYTES is left: {', '.join(short)}"
        fix = (
            "New work is refused until space is free: glasshouse purge --dry-run says what could "
            "go; GLASSHOUSE_KEEP_…_DAYS lets it go by itself."
        )
        yield _found("space", "fail", detail, fix)
    else:
        yield _found("space", "ok", ", ".join(f"{n} {_gib(b)}" for n, b in space.free().items()))
    if settings.database.startswith("sqlite"):
        kind = remote_kind(Path(settings.database.removeprefix("sqlite:///")))
        if kind is not None:
            fix = (
                "SQLite is not safe there: set GLASSHOUSE_HOME to a local disk, or use PostgreSQL."
            )
            yield _found("file_system", "fail", f"the database is on {kind}", fix)


def _gib(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB free"


def _database(settings: Settings) -> Generator[Finding]:
    if settings.database.startswith("sqlite"):
        place = Path(settings.database.removeprefix("sqlite:///"))
        if not place.exists():
            yield _found("database", "ok", "will be made by 'glasshouse up'")
            return
    database = Database(settings.database)
    try:
        with database.read() as tx:
            yield from _of_database(tx, settings, is_sqlite=database.is_sqlite)
    except (ServiceError, SQLAlchemyError) as error:
        detail = error.detail if isinstance(error, ServiceError) else type(error).__name__
        fix = "Is the database server up, and is GLASSHOUSE_DATABASE_URL right?"
        yield _found("database", "fail", detail, fix)
    finally:
        database.close()


def _of_database(tx: Transaction, settings: Settings, *, is_sqlite: bool) -> Generator[Finding]:
    found = startup.revision(tx)
    if problem := startup.mismatch(found):
        detail, _, fix = problem.partition(". ")
        yield _found("revision", "fail", detail, fix)
        return
    yield _found("revision", "ok", f"the database is at revision {found}")
    if is_sqlite:
        said = str(tx.scalars(text("PRAGMA quick_check")).first())
        if said != "ok":
            fix = "Stop the service and restore the last backup: glasshouse restore."
            yield _found("integrity", "fail", f"the database is damaged: {said}", fix)
        else:
            yield _found("integrity", "ok", "quick_check finds nothing")
    lease_ms = int(settings.lease_s * 1000)
    unresponsive = [
        sign.worker
        for sign in heartbeats.signs(tx, lease_ms=lease_ms, canary_s=settings.canary_s)
        if sign.unresponsive
    ]
    if unresponsive:
        detail = f"connected, but receiving no notifications: {', '.join(unresponsive[:10])}"
        fix = "Their jobs start some seconds late. Is the broker up? Restart these workers."
        yield _found("unresponsive", "fail", detail, fix)
    off = heartbeats.disabled_webhooks(tx)
    if off:
        fix = "GET /api/v1/webhooks says why; delete them, and make them anew when they work."
        yield _found("webhooks", "warn", f"{off} were switched off", fix)
    left = len(pending_deletions.find(tx, limit=_MANY_DOOMED))
    if left == _MANY_DOOMED:
        fix = "A worker deletes them each GLASSHOUSE_PURGE_EVERY_S; or: glasshouse purge."
        yield _found("doomed_files", "warn", f"{left} or more files wait to be deleted", fix)


def _found(name: str, state: str, detail: str, fix: str | None = None) -> Finding:
    return {"name": name, "state": state, "detail": detail, "fix": fix}


if __name__ == "__main__":
    sys.stdout.write(jsonio.dumps(findings()) + "\n")
