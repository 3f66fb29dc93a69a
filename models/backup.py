"""Back up and restore the service: ``python -m models.backup create|restore DIRECTORY``.

A backup is taken while the service runs. It copies the database as of one moment (one snapshot),
then every file that rows of that snapshot refer to. Stored files never change, so a later copy is
the same file. A file that is deleted in between is listed in the manifest as lost, and a restore
deletes the rows that refer to it. The manifest has the digest of each file and is written last: a
directory without a manifest is not a backup.

A restore first writes a marker into the artifacts directory and removes it last. API, worker and
migration refuse to start while the marker exists (`models.startup`).
"""

import argparse
import hashlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from sqlalchemy import delete, inspect, select, text
from sqlalchemy.orm import Session

from glasshouse import jsonio
from glasshouse.errors import GlasshouseError
from models import published_models
from models.database import Database, translated
from models.migrate import migrate
from models.settings import Settings
from models.startup import BROKEN_OFF, UNFINISHED, is_unfinished
from models.storage import postgres_tools
from models.storage.artifacts import open_artifacts
from models.tables import Capture, Checkpoint, Dataset, JobArtifact, Mark, now

FORMAT = 1
MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 20
_WAIT_FOR_EVER = """
SELECT set_config(name, '0', true) FROM pg_settings
WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
"""
"""For the transaction whose snapshot pg_dump reads: it may be idle until the dump is done."""
_NAMES = {"sqlite": "glasshouse.db", "postgresql": "glasshouse.dump"}


class BackupError(GlasshouseError):
    """The service could not be backed up or restored."""


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A file of a backup."""

    path: str
    """Path in the backup; for artifacts ``artifacts/`` and the key."""
    size_bytes: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """Return the entry in the manifest."""
        return {"path": self.path, "size_bytes": self.size_bytes, "sha256": self.sha256}


def create(settings: Settings, directory: Path, *, link: bool = False) -> dict[str, Any]:
    """Back everything up into an empty or new directory. Return the manifest without its files.

    Args:
        settings: The settings of the service.
        directory: The target; private to its owner.
        link: Create hard links to the artifacts if possible. They are never changed in place, so
            this is as good as a copy until the disk itself fails.

    Raises:
        BackupError: The directory is not empty, or there is no ``pg_dump``.
    """
    if directory.exists() and any(directory.iterdir()):
        raise BackupError(f"{directory} is not empty; a backup wants a directory of its own")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    copied = _copy_database(settings, directory)
    kept = [_kept(directory, directory / _NAMES[copied.kind])]
    artifacts = open_artifacts(settings)
    lost: list[str] = []
    for key in copied.keys:
        place = directory / "artifacts" / key
        try:
            kept += [_kept(directory, path) for path in _copy(artifacts.local(key), place, link)]
        except FileNotFoundError:
            lost.append(key)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "created_at": now().isoformat(timespec="milliseconds"),
        "version": _version(),
        "database": copied.kind,
        "revision": copied.revision,
        "lost": sorted(lost),
        "files": [one.as_dict() for one in kept],
    }
    _write_durably(directory / MANIFEST, jsonio.dumps(manifest))
    return _summary(manifest)


def restore(settings: Settings, directory: Path) -> dict[str, Any]:
    """Restore a backup into a new service. The backup may be from an older version.

    Raises:
        BackupError: The backup is incomplete, or the service already has a database or artifacts.
    """
    manifest = _read_manifest(directory)
    kind = "sqlite" if settings.database.startswith("sqlite") else "postgresql"
    if manifest["database"] != kind:
        raise BackupError(f"the backup is of {manifest['database']}, the service is on {kind}")
    _refuse_artifacts(settings)
    _check_files(directory, manifest)
    if kind == "sqlite":
        place = Path(settings.database.removeprefix("sqlite:///"))
        if place.exists():
            raise BackupError(f"{place} is there already; restore into a new home")
    else:
        _refuse_tables(settings)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings.artifacts.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark = settings.artifacts / UNFINISHED
    mark.touch(mode=0o600)
    _copy_artifacts(directory, manifest, settings.artifacts)
    if kind == "sqlite":
        _restore_sqlite(settings, directory / _NAMES[kind], manifest["lost"])
    else:
        postgres_tools.restore(settings.database, directory / _NAMES[kind])
        _bring_up_to_date(settings, settings.database, manifest["lost"])
    mark.unlink()
    return _summary(manifest)


@dataclass(frozen=True, slots=True)
class _Copied:
    """The copied database of a backup."""

    kind: str
    revision: str
    keys: list[str]
    """The artifacts that its rows refer to."""


def _copy_database(settings: Settings, directory: Path) -> _Copied:
    if settings.database.startswith("sqlite"):
        copy = directory / _NAMES["sqlite"]
        _copy_sqlite(Path(settings.database.removeprefix("sqlite:///")), copy)
        database = Database(f"sqlite:///{copy}")
        try:
            with database.read() as tx:
                return _Copied("sqlite", _revision(tx), list(_keys(tx)))
        finally:
            database.close()
    database = Database(settings.database)
    try:
        with translated(), database.engine.connect() as opened:
            connection = opened.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                return _dump(Session(connection), settings, directory)
    finally:
        database.close()


def _dump(tx: Session, settings: Settings, directory: Path) -> _Copied:
    """Dump the snapshot of a transaction, which is idle until the dump is done."""
    tx.execute(text(_WAIT_FOR_EVER))
    snapshot = str(tx.scalars(text("SELECT pg_export_snapshot()")).one())
    copied = _Copied("postgresql", _revision(tx), list(_keys(tx)))
    postgres_tools.dump(settings.database, directory / _NAMES["postgresql"], snapshot=snapshot)
    return copied


def _revision(tx: Session) -> str:
    return tx.scalars(text("SELECT version_num FROM alembic_version")).one()


def _restore_sqlite(settings: Settings, source: Path, lost: Sequence[str]) -> None:
    """Restore next to the database's path, and rename as the last step."""
    place = Path(settings.database.removeprefix("sqlite:///"))
    beside = place.parent / f".{place.name}.restoring"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(mode=0o700, parents=True)
    copy = beside / place.name
    shutil.copyfile(source, copy)
    copy.chmod(0o600)
    _bring_up_to_date(settings, f"sqlite:///{copy}", lost)
    os.replace(copy, place)
    shutil.rmtree(beside)


