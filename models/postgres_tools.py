"""``pg_dump`` and ``pg_restore``, found on the path. Only their environment tells the password."""

import os
import shutil
import subprocess
from pathlib import Path

from sqlalchemy import make_url

from glasshouse.errors import GlasshouseError

TIMEOUT_S = 6 * 3600.0


class ToolFailed(GlasshouseError):
    """A program of PostgreSQL is missing, or failed."""


def dump(url: str, to: Path, *, snapshot: str) -> None:
    """Dump a database as one exported snapshot sees it.

    Raises:
        ToolFailed: there is no ``pg_dump``, or it failed.
    """
    options = ["--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"]
    _run("pg_dump", [*options, f"--file={to}"], url)
    to.chmod(0o600)


def restore(url: str, source: Path) -> None:
    """Restore a dump into an empty database.

    Raises:
        ToolFailed: there is no ``pg_restore``, or it failed.
    """
    name = environment(url)["PGDATABASE"]
    options = ["--no-owner", "--no-privileges", "--exit-on-error", "--single-transaction"]
    _run("pg_restore", [*options, f"--dbname={name}", str(source)], url)


def environment(url: str) -> dict[str, str]:
    """What tells libpq where the database is."""
    parts = make_url(url)
    query = {name: str(value) for name, value in parts.query.items()}
    found = {
        "PGHOST": parts.host or query.get("host"),
        "PGPORT": str(parts.port) if parts.port else query.get("port"),
        "PGUSER": parts.username,
        "PGPASSWORD": parts.password,
        "PGDATABASE": parts.database,
        "PGSSLMODE": query.get("sslmode"),
        "PGSSLROOTCERT": query.get("sslrootcert"),
    }
    return {name: value for name, value in found.items() if value}


def _run(program: str, options: list[str], url: str) -> None:
    path = shutil.which(program)
    if path is None:
        raise ToolFailed(
            f"{program} is not on the path: install the client programs of PostgreSQL, of the "
            "server's version or newer"
        )
    done = subprocess.run(  # noqa: S603
        [path, *options],
        env={"PATH": os.environ.get("PATH", ""), **environment(url)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise ToolFailed(f"{program} failed: {done.stderr.strip()[-1000:]}")
