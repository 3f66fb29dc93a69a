"""Commands for the host of the service: backup, restore, purge."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.service.broker import StackError
from glasshouse.cli.service.processes import ROOT
from glasshouse.cli.service.stack import is_locked
from glasshouse.cli.terminal.output import Json
from glasshouse.client.connection.address import home_dir

Home = Annotated[
    Path | None, typer.Option("--home", help="Default: $GLASSHOUSE_HOME, or ~/.glasshouse.")
]


def backup(
    directory: Annotated[Path, typer.Argument(help="A new or empty directory.")],
    home: Home = None,
    link: Annotated[bool, typer.Option("--link", help="Hard links instead of copies.")] = False,
    json: Json = False,
) -> None:
    """Back up the database and all its files while the service runs."""
    options = ["--link"] if link else []
    _become("models.backup", ["create", _absolute(directory), *options], home, json=json)


def restore(
    directory: Annotated[Path, typer.Argument(help="A backup from 'glasshouse backup'.")],
    home: Home = None,
    json: Json = False,
) -> None:
    """Restore a backup into a new home. Verifies all digests first."""
    if is_locked(_place(home)):
        raise StackError(f"a service runs in {_place(home)}; restore into a new home")
    _become("models.backup", ["restore", _absolute(directory)], home, json=json)


def purge(
    home: Home = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
    json: Json = False,
) -> None:
    """Delete data older than GLASSHOUSE_KEEP_…_DAYS. Workers also do this by themselves."""
    _become("models.purge", ["--dry-run"] if dry_run else [], home, json=json)


def _become(module: str, arguments: list[str], home: Path | None, *, json: bool) -> None:
    for name in ("GLASSHOUSE_ARTIFACTS_DIR", "GLASSHOUSE_WORK_DIR"):
        if value := os.environ.get(name):  # it may be relative to the user's directory
            os.environ[name] = _absolute(Path(value))
    os.environ["GLASSHOUSE_HOME"] = str(_place(home))
    os.chdir(ROOT)
    options = ["--json"] if json else []
    command = [sys.executable, "-m", module, *arguments, *options]
    os.execv(sys.executable, command)  # noqa: S606


def _place(home: Path | None) -> Path:
    return home_dir() if home is None else Path(_absolute(home))


def _absolute(path: Path) -> str:
    return str(path.expanduser().absolute())
