"""Back the service up and restore it: ``python -m models.backup create|restore DIRECTORY``.

A backup is taken while the service runs. The database is copied as it was at one moment; then the
files that its rows name are copied, and each one's digest is written into the manifest, which comes
last: a directory without a manifest is no backup. What was deleted meanwhile is listed as lost,
and a restored service does not know it.
"""

import argparse
import hashlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from sqlalchemy import delete, select, text
from sqlalchemy.orm import Session

from glasshouse import jsonio
from glasshouse.errors import GlasshouseError
from models import postgres_tools
from models.artifacts import LocalArtifacts
from models.database import Database
from models.migrate import migrate
from models.settings import Settings
from models.tables import Capture, Checkpoint, Dataset, JobArtifact, Mark, Upload, now

FORMAT = 1
MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 20
_NAMES = {"sqlite": "glasshouse.db", "postgresql": "glasshouse.dump"}


class BackupError(GlasshouseError):
    """The service could not be backed up or restored."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of a backup."""

    path: str
    """In the backup; for artifacts ``artifacts/`` and the key."""
    size_bytes: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        return {"path": self.path, "size_bytes": self.size_bytes, "sha256": self.sha256}


def create(settings: Settings, directory: Path, *, link: bool = False) -> dict[str, Any]:
    """Back everything up into an empty or new directory; gives the manifest without its files.

    Args:
        settings: of the service.
        directory: where to; private to its owner.
        link: make hard links to the artifacts where that is possible; they are never changed in
            place, so this is as good a copy until the disk itself fails.

    Raises:
        BackupError: the directory is not empty, or there is no ``pg_dump``.
    """
    if directory.exists() and any(directory.iterdir()):
        raise BackupError(f"{directory} is not empty; a backup wants a directory of its own")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    artifacts = LocalArtifacts(settings.artifacts)
    kept: list[Kept] = []
    lost: list[str] = []
    with _copied_database(settings, directory) as (kind, tx):
        kept.append(_kept(directory, directory / _NAMES[kind]))
        revision = tx.scalars(text("SELECT version_num FROM alembic_version")).one()
        for key in _keys(tx):
            try:
                found = _copy(artifacts.local(key), directory / "artifacts" / key, link=link)
                kept += [_kept(directory, path) for path in found]
            except FileNotFoundError:
                lost.append(key)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "created_at": now().isoformat(timespec="milliseconds"),
        "version": _version(),
        "database": kind,
        "revision": revision,
        "lost": sorted(lost),
        "files": [one.as_dict() for one in kept],
    }
    _write_durably(directory / MANIFEST, jsonio.dumps(manifest))
    return _told(manifest)


def restore(settings: Settings, directory: Path) -> dict[str, Any]:
    """Make a backup the state of a service that has none yet; it may be of an older version.

    Raises:
        BackupError: it is no whole backup, or the service has a database or artifacts already.
    """
    manifest = _read_manifest(directory)
    kind = "sqlite" if settings.database.startswith("sqlite") else "postgresql"
    if manifest["database"] != kind:
        raise BackupError(f"the backup is of {manifest['database']}, the service is on {kind}")
    if settings.artifacts.exists() and any(settings.artifacts.iterdir()):
        raise BackupError(f"{settings.artifacts} is not empty; restore into a new home")
    _check_files(directory, manifest)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if kind == "sqlite":
        place = Path(settings.database.removeprefix("sqlite:///"))
        if place.exists():
            raise BackupError(f"{place} is there already; restore into a new home")
        _copy_artifacts(directory, settings.artifacts)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = place.with_name(f".{place.name}.restoring")
        shutil.copyfile(directory / _NAMES[kind], beside)
        beside.chmod(0o600)
        os.replace(beside, place)
    else:
        _refuse_tables(settings)
        _copy_artifacts(directory, settings.artifacts)
        postgres_tools.restore(settings.database, directory / _NAMES[kind])
    database = Database(settings.database)
    try:
        migrate(database, lock_file=settings.home / "run" / "migrate.lock")
        with database.write() as tx:
            _forget_lost(tx, manifest["lost"])
    finally:
        database.close()
    return _told(manifest)


@contextmanager
def _copied_database(settings: Settings, directory: Path) -> Generator[tuple[str, Session]]:
    """Copy the database; gives its kind and a transaction that sees just what was copied."""
    if not settings.database.startswith("sqlite"):
        database = Database(settings.database)
        try:
            with database.engine.connect() as opened:
                connection = opened.execution_options(isolation_level="REPEATABLE READ")
                with connection.begin():
                    snapshot = connection.execute(text("SELECT pg_export_snapshot()")).scalar_one()
                    to = directory / _NAMES["postgresql"]
                    postgres_tools.dump(settings.database, to, snapshot=str(snapshot))
                    yield "postgresql", Session(connection)
        finally:
            database.close()
        return
    copy = directory / _NAMES["sqlite"]
    _copy_sqlite(Path(settings.database.removeprefix("sqlite:///")), copy)
    database = Database(f"sqlite:///{copy}")
    try:
        with database.read() as tx:
            yield "sqlite", tx
    finally:
        database.close()


