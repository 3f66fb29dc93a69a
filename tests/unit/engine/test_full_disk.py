"""What a spool does while its file cannot grow. The disk is a stand-in that fails as a full one."""

import errno
import os
import threading
from pathlib import Path

import pytest

from engine.core import spool as spools
from engine.core.spool import SpoolWriter, read_frames
from tests.waiting import until


class Disk:
    """Fails writes like a full disk, after some bytes: to mount a small one needs root."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, handle: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(handle, bytes(data[: self.room]))
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk(room=100)
    monkeypatch.setattr(spools.os, "write", found.write)
    return found


def record(step: int) -> dict[str, object]:
    return {"type": "metrics", "step": step}


def test_what_is_reported_on_a_full_disk_is_kept_and_written_once_there_is_room(
    disk: Disk, tmp_path: Path
):
    spool = SpoolWriter(tmp_path / "spool")
    for step in range(100):
        spool.append(record(step))
        spool.flush()
    found, _ = read_frames(tmp_path / "spool", 0)
    assert 0 < len(found) < 100
    disk.room = 10**9
    spool.close()
    found, _ = read_frames(tmp_path / "spool", 0)
    assert found == [record(step) for step in range(100)]


def test_the_end_waits_for_room(disk: Disk, tmp_path: Path):
    spool = SpoolWriter(tmp_path / "spool")
    for step in range(100):
        spool.append(record(step))
    closing = threading.Thread(target=spool.close)
    closing.start()
    until(lambda: disk.room <= 0)
    assert closing.is_alive()
    disk.room = 10**9
    closing.join(60)
    assert not closing.is_alive()
    found, _ = read_frames(tmp_path / "spool", 0)
    assert len(found) == 100


def test_memory_is_not_filled_instead(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spools, "MAX_WAITING_BYTES", 10_000)
    monkeypatch.setattr(spools, "_FULL_S", 0.0)
    spool = SpoolWriter(tmp_path / "spool")
    with pytest.raises(OSError, match="No space left"):
        for step in range(10_000):
            spool.append(record(step))
            spool.flush()


def test_other_errors_are_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    spool = SpoolWriter(tmp_path / "spool")
    spool.append(record(0))
    monkeypatch.setattr(spools.os, "write", fail)
    with pytest.raises(OSError, match="Input/output"):
        spool.flush()
