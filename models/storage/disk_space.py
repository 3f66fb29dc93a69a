"""Free space and file system types of the disks."""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from glasshouse.errors import StorageFull
from models.settings import Settings

_KEPT_S = 1.0
_REMOTE = ("nfs", "cifs", "smb", "9p", "fuse")


class Space:
    """The disks of this process. Values are cached for one second."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._places = {
            "home": settings.home,
            "artifacts": settings.artifacts,
            "work": settings.work,
        }
        self._known: dict[str, int] = {}
        self._asked_at = 0.0

    def free(self) -> dict[str, int]:
        """Return the free bytes of each place."""
        if not self._known or time.monotonic() - self._asked_at >= _KEPT_S:
            self._known = {name: _free(path) for name, path in self._places.items()}
            self._asked_at = time.monotonic()
        return dict(self._known)

    def short(self, *names: str) -> list[str]:
        """Return the places, of these or of all, with less free space than required."""
        least = self._settings.min_free_bytes
        return [
            name
            for name, left in self.free().items()
            if left < least and name in (names or (name,))
        ]

    def check(self) -> None:
        """Refuse new work while a disk is nearly full.

        Raises:
            StorageFull: A disk is nearly full.
        """
        short = self.short()
        if short:
            raise StorageFull(
                f"The disk of the {' and the '.join(short)} has less than "
                f"{self._settings.min_free_bytes} bytes left.",
                retry_after_s=10,
            )


def remote_kind(path: Path, mounts: Iterable[str] | None = None) -> str | None:
    """Return the file system type of a path if SQLite must not be on it; else None.

    Args:
        path: A file or directory; it need not exist.
        mounts: Lines of ``/proc/mounts``. Default: those of this system.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return None
    place = str(path.resolve())
    best, kind = -1, ""
    for line in mounts:
        parts = line.split()
        if len(parts) < 3:
            continue
        root = parts[1].replace("\\040", " ")
        if (place == root or place.startswith(root.rstrip("/") + "/")) and len(root) > best:
            best, kind = len(root), parts[2]
    return kind if kind.startswith(_REMOTE) else None


def _free(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