def _copy_sqlite(source: Path, to: Path) -> None:
    if not source.exists():
        raise BackupError(f"there is no database at {source}")
    handle = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.close(handle)
    # one step: in WAL mode a long read keeps no writer waiting, and is never begun again
    with (
        closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as live,
        closing(sqlite3.connect(to)) as copy,
    ):
        live.backup(copy)
        found = copy.execute("PRAGMA quick_check").fetchone()[0]
    if found != "ok":
        raise BackupError(f"the copy of the database is damaged: {found}")


def _keys(tx: Session) -> Generator[str]:
    """The artifacts that the database names."""
    for dataset, state, key in tx.execute(select(Dataset.id, Dataset.state, Dataset.key)):
        if state == "ready":
            yield key
        elif state == "pending":
            yield f"uploads/{dataset}"
    for table in (Checkpoint, JobArtifact, Upload):
        yield from tx.scalars(select(table.key).execution_options(yield_per=1000))
    captures = select(Capture.key).distinct().execution_options(yield_per=1000)
    yield from tx.scalars(captures)


def _copy(source: Path, to: Path, *, link: bool) -> list[Path]:
    """Copy a file, or a directory of files; the files that were made."""
    if source.is_dir():
        inside = sorted(path for path in source.rglob("*") if path.is_file())
        pairs = [(path, to / path.relative_to(source)) for path in inside]
    else:
        pairs = [(source, to)]
    for path, place in pairs:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (link and _linked(path, place)):
            shutil.copyfile(path, place)
    return [place for _, place in pairs]


def _linked(path: Path, place: Path) -> bool:
    try:
        os.link(path, place)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        return False
    return True


def _kept(directory: Path, path: Path) -> Kept:
    return Kept(path.relative_to(directory).as_posix(), path.stat().st_size, _digest(path))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest: Any = jsonio.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BackupError(
            f"{directory} has no {MANIFEST}: it is no backup, or no whole one"
        ) from None
    except ValueError as error:
        raise BackupError(f"{directory / MANIFEST} cannot be read: {error}") from None
    found = cast("dict[str, Any]", manifest) if isinstance(manifest, dict) else {}
    if found.get("format") != FORMAT:
        raise BackupError(f"{directory / MANIFEST} is not of the format {FORMAT}")
    return found


def _check_files(directory: Path, manifest: dict[str, Any]) -> None:
    """Compare every file with its digest, before anything is restored."""
    for entry in manifest["files"]:
        path = directory / entry["path"]
        if ".." in Path(entry["path"]).parts or not path.resolve().is_relative_to(
            directory.resolve()
        ):
            raise BackupError(f"the manifest names {entry['path']!r}, which is outside the backup")
        if not path.is_file() or _digest(path) != entry["sha256"]:
            raise BackupError(f"{path} is missing or damaged; nothing was restored")


def _copy_artifacts(directory: Path, to: Path) -> None:
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    source = directory / "artifacts"
    if source.exists():
        shutil.copytree(source, to, dirs_exist_ok=True, copy_function=shutil.copyfile)


def _refuse_tables(settings: Settings) -> None:
    database = Database(settings.database)
    try:
        with database.read() as tx:
            found = tx.scalars(text("SELECT to_regclass('alembic_version')")).one()
    finally:
        database.close()
    if found is not None:
        raise BackupError("the database has tables already; restore into an empty one")


def _forget_lost(tx: Session, keys: Sequence[str]) -> None:
    """Rows whose files were deleted while the backup was taken go too, as they did there."""
    for table in (Capture, Checkpoint, JobArtifact, Dataset, Upload):
        for first in range(0, len(keys), 500):
            tx.execute(delete(table).where(table.key.in_(keys[first : first + 500])))
    tx.execute(delete(Mark))  # nobody has a turn in a service that was not there


def _told(manifest: dict[str, Any]) -> dict[str, Any]:
    files = manifest["files"]
    shown = {name: value for name, value in manifest.items() if name not in ("files", "lost")}
    shown["files"] = len(files)
    shown["bytes"] = sum(entry["size_bytes"] for entry in files)
    return shown | {"lost": len(manifest["lost"])}


def _write_durably(path: Path, content: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _version() -> str:
    try:
        return version("glasshouse")
    except PackageNotFoundError:
        return "0"


def main(arguments: Sequence[str]) -> int:
    """Back up or restore the service of the settings."""
    parser = argparse.ArgumentParser(prog="python -m models.backup", description=__doc__)
    parser.add_argument("action", choices=["create", "restore"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--home", type=Path, help="left out: $GLASSHOUSE_HOME, or ~/.glasshouse")
    parser.add_argument("--link", action="store_true", help="hard links to the artifacts")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    settings = Settings(home=given.home) if given.home else Settings()
    try:
        if given.action == "create":
            told = create(settings, given.directory, link=given.link)
        else:
            told = restore(settings, given.directory)
    except GlasshouseError as error:
        sys.stderr.write(f"error: {error.detail}\n")
        return 1
    if given.json:
        sys.stdout.write(jsonio.dumps(told) + "\n")
    else:
        done = "backed up" if given.action == "create" else "restored"
        sys.stdout.write(f"{done} {told['files']} files, {told['bytes']} bytes\n")
        if told["lost"]:
            sys.stdout.write(f"{told['lost']} files were deleted while the backup was taken\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
