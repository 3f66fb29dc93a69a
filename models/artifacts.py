"""Bulk bytes, by keys that the service makes. A local directory now; S3 fits the same seam."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol


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

    def receive(self, key: str) -> "Incoming":
        """Open a new file to write to; it is stored once its block ends without an error."""
        ...


class Incoming(Protocol):
    """A context manager that gives the path of a file being written."""

    def __enter__(self) -> Path: ...
    def __exit__(self, *error: object) -> bool | None: ...


class LocalArtifacts:
    """Artifacts in a directory, which all hosts of the service share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, key: str, source: Path) -> None:
        """Move a file or directory into the store."""
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
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
        _sync(target.parent)

    def local(self, key: str) -> Path:
        """The path of a stored file or directory."""
        path = self._path(key)
        if not path.exists():
            raise FileNotFoundError(key)
        return path

    def delete(self, prefix: str) -> None:
        """Remove a file or directory."""
        path = self._path(prefix)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    @contextmanager
    def receive(self, key: str) -> Generator[Path]:
        """Give a path to write to; store the file when the block ends, remove it on an error."""
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.incoming")
        try:
            yield beside
            _sync(beside)
            os.replace(beside, target)
            _sync(target.parent)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        parts = PurePosixPath(key).parts
        if not parts or key.startswith("/") or ".." in parts or "\\" in key or "\0" in key:
            raise ValueError(f"{key!r} is not a key of this store")
        return self.root.joinpath(*parts)


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
