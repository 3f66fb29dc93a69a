"""``pg_dump`` and ``pg_restore``, found on the path.

They get the password only in the environment.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from sqlalchemy import make_url

from glasshouse.errors import GlasshouseError

_BLOCK_BYTES = 1 << 20


class ToolFailed(GlasshouseError):
    """A PostgreSQL program is missing, or failed."""


def dump(url: str, to: Path, *, snapshot: str) -> None:
    """Dump a database as of one exported snapshot.

    The dump passes through a pipe of this process, so that ``pg_dump`` does not outlive it.

    Raises:
        ToolFailed: There is no ``pg_dump``, or it failed.
    """
    options = ["--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"]
    to.touch(mode=0o600)
    with to.open("wb") as file, _running("pg_dump", options, url) as (_, dumped):
        shutil.copyfileobj(dumped, file, _BLOCK_BYTES)


def restore(url: str, source: Path) -> None:
    """Restore a dump into a database without its tables: all of it, or nothing.

    ``pg_restore`` reads the dump from a pipe of this process. If the process ends, the dump is
    incomplete, and PostgreSQL rolls the single transaction back.

    Raises:
        ToolFailed: There is no ``pg_restore``, or it failed.
    """
    name = environment(url)["PGDATABASE"]
    options = ["--no-owner", "--no-privileges", "--exit-on-error", "--single-transaction"]
    with (
        source.open("rb") as file,
        _running("pg_restore", [*options, f"--dbname={name}"], url) as (wanted, _),
        suppress(BrokenPipeError),  # it has ended: its exit status says why
    ):
        shutil.copyfileobj(file, wanted, _BLOCK_BYTES)


def environment(url: str) -> dict[str, str]:
    """Return the environment variables that tell libpq where the database is."""
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


@contextmanager
def _running(program: str, options: list[str], url: str) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """Run a program. Yield its standard input and output, and wait for its exit after the block."""
    path = shutil.which(program)
    if path is None:
        raise ToolFailed(
            f"{program} is not on the path: install the client programs of PostgreSQL, of the "
            "server's version or newer"
        )
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603
            [path, *options],
            env={"PATH": os.environ.get("PATH", ""), **environment(url)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        except BaseException:
            process.kill()
            raise
        finally:
            with suppress(BrokenPipeError):
                process.communicate()
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-1000:]
            raise ToolFailed(f"{program} failed with status {process.returncode}: {said}")