def _bring_up_to_date(settings: Settings, url: str, lost: Sequence[str]) -> None:
    database = Database(url)
    try:
        migrate(database, lock_file=settings.home / "run" / "migrate.lock")
        with database.write() as tx:
            _forget_lost(tx, lost)
    finally:
        database.close()


def _copy_sqlite(source: Path, to: Path) -> None:
    if not source.exists():
        raise BackupError(f"there is no database at {source}")
    handle = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.close(handle)
    # a single step: in WAL mode a long read does not block writers and never restarts
    with (
        closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as live,
        closing(sqlite3.connect(to)) as copy,
    ):
        live.backup(copy)
        found = copy.execute("PRAGMA quick_check").fetchone()[0]
    if found != "ok":
        raise BackupError(f"the copy of the database is damaged: {found}")


def _keys(tx: Session) -> Generator[str]:
    """Yield the artifacts that the database refers to."""
    for dataset, state, key in tx.execute(select(Dataset.id, Dataset.state, Dataset.key)):
        if state == "ready":
            yield key
        elif state == "pending":
            yield f"uploads/{dataset}"
    for table in (Checkpoint, JobArtifact):
        yield from tx.scalars(select(table.key).execution_options(yield_per=1000))
    if inspect(tx.connection()).has_table("uploads"):  # backups are also taken before migrations
        yield from tx.scalars(text("SELECT key FROM uploads"))
    captures = select(Capture.key).distinct().execution_options(yield_per=1000)
    yield from tx.scalars(captures)


def _copy(source: Path, to: Path, link: bool) -> list[Path]:
    """Copy a file or a directory of files. Return the created files.

    Raises:
        FileNotFoundError: It was deleted in the meantime, as a whole (`LocalArtifacts.delete`).
    """
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
    except OSError:  # another file system, or one without hard links
        return False
    return True


def _kept(directory: Path, path: Path) -> BackupFile:
    return BackupFile(path.relative_to(directory).as_posix(), path.stat().st_size, _digest(path))


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


def _copy_artifacts(directory: Path, manifest: dict[str, Any], to: Path) -> None:
    """Copy only what the manifest lists, not leftovers of an aborted copy."""
    for entry in manifest["files"]:
        if entry["path"].startswith("artifacts/"):
            place = to / entry["path"].removeprefix("artifacts/")
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copyfile(directory / entry["path"], place)


def _refuse_artifacts(settings: Settings) -> None:
    place = settings.artifacts
    if is_unfinished(settings):
        raise BackupError(BROKEN_OFF.format(place))
    if place.exists() and any(path != settings.work for path in place.iterdir()):
        raise BackupError(f"{place} is not empty; restore into a new home")


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
    """Delete rows whose files were deleted during the backup; the backed-up service did so too."""
    for first in range(0, len(keys), 500):
        lost = keys[first : first + 500]
        published_models.forget_checkpoints(tx, lost)
        for table in (Capture, Checkpoint, JobArtifact, Dataset):
            tx.execute(delete(table).where(table.key.in_(lost)))
    tx.execute(delete(Mark))  # no process has a turn in the new service


def _summary(manifest: dict[str, Any]) -> dict[str, Any]:
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
    parser.add_argument("--home", type=Path, help="default: $GLASSHOUSE_HOME, or ~/.glasshouse")
    parser.add_argument("--link", action="store_true", help="hard links to the artifacts")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    settings = Settings(home=given.home) if given.home else Settings()
    try:
        if given.action == "create":
            summary = create(settings, given.directory, link=given.link)
        else:
            summary = restore(settings, given.directory)
    except GlasshouseError as error:
        sys.stderr.write(f"error: {error.detail}\n")
        return 1
    if given.json:
        sys.stdout.write(jsonio.dumps(summary) + "\n")
    else:
        done = "backed up" if given.action == "create" else "restored"
        sys.stdout.write(f"{done} {summary['files']} files, {summary['bytes']} bytes\n")
        if summary["lost"]:
            sys.stdout.write(f"{summary['lost']} files were deleted while the backup was taken\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
