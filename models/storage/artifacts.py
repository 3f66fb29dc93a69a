"""Bulk data under keys that the service generates, in one directory that all hosts share.

It must be a file system: the engine opens files by path, memory-maps them and reads parts of them,
and a finished file is renamed into place. An object store cannot do that, so it cannot replace this
module.
"""

import os
import shutil
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from glasshouse.failpoints import failpoint
from models.settings import Settings


class Entry(NamedTuple):
    """Something that is stored: a file, or a directory of files."""

    key: str
    name: str
    changed_at: float
    """Seconds since 1970."""


class Artifacts(Protocol):
    """Storage for bulk data. The service generates the keys, never a user."""

    def put(self, key: str, source: Path) -> None:
        """Move a file, or a directory of files, into the store. Durable on return."""
        ...

    def local(self, key: str) -> Path:
        """Return a local path of a stored file or directory, for reading.

        Raises:
            FileNotFoundError: Nothing is stored under the key.
        """
        ...

    def delete(self, prefix: str) -> None:
        """Delete everything under a key. A missing key is no error."""
        ...

    def entries(self, prefix: str) -> list[Entry]:
        """List what is directly under a key, by name. Incomplete entries have names with a dot."""
        ...

    def receive(self, key: str) -> AbstractContextManager[Path]:
        """Open a new file for writing. It is stored if the block ends without an error."""
        ...


def open_artifacts(settings: Settings) -> "LocalArtifacts":
    """Open the store of the settings, creating it if needed."""
    return LocalArtifacts(settings.artifacts)


class LocalArtifacts:
    """Artifacts in a directory that all hosts of the service share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, key: str, source: Path) -> None:
        """Move a file or directory into the store."""
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        failpoint("artifact.rename")
        try:
            os.rename(source, target)
        except OSError:  # another file system: copy next to the target, then rename
            beside = target.with_name(f".{target.name}.incoming")
            if source.is_dir():
                shutil.rmtree(beside, ignore_errors=True)
                shutil.copytree(source, beside)
                _sync_tree(beside)
                os.rename(beside, target)
                shutil.rmtree(source)
            else:
                shutil.copyfile(source, beside)
                _sync(beside)
                os.replace(beside, target)
                source.unlink()
        failpoint("artifact.renamed")
        _sync(target.parent)
        failpoint("artifact.stored")

    def local(self, key: str) -> Path:
        """Return the path of a stored file or directory."""
        path = self._path(key)
        if not path.exists():
            raise FileNotFoundError(key)
        return path

    def delete(self, prefix: str) -> None:
        """Delete a file or directory."""
        path = self._path(prefix)
        failpoint("artifact.delete")
        going = path.with_name(f".{path.name}.deleted")
        if path.is_dir():
            # a directory is renamed first, so that a copy gets all of it or nothing
            shutil.rmtree(going, ignore_errors=True)
            with suppress(FileNotFoundError):  # another process deletes it too
                os.rename(path, going)
        else:
            path.unlink(missing_ok=True)
        shutil.rmtree(going, ignore_errors=True)

    def entries(self, prefix: str) -> list[Entry]:
        """List a directory; empty if there is none."""
        try:
            with os.scandir(self._path(prefix)) as found:
                listed = [Entry(f"{prefix}/{one.name}", one.name, _changed(one)) for one in found]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(listed)

    @contextmanager
    def receive(self, key: str) -> Generator[Path]:
        """Yield a path to write to.

        Store the file at the end of the block; delete it on an error.
        """
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.incoming")
        try:
            yield beside
            failpoint("artifact.received")
            _sync(beside)
            os.replace(beside, target)
            failpoint("artifact.replaced")
            _sync(target.parent)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or ".." in parts or "\\" in key or "\0" in key:
            raise ValueError(f"{key!r} is not a key of this store")
        return self.root.joinpath(*parts)


def _changed(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:  # deleted in the meantime
        return time.time()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(root: Path) -> None:
    for path in root.rglob("*"):
        _sync(path)
    _sync(root)
