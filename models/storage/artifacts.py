"""Bulk bytes, by keys that the service makes, in one directory that all hosts share.

It has to be a file system: the engine opens its files by path, maps them into memory and reads
parts of them, and a finished file is renamed into its place. An object store does not offer
that, so it cannot take the place of this module.
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
    """Something that is stored: a file, or a directory of them."""

    key: str
    name: str
    changed_at: float
    """Seconds since 1970."""


class Artifacts(Protocol):
    """Where bulk bytes are kept. Keys are made by the service, never by a user."""

    def put(self, key: str, source: Path) -> None:
        """Move a file, or a directory of files, into the store. Durable when it returns."""
        ...

    def local(self, key: str) -> Path:
        """A local path of a stored file or directory, to read from.

        Raises:
            FileNotFoundError: nothing is stored under the key.
        """
        ...

    def delete(self, prefix: str) -> None:
        """Remove everything under a key. Nothing there is no error."""
        ...

    def entries(self, prefix: str) -> list[Entry]:
        """What is directly under a key, by name; what is not complete has a name with a dot."""
        ...

    def receive(self, key: str) -> AbstractContextManager[Path]:
        """Open a new file to write to; it is stored once its block ends without an error."""
        ...


def open_artifacts(settings: Settings) -> "LocalArtifacts":
    """The store of the settings; made if it is not there yet."""
    return LocalArtifacts(settings.artifacts)


class LocalArtifacts:
    """Artifacts in a directory, which all hosts of the service share."""

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
        except OSError:  # another file system: copy beside the target, then rename
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
        """The path of a stored file or directory."""
        path = self._path(key)
        if not path.exists():
            raise FileNotFoundError(key)
        return path

    def delete(self, prefix: str) -> None:
        """Remove a file or directory."""
        path = self._path(prefix)
        failpoint("artifact.delete")
        going = path.with_name(f".{path.name}.deleted")
        if path.is_dir():
            # a directory is removed as a whole: a copy has all of it or nothing
            shutil.rmtree(going, ignore_errors=True)
            with suppress(FileNotFoundError):  # somebody else deletes it too
                os.rename(path, going)
        else:
            path.unlink(missing_ok=True)
        shutil.rmtree(going, ignore_errors=True)

    def entries(self, prefix: str) -> list[Entry]:
        """What is in a directory; of none, nothing."""
        try:
            with os.scandir(self._path(prefix)) as found:
                listed = [Entry(f"{prefix}/{one.name}", one.name, _changed(one)) for one in found]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(listed)

    @contextmanager
    def receive(self, key: str) -> Generator[Path]:
        """Give a path to write to; store the file when the block ends, remove it on an error."""
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
    except FileNotFoundError:  # gone meanwhile
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
