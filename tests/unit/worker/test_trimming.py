from pathlib import Path

import pytest

from engine.core.spool import SpoolWriter, read_frames
from worker.attempt.store import punch_hole


def taken(path: Path) -> int:
    """Bytes that a file takes on the disk."""
    return path.stat().st_blocks * 512


def test_what_is_stored_of_a_spool_is_given_back_and_the_rest_can_be_read(tmp_path: Path):
    spool = tmp_path / "spool"
    writer = SpoolWriter(spool)
    text = "x" * 1000
    for number in range(2000):
        writer.append({"type": "metrics", "number": number, "text": text})
    writer.flush()
    whole = spool.read_bytes()
    if not punch_hole(spool, 1):  # part of a block: it becomes zeros
        pytest.skip("this file system cannot do it")
    spool.write_bytes(whole)
    offset, seen = 0, []
    while True:
        records, offset = read_frames(spool, offset, 100)
        if not records:
            break
        seen += [record["number"] for record in records]
        punch_hole(spool, offset)
    assert seen == list(range(2000))
    assert spool.stat().st_size == offset
    assert taken(spool) < 600_000
    writer.append({"type": "end", "number": 2000})
    writer.close()
    assert read_frames(spool, offset)[0] == [{"type": "end", "number": 2000}]


def test_a_missing_file_is_no_error(tmp_path: Path):
    assert not punch_hole(tmp_path / "none", 10)
